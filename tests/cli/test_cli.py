"""The command line itself: what it says, where, and how it ends.

The use cases behind the commands have tests of their own; here, where one is needed, it is a stand-in module that
records what the command handed over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
import yaml
from support.small_disk import small_disk

from osora_cli import __version__
from osora_cli.cli.main import app, run
from osora_cli.cli.output import Output
from osora_cli.config.load import load_config
from osora_cli.config.overrides import Override
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.errors import CheckpointError, ConfigError, DataError, RunError, SetupError


def all_commands(node: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command of the application, as typed."""
    inner = getattr(node, "commands", None)
    if inner is None:
        return [above]
    return [path for name, child in inner.items() for path in all_commands(child, (*above, name))]


COMMANDS = all_commands(typer.main.get_command(app))


@dataclass
class Said:
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        data = json.loads(self.out)
        assert isinstance(data, dict)
        return data


@pytest.fixture
def osora(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*argv: str) -> Said:
        code = run(list(argv))
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


class Result:
    def __init__(self, payload: dict[str, Any], exit_code: int = 0) -> None:
        self.payload, self.exit_code = payload, exit_code

    def to_json(self) -> dict[str, Any]:
        return self.payload


TRAINED = {"schema_version": 1, "run": "outputs/x", "steps": 3, "last_loss": 0.25, "checkpoint": "c", "seconds": 61.0}


@pytest.fixture
def train_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainVaeConfig, dict[str, Any]]]:
    calls: list[tuple[TrainVaeConfig, dict[str, Any]]] = []

    def train(command: str, config: TrainVaeConfig, **kwargs: Any) -> Result:
        assert command == "train vae"
        calls.append((config, kwargs))
        return Result(TRAINED)

    stand_in(monkeypatch, "osora_cli.app.train", train=train)
    return calls


# ---- train vae ------------------------------------------------------------------------------------------------------


def test_train_hands_over_the_config_and_reports(osora: Any, train_calls: list[Any]) -> None:
    said = osora("train", "vae", "--lr", "1e-3", "--async-io", "--exp_name=007", "--from-pretrained", "w", "--load",
                 "a", "b", "--resume", "auto")  # fmt: skip
    config, kwargs = train_calls[0]
    assert (config.lr, config.async_io, config.exp_name, config.load) == (1e-3, True, "007", ["a", "b"])
    assert config.model.from_pretrained == "w"
    assert kwargs == {"config_name": "vae_train_video_dc_ae", "resume_auto": True, "quiet": False, "json_mode": False}
    assert said.code == 0
    assert said.out.splitlines() == [
        "run         outputs/x", "updates     3", "last loss   0.25", "checkpoint  c", "time        1 min 01 s",
    ]  # fmt: skip
    assert said.err == "no CONFIG given: taking the preset `vae/train/video_dc_ae`\n"


def test_train_in_json_and_quiet(osora: Any, train_calls: list[Any]) -> None:
    said = osora("--json", "train", "vae", "video_dc_ae", "--quiet")
    assert said.json() == TRAINED
    assert said.err == ""
    assert train_calls[0][1]["quiet"] is train_calls[0][1]["json_mode"] is True


def test_options_in_front_of_the_command_and_underscores_in_its_name(osora: Any, train_calls: list[Any]) -> None:
    assert osora("--lr", "2", "train", "vae").code == 2, "the word after an option may be its value"
    assert osora("--lr=2", "--quiet", "train", "vae", "--num_workers", "0").code == 0
    assert (train_calls[0][0].lr, train_calls[0][0].num_workers) == (2.0, 0)


def test_resume_auto_only(osora: Any, train_calls: list[Any]) -> None:
    said = osora("train", "vae", "--resume", "outputs/x")
    assert (said.code, train_calls) == (2, [])
    assert "fix: to go on with a run: `osora resume outputs/x`" in said.err


def test_print_config_is_itself_a_config(osora: Any, train_calls: list[Any], tmp_path: Path) -> None:
    said = osora("train", "vae", "--print-config", "--lr", "1e-3", "--bucket-config", "{256px: {8: [[0.5, 1], 2]}}")
    assert (said.code, train_calls) == (0, [])
    assert said.out.startswith("# osora train vae, resolved from ")
    (tmp_path / "printed.yaml").write_text(said.out)
    again = osora("train", "vae", "printed.yaml", "--print-config")
    assert yaml.safe_load(again.out) == yaml.safe_load(said.out)
    assert load_config("printed.yaml", TrainVaeConfig).config.bucket_config == {"256px": {8: ((0.5, 1.0), 2)}}
    assert osora("train", "vae", "--print-config", "--json").json()["config"]["ckpt_every"] == 3000


def test_a_preset_named_behind_checkpoints(osora: Any, train_calls: list[Any]) -> None:
    osora("train", "vae", "--load", "a", "b", "video_dc_ae")
    assert train_calls[0][0].load == ["a", "b"]


# ---- the other commands ---------------------------------------------------------------------------------------------


def test_resume(osora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def resume(target: Path, overrides: Any, *, quiet: bool, json_mode: bool) -> Result:
        calls.append((target, overrides, quiet, json_mode))
        return Result(TRAINED)

    stand_in(monkeypatch, "osora_cli.app.resume", resume=resume)
    said = osora("resume", "--max-steps", "9", "outputs/x", "--no-async-io", "--quiet")
    assert said.code == 0
    overrides = [Override(("max_steps",), 9, "--max-steps"), Override(("async_io",), False, "--no-async-io")]
    assert calls == [(Path("outputs/x"), overrides, True, False)]
    assert osora("resume").code == osora("resume", "a", "b").code == osora("resume", "a", "--max-stesp", "1").code == 2


def test_resume_prints_the_config_it_would_run_with(osora: Any, tmp_path: Path) -> None:
    from osora_cli.config.freeze import write_config

    run_folder = tmp_path / "outputs/x"
    (run_folder / "epoch0-global_step1").mkdir(parents=True)
    write_config(load_config("video_dc_ae", TrainVaeConfig, default="vae/train/x").config, run_folder)
    for target in ("outputs/x", "outputs/x/epoch0-global_step1"):
        said = osora("resume", target, "--epochs", "3", "--print-config")
        assert yaml.safe_load(said.out)["epochs"] == 3, said.err
    said = osora("resume", "outputs/x", "--model.latent-channels", "3", "--print-config")
    assert said.code == 2
    assert "`model.latent_channels` is `None` in the run and `3` here" in said.err


def test_reconstruct(osora: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    payload = {
        "save_dir": "d", "weights": "RUN/ck, update 7", "clips": [1, 2],
        "mean": {"psnr": 31.234, "ssim": 0.95, "constant_colour_psnr": 12.0, "flicker": 0.0123,
                 "checkerboard_space": 0.0123, "checkerboard_space_ratio": 1.5, "checkerboard_time": None},
        "protocol": {"checkerboard_periods": {"frames": 4, "pixels": 32}},
        "left_out": [{"path": "x.mp4", "reason": "too short"}], "picture": "d/p.png", "metrics": "d/metrics.json",
        "seconds": 1.5, "notes": ["a note"],
    }  # fmt: skip

    def reconstruct(config: Any, *, progress: Any, notify: Any) -> Result:
        calls.append(config)
        notify("weights: RUN/ck")
        progress(1, 2, "a.mp4", 0.5)
        return Result(payload)

    stand_in(monkeypatch, "osora_cli.app.reconstruct.run", reconstruct=reconstruct)
    (tmp_path / "r.yaml").write_text("num_workers: 0\n")
    said = osora("infer", "reconstruct", "r.yaml", "--save-dir", "d", "--model.from-pretrained", "ck")
    assert said.code == 0
    assert (calls[0].save_dir, calls[0].model.from_pretrained) == ("d", "ck")
    assert "PSNR                    31.23 dB, mean over clips" in said.out
    assert "clips                   2, 1 left out" in said.out
    assert "weights                 RUN/ck, update 7" in said.out
    assert "checkerboard            1.23 % of the error at 32 px, 1.50 x its surroundings" in said.out
    assert "left out: x.mp4: too short" in said.out
    assert said.err == "weights: RUN/ck\na note\n"
    assert osora("infer", "reconstruct", "r.yaml", "--json").json()["mean"]["psnr"] == 31.234


def test_verify(osora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    finding = {"file": "model/a.safetensors", "tensor": "w", "what": "has a flipped bit", "kind": "damage"}
    checks = [
        {"name": "structure", "status": "passed", "detail": "", "findings": []},
        {"name": "digests", "status": "failed", "detail": "3 of 4 files", "findings": [finding]},
    ]
    payload = {"schema_version": 1, "kind": "checkpoint", "path": "c", "verdict": "damaged", "checks": checks}

    def verify_path(path: Path, **kwargs: Any) -> Result:
        kwargs.pop("progress")
        calls.append((path, kwargs))
        return Result(payload, 4)

    stand_in(monkeypatch, "osora_cli.app.ckpt.verify", verify_path=verify_path)
    said = osora("ckpt", "verify", "c", "--quick")
    assert said.code == 4
    assert calls == [(Path("c"), {"quick": True, "deep": False, "strict": False})]
    assert said.out.splitlines() == [
        "damaged  c", "  passed   structure", "  failed   digests: 3 of 4 files",
        "           model/a.safetensors: tensor `w` has a flipped bit",
    ]  # fmt: skip
    said = osora("ckpt", "verify", "c", "--strict", "--json")
    assert (said.code, said.json()) == (4, payload)
    payload.update(kind="run", checkpoints=[{"path": "r/c", "verdict": "damaged", "checks": checks}], resume_from="r/b")
    lines = osora("ckpt", "verify", "r").out.splitlines()
    assert lines[0] == "damaged  r/c"
    assert lines[-2:] == ["verdict: damaged", "resume from: r/b"]


def test_data_meta(osora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @dataclass
    class Meta:
        rows: int
        bad: list[tuple[str, str]]
        output: Path
        seconds: float
        bad_report: Path | None
        probed: int = 14
        notes: tuple[str, ...] = ()

    def make_meta(source: Path, target: Path, **kwargs: Any) -> Meta:
        kwargs.pop("progress")
        calls.append((source, target, kwargs))
        return Meta(2, [(f"{i}.mp4", "no video") for i in range(12)], target, 0.5, Path("bad.csv"))

    stand_in(monkeypatch, "osora_cli.app.data.meta", make_meta=make_meta)
    said = osora("data", "meta", "--input", "a.csv", "--output=b.csv", "--num_workers", "0", "--root", "/r", "--exact")
    assert said.code == 0
    expected = {
        "num_workers": 0,
        "root": Path("/r"),
        "exact": True,
        "merge": [],
        "on_error": None,
        "time_limit_s": 60.0,
    }
    assert calls == [(Path("a.csv"), Path("b.csv"), expected)]
    assert "clips     2" in said.out
    assert "left out  12" in said.out
    assert said.err.splitlines()[0] == "left out: 0.mp4: no video"
    assert said.err.splitlines()[-1] == "left out: 2 more"
    bad = osora("data", "meta", "--input", "a", "--output", "b", "--json").json()["bad"]
    assert bad[0] == {"path": "0.mp4", "reason": "no video"}
    for argv in (["--input", "a"], ["--input", "a", "--output", "b", "--num-workers", "-1"],
                 ["--input", "a", "--output", "b", "--num-workers", "x"],
                 ["--input", "a", "--output", "b", "--on-error", "stop"],
        ["--input", "a", "--output", "b", "--time-limit", "0"],
                 ["--input", "a", "--output", "b", "c"], ["--inptu", "a", "--output", "b"]):  # fmt: skip
        said = osora("data", "meta", *argv)
        assert said.code == 2, argv
        assert said.err.startswith("error: "), argv
        assert "Traceback" not in said.err


def test_demo(osora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run_demo(directory: Path, *, quiet: bool, tell: Any) -> Result:
        calls.append((directory, quiet))
        tell("clips")
        rows = [{"step": "clips", "outcome": "8 clips", "seconds": 1.0}]
        psnr = {"constant": 12.0, "block_means": 20.0, "before": 10.0, "after": 24.5}
        return Result({"folder": "d", "rows": rows, "psnr": psnr, "picture": "d/p.png", "seconds": 75.0})

    stand_in(monkeypatch, "osora_cli.app.demo.run", run_demo=run_demo)
    said = osora("demo", "--dir", "d")
    assert calls == [(Path("d"), False)]
    assert said.err == "clips\n"
    assert "clips  8 clips (1.0 s)" in said.out
    assert re.search(r"trained, first stage +24\.50 dB", said.out)
    assert said.out.endswith("picture  d/p.png\nfolder   d\ndone in 1 min 15 s\n")


def test_config_show(osora: Any) -> None:
    said = osora("config", "show", "train-vae")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    shown = re.findall(r"^  ([a-z_.0-9]+)  \(", said.out, re.MULTILINE)
    fields = osora("config", "show", "train_vae", "--json").json()["fields"]
    keys = {field["key"] for field in fields}
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    assert {"optim", "model", "model.encoder"} <= sections
    assert set(shown) == keys - sections
    lines = osora("config", "show", "train-vae", "--optim").out
    assert osora("config", "show", "train-vae", "optim").out.splitlines()[3].startswith("  optim.cls  (one of")
    assert lines == ""
    assert "osora config show train-vae" in osora("config", "show").out
    assert "did you mean `optim`" in osora("config", "show", "train-vae", "optm").err
    assert osora("config", "show", "train-vea").code == 2


def test_config_convert(osora: Any) -> None:
    Path("a.py").write_text("_base_ = ['b.py']\nlr = 1e-5\n")
    Path("b.py").write_text("lr = 5e-5\nvae_loss_config = dict(perceptual_loss_weight=0.25)\n")
    said = osora("config", "convert", "a.py", "c.yaml")
    assert (said.code, said.out) == (0, "c.yaml: a config of `osora train vae`\n")
    shown = osora("config", "convert", "a.py", "--json").json()
    assert shown["config"] == {"lr": 1e-5, "vae_loss_config": {"perceptual_loss_weight": 0.25}}
    assert osora("config", "convert", "a.py").out == Path("c.yaml").read_text()
    again = osora("config", "convert", "a.py", "c.yaml")
    assert (again.code, "`c.yaml` exists already" in again.err) == (2, True)
    assert osora("config", "convert", "a.py", "c.yaml", "--force").code == 0
    one, two = (osora("train", "vae", name, "--print-config", "--json").json()["config"] for name in ("a.py", "c.yaml"))
    assert one == two
    Path("b.py").write_text("lr = open('x')\n")
    bad = osora("config", "convert", "a.py")
    assert (bad.code, bad.out) == (2, "")
    assert "b.py:1" in bad.err


def test_doctor(osora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from osora_cli.app.doctor.finding import Finding
    from osora_cli.app.doctor.run import Diagnosis

    found = [Finding("decoder", "ok", "PyAV"), Finding("disk speed", "fail", "no room", "free space on that disk")]
    stand_in(monkeypatch, "osora_cli.app.doctor.run", diagnose=lambda outputs, tell: Diagnosis(found))
    said = osora("doctor", "--outputs", "runs")
    assert said.code == 5
    assert said.out.splitlines() == [
        "ok      decoder: PyAV", "fail    disk speed: no room", "        fix: free space on that disk",
    ]  # fmt: skip
    assert [f["status"] for f in osora("doctor", "--json").json()["findings"]] == ["ok", "fail"]
    found.pop()
    assert osora("doctor").code == 0


# ---- errors and exit codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("loss is `nan` at update 3"), 1, "error: loss is `nan` at update 3"),
        (ConfigError("x"), 2, "error: x"),
        (DataError("no table", where="t.csv", allowed="a, b", hint="osora data meta"), 3,
         "error: no table\n  where: t.csv\n  allowed: a, b\n  fix: osora data meta"),
        (CheckpointError("cut"), 4, "error: cut"),
        (SetupError("no space"), 5, "error: no space"),
        (OSError(28, "No space left on device", "/d/f"), 5, "error: `/d/f`: No space left on device"),
        (PermissionError(13, "Permission denied", "/d"), 5, "error: `/d`: Permission denied"),
        (ValueError("odd"), 1,
         "error: internal error: ValueError: odd\n  fix: run it again with `--debug` for the traceback"),
    ],
)  # fmt: skip
def test_errors(osora: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str) -> None:
    def verify_path(*args: Any, **kwargs: Any) -> Result:
        raise error

    stand_in(monkeypatch, "osora_cli.app.ckpt.verify", verify_path=verify_path)
    said = osora("ckpt", "verify", "c")
    assert (said.code, said.out, said.err) == (code, "", words + "\n")
    said = osora("ckpt", "verify", "c", "--json")
    assert said.code == code
    data = said.json()
    assert data["schema_version"] == 1
    assert set(data["error"]) >= {"message", "where", "allowed", "hint", "exit_code"}
    assert data["error"]["exit_code"] == code
    said = osora("ckpt", "verify", "c", "--debug")
    assert said.code == code
    assert said.err.startswith("Traceback (most recent call last):")
    assert said.err.endswith(words + "\n")


def test_faults_of_a_config_in_json(osora: Any) -> None:
    said = osora("train", "vae", "--lr", "x", "--epochs", "0", "--json")
    assert said.code == 2
    assert [fault["where"] for fault in said.json()["error"]["faults"]] == ["--lr", "--epochs"]
    said = osora("train", "vae", "--lrr", "x", "--json")
    assert said.json()["error"]["hint"] == "did you mean `--lr`?"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "`trian` is not a command of `osora`"),
        (["train", "vea"], "`vea` is not a command of `osora train`"),
        (["train"], "`osora train` needs a command"),
        (["--foo"], "`--foo` is not an option"),
        (["train", "vae", "--foo"], "`--foo` is not an option"),
        (["train", "vae", "a.yaml", "b.yaml"], "`b.yaml` is one argument too many"),
        (["train", "vae", ""], "`osora train vae` is given an empty word"),
        (["ckpt", "verify"], "missing argument 'PATH'"),
        (["weights", "fetch"], "missing argument 'NAME'"),
    ],
)
def test_usage(osora: Any, argv: list[str], words: str) -> None:
    said = osora(*argv)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {words}")


def test_numbers_that_json_has_no_word_for(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_mode=True).result({"a": [float("nan"), float("inf"), 1.5], "p": Path("x")}, "")
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "a": [None, None, 1.5], "p": "x"}


# ---- help and version -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_every_command(osora: Any, words: tuple[str, ...]) -> None:
    for argv in ([*words, "--help"], [*words, "-h"], ["-h", *words], [*words, "--nonsense", "x", "--help"]):
        said = osora(*argv)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"Usage: osora {' '.join(words)} ")
        assert max(map(len, said.out.splitlines())) <= 80
        assert f"    osora {' '.join(words)}" in said.out, "an example"
    if words in (("train", "vae"), ("infer", "reconstruct")):
        assert f"osora config show {'-'.join(words)}" in said.out


def test_every_command_has_help_in_this_test_and_the_same_output_options() -> None:
    found: dict[tuple[str, ...], Any] = {}

    def collect(node: Any, path: tuple[str, ...]) -> None:
        for name, command in getattr(node, "commands", {}).items():
            collect(command, (*path, name))
        if not hasattr(node, "commands"):
            found[path] = node

    collect(typer.main.get_command(app), ())
    assert set(found) == set(COMMANDS)
    for path, command in found.items():
        options = {word for param in command.params for word in param.opts}
        assert options >= {"--json", "--quiet", "--debug"}, path


def test_help_without_a_command(osora: Any) -> None:
    assert osora().out == osora("--help").out
    assert osora().code == 0
    assert osora("train", "--help").out.startswith("Usage: osora train ")


def test_version(osora: Any) -> None:
    for argv in (["--version"], ["train", "vae", "--version"], ["--version", "ckpt", "verify"]):
        assert osora(*argv).out == f"osora {__version__}\n"
    assert osora("--version", "--json").json() == {"schema_version": 1, "version": __version__}


# ---- as a process ---------------------------------------------------------------------------------------------------


def process(*argv: str, code: str | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "osora_cli"]), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **kwargs)


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["train", "vae", "--help"], ["--version"], [],
                                  ["train", "vae", "--print-config"], ["config", "show", "train-vae"],
                                  ["train", "vae", "--lrr", "1"], ["train", "vea"]],
                         ids=" ".join)  # fmt: skip
def test_what_needs_no_tensors_imports_none(argv: list[str]) -> None:
    code = (
        "import sys\nfrom osora_cli.cli.main import run\nrun(sys.argv[1:])\n"
        "heavy = {'torch', 'pandas', 'av', 'numpy', 'pyarrow', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = process(*argv, code=code)
    assert done.returncode == 0, done.stderr


def test_as_a_module_it_ends_with_the_exit_code() -> None:
    assert process("--version").stdout == f"osora {__version__}\n"
    done = process("train", "vea")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: `vea` is not a command of `osora train`\n")


def test_no_colour_where_nobody_looks() -> None:
    assert "\033" not in process("train", "vea", env={**os.environ, "FORCE_COLOR": ""}).stderr


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_on_a_terminal_unless_it_is_unwanted(env: dict[str, str], coloured: bool) -> None:
    import pty

    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    subprocess.run([sys.executable, "-m", "osora_cli", "vea"], stderr=theirs, stdout=subprocess.DEVNULL, check=False,
                   env={**clean, "TERM": "xterm", **env}, timeout=60)  # fmt: skip
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert ("\033[1;31merror:\033[0m" in said) is coloured
    assert "`vea` is not a command" in said


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m osora_cli config show train-vae | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("# osora train vae")
    assert done.stdout.splitlines()[1] in ("0", "141"), "0 when all fitted into the pipe"


def test_a_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "osora_cli", "config", "show", "train-vae"], stdout=writer,
                          stderr=subprocess.PIPE, timeout=60, check=False)  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "osora_cli", "config", "show", "train-vae"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (5, "error: No space left on device\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("show", "train-vae"), ("show", "train-vae", "--json")])
def test_a_disk_that_fills_up_behind_stdout_is_an_error(
    unbuffered: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    # Without a buffer Python drops what a write did not take, and says nothing.
    with small_disk(tmp_path / "disk", 8 / 1024) as disk, (disk / "said").open("w") as said:
        done = subprocess.run([sys.executable, "-m", "osora_cli", "config", *words], stdout=said, text=True,
                              stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                              timeout=60, check=False)  # fmt: skip
        assert (disk / "said").stat().st_size > 0
    assert (done.returncode, done.stderr) == (5, "error: No space left on device\n")


_SLOW = """
import sys, time, types
module = types.ModuleType("osora_cli.app.ckpt.verify")
def verify_path(*args, **kwargs):
    print("ready", file=sys.stderr, flush=True)
    try:
        time.sleep(60)
    finally:
        if sys.argv[-1] == "twice":
            print("tidying", file=sys.stderr, flush=True)
module.verify_path = verify_path
sys.modules["osora_cli.app.ckpt.verify"] = module
import atexit
if sys.argv.pop() == "twice":
    atexit.register(lambda: (print("tidying", file=sys.stderr, flush=True), time.sleep(60)))
from osora_cli.cli.main import main
main()
"""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_ctrl_c(times: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", _SLOW, "ckpt", "verify", "x", times], stderr=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stderr is not None
    assert child.stdout is not None
    assert child.stderr.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    said = child.stderr.readline()
    assert said == "interrupted: stopped by Ctrl-C\n"
    if times == "twice":
        assert child.stderr.readline() == "tidying\n"
        child.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert child.wait(20) == 130
    assert time.monotonic() - started < 10
    assert child.stderr.read() == ""
    child.stderr.close()
    child.stdout.close()


def test_words_that_are_no_text(tmp_path: Path) -> None:
    name = b"caf\xe9.yaml"
    done = subprocess.run([sys.executable.encode(), b"-m", b"osora_cli", b"train", b"vae", name, b"--json"],
                          capture_output=True, timeout=60, cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["message"] == "the config `caf\udce9.yaml` does not exist"
    assert b"Traceback" not in done.stderr


def test_a_shell_can_complete(tmp_path: Path) -> None:
    env = {**os.environ, "_OSORA_COMPLETE": "complete_bash", "COMP_WORDS": "osora tr", "COMP_CWORD": "1"}
    assert process(env=env).stdout.split() == ["train"]
