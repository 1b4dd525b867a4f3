"""`osora train diffusion` on real clips: what it writes, what it goes on from, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import tiny
from support.process import Finished, osora
from support.tiny import make_table, records
from support.tiny_diffusion import CONFIG, DC_AE, MODEL, write_config

# The stage 1 preset with a small network: everything that is not named here is the preset's.
SMALL = (
    "--ae", json.dumps(DC_AE), "--is-causal-vae", "False", "--model.axes-dim", "[4,6,6]", "--model.hidden-size", "32",
    "--model.num-heads", "2", "--model.depth", "1", "--model.depth-single-blocks", "1", "--model.in-channels", "16",
    "--model.vec-in-dim", "12", "--model.context-in-dim", "16", "--t5", json.dumps(CONFIG["t5"]),
    "--clip", json.dumps(CONFIG["clip"]), "--bucket-config", json.dumps(CONFIG["bucket_config"]), "--num-workers", "0",
    "--dtype", "fp32", "--log-every", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    make_table(folder)
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """The stage 1 preset, small, run for four updates in the way of the article; its folder has a name by time."""
    argv = ["train", "diffusion", "stage1", "--dataset.data-path", "clips.csv", "--async-io", "True", *SMALL]
    finished = osora(*argv, "--max-steps", "4", "--ckpt-every", "2", "--ema-decay", "0.9", cwd=home)
    assert finished.code == 0, finished.stderr
    (run,) = (home / "outputs").iterdir()
    return run


def train(home: Path, folder: Path, *argv: str | Path, **changes: Any) -> Finished:
    config = write_config(folder, **{"max_steps": 2, **changes})
    return osora("train", "diffusion", config, "--exp-name", "run", "--outputs", folder, *argv, cwd=home)


def test_what_a_run_leaves(home: Path, trained: Path) -> None:
    assert trained.name.startswith("diffusion_train_stage1-")
    checkpoints = sorted(p.name for p in trained.glob("epoch*"))
    assert checkpoints == ["epoch0-global_step2", "epoch1-global_step4"]
    assert {p.name for p in (trained / checkpoints[-1]).iterdir()} >= {
        "model", "optimizer", "lr_scheduler", "running_states.json", "ema.safetensors", "async_file_io.log", "sampler",
    }  # fmt: skip
    log = (trained / "log.txt").read_text()
    assert f"Saved checkpoint at epoch 1, step 2, global_step 4 to outputs/{trained.name}/{checkpoints[-1]}" in log
    assert "the table has no column score_vmafmotion" in log
    assert records(trained)[-1]["lr"] == 5e-5
    frozen = json.loads((trained / "config.txt").read_text())
    assert (frozen["keep_n_latest"], frozen["async_io"], frozen["optim"]["eps"]) == (20, True, 1e-15)
    assert osora("ckpt", "verify", trained, "--json", cwd=home).code == 0


def test_resume_by_wildcard_with_a_new_learning_rate(home: Path, trained: Path, tmp_path: Path) -> None:
    argv = ["--load", f"outputs/{trained.name}/epoch*-global_step*", "--lr", "3e-4", "--max-steps", "6"]
    finished = osora(
        "train", "diffusion", "stage1", "--dataset.data-path", "clips.csv", *SMALL, *argv, "--exp-name", "next",
        "--outputs", tmp_path, "--model.from-pretrained", "nowhere.safetensors", cwd=home,
    )  # fmt: skip
    assert finished.code == 0, finished.stderr
    assert f"going on from outputs/{trained.name}/epoch1-global_step4: " in finished.stderr
    assert "learning rate: 0.0003, in the checkpoint 5e-05" in finished.stderr
    assert "`model.from_pretrained` `nowhere.safetensors` is not read" in finished.stderr
    assert [(r["step"], r["lr"]) for r in records(tmp_path / "next")] == [(5, 3e-4), (6, 3e-4)]


def test_a_checkpoint_without_running_states_is_incomplete(home: Path, trained: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(trained / "epoch1-global_step4", tmp_path / "epoch1-global_step4"))
    (checkpoint / "running_states.json").unlink()
    finished = train(home, tmp_path, "--load", checkpoint)
    assert finished.code == 4
    assert "running_states.json" in finished.stderr


def test_a_checkpoint_of_another_model_is_refused(home: Path, trained: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {**MODEL, "cond_embed": True}, "condition_config": {"t2v": 1}, "max_steps": 9}
    finished = train(home, tmp_path, "--load", trained, **changes)
    assert finished.code == 4
    assert "`model` is of another network than the config's: `cond_in.weight` is missing" in finished.stderr
    assert not (tmp_path / "run").exists()


def test_retention_leaves_eval_and_the_data_may_begin_anew(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path, ckpt_every=1, max_steps=2).code == 0
    run = tmp_path / "run"
    kept = [run / "eval/picture.txt", run / "epoch0-global_step1/eval/sample.txt"]
    for path in kept:
        path.parent.mkdir()
        path.touch()
    (tmp_path / "other").mkdir()
    begun = train(home, tmp_path / "other", "--load", run, "--start-step", "0", "--start-epoch", "0", max_steps=4)
    assert begun.code == 0, begun.stderr
    first, again = records(run), records(tmp_path / "other/run")
    assert [r["step"] for r in again] == [3, 4]
    assert [r["samples"] for r in again] == [r["samples"] for r in first], "the data are those of the first updates"
    assert [r["epoch"] for r in again] == [0, 0]
    assert osora("resume", run, "--max-steps", "4", "--keep-n-latest", "1", cwd=home).code == 0
    # What it went on from is kept as well.
    assert sorted(p.parent.name for p in run.glob("epoch*/model")) == ["epoch0-global_step2", "epoch1-global_step4"]
    assert all(path.is_file() for path in kept)


def test_an_autoencoder_of_ones_own(home: Path, tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    config = tiny.write_config(tmp_path / "vae", max_steps=2)
    made = osora("train", "vae", config, "--exp-name", "run", "--outputs", tmp_path / "vae", cwd=home)
    assert made.code == 0, made.stderr
    own = tmp_path / "vae/run"
    finished = train(home, tmp_path, ae={"type": "dc_ae", "from_pretrained": str(own), "scaling_factor": 0.5})
    assert finished.code == 0, finished.stderr
    assert f"autoencoder: {own}/epoch0-global_step2, update 2, averaged weights (EMA)" in finished.stderr
    # The run's config knows the architecture, so that it says all that it needs.
    frozen = json.loads((tmp_path / "run/config.txt").read_text())["ae"]
    assert frozen["encoder"]["width_list"] == [8, 32]
    assert frozen["from_pretrained"] == f"{own}/epoch0-global_step2", "the checkpoint, not a run that may go on"
    assert frozen["scaling_factor"] == 0.5
    assert osora("resume", own, "--max-steps", "3", cwd=home).code == 0
    assert (own / "latest").read_text().strip().endswith("_step3")
    onwards = osora("resume", tmp_path / "run", "--max-steps", "5", cwd=home)
    assert onwards.code == 0, onwards.stderr
    assert f"autoencoder: {own}/epoch0-global_step2, update 2" in onwards.stderr
    other = train(home, tmp_path, "--exp-name", "x", ae={**DC_AE, "from_pretrained": str(own), "latent_channels": 8})
    assert other.code == 2
    assert "`latent_channels` is `8` here and `4` there" in other.stderr
    assert "ae.latent_channels" in other.stderr


def test_weights_of_one_run_start_another(home: Path, trained: Path, tmp_path: Path) -> None:
    """A t2v model with an image condition added: the new part starts at zero, which is told."""
    changes: dict[str, Any] = {
        "model": {**MODEL, "depth_single_blocks": 1, "cond_embed": True, "from_pretrained": str(trained)},
        "condition_config": {"i2v_head": 1},
        "lr": 0.0,
        "max_steps": 1,
        "lr_scheduler": {},
    }
    finished = train(home, tmp_path, **changes)
    assert finished.code == 0, finished.stderr
    assert "cond_in.weight, cond_in.bias are not in the weights and start at zero" in finished.stderr
    assert f"{trained}/epoch1-global_step4 (update 4): optimizer, schedule and counters begin anew" in finished.stderr

    def weights(run: Path) -> dict[str, Any]:
        newest = run / (run / "latest").read_text().strip() / "model"
        return {k: v for p in newest.glob("*.safetensors") for k, v in load_file(p).items()}

    before, after = weights(trained), weights(tmp_path / "run")
    assert set(after) - set(before) == {"cond_in.weight", "cond_in.bias"}
    assert all(bool((after[key] == value).all()) for key, value in before.items())
    assert not any(bool(after[key].any()) for key in set(after) - set(before))


@pytest.mark.parametrize(
    ("argv", "changes", "code", "words"),
    [
        (["--plugin", "hybrid", "--plugin-config.sp-size", "4"], {}, 2,
         ["`plugin_config.sp_size` is `4`", "one process", "torchrun --nproc-per-node 4"]),
        (["--plugin", "hybrid", "--plugin-config.tp-size", "2"], {}, 2, ["no tensor parallelism"]),
        (["--model.in-channels", "32"], {}, 2, ["4 latent channels in patches of 2 x 2 make 16"]),
        (["--model.cond-embed"], {}, 2, ["no `condition_config` is given"]),
        ([], {"condition_config": {"i2v_head": 1}}, 2, ["`model.cond_embed` is false"]),
        ([], {"condition_config": {"i2v_heads": 1}}, 2, ["i2v_heads"]),
        ([], {"bucket_config": {"32px_ar1:1": {9: [1.0, 2]}}}, 2, ["a clip of `9` frames"]),
        (["--is-causal-vae"], {}, 2, ["`is_causal_vae` is `true`, which dc_ae is not"]),
        (["--ae.from-pretrained", "nowhere.safetensors"], {}, 4, ["the weights `nowhere.safetensors` do not exist"]),
        (["--model.from-pretrained", "nowhere.safetensors"], {}, 4, ["`nowhere.safetensors` do not exist"]),
        (["--t5.width", "8"], {}, 2, ["`t5.width` is `8` and `model.context_in_dim` is `16`"]),
        (["--dataset.data-path", "null"], {}, 2, ["no table of clips is given"]),
        (["--no-i2v-ref-loss"], {}, 2, ["no `condition_config` is given"]),
    ],
)  # fmt: skip
def test_bad_input_ends_before_a_folder_is_made(
    home: Path, tmp_path: Path, argv: list[str], changes: dict[str, Any], code: int, words: list[str]
) -> None:
    finished = train(home, tmp_path, *argv, **changes)
    assert finished.code == code, finished.stderr
    for text in words:
        assert text in finished.stderr
    assert not (tmp_path / "run").exists()


def test_print_config_is_the_presets(home: Path) -> None:
    finished = osora("train", "diffusion", "--print-config", "--json", cwd=home)
    assert finished.code == 0
    config = finished.json()["config"]
    assert config["bucket_config"] == {"256px": {"1": [1.0, 50]}, "768px": {"1": [0.5, 11]}, "1024px": {"1": [0.5, 7]}}
    assert config["async_io"] is False


def test_masters_and_warm_up_on_resume_are_as_the_config_says(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path, dtype="bf16", lr_scheduler={"warmup_steps": 4}).code == 0
    run = tmp_path / "run"
    newest = run / (run / "latest").read_text().strip()
    assert any(newest.glob("master*")), "fp32 weights are saved beside bf16 ones"
    kept = osora("resume", run, "--max-steps", "3", "--warmup-steps", "9", cwd=home)
    assert "the warm-up goes on as the checkpoint has it: 4 updates" in kept.stderr
    assert "approximate" not in kept.stderr
    argv = ["--max-steps", "4", "--warmup-steps", "9", "--update-warmup-steps", "--no-load-master-weights"]
    changed = osora("resume", run, *argv, cwd=home)
    assert changed.code == 0, changed.stderr
    assert (
        "without fp32 weights of `model` (`load_master_weights` is false) the resume is approximate" in changed.stderr
    )
    rates = [r["lr"] for r in records(run)]
    assert rates[2] == pytest.approx(1e-6 + 3 / 5 * (1e-3 - 1e-6), rel=1e-4)
    assert rates[3] == pytest.approx(1e-6 + 4 / 10 * (1e-3 - 1e-6), rel=1e-4)
