"""`osora data cache`, `data latent-stats` and training from a cache, as commands."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.process import Finished, osora
from support.tiny import records
from support.tiny_cache import make_table
from support.tiny_diffusion import write_config

from osora_cli.data.cache_store import Store


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_table(folder, clips=5)
    write_config(folder, bucket_config={"32px_ar1:1": {8: [1.0, 2]}})
    return folder


@pytest.fixture(scope="module")
def cache(home: Path) -> Finished:
    return ok(osora("data", "cache", "tiny.yaml", "--json", cwd=home))


def ok(done: Finished) -> Finished:
    assert done.code == 0, done.stderr
    return done


def train(home: Path, name: str, *more: str) -> Path:
    ok(osora("train", "diffusion", "tiny.yaml", "--exp-name", name, "--max-steps", "5", *more, cwd=home))
    return home / "outputs" / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    (folder,) = run.glob("epoch*-global_step5")
    return {k: v for path in sorted((folder / "model").glob("*.safetensors")) for k, v in load_file(path).items()}


def test_the_cache_says_what_it_made(home: Path, cache: Finished) -> None:
    result = cache.json()
    assert result["clips_made"] == 5
    assert result["captions_made"] == 6
    assert result["ranks"] == 1
    assert (home / "clips.cache/latents/index.parquet").is_file()
    again = ok(osora("data", "cache", "tiny.yaml", cwd=home))
    assert "0 made, 5 there already" in again.stdout


def test_training_from_the_cache_is_training_on_the_fly(home: Path, cache: Finished) -> None:
    plain, cached = train(home, "plain"), train(home, "cached", "--cached-video", "--cached-text")
    assert "from the cache" in (cached / "log.txt").read_text()
    told, told_cached = records(plain), records(cached)
    assert [r["samples"] for r in told] == [r["samples"] for r in told_cached]
    for one, other in zip(told, told_cached, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(cached)[key], value, rtol=0, atol=1e-5)


def test_text_alone_from_the_cache_is_bit_equal(home: Path, cache: Finished) -> None:
    plain, cached = train(home, "plain2"), train(home, "cached2", "--cached-text")
    assert records(plain) == records(cached)
    assert all(torch.equal(value, weights(cached)[key]) for key, value in weights(plain).items())


def test_a_cached_run_resumes_exactly(home: Path, cache: Finished) -> None:
    flags = ("--cached-video", "--cached-text")
    straight = train(home, "straight", *flags)
    ok(osora("train", "diffusion", "tiny.yaml", "--exp-name", "cut", "--max-steps", "2", *flags, cwd=home))
    ok(osora("resume", "outputs/cut", "--max-steps", "5", cwd=home))
    assert [r["loss"] for r in records(straight)] == [r["loss"] for r in records(home / "outputs/cut")]
    assert all(torch.equal(v, weights(home / "outputs/cut")[k]) for k, v in weights(straight).items())


def test_scoring_and_sampling_leave_the_training_as_it_is(home: Path) -> None:
    plain = train(home, "unscored")
    scored = train(home, "scored", "--eval-every", "2", "--eval.number", "3", "--sampling-option.num-steps", "3")
    told = [r for r in records(scored) if "loss" in r]
    assert told == records(plain)
    assert all(torch.equal(value, weights(scored)[key]) for key, value in weights(plain).items())
    folder = scored / "eval"
    assert (folder / "update0000002-samples.png").is_file()
    assert (folder / "update0000004-sample1.mp4").stat().st_size > 500
    assert not list(folder.glob(".*"))


def test_a_cache_that_is_not_there_is_an_error_with_its_command(home: Path) -> None:
    done = osora(
        "train", "diffusion", "tiny.yaml", "--cached-video", "--cache-dir", "elsewhere", "--exp-name", "no", cwd=home
    )
    assert done.code == 3
    assert "lacks 5 clips" in done.stderr
    assert "osora data cache" in done.stderr
    assert not (home / "outputs/no").exists()


def test_clips_are_not_needed_once_they_are_cached(home: Path, tmp_path: Path, cache: Finished) -> None:
    for name in ("clips.csv", "tiny.yaml"):
        (tmp_path / name).write_bytes((home / name).read_bytes())
    flags = ("--cached-video", "--cached-text", "--cache-dir", str(home / "clips.cache"))
    run = train(tmp_path, "no-clips", *flags)
    assert [r["loss"] for r in records(run)] == [r["loss"] for r in records(train(home, "with-clips", *flags[:2]))]


_MAKE = """
import sys
from osora_cli.app.cache.run import make_cache
from osora_cli.config.diffusion import TrainDiffusionConfig
from osora_cli.config.load import load_config
make_cache(load_config(sys.argv[1], TrainDiffusionConfig).config, shard_bytes=1)
"""


def test_a_cache_killed_while_it_is_made_goes_on_and_is_the_same(home: Path, tmp_path: Path, cache: Finished) -> None:
    # The same files: an encoder with threads does not always give the same bytes again.
    for name in ("clips.csv", "tiny.yaml", *(f"clip{i}.mp4" for i in range(5))):
        shutil.copy2(home / name, tmp_path / name)
    child = subprocess.Popen([sys.executable, "-c", _MAKE, "tiny.yaml"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    latents = tmp_path / "clips.cache/latents"
    try:
        deadline = time.monotonic() + 90
        while child.poll() is None and time.monotonic() < deadline:
            if len(list(latents.glob("*.safetensors"))) >= 2:
                break
            time.sleep(0.001)
    finally:
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    before = len(Store.open(latents).entries)
    assert 2 <= before < 5
    result = ok(osora("data", "cache", "tiny.yaml", "--json", cwd=tmp_path)).json()
    assert result["clips_made"] == 5 - before
    here, there = Store.open(latents).entries, Store.open(home / "clips.cache/latents").entries
    assert {key: entry.digests for key, entry in here.items()} == {key: e.digests for key, e in there.items()}
    assert not list(latents.glob(".writing-*"))


def test_latent_stats_and_the_config_they_write(home: Path) -> None:
    result = ok(osora("data", "latent-stats", "tiny.yaml", "--json", "--write", "scaled.yaml", cwd=home)).json()
    assert result["clips"] == 5
    assert len(result["channels"]) == 4
    factor = result["ae"]["scaling_factor"]
    assert factor == pytest.approx(result["std"], rel=1e-5)
    assert yaml.safe_load((home / "scaled.yaml").read_text())["ae"]["scaling_factor"] == factor
    again = ok(osora("data", "latent-stats", "scaled.yaml", "--json", cwd=home)).json()
    assert again["present_std"] == pytest.approx(1.0, abs=1e-4)
    assert again["std"] == pytest.approx(result["std"], rel=1e-5)
    shown = json.loads(ok(osora("train", "diffusion", "scaled.yaml", "--print-config", "--json", cwd=home)).stdout)
    assert shown["config"]["ae"]["scaling_factor"] == factor
    taken = osora("data", "latent-stats", "tiny.yaml", "--write", "scaled.yaml", cwd=home)
    assert taken.code == 2
    assert "exists already" in taken.stderr
