"""`osora weights ...`: pretrained parts."""

from __future__ import annotations

from typing import Annotated

import typer

from osora_cli.cli.options import Debug, Json, Quiet, examples, new_app
from osora_cli.cli.output import Output, guarded
from osora_cli.cli.results import table

app = new_app("Get pretrained parts.")


@app.command("list", epilog=examples("osora weights list"))
@guarded
def list_parts(json_mode: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """List the pretrained parts, their size and licence, and where those lie that are here."""
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.weights import list_weights

    found = list_weights()
    payload = {
        "weights": [
            {
                "name": status.source.name,
                "what": status.source.what,
                "bytes": status.source.size,
                "licence": list(status.source.licence),
                "path": None if status.path is None else str(status.path),
            }
            for status in found
        ]
    }
    lines: list[str] = []
    for status in found:
        source = status.source
        pairs = [
            ("what", source.what),
            ("size", f"{source.size / 10**6:,.0f} MB"),
            ("licence", "; ".join(source.licence)),
            ("here", status.path or "no"),
        ]
        lines += [source.name, *(f"  {line}" for line in table(pairs))]
    output.result(payload, lines)


@app.command(
    "fetch", epilog=examples("osora weights fetch lpips-vgg", "osora weights fetch dc-ae-f32t4c128 --to ckpts")
)
@guarded
def fetch_part(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `osora weights list` shows.")],
    to: Annotated[str | None, typer.Option("--to", metavar="DIR", help="A folder; default: the cache.")] = None,
    json_mode: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fetch a pretrained part, checked by its digest. Its licence is shown first."""
    output = Output(json_mode, quiet, debug)
    from osora_cli.app.weights import fetch

    # The licence is said even when all else is quiet.
    path = fetch(name, to, progress=Output().note)
    output.result({"name": name, "path": str(path)}, str(path))
