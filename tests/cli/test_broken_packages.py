"""Optional packages that are there and cannot be imported: no command that does not ask for one may notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from support import tiny, tiny_diffusion

OPTIONAL = (
    "apex", "bitsandbytes", "colossalai", "cv2", "decord", "deepspeed", "diffusers", "flash_attn", "imageio",
    "liger_kernel", "tensornvme", "torchaudio", "torchcodec", "torchvision", "transformers", "wandb", "xformers",
)  # fmt: skip
# What each does when it is imported: it leaves its name, then fails as a build for another machine does.
BROKEN = """
from pathlib import Path
(Path(__file__).parent / "touched").write_text("")
raise {error}
"""
LINES = [
    ["data", "meta", "--input", "clips.csv", "--output", "meta.csv", "--num-workers", "0"],
    ["train", "vae", "vae.yaml", "--outputs", "runs", "--exp-name", "a", "--async-io"],
    ["train", "diffusion", "diffusion.yaml", "--outputs", "runs", "--exp-name", "b", "--async-io"],
    ["ckpt", "verify", "runs/a", "--deep"],
    ["ckpt", "export", "runs/a", "w.safetensors"],
    ["infer", "reconstruct", "demo/reconstruct", "--from-pretrained", "runs/a", "--dataset.data-path", "meta.csv",
     "--save-dir", "out", "--no-lpips", "--num-samples", "1", "--bucket-config", "{}"],
    ["config", "show", "train-vae"],
]  # fmt: skip
RUN = """
import json, sys
import torch
torch.set_num_threads(1)
from osora_cli.cli.main import run
codes = {" ".join(line): run(line) for line in json.loads(sys.argv[1])}
print("codes", json.dumps(codes))
"""


def test_no_command_notices(tmp_path: Path) -> None:
    """Videos are decoded and encoded as well, with no program of the system in reach."""
    lib = tmp_path / "lib"
    for number, name in enumerate(OPTIONAL):
        (lib / name).mkdir(parents=True)
        error = ("ImportError('libaio.so.1: cannot open shared object file')", "OSError('undefined symbol: aio')")
        (lib / name / "__init__.py").write_text(BROKEN.format(error=error[number % 2]))
    tiny.make_table(tmp_path, clips=2, frames=12)
    tiny.write_config(tmp_path, max_steps=1, tensorboard=False).rename(tmp_path / "vae.yaml")
    tiny_diffusion.write_config(tmp_path, max_steps=1, tensorboard=False).rename(tmp_path / "diffusion.yaml")
    env = {k: v for k, v in os.environ.items() if k not in ("PATH", "LD_LIBRARY_PATH")}
    env |= {"PYTHONPATH": str(lib), "PATH": str(tmp_path / "nothing"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(LINES)], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = json.loads(re.findall(r"^codes (.*)$", done.stdout, re.MULTILINE)[0])
    assert set(codes.values()) == {0}, (codes, done.stderr)
    assert "checkpoints: in the background, writer threads" in done.stderr
    # `async_io_backend: auto` looks at TensorNVMe; nothing else is even tried.
    assert {path.parent.name for path in lib.glob("*/touched")} == {"tensornvme"}


def requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires(name) or []]


def test_no_optional_package_is_needed_and_all_that_is_needed_fits() -> None:
    """What `pip check` looks at, for osora and everything below it; and no version of it is pinned by osora."""
    needed = [r for r in requirements("osora") if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert needed
    assert {r.name.replace("-", "_") for r in needed}.isdisjoint(OPTIONAL)
    assert [str(r) for r in needed if any(part.operator in ("==", "===", "~=") for part in r.specifier)] == []
    seen = set[str]()
    while needed:
        requirement = needed.pop()
        if requirement.name in seen:
            continue
        seen.add(requirement.name)
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), str(requirement)
        extras = [*requirement.extras, ""]
        below = requirements(requirement.name)
        needed += [r for r in below if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
