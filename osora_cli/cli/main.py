"""`osora`: the application, and the way from argv to an exit code.

Nothing here imports torch, pandas or av: each command imports what it needs when it runs, so that `osora --help`
costs no more than Typer itself.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
import typer.main

from osora_cli.cli import ckpt, config, data, demo, doctor, infer, report, resume, train, weights
from osora_cli.cli.argv import HELP_WORDS, has_flag, plan_invocation
from osora_cli.cli.options import new_app
from osora_cli.cli.output import Output, ReaderGone, attempt

app = new_app("Train video autoencoders and video diffusion models, from a table of clips to proven checkpoints.")
app.add_typer(data.app, name="data")
app.add_typer(train.app, name="train")
resume.register(app)
app.add_typer(infer.app, name="infer")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(weights.app, name="weights")
app.add_typer(config.app, name="config")
report.register(app)
doctor.register(app)
demo.register(app)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    json_mode: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Train video autoencoders and video diffusion models, from a table of clips to proven checkpoints."""
    if version:
        from osora_cli import __version__

        Output(json_mode).result({"version": __version__}, f"osora {__version__}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the process's own). Raises SystemExit with the exit code."""
    raise SystemExit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run a command line; gives its exit code (design: 0 done, 1 run, 2 usage, 3 data, 4 checkpoint, 5 setup)."""
    words = list(argv)
    # torch's threads spin while they wait for each other; once loader workers or other programs want the same cores,
    # that costs several times the speed. Read when torch is imported, which has not happened yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        # DDP warns once of a choice that is meant (engine/ddp.py); torch's errors are still said.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _make_streams_forgiving()
    output = Output(*(has_flag(words, flag) for flag in ("--json", "--quiet", "--debug")))
    return attempt(lambda: _dispatch(words), output)


def _dispatch(words: list[str]) -> int:
    root_command = typer.main.get_command(app)
    if "_OSORA_COMPLETE" in os.environ:  # a shell asks for completions: argv is not ours to read
        root_command.main(args=words, prog_name="osora")
    found = plan_invocation(root_command, words)
    try:
        code = found.command.main(
            args=found.argv,
            prog_name=found.name,
            standalone_mode=False,
            obj=found.overrides,
            help_option_names=list(HELP_WORDS),
        )
    except SystemExit as error:  # what Typer makes of a closed pipe, while it prints help
        raise ReaderGone from error
    return code if isinstance(code, int) else 0


def _make_streams_forgiving() -> None:
    """A stream that is closed, a file name that is no valid text, a terminal without Unicode: none ends a command."""
    # Open for as long as the process lives.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # PYTHONUNBUFFERED: what a disk that fills up or a closed pipe did not take would be dropped without an error.
        descriptor, encoding = sys.stdout.fileno(), sys.stdout.encoding
        sys.stdout = open(descriptor, "w", 1, encoding, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
