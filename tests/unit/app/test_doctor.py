"""The doctor: what it finds on this very machine, and that it sees what is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from support.small_disk import small_disk

from osora_cli.app.doctor import compute, extras, media, system
from osora_cli.app.doctor.finding import Finding, guarded
from osora_cli.app.doctor.run import Diagnosis, checks, diagnose


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_can_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "TEST_BYTES", 2**20)
    told: list[str] = []
    found = diagnose(tmp_path / "not" / "yet", told.append)
    names = by_name(found.findings)
    assert found.healthy, [f for f in found.findings if f.status == "fail"]
    assert names["versions"].values is not None
    assert names["versions"].values["torch"] == torch.__version__
    assert names["decoder"].status == "ok"
    assert names["decoder"].text.startswith(f"PyAV {av.__version__} with FFmpeg {av.ffmpeg_version_info}: ")
    assert names["conv3d bf16, 2 frames"].status == "ok"
    assert told == list(checks(tmp_path))
    assert not list(tmp_path.iterdir()), "nothing is left behind, and no folder is made"
    assert all(finding.cure for finding in found.findings if finding.status in ("warn", "fail"))


@pytest.mark.parametrize("frames", [2, 8])
def test_a_wrong_convolution_is_seen(monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
    right = compute.conv3d_errors(torch.device("cpu"), frames)
    assert all(0 < error < compute.MAX_RELATIVE_ERROR for error in right)

    class Wrong(compute.Conv3d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            out = super().forward(input)
            return out * 1.05 if out.dtype == torch.bfloat16 else out

    monkeypatch.setattr(compute, "Conv3d", Wrong)
    found = by_name(list(compute.convolution()))[f"conv3d bf16, {frames} frames"]
    assert found.status == "fail"
    assert "--dtype fp32" in (found.cure or "")


def test_a_wrong_decoder_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "read_frames", lambda path, order: np.zeros((len(order), 48, 64, 3), np.uint8))
    monkeypatch.setattr(media, "CODECS", ("h264", "no-such-codec"))
    found = by_name(list(media.decoder()))
    assert found["decoder"].status == "fail"
    assert found["codecs"].text == "no decoder for no-such-codec"


def test_a_release_that_is_known_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0+cu130")
    found = by_name(list(compute.versions()))["torch 2.9.0"]
    assert (found.status, found.cure) == ("warn", "pip install 'torch!=2.9.0'")


def test_a_small_disk_and_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 8) as folder:
        found = by_name(list(system.disk(folder / "outputs")))
        assert found["disk space"].status == "warn"
        assert found["disk speed"].status == "fail"
        assert not list(folder.iterdir())
    monkeypatch.setattr(system.resource, "getrlimit", lambda _: (256, 4096))
    few = by_name(list(system.limits()))["open files"]
    assert (few.status, few.cure) == ("warn", "`ulimit -n 4096` before a training with many workers")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> tuple[float, float]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(system, "write_speed", refuse)
    found = by_name(list(system.disk(tmp_path)))["disk speed"]
    assert (found.status, "Permission denied" in found.text) == ("fail", True)


def install(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that only look like the real ones, on the path of this process and its children."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_the_release_of_tensornvme_without_its_async_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist = "tensornvme-0.1.0.dist-info/METADATA"
    install(tmp_path, {"tensornvme/__init__.py": "", "tensornvme/_C.py": "",
                       dist: "Metadata-Version: 2.1\nName: tensornvme\nVersion: 0.1.0\n"}, monkeypatch)  # fmt: skip
    (found,) = extras.tensornvme()
    assert found.status == "warn"
    assert "0.1.0, and `tensornvme.async_file_io`: ModuleNotFoundError" in found.text
    (tmp_path / "tensornvme" / "async_file_io.py").write_text("")
    (found,) = extras.tensornvme()
    assert (found.status, found.text) == ("ok", "0.1.0, all parts")


def test_a_broken_colossalai_is_named_and_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = "Metadata-Version: 2.1\nName: colossalai\nVersion: 0.5.0\n"
    files = {"colossalai/__init__.py": "import os\nos.abort()\n", "colossalai-0.5.0.dist-info/METADATA": about}
    install(tmp_path, files, monkeypatch)
    (found,) = extras.colossalai()
    assert found.status == "fail"
    assert found.text == "0.5.0 cannot be imported: its import ended with code -6"
    (tmp_path / "colossalai" / "__init__.py").write_text("raise ImportError('no module of that name')\n")
    (found,) = extras.colossalai()
    assert found.text == "0.5.0 cannot be imported: ImportError: no module of that name"


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("the driver is gone")

    (found,) = guarded("GPU", broken)
    assert (found.status, found.text) == ("fail", "the check itself failed: RuntimeError: the driver is gone")
    assert not Diagnosis([found]).healthy
