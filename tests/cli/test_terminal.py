"""What commands write to a terminal, narrow or plain, and to something that is none."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.checkpoints import save

from osora_cli.cli.main import app, run
from osora_cli.cli.results import reconstruct_lines
from osora_cli.cli.width import fitted
from osora_cli.report.base import RunStart
from osora_cli.report.console import ConsoleReport

# Several command lines in one process, each with its own environment: importing costs far more than they do.
_SEVERAL = """
import json, os, sys
from osora_cli.cli.main import run
for env, words in json.loads(sys.argv[1]):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        os.environ.pop(name, None)
    os.environ.update(env)
    code = run(words)
    sys.stderr.flush()
    print(f"\\x1e{code}\\x1d", end="", flush=True)
"""

Command = tuple[dict[str, str], list[str]]
Said = list[tuple[int, str]]


def all_helps(node: Any, above: tuple[str, ...] = ()) -> list[list[str]]:
    """`--help` of the application, of each group and of each command."""
    own = [[*above, "--help"]]
    return own + [words for name, c in getattr(node, "commands", {}).items() for words in all_helps(c, (*above, name))]


HELPS = all_helps(typer.main.get_command(app))


def split_said(text: str) -> Said:
    parts = [part.split("\x1e") for part in text.split("\x1d")[:-1]]
    return [(int(code), said) for said, code in parts]


def on_terminal(commands: list[Command]) -> Said:
    """Exit code and what was written, stdout and stderr together, of each command on a terminal of 80 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", _SEVERAL, json.dumps(commands)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        said += data
    os.close(ours)
    assert child.wait(120) == 0, said.decode()
    return split_said(said.decode().replace("\r\n", "\n"))


def in_a_pipe(commands: list[Command]) -> Said:
    """The same with both streams in one pipe and stdin closed."""
    child = [sys.executable, "-c", _SEVERAL, json.dumps(commands)]
    done = subprocess.run(
        ["bash", "-c", 'exec <&-; exec "$@"', "bash", *child], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=240, check=True,
    )  # fmt: skip
    return split_said(done.stdout.decode())


def too_long(text: str, columns: int) -> list[str]:
    """Lines that are wider, but for those that are one long word, a path, behind their indentation."""
    wide = [line for line in text.splitlines() if len(line) > columns]
    return [line for line in wide if len(line.split()) > 1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with long update numbers, one of its checkpoints damaged, one cut; and records for a report."""
    folder = tmp_path_factory.mktemp("terminal")
    older, cut, *_ = save(folder / "run", 4, 40_000, 1_234_567)
    shard = older / "model/model-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    (cut / "master.safetensors").unlink()
    lines = [json.dumps({"step": n, "lr": 1e-4, "loss": 1.0, "rec_per_pixel": n**-0.3}) for n in range(1, 300)]
    (folder / "run/metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tables(home: Path) -> list[list[str]]:
    run_folder = str(home / "run")
    newest = f"{run_folder}/epoch0-global_step1234567"
    return [
        ["ckpt", "list", run_folder],
        ["ckpt", "verify", run_folder],
        ["ckpt", "verify", newest],
        ["ckpt", "prune", run_folder, "--keep-n-latest", "1"],
        ["weights", "list"],
        ["report", run_folder, "--output", str(home / "report")],
    ]


PLAIN = {"TERM": "dumb"}
ERRORS = [["vea"], ["train", "vae", "--lrr", "1"]]
COLOURED = {"TERM": "xterm"}
WITHOUT = {"TERM": "xterm", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def piped(home: Path) -> Said:
    return in_a_pipe([(COLOURED, words) for words in [*tables(home), *ERRORS]])


@pytest.fixture(scope="module")
def shown(home: Path) -> dict[str, Said]:
    """Tables and help on 80 columns and on 60, errors and a bar with colours and without."""
    verify = ["ckpt", "verify", str(home / "run")]
    groups: dict[str, list[Command]] = {
        "80": [(PLAIN, words) for words in [*tables(home), *HELPS]],
        "60": [({**PLAIN, "COLUMNS": "60"}, words) for words in [*tables(home)[:-1], *HELPS]],
        "plain": [(PLAIN, words) for words in ERRORS],
        "coloured": [(COLOURED, words) for words in [verify, *ERRORS]],
        "without": [(WITHOUT, words) for words in [verify, *ERRORS]],
    }
    said = iter(on_terminal([command for group in groups.values() for command in group]))
    return {name: [next(said) for _ in group] for name, group in groups.items()}


@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_terminal_hides_nothing(piped: Said, shown: dict[str, Said], home: Path, columns: int) -> None:
    """Every word that a pipe gets is on the terminal too, in the same order; no line is wider than it."""
    assert [code for code, _ in piped] == [0, 4, 0, 0, 0, 0, 2, 2], piped
    assert any(too_long(said, 80) for _, said in piped), "there is something to break"
    said = shown[str(columns)]
    count = len(said) - len(HELPS)
    for (code, text), (code_in_pipe, in_pipe) in zip(said[:count], piped, strict=False):
        assert code == code_in_pipe
        assert text.split() == in_pipe.split()
        assert too_long(text, columns) == []
        assert "…" not in text
    for (code, text), words in zip(said[count:], HELPS, strict=True):
        assert code == 0, words
        assert text.startswith("Usage: osora"), words
        if columns == 80:
            assert too_long(text, 80) == [], words


def test_escape_codes_only_for_a_terminal_that_takes_them(piped: Said, shown: dict[str, Said]) -> None:
    assert not any("\x1b" in text for _, text in [*piped, *shown["80"], *shown["plain"]])
    assert not any(re.search(r"\x1b\[[\d;]+m", text) for _, text in shown["without"]), "no colour, no bold"
    assert not any("\x1b" in text for _, text in shown["without"][1:])
    assert "\x1b[1;31merror:\x1b[0m `vea`" in shown["coloured"][1][1]
    assert shown["coloured"][1][1].replace("\x1b[1;31m", "").replace("\x1b[0m", "") == shown["plain"][0][1]


@pytest.mark.parametrize(
    ("env", "coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_force_color(
    env: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert run(["vea"]) == 2
    assert ("\x1b[1;31merror:\x1b[0m" in capsys.readouterr().err) is coloured


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("env", "stream", "escapes", "colours"),
    [
        ({"TERM": "xterm"}, Terminal, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal, True, False),
        ({"TERM": "dumb"}, Terminal, False, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, io.StringIO, False, False),
        ({"TERM": "xterm"}, io.StringIO, False, False),
    ],
)
def test_the_bar_of_a_training(
    env: dict[str, str], stream: type[io.StringIO], escapes: bool, colours: bool, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A bar moves its cursor where there is one; anything else gets one plain line an update."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    said = stream()
    report = ConsoleReport(stream=said)
    report.on_start(RunStart(tmp_path, 0, 10, {}))
    report.on_update({"step": 3})
    report.on_log({"step": 3, "epoch": 0, "loss": 0.5, "lr": 1e-4})
    report.on_event("warning", "a [red]clip[/red] is short", {})
    report.close()
    text = said.getvalue()
    assert "warning: a [red]clip[/red] is short" in text
    assert ("\x1b" in text) is escapes
    assert bool(re.search(r"\x1b\[(?:\d+;)*3[0-7]m|\x1b\[38;", text)) is colours
    assert ("update 3/10, epoch 0: loss 0.5" in text) is not escapes


def test_a_reconstructions_table_fits() -> None:
    path = "/data/" + "a_long_folder/" * 8 + "metrics.json"
    result = {
        "clips": [1], "left_out": [{"path": path, "reason": "too short for what the autoencoder takes, 17 frames"}],
        "weights": f"{path}, update 1234567", "metrics": path, "picture": path, "seconds": 7.0,
        "mean": {"psnr": 31.2, "checkerboard_space": 0.01, "checkerboard_space_ratio": 1.5, "checkerboard_time": 0.02,
                 "checkerboard_time_ratio": 1.1},
        "protocol": {"checkerboard_periods": {"frames": 4, "pixels": 32}},
    }  # fmt: skip
    lines = reconstruct_lines(result)
    assert max(map(len, lines)) > 80
    shown = fitted(lines, 80)
    assert " ".join(shown).split() == " ".join(lines).split()
    assert too_long("\n".join(shown), 80) == []
    for columns in (1, 20, 60):
        assert " ".join(fitted(lines, columns)).split() == " ".join(lines).split()


def test_a_reader_that_has_gone() -> None:
    """Help is not written by the function that writes results."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "osora_cli", "--help"], stdout=writer, stderr=subprocess.PIPE,
                          timeout=120, check=False)  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
