"""`osora ckpt export`: the weights of a checkpoint as one file or in Hugging Face's layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from osora_cli.checkpoint import fsio, layout
from osora_cli.checkpoint.export import Export, ExportedFile
from osora_cli.checkpoint.findings import Verdict
from osora_cli.checkpoint.reader import CheckpointReader
from osora_cli.checkpoint.resolve import resolve_load
from osora_cli.checkpoint.space import readable_size
from osora_cli.checkpoint.verify import is_checkpoint, verify
from osora_cli.errors import CheckpointError, SetupError, UsageError

Weights = Literal["auto", "ema", "model", "master", "discriminator"]
Dtype = Literal["same", "fp32", "bf16", "fp16"]
WEIGHTS: tuple[Weights, ...] = ("auto", "ema", "model", "master", "discriminator")
DTYPES: dict[Dtype, torch.dtype | None] = {
    "same": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_GB = 1e9


@dataclass(frozen=True)
class ExportResult:
    """What was written, from where, and how sure it is."""

    checkpoint: Path
    verdict: Verdict
    weights: str
    dtype: Dtype
    output: Path
    tensors: int
    files: list[ExportedFile]
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "export",
            "checkpoint": str(self.checkpoint),
            "verdict": self.verdict,
            "weights": self.weights,
            "dtype": self.dtype,
            "output": str(self.output),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "files": [{"path": f.path, "bytes": f.size, "xxh3_128": f.digest} for f in self.files],
            "notes": self.notes,
        }


def export(
    source: Path | str,
    output: Path | str,
    *,
    weights: Weights = "auto",
    dtype: Dtype = "same",
    shard_gb: float = 5.0,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write the weights of a checkpoint.

    Args:
        source: a checkpoint, or a run: its newest checkpoint that verifies.
        output: a name that ends in `.safetensors` becomes one file, any other a folder in Hugging Face's layout.
        weights: "auto" takes the EMA where there is one, else the masters, else the weights of the computation.
        dtype: of the floating tensors.
        shard_gb: largest file of a folder, in 1e9 bytes.
        force: export a checkpoint that does not verify, as far as it can be read.
        progress: called with (bytes done, bytes in all), for the verification and then for the export.

    Raises:
        UsageError: the output exists, or a value that is none of those.
        CheckpointError: no checkpoint, one that does not verify, or weights that it does not hold.
        SetupError: no room for the output, or no right to write it.
    """
    started = time.monotonic()
    source, output = Path(source), Path(output)
    _check_arguments(output, weights, dtype, shard_gb)
    path, verdict, notes = _verified(source, force, progress)
    reader = CheckpointReader(path)
    job = Export(reader, _group(reader, weights), DTYPES[dtype])
    _require_room(output, job.total_bytes)
    try:
        if output.suffix == ".safetensors":
            files = job.to_file(output, progress)
        else:
            files = job.to_folder(output, round(shard_gb * _GB), progress)
    except OSError as error:
        raise SetupError(f"`{output}` cannot be written: {error.strerror}", hint="choose another folder") from error
    seconds = time.monotonic() - started
    group = _group(reader, weights)
    return ExportResult(path, verdict, group, dtype, output, len(job.tensors), files, seconds, notes)


_PICKLED = (".pt", ".pth", ".bin", ".ckpt")


def _check_arguments(output: Path, weights: str, dtype: str, shard_gb: float) -> None:
    if weights not in WEIGHTS:
        raise UsageError(f"unknown weights `{weights}`", where="--weights", allowed=", ".join(WEIGHTS))
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype `{dtype}`", where="--dtype", allowed=", ".join(DTYPES))
    if not shard_gb > 0:
        raise UsageError(f"`{shard_gb}` GB is no size of a file", where="--shard-gb", allowed="more than 0")
    if output.suffix.lower() in _PICKLED:
        raise UsageError(
            f"`{output}` would be a pickled file, which is not written",
            where="OUT",
            allowed="NAME.safetensors, or a folder for Hugging Face's layout",
            hint=f"name it `{output.with_suffix('.safetensors')}`",
        )
    if output.exists() or output.is_symlink():
        raise UsageError(f"`{output}` exists already", hint="remove it, or name another output")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"the folder `{output.parent}` does not exist", hint=f"mkdir -p {output.parent}")
    for folder in output.resolve().parents:
        if is_checkpoint(folder):
            raise UsageError(
                f"`{output}` lies in the checkpoint `{folder.name}`, which would no longer verify",
                where="OUT",
                hint=f"name an output outside of it, such as `{folder.parent / output.name}`",
            )


def _verified(
    source: Path, force: bool, progress: Callable[[int, int], None] | None
) -> tuple[Path, Verdict, list[str]]:
    if not is_checkpoint(source):
        resolved = resolve_load([str(source)])
        passed = [f"passed over {p.name}: {verdict}: {reason}" for p, verdict, reason in resolved.passed_over]
        proven: Verdict = "ok" if (resolved.path / layout.MANIFEST).exists() else "complete"  # by each of its digests
        return resolved.path, proven, passed
    report = verify(source, progress=progress)
    if report.is_good:
        notes = (
            [] if report.verdict == "ok" else ["no manifest: what could be checked holds, flipped bits cannot be told"]
        )
        return source, report.verdict, notes
    if not force:
        raise CheckpointError(
            f"`{source}` is {report.verdict}: {report.reason}",
            hint=f"osora ckpt verify {source}\n       `--force` exports what can be read of it all the same",
        )
    return source, report.verdict, [f"exported by force: the checkpoint is {report.verdict}: {report.reason}"]


def _group(reader: CheckpointReader, weights: Weights) -> str:
    held = reader.groups()
    wanted = ("ema", "master", "model") if weights == "auto" else (weights,)
    found = next((group for group in wanted if group in held), None)
    if found is None:
        names = ", ".join(group for group in WEIGHTS if group in held) or "nothing"
        raise CheckpointError(f"`{reader.path}` holds no `{wanted[0]}`", where="--weights", allowed=names)
    return found


def _require_room(output: Path, needed: int) -> None:
    free = fsio.free_bytes(output.resolve().parent)
    if free < needed:
        raise SetupError(
            f"no space for the export: it takes {readable_size(needed)}, there are {readable_size(free)} left",
            where=str(output.resolve().parent),
            hint="free space on that disk, take `--dtype bf16`, or name an output on another disk",
        )
