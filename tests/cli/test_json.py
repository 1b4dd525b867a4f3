"""Every command's `--json` against its schema, with what the commands really print: one small run of each kind.

`osora demo` has its own test (test_demo.py), which checks its result against the schema too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support import tiny, tiny_diffusion
from support.clips import make_clip
from support.disc import write_disc_config
from support.json_schemas import BESIDE, FOLDER, SHAPES, check, schema
from support.process import Finished, osora

from osora_cli.cli.main import app

STEP1, STEP2 = "runs/vae/epoch0-global_step1", "runs/vae/epoch0-global_step2"
RECONSTRUCT = (
    "infer", "reconstruct", "demo/reconstruct", "--dataset.data-path", "clips.csv", "--from-pretrained", STEP2,
    "--bucket-config", "{32px_ar1:1: {8: [1.0, 1]}}", "--lpips", "False", "--dtype", "fp32",
)  # fmt: skip
# (command, shape, exit code, the rest of the line), each on its own: what one makes no other needs.
CASES: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("data meta", "data-meta", 0, ("--input", "clips.csv", "--output", "{out}/meta.csv", "--num-workers", "0")),
    ("data meta", "data-meta", 0, ("--input", "broken", "--output", "{out}/meta.csv", "--num-workers", "0")),
    ("data check", "data-check", 0, ("clips.csv", "vae.yaml", "--clips-out", "{out}/clips.csv")),
    ("data check", "data-check", 0, ("clips.csv", "vae.yaml", "--no-files")),
    ("data check", "data-check", 3, ("clips.csv", "vae.yaml", "--bucket-config", "{512px: {8: [1.0, 1]}}")),
    ("data cache", "data-cache", 0, ("diffusion.yaml", "--cache-dir", "{out}/cache")),
    ("data latent-stats", "data-latent-stats", 0, ("diffusion.yaml", "--number", "2", "--write", "{out}/a.yaml")),
    ("train vae", "dry-run", 0, ("vae.yaml", "--dry-run")),
    ("train vae", "print-config", 0, ("vae.yaml", "--print-config")),
    ("train vae-disc", "train", 0, ("disc.yaml", "--from-pretrained", STEP2, "--outputs", "{out}")),
    ("train vae-disc", "dry-run", 0, ("disc.yaml", "--from-pretrained", STEP2, "--dry-run")),
    ("train vae-disc", "print-config", 0, ("disc.yaml", "--print-config")),
    ("train diffusion", "train", 0, ("diffusion.yaml", "--outputs", "{out}")),
    ("train diffusion", "dry-run", 0, ("diffusion.yaml", "--dry-run")),
    ("train diffusion", "print-config", 0, ("diffusion.yaml", "--print-config")),
    ("resume", "train", 0, ("{run}", "--max-steps", "3")),
    ("resume", "train", 0, ("{run}",)),
    ("resume", "print-config", 0, ("runs/vae", "--print-config")),
    ("infer reconstruct", "print-config", 0, (*RECONSTRUCT[2:], "--print-config")),
    ("ckpt verify", "ckpt-verify-run", 0, ("runs/vae", "--quick")),
    ("ckpt verify", "ckpt-verify-run", 4, ("{damaged}",)),
    ("ckpt verify", "ckpt-verify-checkpoint", 0, (STEP2, "--deep")),
    ("ckpt verify", "ckpt-verify-checkpoint", 4, ("{damaged}/epoch0-global_step2",)),
    ("ckpt list", "ckpt-list", 0, ("runs/vae",)),
    ("ckpt list", "ckpt-list", 0, ("{damaged}",)),
    ("ckpt export", "ckpt-export", 0, ("runs/vae", "{out}/model.safetensors")),
    ("ckpt export", "ckpt-export", 0, (STEP1, "{out}/model", "--weights", "model", "--dtype", "bf16")),
    ("ckpt prune", "ckpt-prune", 0, ("runs/vae", "--keep-n-latest", "1")),
    ("ckpt prune", "ckpt-prune", 0, ("{run}", "--keep-n-latest", "1", "--yes")),
    ("weights list", "weights-list", 0, ()),
    ("weights fetch", "weights-fetch", 0, ("hunyuan_vae", "--to", "weights")),
    ("config show", "config-commands", 0, ()),
    ("config show", "config-show", 0, ("train-diffusion",)),
    ("config convert", "config-convert", 0, ("seed.py", "{out}/seed.yaml")),
    ("config convert", "config-convert", 0, ("seed.py", "--command", "train-vae")),
    ("report", "report", 0, ("runs/vae", "--output", "{out}/report")),
    ("doctor", "doctor", 0, ("--outputs", "{out}")),
]
FAILURES: list[tuple[int, tuple[str, ...]]] = [
    (2, ("train", "vae", "vae.yaml", "--lrr", "1")),
    (2, ("train", "vae", "vae.yaml", "--lr", "x", "--epochs", "0")),
    (2, ("chekpoint",)),
    (3, ("data", "check", "nowhere.csv", "vae.yaml")),
    (4, ("ckpt", "export", "nowhere", "model.safetensors")),
    (5, ("data", "meta", "--input", "clips.csv", "--output", "clips.csv/meta.csv")),
]


def said(home: Path, *argv: str, code: int = 0) -> Any:
    """What `osora ARGV... --json` prints: one object and nothing beside it."""
    finished: Finished = osora(*argv, "--json", cwd=home)
    assert finished.code == code, finished.stderr
    return finished.json()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, a config of each training, and `runs/vae`: two updates, a checkpoint after each, two scorings."""
    home = tmp_path_factory.mktemp("json")
    tiny.make_table(home)
    scored = {"number": 2, "lpips": False, "pictures": 1}
    tiny.write_config(home, max_steps=2, ckpt_every=1, eval_every=2, eval=scored).rename(home / "vae.yaml")
    write_disc_config(home, max_steps=1).rename(home / "disc.yaml")
    tiny_diffusion.write_config(home, max_steps=1).rename(home / "diffusion.yaml")
    (home / "seed.py").write_text("model = dict(type='dc_ae', model_name='dc-ae-f32t4c128')\nepochs = 2\n")
    (home / "weights").mkdir()
    (home / "weights" / "hunyuan_vae.safetensors").write_bytes(b"is there")
    (home / "broken").mkdir()
    make_clip(home / "broken" / "good.mp4", frames=3)
    (home / "broken" / "bad.mp4").write_bytes(b"no film")
    trained = said(home, "train", "vae", "vae.yaml", "--exp-name", "vae", "--outputs", "runs", "--async-io")
    check("train", trained)
    return home


def filled(words: tuple[str, ...], home: Path, folder: Path) -> list[str]:
    """The words with a folder for `{out}`, a copy of the run for `{run}`, one with a changed byte for `{damaged}`."""
    if any("{run}" in word for word in words):
        shutil.copytree(home / "runs" / "vae", folder / "vae")
    if any("{damaged}" in word for word in words):
        shutil.copytree(home / "runs" / "vae", folder / "damaged")
        shard = next((folder / "damaged" / "epoch0-global_step2" / "model").glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    places = {"{out}": folder, "{run}": folder / "vae", "{damaged}": folder / "damaged"}
    for name, path in places.items():
        words = tuple(word.replace(name, str(path)) for word in words)
    return list(words)


@pytest.mark.parametrize(("command", "shape", "code", "rest"), CASES, ids=lambda value: str(value)[:40])
def test_what_it_prints_has_its_shape(
    home: Path, tmp_path: Path, command: str, shape: str, code: int, rest: tuple[str, ...]
) -> None:
    assert shape in SHAPES[command]
    check(shape, said(home, *command.split(), *filled(rest, home, tmp_path), code=code))


def test_a_reconstruction_and_its_file_have_one_shape(home: Path, tmp_path: Path) -> None:
    payload = said(home, *RECONSTRUCT, "--num-samples", "2", "--save-dir", str(tmp_path))
    check("infer-reconstruct", payload)
    assert json.loads((tmp_path / "metrics.json").read_text()) == payload


@pytest.mark.parametrize(("code", "argv"), FAILURES, ids=lambda value: str(value)[:40])
def test_a_failure_is_an_object_with_the_exit_code_in_it(home: Path, code: int, argv: tuple[str, ...]) -> None:
    payload = said(home, *argv, code=code)
    check("error", payload)
    assert payload["error"]["exit_code"] == code


def test_the_version(home: Path) -> None:
    check("version", said(home, "--version"))


# ---- that nothing is missing -----------------------------------------------------------------------------------------


def json_commands(node: Any, above: tuple[str, ...] = ()) -> set[str]:
    """Every command of the application that takes `--json`."""
    if hasattr(node, "commands"):
        return set().union(*(json_commands(child, (*above, name)) for name, child in node.commands.items()))
    return {" ".join(above)} if any("--json" in param.opts for param in node.params) else set()


def test_every_command_with_json_has_a_shape() -> None:
    assert json_commands(typer.main.get_command(app)) == set(SHAPES)


def test_every_shape_of_every_command_is_checked() -> None:
    elsewhere = {("train vae", "train"), ("infer reconstruct", "infer-reconstruct"), ("demo", "demo")}
    checked = {(command, shape) for command, shape, _, _ in CASES} | elsewhere
    assert checked == {(command, shape) for command, shapes in SHAPES.items() for shape in shapes}


def test_every_schema_is_used_and_strict() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert names == {shape for shapes in SHAPES.values() for shape in shapes} | set(BESIDE)
    for name in names:
        found = schema(name)
        assert found["additionalProperties"] is False, name
        assert "schema_version" in found["required"], name
