"""Pretrained parts: which there are, where they lie, and how each is fetched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from osora_cli.errors import SetupError, UsageError

Progress = Callable[[str], None]

GB = 10**9


@dataclass(frozen=True)
class WeightsSource:
    """A pretrained part.

    Attributes:
        name: what `osora weights fetch` takes.
        what: one line.
        file: name of the file in the cache or folder.
        size: bytes, about.
        licence: lines that are shown before anything is fetched.
        repo: `org/name` on the hub; None: through pip (model/lpips_weights.py).
    """

    name: str
    what: str
    file: str
    size: int
    licence: tuple[str, ...]
    repo: str | None


@dataclass(frozen=True)
class WeightsStatus:
    """A source, and its file if it lies in the cache or in ./ckpts."""

    source: WeightsSource
    path: Path | None


_CARD = "as its model card declares, shown before the file is fetched"


def sources() -> dict[str, WeightsSource]:
    """All pretrained parts by name."""
    from osora_cli.model import lpips_weights as lpips

    parts = [
        WeightsSource(
            lpips.NAME, "LPIPS with VGG16: the perceptual loss and metric", lpips.FILE_NAME,
            lpips.SIZE_MB * 10**6, lpips.LICENCE, None,
        ),
        WeightsSource(
            "dc-ae-f32t4c128", "Video DC-AE of Open-Sora 2.0, 459 M parameters", "F32T4C128_AE.safetensors",
            int(1.9 * GB), (_CARD,), "hpcai-tech/Open-Sora-v2-Video-DC-AE",
        ),
        WeightsSource(
            "hunyuan_vae", "causal VAE of HunyuanVideo, 246 M parameters", "hunyuan_vae.safetensors",
            int(1.0 * GB), ("Tencent Hunyuan Community License, limited by region and use", _CARD),
            "hpcai-tech/Open-Sora-v2",
        ),
        WeightsSource(
            "open-sora-v2", "MMDiT of Open-Sora 2.0 on HunyuanVideo latents, 11.9 B parameters",
            "Open_Sora_v2.safetensors", 24 * GB, (_CARD,), "hpcai-tech/Open-Sora-v2",
        ),
        WeightsSource(
            "open-sora-v2-dc-ae", "MMDiT of Open-Sora 2.0 on Video DC-AE latents, 11.9 B parameters",
            "Open_Sora_v2_Video_DC_AE.safetensors", 24 * GB, (_CARD,), "hpcai-tech/Open-Sora-v2-Video-DC-AE",
        ),
    ]  # fmt: skip
    return {part.name: part for part in parts}


def list_weights() -> list[WeightsStatus]:
    """Every pretrained part and where it lies, if it does."""
    from osora_cli.model.lpips_weights import cache_dir

    out = []
    for source in sources().values():
        places = [cache_dir() / source.file, Path("ckpts") / source.file]
        out.append(WeightsStatus(source, next((p for p in places if p.is_file()), None)))
    return out


def fetch(name: str, to: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch a pretrained part and return its file. One that is there already is kept.

    Args:
        name: as `list_weights` names it.
        to: folder; None: the cache ($OSORA_CACHE, else the user's cache folder).
        progress: called with lines for the user; licences come before anything is fetched.

    Raises:
        UsageError: no such name.
        SetupError: what fetches it is missing, no network, no room, or not the known file.
    """
    from osora_cli.model.hub import hub_download
    from osora_cli.model.lpips_weights import cache_dir, fetch_lpips

    known = sources()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise UsageError(
            f"there are no weights named `{name}`",
            allowed=", ".join(known),
            hint=f"osora weights fetch {near[0]}" if near else "osora weights list",
        )
    source, folder = known[name], Path(to) if to is not None else cache_dir()
    say = progress or (lambda _: None)
    if source.repo is None:
        return fetch_lpips(folder, say)
    path = folder / source.file
    if path.is_file():
        say(f"`{path}` is there")
        return path
    for line in source.licence:
        say(f"licence: {line}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"`{folder}` cannot be written: {error.strerror}", hint="--to ANOTHER_FOLDER") from error
    _check_room(folder, source)
    got = hub_download(source.repo, source.file, folder, progress=say)
    say(f"wrote `{got}`")
    return got


def _check_room(folder: Path, source: WeightsSource) -> None:
    free = shutil.disk_usage(folder).free
    if free < source.size:
        raise SetupError(
            f"`{folder}` has {free / GB:.1f} GB free, `{source.name}` takes {source.size / GB:.1f} GB",
            hint="--to A_LARGER_FOLDER, or OSORA_CACHE",
        )
