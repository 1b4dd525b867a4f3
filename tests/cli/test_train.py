"""`osora train vae` and `osora resume` on real clips: what they write, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.clips import make_clip
from support.process import Finished, osora, start
from support.tiny import make_table, records, write_config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    make_table(folder)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A run of four updates with checkpoints at 2 and 4. Tests that change it copy it first."""
    folder = home / "shared"
    folder.mkdir()
    config = write_config(folder, ckpt_every=2, max_steps=4)
    finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", folder, "--async-io", cwd=home)
    assert finished.code == 0, finished.stderr
    return folder / "run"


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"


def train(home: Path, folder: Path, *argv: str | Path, **changes: Any) -> Finished:
    config = write_config(folder, **{"max_steps": 2, **changes})
    return osora("train", "vae", config, "--exp-name", "run", "--outputs", folder, *argv, cwd=home)


def test_what_a_run_leaves(trained: Path) -> None:
    names = {p.name for p in trained.iterdir()}
    assert names >= {"config.yaml", "config.txt", "metrics.jsonl", "log.txt", "latest", "tensorboard", "run.json"}
    assert [n for n in names if n.startswith(".")] == [".lock"]
    checkpoints = sorted(p.name for p in trained.glob("epoch*"))
    assert [c.split("step")[1] for c in checkpoints] == ["2", "4"]
    assert (trained / "latest").read_text().strip() == checkpoints[-1]
    assert json.loads((trained / "config.txt").read_text())["ckpt_every"] == 2
    states = json.loads((trained / checkpoints[-1] / "running_states.json").read_text())
    assert states == {"epoch": 1, "step": 2, "global_step": 4, "batch_size": 2, "actual_update_step": 4}
    log = (trained / "log.txt").read_text()
    assert f"Saved checkpoint at epoch 1, step 2, global_step 4 to {trained / checkpoints[-1]}" in log
    record = records(trained)[-1]
    assert record["step"] == 4
    assert len(record["samples"]) == 2
    assert record["grad_norm"] > 0


def test_json_ends_with_one_object(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, "--json")
    result = finished.json()
    assert finished.code == 0
    assert result["steps"] == 2
    assert result["run"] == str(tmp_path / "run")
    assert Path(result["checkpoint"]).name == (tmp_path / "run" / "latest").read_text().strip()
    assert result["last_loss"] == pytest.approx(records(tmp_path / "run")[-1]["loss"])


def test_loss_falls(home: Path, tmp_path: Path) -> None:
    """Not a proof of anything but that gradients reach the weights."""
    assert train(home, tmp_path, max_steps=60, lr=3e-3).code == 0
    losses = [r["loss"] for r in records(tmp_path / "run")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_accumulation_counts_updates(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path, max_steps=3, accumulation_steps=4).code == 0
    assert [len(r["samples"]) for r in records(tmp_path / "run")] == [8, 8, 8]


def test_epochs_end_a_run_and_leftovers_are_told(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, max_steps=None, epochs=3, accumulation_steps=4)
    assert finished.code == 0
    assert [r["step"] for r in records(tmp_path / "run")] == [1]
    assert "2 micro-batches were left over" in finished.stderr


def test_existing_run_is_not_overwritten(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    before = (run / "metrics.jsonl").read_bytes()
    finished = train(home, tmp_path)
    assert finished.code == 2
    assert "exists already" in finished.stderr
    assert "osora resume" in finished.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_resume_auto_starts_then_goes_on(home: Path, tmp_path: Path) -> None:
    first = train(home, tmp_path, "--resume", "auto")
    assert first.code == 0
    assert "starts anew" in first.stderr
    second = train(home, tmp_path, "--resume", "auto", max_steps=4)
    assert second.code == 0
    assert "going on from" in second.stderr
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4]


def test_resume_auto_needs_a_name(home: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=2)
    finished = osora("train", "vae", config, "--outputs", tmp_path, "--resume", "auto", cwd=home)
    assert finished.code == 2
    assert "--exp-name" in finished.stderr


def test_load_takes_the_newest_that_verifies_into_a_new_run(home: Path, trained: Path, tmp_path: Path) -> None:
    source = copy_of(trained, tmp_path / "source")
    newest = next(source.glob("epoch*-global_step4"))
    shard = next((newest / "model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    for load in ([f"{source}/epoch*-global_step*"], [str(p) for p in sorted(source.glob("epoch*"))]):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        finished = train(home, tmp_path, "--load", *load, max_steps=4)
        assert finished.code == 0, finished.stderr
        assert "passed over" in finished.stderr
        assert shard.name in finished.stderr
        assert [r["step"] for r in records(tmp_path / "run")] == [3, 4]


def test_new_learning_rate_on_resume_is_used(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    finished = osora("resume", run, "--max-steps", "6", "--lr", "2e-4", cwd=home)
    assert finished.code == 0
    assert [r["lr"] for r in records(run)][-2:] == [2e-4, 2e-4]
    assert "lr = 0.0002" in finished.stderr


def test_a_finished_run_has_nothing_left(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    finished = osora("resume", run, cwd=home)
    assert finished.code == 0
    assert "nothing left to do" in finished.stderr
    assert len(records(run)) == 4
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    less = osora("resume", run, "--max-steps", "3", cwd=home)
    assert less.code == 2
    assert "4 updates done already" in less.stderr
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_and_ends(home: Path, tmp_path: Path, number: int, code: int) -> None:
    config = write_config(tmp_path, max_steps=100_000)
    process, _, err = start("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, "--async-io", cwd=home)
    run = tmp_path / "run"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 3)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    wait_for(lambda: len(list(run.glob("epoch*"))) == 1)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code, err.read_text()
    last = records(run)[-1]["step"]
    assert (run / "latest").read_text().strip().endswith(f"global_step{last}")
    assert osora("ckpt", "verify", run, cwd=home).code == 0


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_non_finite_updates_end_the_run_before_a_checkpoint(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, max_steps=50, lr=1e30, grad_clip=0.0, max_nonfinite_steps=3, ckpt_every=1)
    assert finished.code == 1
    assert "not finite" in finished.stderr
    skipped = [r["skipped_updates"] for r in records(tmp_path / "run")]
    assert skipped[-1] == 3
    assert osora("ckpt", "verify", tmp_path / "run", cwd=home).code == 0
    # No save in between: it would push out the last good one, and be the newest.
    assert [p.name for p in (tmp_path / "run").glob("epoch*")] == ["epoch0-global_step1"]
    assert "save is put off" in finished.stderr
    assert "from before them" in finished.stderr


def test_epochs_that_end_before_max_steps_are_told(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, epochs=1, max_steps=50)
    assert finished.code == 0
    assert "ended by `epochs` (1), 2 updates of `max_steps` (50) are done" in finished.stderr
    again = osora("resume", tmp_path / "run", cwd=home)
    assert again.code == 0
    assert "2 updates of `max_steps` (50)" in again.stderr


def test_an_end_amid_non_finite_updates_is_told(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, max_steps=3, lr=1e30, grad_clip=0.0)
    assert finished.code == 0
    assert "the checkpoint may be of no use" in finished.stderr


@pytest.mark.parametrize(
    ("changes", "argv", "code", "words"),
    [
        ({"dataset": {"data_path": "none.csv"}}, [], 3, ["none.csv"]),
        ({"dataset": {"data_path": None}}, [], 2, ["no table", "osora data meta"]),
        ({"dataset": {"data_path": "bare.csv"}}, [], 3, ["num_frames", "height", "fps", "osora data meta"]),
        ({"dataset": {"data_path": "empty.csv"}}, [], 3, ["no rows"]),
        ({"bucket_config": {"1024px_ar1:1": {8: [1.0, 2]}}}, [], 3, ["5 clips", "fewer pixels"]),
        ({"bucket_config": {"32px_ar1:1": {64: [1.0, 2]}}}, [], 3, ["too few frames", "28 frames"]),
        ({"bucket_config": {"32px_ar1:1": {8: [1.0, 9]}}}, [], 3, ["batch size 9"]),
        ({"bucket_config": {"32px_ar1:1": {7: [1.0, 2]}}}, [], 2, ["`7` frames", "6 or 8"]),
        ({"bucket_config": {}}, [], 2, ["bucket_config"]),
        ({}, ["--optim.lrr", "3"], 2, ["optim.lrr", "optim.lr"]),
        ({}, ["--epochs", "many"], 2, ["epochs", "many"]),
        ({"learning_rate": 3}, [], 2, ["learning_rate"]),
        ({}, ["--load", "nothing/epoch*"], 4, ["nothing/epoch*"]),
        ({}, ["--load", "."], 4, ["running_states.json"]),
        ({}, ["--start-epoch", "0"], 2, ["--load"]),
        ({"vae_loss_config": {"perceptual_loss_weight": 0.5}}, [], 5, ["osora weights fetch lpips-vgg"]),
        ({}, ["--device", "cuda"], 5, ["no GPU"]),
    ],
    ids=lambda v: "-".join(v)[:40] if isinstance(v, list) else None,
)
def test_bad_input(
    home: Path, tmp_path: Path, changes: dict[str, Any], argv: list[str], code: int, words: list[str]
) -> None:
    if "cuda" in argv:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    (home / "bare.csv").write_text("path,text\nclip0.mp4,a clip\n")
    (home / "empty.csv").write_text("path,text,num_frames,height,width,aspect_ratio,resolution,fps\n")
    config = write_config(tmp_path, **{"max_steps": 2, **changes})
    finished = osora(
        "train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, *argv, cwd=home,
        env={"OSORA_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert finished.code == code, finished.stderr
    assert finished.stderr.lstrip().startswith("error: ")
    assert "Traceback" not in finished.stderr
    for word in words:
        assert word in finished.stderr
    assert not (tmp_path / "run").exists()


def test_other_data_than_the_checkpoints(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    make_clip(tmp_path / "other.mp4", frames=30)
    table = tmp_path / "other.csv"
    table.write_text((home / "clips.csv").read_text() + f"{tmp_path}/other.mp4,another,30,64,96,{64 / 96},6144,24.0\n")
    before = {p.name: p.stat().st_mtime_ns for p in run.iterdir()}
    for change in (
        ("--dataset.data-path", str(table)),
        ("--bucket-config", '{"32px_ar1:1": {8: [1.0, 1]}}'),
        ("--seed", "8"),
    ):
        refused = osora("resume", run, "--max-steps", "6", *change, cwd=home)
        assert refused.code == 2, refused.stderr
        assert "--start-epoch 0 --start-step 0" in refused.stderr
    assert {p.name: p.stat().st_mtime_ns for p in run.iterdir()} == before
    taken = osora(
        "resume", run, "--max-steps", "6", "--dataset.data-path", table, "--start-step", "0", "--start-epoch", "0",
        cwd=home,
    )  # fmt: skip
    assert taken.code == 0, taken.stderr
    assert [(r["step"], r["epoch"]) for r in records(run)][-2:] == [(5, 0), (6, 0)]


def test_another_model_is_refused(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    finished = osora("resume", run, "--max-steps", "6", "--model.latent-channels", "8", cwd=home)
    assert finished.code == 2
    assert "model.latent_channels" in finished.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("io", ["--async-io", "--no-async-io"])
def test_full_disk_leaves_the_checkpoint_before(home: Path, tmp_path: Path, io: str) -> None:
    from support.small_disk import small_disk

    with small_disk(tmp_path / "disk", megabytes=6) as disk:
        config = write_config(tmp_path, max_steps=40, ckpt_every=1)
        finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", disk, io, cwd=home)
        assert finished.code == 5, finished.stderr
        assert "space" in finished.stderr
        run = disk / "run"
        assert len(list(run.glob("epoch*"))) >= 1
        assert osora("ckpt", "verify", run, cwd=home).code == 0


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_without_room_for_a_checkpoint_is_said_at_once(home: Path, tmp_path: Path, policy: str) -> None:
    """The only save would come after the last update."""
    from support.small_disk import small_disk

    with small_disk(tmp_path / "disk", megabytes=1.5) as disk:
        config = write_config(tmp_path, max_steps=2, on_save_error=policy, tensorboard=False)
        finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", disk, cwd=home)
        assert finished.code == 5, finished.stderr
        done = len(records(disk / "run")) if (disk / "run" / "metrics.jsonl").exists() else 0
    assert done == (2 if policy == "continue" else 0)
    assert "no space for a checkpoint: it takes 2." in finished.stderr
    assert ("saves will fail until there is room" in finished.stderr) == (policy == "continue")


def test_buffers_too_small_for_a_checkpoint_are_said_and_it_is_whole(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, "--async-io", async_io_buffer_gib=1e-4, tensorboard=False, max_steps=1)
    assert finished.code == 0, finished.stderr
    assert finished.stderr.count("go through 107.4 kB of staging buffers: the training waits") == 1
    assert osora("ckpt", "verify", tmp_path / "run", cwd=home).code == 0


def test_folder_that_cannot_be_written(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    config = write_config(tmp_path, max_steps=2)
    finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path / "file", cwd=home)
    assert finished.code == 5
    assert "cannot write" in finished.stderr


def test_a_requeued_job_goes_on_with_its_own_checkpoint(home: Path, trained: Path, tmp_path: Path) -> None:
    """`--load BASE --resume auto`: BASE counts for the first start only."""
    line = ("--load", str(trained), "--resume", "auto")
    assert train(home, tmp_path, *line, max_steps=6).code == 0
    again = train(home, tmp_path, *line, max_steps=8)
    assert again.code == 0, again.stderr
    assert [r["step"] for r in records(tmp_path / "run")] == [5, 6, 7, 8]
    assert not list((tmp_path / "run").glob("set-aside-*"))


def test_a_failed_last_save_is_never_exit_0(home: Path, tmp_path: Path) -> None:
    from support.small_disk import small_disk

    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        config = write_config(tmp_path, max_steps=2, on_save_error="continue")
        finished = osora("train", "vae", config, "--exp-name", "run", "--outputs", disk, cwd=home)
        assert finished.code == 5, finished.stderr
        assert not list((disk / "run").glob("epoch*"))


def test_one_process_a_run(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    process, _, err = start("resume", run, "--max-steps", "100000", "--ckpt-every", "0", cwd=home)
    wait_for(lambda: len(records(run)) >= 6)
    config = (run / "config.yaml").read_bytes()
    refused = osora("resume", run, "--max-steps", "9", cwd=home)
    assert refused.code == 2, refused.stderr
    assert f"process {process.pid} on" in refused.stderr
    assert (run / "config.yaml").read_bytes() == config
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 143, err.read_text()
    steps = [r["step"] for r in records(run)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_that_is_renamed_fails_at_its_next_save(home: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=100_000)
    process, _, err = start("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path, cwd=home)
    run = tmp_path / "run"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2)
    run.rename(tmp_path / "moved")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    process.join()
    assert process.exitcode == 1
    assert "was moved or replaced" in err.read_text()
    assert not run.exists()


def test_checkpoint_of_another_run_is_passed_over(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    assert train(home, tmp_path / "run", "--exp-name", "other", max_steps=6).code == 0
    stranger = next((run / "other").glob("epoch*-global_step6"))
    shutil.copytree(stranger, run / stranger.name)
    shutil.rmtree(run / "other")
    verdict = osora("ckpt", "verify", run, "--json", cwd=home).json()
    assert Path(verdict["resume_from"]).name.endswith("global_step4")
    finished = osora("resume", run, "--max-steps", "5", cwd=home)
    assert finished.code == 0, finished.stderr
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5]
    checks = {c["name"]: c for c in verdict["checks"]}
    assert checks[stranger.name]["detail"] == "foreign"
    assert "is of the run" in checks[stranger.name]["findings"][0]["what"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--load", "elsewhere"], ["--load", "a resume goes on with the run itself"]),
        (["--start-epoch", "99999", "--epochs", "100"], ["start_epoch", "100 epochs"]),
        (["--start-step", "99"], ["start_step", "epoch 1 has 2 batches"]),
    ],
    ids=["load", "start-epoch", "start-step"],
)
def test_resume_refuses(home: Path, trained: Path, tmp_path: Path, argv: list[str], words: list[str]) -> None:
    run = copy_of(trained, tmp_path)
    finished = osora("resume", run, "--max-steps", "9", *argv, cwd=home)
    assert finished.code == 2, finished.stderr
    for word in words:
        assert word in finished.stderr


def test_resume_from_another_folder_and_by_other_names(home: Path, trained: Path, tmp_path: Path) -> None:
    run = copy_of(trained, tmp_path)
    (run / "run.json").write_text("")  # as a power cut may leave it
    checkpoint = next(run.glob("epoch*-global_step4"))
    assert osora("resume", ".", "--max-steps", "5", cwd=checkpoint).code == 0
    (tmp_path / "link").symlink_to(next(run.glob("epoch*-global_step5")))
    assert osora("resume", tmp_path / "link", "--max-steps", "6", cwd=tmp_path).code == 0
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]


def test_a_run_is_not_named_like_a_checkpoint(home: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, "--exp-name", "epoch0-global_step5")
    assert finished.code == 2
    assert "a checkpoint's name" in finished.stderr


def test_nothing_to_do_in_a_new_run_is_refused(home: Path, trained: Path, tmp_path: Path) -> None:
    finished = train(home, tmp_path, "--load", trained, max_steps=3)
    assert finished.code == 2
    assert "4 updates done already" in finished.stderr
    assert not (tmp_path / "run").exists()


def test_a_changed_table_is_said_before_what_it_makes_of_the_clips(trained: Path, home: Path, tmp_path: Path) -> None:
    """The clips of the new table are all too small: that is no fault of the run's, whose table it is not."""
    run = copy_of(trained, tmp_path)
    text = (home / "clips.csv").read_text()
    small = tmp_path / "clips.csv"
    small.write_text(text.replace(",64,96,", ",8,12,"))
    finished = osora("resume", run, "--max-steps", "6", "--dataset.data-path", small, "--dataset.root", home, cwd=home)
    assert finished.code == 2
    assert "the table's digest" in finished.stderr
    assert "--start-step 0" in finished.stderr
    anew = osora("resume", run, "--max-steps", "6", "--dataset.data-path", small, "--dataset.root", home,
                 "--start-step", "0", "--start-epoch", "0", cwd=home)  # fmt: skip
    assert anew.code == 3
    assert "no bucket gives a batch" in anew.stderr
