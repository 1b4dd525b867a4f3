"""MMDiT weights from one layout to another: q, k and v fused or split, and the two rotary channel layouts.

FLUX.1 is fused and interleaved, the released video weights are split and half (models.md 2.5, 2.8). Which of fused and
split a file has shows in its keys. Its rotary layout does not show anywhere, and the wrong one loads without complaint
into a model that is wrong by a few per cent, so it is always said by the caller.

Shapes: E hidden width, M width of the MLP, H heads, D channels of a head, K = D / 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from osora_cli.config.models.flux import FluxConfig
from osora_cli.errors import CheckpointError

RopeLayout = Literal["interleaved", "half"]
State = Mapping[str, Tensor]

# A fused projection and the parts it is made of, in the order of its rows.
_PARTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "linear1": ("q_proj", "k_proj", "v_mlp")}
_OWNER = r"(?P<owner>double_blocks\.\d+\.(?:img|txt)_attn|single_blocks\.\d+)"
_PROJECTION = re.compile(_OWNER + r"\.(?P<part>qkv|linear1|q_proj|k_proj|v_proj|v_mlp)\.(?P<leaf>weight|bias)")
_SCALE = re.compile(_OWNER + r"\.norm\.(?:query|key)_norm\.scale")


def is_fused(state: State) -> bool | None:
    """Whether the state's q, k and v are fused; None when it holds no projection of them."""
    for key in state:
        match = _PROJECTION.fullmatch(key)
        if match:
            return match["part"] in _PARTS
    return None


def split_qkv(state: State, config: FluxConfig) -> dict[str, Tensor]:
    """Fused projections cut into q, k, v (single blocks: v with the MLP's rows). Other keys pass through.

    The new tensors are views of the old ones.

    Raises:
        CheckpointError: a fused projection has too few rows for the config's width.
    """
    width = config.hidden_size
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        match = _PROJECTION.fullmatch(key)
        if match is None or match["part"] not in _PARTS:
            out[key] = value
            continue
        if value.shape[0] < 3 * width:
            raise CheckpointError(
                f"`{key}` has {value.shape[0]} rows, q, k and v of hidden_size {width} need {3 * width}",
                hint="check hidden_size against the weights",
            )
        rows = (value[:width], value[width : 2 * width], value[2 * width :])
        for part, part_value in zip(_PARTS[match["part"]], rows, strict=True):
            out[f"{match['owner']}.{part}.{match['leaf']}"] = part_value
    return out


def fuse_qkv(state: State) -> dict[str, Tensor]:
    """Split projections joined into one, rows q, k, v (and the MLP's). Other keys pass through.

    Raises:
        CheckpointError: some of q, k and v are missing; the message names all that are.
    """
    out: dict[str, Tensor] = {}
    missing: list[str] = []
    for key, value in state.items():
        match = _PROJECTION.fullmatch(key)
        if match is None or match["part"] in _PARTS:
            out[key] = value
            continue
        fused = "linear1" if match["owner"].startswith("single_blocks") else "qkv"
        fused_key = f"{match['owner']}.{fused}.{match['leaf']}"
        if fused_key in out:
            continue
        part_keys = [f"{match['owner']}.{part}.{match['leaf']}" for part in _PARTS[fused]]
        lacking = [part_key for part_key in part_keys if part_key not in state]
        missing += [part_key for part_key in lacking if part_key not in missing]
        if not lacking:
            out[fused_key] = torch.cat([state[part_key] for part_key in part_keys])
    if missing:
        raise CheckpointError(
            f"q, k and v cannot be fused, {len(missing)} of their keys are missing: {', '.join(missing)}"
        )
    return out


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
        state: weights by key; keys that are no projection of q, k or v pass through.
        config: the model that they are for.
        source_rope: rotary layout that the weights were trained with; None: the config's own.

    Raises:
        CheckpointError: projections that are incomplete or of another width.
    """
    out = dict(state)
    if source_rope is not None:
        out = convert_rope(out, config, source_rope, "half" if config.use_liger_rope else "interleaved")
    fused = is_fused(out)
    if fused is None or fused == config.fused_qkv:
        return out
    return fuse_qkv(out) if config.fused_qkv else split_qkv(out, config)
