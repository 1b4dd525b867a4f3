"""A run's report as one HTML file that needs no other."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#222;background:#fff}"
    "img{max-width:100%}table{border-collapse:collapse}td{padding:.15rem .8rem .15rem 0;vertical-align:top}"
    ".verdict{padding:.7rem 1rem;background:#eef3f8;border-left:4px solid #48c}"
)


def page(title: str, verdict: str, facts: Sequence[tuple[str, str]], images: Mapping[str, bytes]) -> str:
    """The report: a verdict, a table of facts, and PNG images by name."""
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts)
    shown = "".join(
        f'<p><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(image).decode()}"></p>\n'
        for name, image in images.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        f'<p class="verdict">{escape(verdict)}</p>\n<table>{rows}</table>\n{shown}</body></html>\n'
    )
