"""Names inside a run and inside a checkpoint: the only place that spells them. Knows no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUNNING_STATES = "running_states.json"
MANIFEST = "manifest.json"
ASYNC_LOG = "async_file_io.log"
ASYNC_LOG_LINE = "All tasks are completed"
OWNER = ".owner.json"
RUN_FILE = "run.json"  # in the run's folder: who the run is
LATEST = "latest"
EVAL = "eval"
RNG_DIR = "rng"
EMA_PT = "ema.pt"
PARAM_GROUPS = "pytorch_optim_group.bin"
STAGING_PREFIX = ".staging-"
TRASH_PREFIX = ".trash-"

# Small states that are one file each at the top of a checkpoint.
SMALL_NAMES = ("lr_scheduler", "sampler", "disc_lr_scheduler")


@dataclass(frozen=True)
class GroupLayout:
    """Where the tensors of one group lie.

    Attributes:
        folder: folder of the shards and their index; "" for a group that is one file at the top.
        stem: `model` gives `model-00001.safetensors` and `model.safetensors.index.json`.
        prefix: stands before every key in the file.
        optimizer: keys are `state.{i}.{name}`; one parameter's states are never split over two files.
    """

    folder: str
    stem: str
    prefix: str = ""
    optimizer: bool = False

    def shard(self, number: int) -> str:
        """Path of the shard with this number (from 1), relative to the checkpoint."""
        if not self.folder:
            return f"{self.stem}.safetensors"
        return f"{self.folder}/{self.stem}-{number:05d}.safetensors"

    @property
    def index(self) -> str | None:
        return f"{self.folder}/{self.stem}.safetensors.index.json" if self.folder else None

    @property
    def param_groups(self) -> str | None:
        return f"{self.folder}/{PARAM_GROUPS}" if self.optimizer else None


# In the order in which their files are planned.
GROUPS: dict[str, GroupLayout] = {
    "model": GroupLayout("model", "model"),
    "optimizer": GroupLayout("optimizer", "optimizer", optimizer=True),
    "ema": GroupLayout("", "ema"),
    "master": GroupLayout("", "master", prefix="module."),
    "discriminator": GroupLayout("discriminator", "model"),
    "disc_optimizer": GroupLayout("disc_optimizer", "optimizer", optimizer=True),
    "disc_master": GroupLayout("", "disc_master", prefix="module."),
}

_FOLDER = re.compile(r"epoch(\d+)-global_step(\d+)\Z")
_STATE = re.compile(r"state\.(\d+)\.(.+)\Z")


def folder_name(epoch: int, update: int) -> str:
    """`epoch{E}-global_step{S}`, S counted in optimizer updates."""
    return f"epoch{epoch}-global_step{update}"


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """(epoch, update) of a checkpoint's folder name, None for any other name."""
    match = _FOLDER.match(name)
    return (int(match[1]), int(match[2])) if match else None


def parse_state_key(key: str) -> tuple[int, str] | None:
    """(parameter number, state name) of an optimizer's key `state.{i}.{name}`, None for any other."""
    match = _STATE.match(key)
    return (int(match[1]), match[2]) if match else None


def rng_file(rank: int) -> str:
    return f"{RNG_DIR}/rank-{rank:05d}.json"


def checkpoint_folders(run: Path) -> list[Path]:
    """The folders of a run that are named as checkpoints are, lowest update first."""
    found = []
    for entry in run.iterdir():
        numbers = parse_folder_name(entry.name)
        if numbers is not None and entry.is_dir():
            found.append((numbers[1], numbers[0], entry))
    return [entry for *_, entry in sorted(found)]
