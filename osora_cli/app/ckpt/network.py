"""What a run's config asks of the weights in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osora_cli.config.base import Section
from osora_cli.config.freeze import thaw
from osora_cli.errors import ConfigError, OsoraError

# Section of the config -> group of a checkpoint.
_GROUPS = {"model": "model", "discriminator": "discriminator"}


def network_shapes(run: Path) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
    """Shapes of the state dict of each network that the run in this folder trains, by group. Takes no memory.

    Raises:
        OsoraError: the run has no config, or one that no network here can be built from.
    """
    from osora_cli.model.build import build_model

    config = thaw(run).config
    shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}
    for name, group in _GROUPS.items():
        section = getattr(config, name, None)
        if isinstance(section, Section):
            try:
                network = build_model(section, device="meta")
            except OsoraError:
                raise
            except Exception as error:  # a combination of sizes that only torch objects to
                raise ConfigError(f"the config's `{name}` cannot be built: {error}") from error
            shapes[group] = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    return shapes
