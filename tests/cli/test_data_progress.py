"""The bar of long commands, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

CODE = """
import time
from osora_cli.cli import progress
from osora_cli.cli.output import Output
progress._REDRAW_SECONDS, progress._LINE_SECONDS = 0.0, 0.0
bar = progress.Progress(Output({quiet}), "data meta", "clips")
for done in range(5):
    bar(done, 4)
bar.close()
"""


def _on_terminal(quiet: bool) -> str:
    """What a terminal gets on stderr."""
    own, theirs = pty.openpty()
    seen: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                data = os.read(own, 4096)
            except OSError:
                return
            if not data:
                return
            seen.append(data)

    reader = threading.Thread(target=drain)
    reader.start()
    argv = [sys.executable, "-c", CODE.format(quiet=f"False, {quiet}")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run(argv, stderr=theirs, stdout=subprocess.DEVNULL, env=environment, check=True, timeout=60)
    os.close(theirs)
    reader.join(10)
    os.close(own)
    return b"".join(seen).decode()


def test_a_bar_on_a_terminal_and_none_when_quiet() -> None:
    said = _on_terminal(quiet=False)
    assert "data meta" in said
    assert "4/4" in said
    assert "━" in said
    assert said.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h\r\x1b[1A\x1b[2K")), "it is taken away at the end"
    assert _on_terminal(quiet=True) == ""


def test_lines_elsewhere() -> None:
    argv = [sys.executable, "-c", CODE.format(quiet="False, False")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines() == [f"data meta: {number} of 4 clips" for number in range(5)]
    assert done.stdout == ""
