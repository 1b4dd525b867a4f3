"""What an autoencoder's training starts from: its seed or pretrained weights, and which of its parts are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from osora_cli.app.checkpoint_fit import check_fits
from osora_cli.app.training import STARTING
from osora_cli.checkpoint.layout import checkpoint_folders
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.resolve import resolve_load
from osora_cli.checkpoint.verify import is_checkpoint
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.engine.base import named_trainable
from osora_cli.errors import CheckpointError, ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.weights import HUB, LoadReport, check_weights, load_weights
from osora_cli.tensors import TensorShard

_WHERE = "model.from_pretrained"


@dataclass(frozen=True)
class StartWeights:
    """Pretrained weights that were found, and verified where they are a checkpoint's.

    Attributes:
        source: a file, a folder of weights, a checkpoint, or a name on the hub.
        group: of a checkpoint, what is laid over its model's weights: `ema`, or `master` for fp32 values; else None.
        ema: whether it is the average of weights.
    """

    source: str
    group: str | None
    ema: bool


def check_start(config: TrainVaeConfig, notes: list[str], reader: CheckpointReader | None) -> StartWeights | None:
    """Find the weights that `model.from_pretrained` names, and see that they and `freeze_layers` fit the network.

    Args:
        notes: what was found is added here.
        reader: the checkpoint to go on from. It wins over `from_pretrained`, which is not looked at.

    Raises:
        CheckpointError: nothing is there, nothing that verifies, or it is of another model.
        ConfigError: `freeze_layers` names what is not there, or leaves nothing to train.
    """
    network = build_model(config.model.model_copy(update={"from_pretrained": None}), device="meta")
    freeze(network, config.freeze_layers)
    name = config.model.from_pretrained
    if reader is not None:
        check_fits(reader, "model", "optimizer", network)
        return None
    if name is None:
        if config.freeze_layers:
            notes.append(
                f"freeze_layers: {_listed(config.freeze_layers)} stays as drawn at random, no weights are given"
            )
        return None
    start = find_start(name, config.pretrained_ema, notes)
    if not start.source.startswith(HUB):
        report = check_weights(network, start.source, ema=start.ema and start.group is None)
        if not report.fits:
            if config.model.strict_load:
                raise CheckpointError(
                    report.text(), where=_WHERE, hint="`strict_load: false` takes what fits and leaves the rest"
                )
            notes.append(report.text())
    notes.append(f"{STARTING}{told_start(start)}")
    return start


def find_start(name: str, ema: bool, notes: list[str]) -> StartWeights:
    """The weights that `name` means: a checkpoint's or a run's verified, a file's or the hub's as they are.

    Raises:
        CheckpointError: nothing is there, or nothing that verifies.
    """
    path = Path(name).expanduser()
    if name.startswith(HUB) or path.is_file() or _is_weights_folder(path):
        return StartWeights(name if name.startswith(HUB) else str(path), None, ema)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"the weights `{name}` do not exist", where=_WHERE)
    resolved = resolve_load([name])
    notes += [f"passed over {p}: {verdict}, {reason}" for p, verdict, reason in resolved.passed_over]
    groups = CheckpointReader(resolved.path).groups()
    if ema and "ema" not in groups:
        raise CheckpointError(
            f"`{resolved.path}` holds no average of weights",
            where="pretrained_ema",
            hint="leave `--pretrained-ema` out to start from the weights themselves",
        )
    group = "ema" if ema else "master" if "master" in groups else None
    return StartWeights(str(resolved.path), group, ema)


def _is_weights_folder(path: Path) -> bool:
    """A folder of weights' files, nothing of a checkpoint or of a run."""
    if not path.is_dir() or is_checkpoint(path) or checkpoint_folders(path):
        return False
    return any(p.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") for p in path.iterdir())


def told_start(start: StartWeights) -> str:
    """A start in words."""
    what = "the average of weights" if start.ema else "the weights"
    if not is_checkpoint(Path(start.source)):
        return f"{what} in {start.source}"
    step = CheckpointReader(start.source).counters.actual_update_step
    exact = ", in fp32" if start.group == "master" else ""
    return f"{what} of {start.source} (update {step}{exact}): optimizer, schedule and counters begin anew"


def build_autoencoder(config: TrainVaeConfig, start: StartWeights | None) -> DcAe:
    """The autoencoder in fp32 on the CPU, from its seed or from `start`, with what is frozen marked so."""
    module = build_model(config.model.model_copy(update={"from_pretrained": None}), device="cpu", seed=config.seed)
    assert isinstance(module, DcAe)
    if start is not None:
        load_start(module, start, config.model.strict_load)
    if config.grad_checkpoint:
        module.enable_grad_checkpoint()
    freeze(module, config.freeze_layers)
    return module


def load_start(module: nn.Module, start: StartWeights, strict: bool) -> LoadReport:
    """Fill a network from `start`.

    Raises:
        CheckpointError: the weights are damaged, or with `strict` of another model.
    """
    report = load_weights(module, start.source, strict, ema=start.ema and start.group is None)
    if start.group is not None:
        reader = CheckpointReader(start.source)
        held = reader.tensors(start.group)
        # Masters and average cover what was trained; what they do not hold is the model's own.
        shards = [TensorShard.whole(k, v) for k, v in module.state_dict().items() if k in held]
        reader.read_into(start.group, shards, cast=True)
    return report


def freeze(module: nn.Module, names: Sequence[str] | str | None) -> None:
    """Mark the parameters below each named part as not trained.

    Raises:
        ConfigError: no parameter is below a name, or all of them would be frozen.
    """
    wanted = [names] if isinstance(names, str) else list(names or ())
    for name in wanted:
        found = [p for key, p in module.named_parameters() if key == name or key.startswith(f"{name}.")]
        if not found:
            parts = ", ".join(key for key, _ in module.named_children())
            raise ConfigError(
                f"the model has no part `{name}`", where="freeze_layers", allowed=f"{parts}, or a part of them"
            )
        for p in found:
            p.requires_grad_(False)
    if wanted and next(iter(named_trainable(module)), None) is None:
        raise ConfigError(f"{_listed(wanted)} leave nothing of the model to train", where="freeze_layers")


def _listed(names: Sequence[str] | str) -> str:
    return ", ".join(f"`{name}`" for name in ([names] if isinstance(names, str) else names))
