"""The configs that come with osora, found by name: `vae/train/video_dc_ae`, or `video_dc_ae` for short."""

from __future__ import annotations

import difflib
from pathlib import Path

from osora_cli.errors import ConfigError

SUFFIXES = (".yaml", ".yml")
_PACKAGE = Path(__file__).resolve().parent.parent


def preset_root() -> Path | None:
    """Folder of the presets: inside an installed package, or `configs/` of the checkout it is installed from."""
    for folder in (_PACKAGE / "presets", _PACKAGE.parent / "configs"):
        if folder.is_dir():
            return folder
    return None


def preset_names(root: Path | None = None) -> list[str]:
    """Full names, sorted: `demo/vae`, `vae/train/video_dc_ae`."""
    root = root or preset_root()
    if root is None:
        return []
    found = (p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    return sorted(p.relative_to(root).with_suffix("").as_posix() for p in found)


def find_preset(name: str, group: str = "", root: Path | None = None) -> tuple[str, Path] | None:
    """(full name, file) of the preset that `name` means; None when there is none.

    `name` is full, or short; a short one is looked for in `group` (the folder of the command's own configs) first.
    Raises ConfigError for a short name that several presets bear, none of them in `group`.
    """
    root = root or preset_root()
    if root is None:
        return None
    wanted = name.removeprefix("./").removeprefix("configs/")
    wanted = wanted.removesuffix(".yaml").removesuffix(".yml").removesuffix(".py")
    names = preset_names(root)
    if wanted in names:
        return wanted, _file(root, wanted)
    if f"{group}/{wanted}" in names:
        return f"{group}/{wanted}", _file(root, f"{group}/{wanted}")
    same = [full for full in names if full.rpartition("/")[2] == wanted]
    if len(same) > 1:
        raise ConfigError(
            f"`{name}` is the short name of {len(same)} presets", allowed=", ".join(f"`{full}`" for full in same)
        )
    return (same[0], _file(root, same[0])) if same else None


def is_preset(name: str, group: str = "") -> bool:
    """Whether a word names a preset, in full or for short."""
    try:
        return find_preset(name, group) is not None
    except ConfigError:
        return True


def nearest_preset(name: str, group: str = "") -> str | None:
    """The preset that a mistyped name was probably meant for; of two with one short name, that of `group`."""
    names = sorted(preset_names(), key=lambda full: not full.startswith(f"{group}/"))
    table = {full.rpartition("/")[2]: full for full in reversed(names)} | {full: full for full in names}
    wanted = name.removeprefix("configs/").removesuffix(".yaml").removesuffix(".yml").removesuffix(".py")
    close = difflib.get_close_matches(wanted, table, n=1, cutoff=0.7)
    return table[close[0]] if close else None


def _file(root: Path, name: str) -> Path:
    return next(p for p in (root / f"{name}{suffix}" for suffix in SUFFIXES) if p.is_file())
