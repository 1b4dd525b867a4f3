"""Optional parts: which are here, and whether they can be imported.

Each is imported in a process of its own: one that is broken, or that changes torch on import, leaves this one alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from osora_cli.app.doctor.finding import Finding, Status
from osora_cli.app.weights import list_weights

TIMEOUT_S = 120


def colossalai() -> Iterator[Finding]:
    """The engine `colossalai`."""
    version = _version("colossalai")
    if version is None:
        yield Finding(
            "colossalai", "absent", "not installed: the native engine trains", "only for `engine: colossalai`: "
            "pip install 'osora[colossalai]', then pip install --no-deps colossalai==0.5.0",
        )  # fmt: skip
        return
    error = import_error("colossalai.booster.plugin", "colossalai.nn.optimizer")
    yield Finding(
        "colossalai",
        "ok" if error is None else "fail",
        version if error is None else f"{version} cannot be imported: {error}",
        None if error is None else "pip install 'osora[colossalai]' brings what it needs; or `--engine native`",
        {"version": version},
    )


def tensornvme() -> Iterator[Finding]:
    """The checkpoint writer `tensornvme`: the package, its compiled part, its async module."""
    source = "build it from github.com/hpcaitech/TensorNVMe: it takes cmake, a CUDA torch and the CUDA headers"
    version = _version("tensornvme")
    if version is None:
        cure = f"only for `async_io_backend: tensornvme`: {source}"
        yield Finding("tensornvme", "absent", "not installed: osora's own threads write checkpoints", cure)
        return
    parts = {name: import_error(name) for name in ("tensornvme", "tensornvme._C", "tensornvme.async_file_io")}
    broken = {name: error for name, error in parts.items() if error is not None}
    told = "; ".join(f"`{name}`: {error}" for name, error in broken.items())
    yield Finding(
        "tensornvme",
        "ok" if not broken else "warn",
        f"{version}, all parts" if not broken else f"{version}, and {told}; threads write checkpoints",
        None if not broken else f"PyPI's 0.1.0 has no async module; {source}",
        {"version": version, "broken": broken},
    )


def build_tools() -> Iterator[Finding]:
    """What building TensorNVMe takes."""
    from torch.utils.cpp_extension import CUDA_HOME

    found = {"cmake": shutil.which("cmake"), "CUDA headers": _cuda_headers(CUDA_HOME)}
    missing = [name for name, path in found.items() if path is None]
    yield Finding(
        "build tools",
        "absent" if missing else "ok",
        f"no {' and no '.join(missing)}" if missing else ", ".join(f"{n} in {p}" for n, p in found.items()),
        "needed only to build TensorNVMe" if missing else None,
    )


def others() -> Iterator[Finding]:
    """Text encoders, W&B, and the weights that have been fetched."""
    for name, use, extra in (("transformers", "T5 and CLIP", "text"), ("wandb", "Weights & Biases", "wandb")):
        version = _version(name)
        told: tuple[Status, str, str | None] = ("ok", str(version), None)
        if version is None:
            told = ("absent", f"not installed: no {use}", f"pip install 'osora[{extra}]'")
        yield Finding(name, *told)
    for status in list_weights():
        name = status.source.name
        if status.path is None:
            yield Finding(name, "absent", status.source.what, f"osora weights fetch {name}")
        else:
            yield Finding(name, "ok", str(status.path))


def import_error(*modules: str) -> str | None:
    """Why the modules cannot be imported in a fresh process, in one line; None: they can."""
    code = "import " + ", ".join(modules)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its import ended with code {done.returncode}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version" if find_spec(name) is not None else None


def _cuda_headers(home: str | None) -> str | None:
    if home is None:
        return None
    include = Path(home) / "include"
    return str(include) if (include / "cuda_runtime.h").is_file() else None
