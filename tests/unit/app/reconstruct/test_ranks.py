"""Processes that share the clips of a reconstruction: real ones, over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clips import make_clip
from support.recon import config, write_table

from osora_cli.app.reconstruct.ranks import share_of
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import probe

TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def run_ranks(world_size: int, arguments: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of `osora infer reconstruct` on each rank."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "osora_cli", "infer", "reconstruct", *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(processes, said, strict=True)]


def numbers(clip: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in clip.items() if isinstance(value, int | float)}


def test_share_of_deals_by_falling_cost_and_keeps_the_order() -> None:
    cost = {3: 5.0, 1: 9.0, 7: 5.0, 4: 1.0, 9: 7.0}
    shares = [share_of([3, 1, 7, 4, 9], cost.__getitem__, rank, 2) for rank in (0, 1)]
    assert shares == [[3, 1, 4], [7, 9]]
    assert sorted(shares[0] + shares[1]) == [1, 3, 4, 7, 9]
    assert share_of([3, 1], cost.__getitem__, 2, 3) == []
    for world_size in (1, 2, 3, 5, 8):
        shares = [share_of([3, 1, 7, 4, 9], cost.__getitem__, rank, world_size) for rank in range(world_size)]
        dealt = [row for share in shares for row in share]
        assert sorted(dealt) == [1, 3, 4, 7, 9]


def test_two_processes_make_what_one_makes(tmp_path: Path, run: Path) -> None:
    files = [make_clip(tmp_path / f"c{i}.mp4", frames=n, size=(64, 48)) for i, n in enumerate((20, 8, 12, 9, 8))]
    table = write_table(tmp_path / "t.csv", files)
    rows = table.read_text().splitlines()
    rows[4] = rows[4].replace("c3.mp4", "missing.mp4")
    table.write_text("\n".join(rows) + "\n")
    given = config(table, run, tmp_path / "two")
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump(
            {
                "dataset": {"data_path": str(table)},
                "model": {"from_pretrained": str(run)},
                "dtype": given.dtype,
                "lpips": False,
                "save_dir": str(tmp_path / "two"),
            }
        )
    )
    lead, other = run_ranks(2, [str(tmp_path / "c.yaml")])
    assert lead[0] == other[0] == 0, lead[2] + other[2]
    assert other[1:] == ("", ""), "only the first rank speaks"
    assert "4, 1 left out" in lead[1]
    one = reconstruct(config(table, run, tmp_path / "one")).to_json()
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert two["protocol"]["ranks"] == 2
    assert [clip["name"] for clip in two["clips"]] == ["c0", "c1", "c2", "c4"]
    for clip, its in zip(one["clips"], two["clips"], strict=True):
        assert numbers(its) == pytest.approx(numbers(clip), rel=1e-3)
        assert {k: its[k] for k in its.keys() - numbers(its)} == {k: clip[k] for k in clip.keys() - numbers(clip)}
        for side in ("orig", "recn", "side_by_side"):
            assert probe(tmp_path / "two" / clip[side]).num_frames == clip["frames"]
    assert numbers(two["mean"]) == pytest.approx(numbers(one["mean"]), rel=1e-3)
    assert [clip["row"] for clip in two["left_out"]] == [3]
    names = {p.name for p in (tmp_path / "two").iterdir()}
    assert names == {"orig", "recn", "side_by_side", "side_by_side.png", "metrics.json"}
    pictures = [(tmp_path / name / "side_by_side.png").read_bytes() for name in ("one", "two")]
    assert len(pictures[1]) == pytest.approx(len(pictures[0]), rel=0.05)


def test_an_error_is_said_once_and_ends_all(tmp_path: Path, run: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "bad.mp4").write_bytes(b"no video")
    said = run_ranks(
        2,
        ["demo/reconstruct", "--dataset.data-path", str(data), "--from-pretrained", str(run),
         "--save-dir", str(tmp_path / "out"), "--bucket-config", "{}", "--no-lpips"],
    )  # fmt: skip
    assert {code for code, _, _ in said} == {3}
    assert sum("none of 1 clip can be reconstructed" in words for _, _, words in said) == 1
    assert all(out == "" for _, out, _ in said)
    assert not (tmp_path / "out").exists()
