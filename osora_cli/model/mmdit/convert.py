"""MMDiT weights from one layout to another: q, k and v fused or split, and the two rotary channel layouts.

FLUX.1 is fused and interleaved, the released video weights are split and half. Which of fused and
split a file has shows in its keys. Its rotary layout does not show anywhere, and the wrong one loads without complaint
into a model that is wrong by a few per cent, so it is always said by the caller.

Shapes: E hidden width, M width of the MLP, H heads, D channels of a head, K = D / 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from osora_cli.config.models.flux import FluxConfig
from osora_cli.errors import CheckpointError

RopeLayout = Literal["interleaved", "half"]
Shape = tuple[int, ...]
Rows = tuple[str, int, int]  # a stored key, its first row, and the row after its last
State = Mapping[str, Tensor]

# A fused projection and the parts it is made of, in the order of its rows.
_PARTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "linear1": ("q_proj", "k_proj", "v_mlp")}
_OWNER = r"(?P<owner>double_blocks\.\d+\.(?:img|txt)_attn|single_blocks\.\d+)"
_PROJECTION = re.compile(_OWNER + r"\.(?P<part>qkv|linear1|q_proj|k_proj|v_proj|v_mlp)\.(?P<leaf>weight|bias)")
_SCALE = re.compile(_OWNER + r"\.norm\.(?:query|key)_norm\.scale")


def qkv_rows(shapes: Mapping[str, Shape], config: FluxConfig) -> dict[str, list[Rows]]:
    """How the projections of `config` are made of stored ones that are fused where it wants them split, or split.

    Fused rows are q, k, v, in single blocks followed by the MLP's; those of v and the MLP stay together when split.

    Args:
        shapes: shapes of what is stored, by key.
        config: the model that it is for.

    Returns:
        For each key that is made: the stored keys and ranges of rows that it joins. Stored projections that are
        incomplete or too small are left out, and so stand out as keys that the model does not know.
    """
    width = config.hidden_size
    made: dict[str, list[Rows]] = {}
    for key, shape in shapes.items():
        match = _PROJECTION.fullmatch(key)
        if match is None or (match["part"] in _PARTS) == config.fused_qkv:
            continue
        owner, leaf = match["owner"], match["leaf"]
        fused = "linear1" if owner.startswith("single_blocks") else "qkv"
        parts = [f"{owner}.{part}.{leaf}" for part in _PARTS[fused]]
        if config.fused_qkv:
            if all(part in shapes for part in parts):
                made[f"{owner}.{fused}.{leaf}"] = [(part, 0, shapes[part][0]) for part in parts]
        elif shape[0] >= 3 * width:
            cuts = (0, width, 2 * width, shape[0])
            made |= {part: [(key, *cut)] for part, cut in zip(parts, pairwise(cuts), strict=True)}
    return made


def convert_rope(state: State, config: FluxConfig, source: RopeLayout, target: RopeLayout) -> dict[str, Tensor]:
    """Reorder the channels of q and k, and of their norms' scales, within each head; v and all else stay.

    Interleaved to half takes channels 0, 2, 4, ... and then 1, 3, 5, ...: pair k moves from (2k, 2k + 1) to
    (k, k + K). Works on fused and split projections.
    """
    if source == target:
        return dict(state)
    order_D = torch.arange(config.head_dim).view(-1, 2).T.flatten()
    if target == "interleaved":
        order_D = order_D.argsort()
    width = config.hidden_size

    def reorder(rows: Tensor) -> Tensor:
        heads = rows.reshape(-1, config.head_dim, *rows.shape[1:])
        return heads[:, order_D.to(rows.device)].reshape(rows.shape)

    out: dict[str, Tensor] = {}
    for key, value in state.items():
        match = _PROJECTION.fullmatch(key)
        if match is None:
            out[key] = reorder(value) if _SCALE.fullmatch(key) else value
        elif match["part"] in _PARTS:
            out[key] = torch.cat([reorder(value[: 2 * width]), value[2 * width :]])
        else:
            out[key] = reorder(value) if match["part"] in ("q_proj", "k_proj") else value
    return out


def convert_state(state: State, config: FluxConfig, source_rope: RopeLayout | None = None) -> dict[str, Tensor]:
    """A state in the layout of `config`: `fused_qkv` as the keys tell, `use_liger_rope` as the caller tells.

    Args:
        state: weights by key; keys that are no projection of q, k or v pass through. Split projections are views of
            the fused ones.
        config: the model that they are for.
        source_rope: rotary layout that the weights were trained with; None: the config's own.

    Raises:
        CheckpointError: projections that are incomplete or too small for the config's width; all are named.
    """
    if source_rope is not None:
        state = convert_rope(state, config, source_rope, "half" if config.use_liger_rope else "interleaved")
    made = qkv_rows({key: tuple(value.shape) for key, value in state.items()}, config)
    used = {key for rows in made.values() for key, _, _ in rows}
    out = {key: value for key, value in state.items() if key not in used}
    wrong = [
        key for key in out if (match := _PROJECTION.fullmatch(key)) and (match["part"] in _PARTS) != config.fused_qkv
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} projections cannot be {'fused' if config.fused_qkv else 'split'} for a hidden_size of "
            f"{config.hidden_size}: {', '.join(f'`{key}` {list(out[key].shape)}' for key in wrong)}",
            hint="check that the weights are complete, and hidden_size",
        )
    for key, rows in made.items():
        pieces = [state[source][start:stop] for source, start, stop in rows]
        out[key] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out
