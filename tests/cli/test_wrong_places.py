"""Paths of the wrong kind given to commands: each ends in its own exit code, and says what is wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from osora_cli.cli.main import run
from osora_cli.cli.output import as_osora_error


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST])
def test_a_path_of_the_wrong_kind_is_no_internal_error(number: int) -> None:
    error = as_osora_error(OSError(number, os.strerror(number), "some/where"))
    assert (error.exit_code, error.message) == (5, f"`some/where`: {os.strerror(number)}")


def test_too_little_memory_is_no_internal_error() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.00 GiB is "
        "free. Including non-PyTorch memory, this process has 22.00 GiB memory in use. If reserved but unallocated ..."
    )
    error = as_osora_error(torch.OutOfMemoryError(text))
    assert error.exit_code == 1
    assert error.message.startswith(
        "the GPU has too little memory: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"
    )
    assert error.message.endswith("of which 1.00 GiB is free")
    assert "--dry-run" in str(error.hint)
    assert as_osora_error(MemoryError()).message == "the machine has too little memory"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["ckpt", "list", "a.txt"], 4, "`a.txt` is no folder"),
        (["ckpt", "prune", "plain"], 4, "`plain` is no run"),
        (["config", "convert", "c.yaml", "out.py"], 2, "`out.py` is no name of a YAML file"),
        (["config", "convert", "c.yaml", "no/such/out.yaml"], 5, "`no/such/out.yaml` cannot be written"),
        (["infer", "reconstruct", "--save-dir", ""], 2, "allowed: text that is not empty"),
        (["train", "vae", "--outputs="], 2, "`outputs` is ``"),
        (["train", "vae", "demo/vae", "--dataset.data-path="], 2, "allowed: text that is not empty"),
        (["resume", ""], 2, "`osora resume` is given an empty word"),
        (["ckpt", "verify", ""], 2, "`osora ckpt verify` is given an empty word"),
        (["data", "meta", "--input=", "--output", "t.csv"], 2, "`osora data meta` is given an empty word"),
        (["data", "check", "t.csv", "vae/inference/video_dc_ae"], 2, "is a config of `osora infer reconstruct`"),
        (["--quiet"], 2, "no command is given"),
        (["train", "vae", "demo/vae", "--dataset.data-path", "no.csv"], 3, "osora data meta --input"),
        (["train", "diffusion", "demo/diffusion", "--dataset.data-path", "t.csv"], 2, "--ae.from-pretrained RUN"),
    ],
)
def test_what_is_said(
    line: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "c.yaml").write_text("lr: 1.0e-4\n")
    header = "path,text,num_frames,height,width,aspect_ratio,resolution,fps\n"
    (tmp_path / "t.csv").write_text(header + "x.mp4,,32,64,64,1.0,4096,25.0\n")
    assert run(line) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.py").exists()
