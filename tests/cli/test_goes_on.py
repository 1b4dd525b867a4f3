"""What `osora resume` goes on with when nothing but the run is named, and what it does not take for a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.process import Kill, osora
from support.tiny import make_table, records, write_config

from osora_cli.cli.main import run

TOTAL = 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates of two micro-batches each, killed after its second, with a checkpoint of each."""
    home = tmp_path_factory.mktemp("goes-on")
    make_table(home)
    write_config(home, max_steps=TOTAL, ckpt_every=1, accumulation_steps=2, tensorboard=False)
    line = ("train", "vae", "tiny.yaml", "--outputs", home, "--exp-name", "run")
    finished = osora(*line, cwd=home, kill=Kill("retention", nth=2))
    assert finished.code == -9, finished.stderr
    return home / "run"


def test_a_killed_run_ends_at_its_own_total(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Total, saves and names count updates, whatever an update is made of; and once it is complete it stays so."""
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    monkeypatch.chdir(killed.parent)
    for _ in range(2):
        assert run(["resume", str(folder)]) == 0
        assert [r["step"] for r in records(folder)] == [1, 2, 3, 4]
        steps = {p.name.partition("-global_step")[2] for p in folder.glob("epoch*")}
        assert steps == {"1", "2", "3", "4"}
        assert (folder / "latest").read_text().strip().endswith("global_step4")
    assert (
        "nothing left to do: 4 updates are done already, `max_steps` is 4: a higher `--max-steps` goes on"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("form", ["w.safetensors", "folder"])
def test_weights_alone_are_no_run(
    killed: Path, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(killed.parent)
    weights = tmp_path / ("w.safetensors" if form == "w.safetensors" else "folder/model.safetensors")
    weights.parent.mkdir(exist_ok=True)
    shutil.copy(next(killed.glob("epoch*-global_step2/model/*.safetensors")), weights)
    named = str(tmp_path / form)
    for line in (["resume", named], ["train", "vae", "tiny.yaml", "--outputs", str(tmp_path), "--load", named]):
        capsys.readouterr()
        assert run(line) == 4
        said = capsys.readouterr().err
        assert f"error: `{named}`" in said
        assert "weights alone are no checkpoint" in said
        assert "--model.from-pretrained" in said
