"""`osora ckpt ...` on a run that was really trained: bf16 with masters and EMA, saved in the background."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.process import Finished, osora, start
from support.small_disk import small_disk
from support.tiny import make_table, write_config

from osora_cli.checkpoint.fsio import free_bytes

UPDATES = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ckpt")
    make_table(folder)
    config = write_config(folder, dtype="bf16", ckpt_every=0, ckpt_every_minutes=1e-9, max_steps=UPDATES)
    finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", folder, "--async-io", cwd=folder)
    assert finished.code == 0, finished.stderr
    return folder


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return Path(shutil.copytree(home / "run", tmp_path / "run"))


def ckpt(home: Path, *argv: str | Path) -> Finished:
    return osora("ckpt", *argv, cwd=home)


def updates(run: Path) -> list[int]:
    return sorted(int(p.name.rpartition("step")[2]) for p in run.glob("epoch*"))


def newest(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def test_the_clock_saves_at_every_update(home: Path) -> None:
    assert updates(home / "run") == list(range(1, UPDATES + 1))


def test_deep_verify_of_a_trained_run(home: Path) -> None:
    """Masters, EMA and the network of the config are all compared, nothing is skipped but for the first."""
    finished = ckpt(home, "verify", home / "run", "--deep", "--json")
    assert finished.code == 0, finished.stderr
    result = finished.json()
    assert result["verdict"] == "ok"
    assert result["level"] == "deep"
    last = {check["name"]: check["status"] for check in result["checkpoints"][-1]["checks"]}
    assert [last[name] for name in ("values", "masters", "ema", "previous", "network")] == ["passed"] * 5
    assert ckpt(home, "verify", home / "run", "--deep", "--quick").code == 2


def test_deep_verify_against_another_network(run: Path, home: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "latent_channels: 4" in text
    (run / "config.yaml").write_text(text.replace("latent_channels: 4", "latent_channels: 8"))
    finished = ckpt(home, "verify", newest(run), "--deep")
    assert finished.code == 4
    assert "the config's network" in finished.stdout
    assert ckpt(home, "verify", newest(run)).code == 0


def test_list(run: Path, home: Path) -> None:
    (newest(run) / "master.safetensors").unlink()
    finished = ckpt(home, "list", run)
    assert finished.code == 0
    lines = finished.stdout.splitlines()
    assert lines[0].split()[:3] == ["checkpoint", "structure", "size"]
    by_name = {line.split()[0]: line for line in lines[1 : UPDATES + 1]}
    assert "latest" in by_name[newest(run).name]
    assert "incomplete" in by_name[newest(run).name]
    assert "resume" in by_name[next(p.name for p in run.glob(f"epoch*step{UPDATES - 1}"))]
    assert "model optimizer ema master" in lines[1]
    assert "threads" in lines[1]
    assert f"{newest(run).name}: master.safetensors: is missing" in finished.stdout
    rows = ckpt(home, "list", run, "--json").json()["checkpoints"]
    assert [row["update"] for row in rows] == updates(run)
    assert rows[0]["ranks"] == 1
    assert rows[0]["bytes"] == sum(p.stat().st_size for p in (run / rows[0]["name"]).rglob("*") if p.is_file())


def test_list_of_what_is_no_run(run: Path, home: Path, tmp_path: Path) -> None:
    assert ckpt(home, "list", tmp_path / "none").code == 4
    finished = ckpt(home, "list", newest(run))
    assert finished.code == 4
    assert "is a checkpoint" in finished.stderr
    (tmp_path / "empty").mkdir()
    finished = ckpt(home, "list", tmp_path / "empty")
    assert finished.code == 4
    assert "is no run" in finished.stderr


def test_a_folder_of_runs_in_a_runs_place_names_the_newest(run: Path, home: Path) -> None:
    outputs = run.parent
    for argv, code in (
        (["ckpt", "verify"], 4), (["ckpt", "list"], 4), (["ckpt", "prune"], 4), (["resume"], 4), (["report"], 2)
    ):  # fmt: skip
        finished = osora(*argv, str(outputs), cwd=home)
        assert finished.code == code, finished.stderr
        assert f"it holds 1 run: name `{run}`" in finished.stderr


def test_export_of_the_ema_loads_into_the_network(run: Path, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "ema.safetensors"
    finished = ckpt(home, "export", run, out, "--json")
    assert finished.code == 0, finished.stderr
    result = finished.json()
    assert result["weights"] == "ema"
    assert result["verdict"] == "ok"
    assert Path(result["checkpoint"]) == newest(run)
    from osora_cli.app.ckpt.network import network_shapes

    got = load_file(out)
    assert {key: tuple(value.shape) for key, value in got.items()} == dict(network_shapes(run)["model"])
    assert all(value.dtype == torch.float32 for value in got.values())
    again = ckpt(home, "export", run, out)
    assert again.code == 2
    assert "exists already" in again.stderr


def test_export_in_hugging_faces_layout(run: Path, home: Path, tmp_path: Path) -> None:
    finished = ckpt(
        home, "export", newest(run), tmp_path / "hf", "--weights", "model", "--dtype=fp16", "--shard-gb", "1e-5"
    )
    assert finished.code == 0, finished.stderr
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    tensors = {k: v for name in set(index["weight_map"].values()) for k, v in load_file(tmp_path / "hf" / name).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert {value.dtype for value in tensors.values()} == {torch.float16}


def test_export_refuses_what_does_not_verify(run: Path, home: Path, tmp_path: Path) -> None:
    path = newest(run) / "ema.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    finished = ckpt(home, "export", newest(run), tmp_path / "out.safetensors")
    assert finished.code == 4
    assert "ema.safetensors" in finished.stderr
    assert not (tmp_path / "out.safetensors").exists()
    finished = ckpt(home, "export", newest(run), tmp_path / "out.safetensors", "--force")
    assert finished.code == 0
    assert "by force" in finished.stderr


def test_prune_says_first_and_does_when_told(run: Path, home: Path) -> None:
    before = updates(run)
    finished = ckpt(home, "prune", run, "--keep-n-latest", "2", "--keep-every", "3")
    assert finished.code == 0, finished.stderr
    assert "would remove 3 of 6 checkpoints" in finished.stdout
    assert "--yes" in finished.stdout
    assert updates(run) == before
    finished = ckpt(home, "prune", run, "--keep-n-latest", "2", "--keep-every", "3", "--yes", "--json")
    assert finished.code == 0
    assert finished.json()["done"] is True
    assert updates(run) == [3, 5, 6]
    assert not [p for p in run.iterdir() if p.name.startswith((".trash", ".staging"))]
    assert ckpt(home, "verify", run).code == 0


def test_prune_takes_the_runs_own_settings(run: Path, home: Path) -> None:
    finished = ckpt(home, "prune", run, "--yes")
    assert finished.code == 2
    assert "keeps all checkpoints" in finished.stderr
    assert ckpt(home, "prune", run, "--keep-n-latest", "0", "--yes").code == 2
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("keep_n_latest: -1", "keep_n_latest: 1"))
    assert ckpt(home, "prune", run, "--yes").code == 0
    assert updates(run) == [6]


def test_prune_keeps_the_newest_that_verifies_and_what_does_not(run: Path, home: Path) -> None:
    """A flipped bit, which only the digests tell, and pictures that nobody wrote a digest of."""
    path = newest(run) / "model/model-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    first = next(run.glob("epoch*step1"))
    (first / "eval").mkdir()
    (first / "eval/picture.png").write_bytes(b"png")
    finished = ckpt(home, "prune", run, "--keep-n-latest", "1", "--yes")
    assert finished.code == 0, finished.stderr
    assert updates(run) == [1, 5, 6]
    assert [p.name for p in first.rglob("*")] == ["eval", "picture.png"]
    finished = ckpt(home, "verify", run)
    assert "resume from" in finished.stdout
    assert f"step{UPDATES - 1}" in finished.stdout.rpartition("resume from")[2]


def test_prune_keeps_where_the_run_was_resumed_from(run: Path, home: Path) -> None:
    start = next(run.glob("epoch*step3"))
    finished = osora("resume", start, "--max-steps", "8", cwd=home)
    assert finished.code == 0, finished.stderr
    assert updates(run)[-1] == 8
    assert ckpt(home, "prune", run, "--keep-n-latest", "1", "--yes").code == 0
    assert updates(run) == [3, 8]


def test_a_writer_that_is_not_there_is_refused_before_anything_is_made(home: Path, tmp_path: Path) -> None:
    finished = osora(
        "train", "vae", home / "tiny.yaml", "--outputs", tmp_path, "--exp-name", "x", "--async-io",
        "--async-io-backend", "tensornvme", cwd=home,
    )  # fmt: skip
    if finished.code == 0:
        pytest.skip("NOT TESTED: TensorNVMe is installed here")
    assert finished.code == 5
    assert "async_io_backend `tensornvme`" in finished.stderr
    assert "github.com/hpcaitech/TensorNVMe" in finished.stderr
    assert list(tmp_path.iterdir()) == []


def wait_for(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)


def start_on_a_full_disk(home: Path, disk: Path, policy: str) -> tuple[Any, Path, Path]:
    """A training that saves every update, on a disk with room for its records but for no checkpoint."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(disk) - 600_000)
    config = write_config(disk.parent, ckpt_every=1, max_steps=100_000, on_save_error=policy, tensorboard=False)
    process, _, err = start("train", "vae", config, "--exp-name", "run", "--outputs", disk, "--async-io", cwd=home)
    return process, err, filler


def test_a_failed_save_ends_the_run(home: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 12) as disk:
        process, err, _ = start_on_a_full_disk(home, disk, "stop")
        process.join()
        assert process.exitcode == 5
        assert "no space for a checkpoint" in err.read_text()
        assert "--keep-n-latest" in err.read_text()


def test_a_failed_save_is_told_and_the_run_goes_on(home: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 12) as disk:
        process, err, filler = start_on_a_full_disk(home, disk, "continue")
        run = disk / "run"
        told = "a save failed and the run goes on: no space"
        try:
            wait_for(lambda: err.exists() and err.read_text().count(told) >= 2)
            filler.unlink()
            wait_for(lambda: (run / "latest").exists())
        finally:
            os.kill(process.pid, signal.SIGTERM)
            process.join()
        assert process.exitcode == 143, err.read_text()
        assert ckpt(home, "verify", newest(run)).code == 0
        assert not list(run.glob(".staging-*"))
