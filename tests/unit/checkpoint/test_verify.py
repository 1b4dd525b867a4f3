"""The result object of `osora ckpt verify`, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import save
from support.opensora import write_async

from osora_cli.app.ckpt.verify import verify_path
from osora_cli.checkpoint.verify import verify
from osora_cli.errors import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run", 1, 2)
    return tmp_path / "run"


def test_a_checkpoint(run: Path) -> None:
    result = verify_path(run / "epoch0-global_step2")
    data = result.to_json()
    assert data["schema_version"] == 1
    assert (data["kind"], data["verdict"], data["path"]) == ("checkpoint", "ok", str(run / "epoch0-global_step2"))
    assert data["counters"]["actual_update_step"] == 2
    assert {check["name"]: check["status"] for check in data["checks"]}["digests"] == "passed"
    assert all(check["findings"] == [] for check in data["checks"])
    assert result.exit_code == 0
    assert "resume_from" not in data


def test_a_run(run: Path) -> None:
    (run / "epoch0-global_step1/ema.safetensors").write_bytes(b"")
    result = verify_path(run)
    data = result.to_json()
    assert (data["kind"], data["verdict"]) == ("run", "damaged")
    assert data["resume_from"] == str(run / "epoch0-global_step2")
    assert [row["verdict"] for row in data["checkpoints"]] == ["damaged", "ok"]
    assert [(check["name"], check["status"]) for check in data["checks"]] == [
        ("epoch0-global_step1", "failed"),
        ("epoch0-global_step2", "passed"),
    ]
    assert data["checks"][0]["findings"][0]["file"] == "epoch0-global_step1/ema.safetensors"
    assert result.exit_code == 4
    assert len(result.rows) == 2


def test_quick_is_complete_and_strict_wants_proof(run: Path) -> None:
    assert verify_path(run, quick=True).verdict == "complete"
    assert verify_path(run, quick=True).exit_code == 0
    assert verify_path(run, quick=True, strict=True).exit_code == 4
    assert verify_path(run, strict=True).exit_code == 0
    foreign = write_async(run.parent / "other/epoch0-global_step6", 6)
    assert verify_path(foreign).exit_code == 0
    assert verify_path(foreign, strict=True).exit_code == 4


def test_a_run_without_checkpoints_and_paths_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    result = verify_path(tmp_path)
    assert (result.verdict, result.exit_code, result.resume_from) == ("incomplete", 4, None)
    with pytest.raises(CheckpointError, match="does not exist"):
        verify_path(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is no folder"):
        verify_path(tmp_path / "config.yaml")


def test_progress_ends_at_the_whole(run: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(run / "epoch0-global_step2", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    size = sum(p.stat().st_size for p in (run / "epoch0-global_step2").rglob("*") if p.is_file())
    assert report.bytes == size - (run / "epoch0-global_step2/manifest.json").stat().st_size


@pytest.mark.parametrize("quick", [True, False])
def test_our_checkpoints_are_verified_without_torch(run: Path, quick: bool) -> None:
    code = (
        "import sys; from osora_cli.app.ckpt.verify import verify_path;"
        f"r = verify_path({str(run)!r}, quick={quick});"
        "assert r.exit_code == 0, r.to_json();"
        "bad = {'torch', 'numpy', 'pandas', 'av'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
