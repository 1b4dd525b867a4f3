"""Parts of the MMDiT against golden vectors: embeddings, rotary tables, attention, blocks, packing.

What a case calls is the first part of its id; sizes, seeds and options come from its fields. Some cases refer to
another's inputs ("same"), which `field` follows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.golden import (
    assert_close,
    assert_keys,
    cases_of,
    fill_by_rule,
    golden_tensor,
    load_item,
    make_input,
    seeded_randn,
)
from torch import Tensor, nn

from osora_cli.config.models.flux import patch_grid
from osora_cli.model.mmdit.attention import RMSNorm, full_attention, rotate_and_attend
from osora_cli.model.mmdit.blocks import DoubleStreamBlock, LastLayer, SingleStreamBlock
from osora_cli.model.mmdit.embed import MLPEmbedder, timestep_embedding
from osora_cli.model.mmdit.packing import image_ids, make_tokens, pack, unpack
from osora_cli.model.mmdit.rope import RopeTable, apply_rope, rope_table

ITEM = "mmdit_pieces"
Outputs = Mapping[str, Tensor]
NoteRepaired = Callable[[str, str], None]


def field(name: str, *, of: str = "") -> Any:
    """The first value of an input field, over all cases whose id begins with `of`, that is not a reference."""
    for case in load_item(ITEM)[0]["cases"]:
        inputs = case.get("inputs")
        if case["id"].startswith(of) and isinstance(inputs, dict) and inputs.get(name) not in (None, "same"):
            return inputs[name]
    raise AssertionError(f"no case of {ITEM} states the input `{name}`")


def number(text: str, name: str) -> float:
    """The number behind a word in a free text: `number("heads 4, mlp_ratio 2.0", "heads")` is 4."""
    match = re.search(rf"{name} (-?[\d.]+)", text)
    assert match, f"`{text}` does not give {name}"
    return float(match[1])


def table_ids() -> Tensor:
    lengths = [int(length) for length in re.findall(r"arange\((\d+)\)", field("ids", of="embednd"))]
    return image_ids((lengths[0], lengths[1], lengths[2]))


def head_table(*, interleaved: bool) -> RopeTable:
    axes, theta = field("axes_dim", of="embednd"), field("theta", of="embednd")
    return rope_table(table_ids(), axes, theta, interleaved=interleaved)


def block_table() -> RopeTable:
    text = field("pe", of="double_block")
    axes = [int(dim) for dim in re.findall(r"\d+", text[text.index("[") : text.index("]")])]
    rows, num_axes = re.search(r"first (\d+) rows, first (\d+) axes", text).groups()  # type: ignore[union-attr]
    ids = table_ids()[:, : int(rows), : int(num_axes)]
    return rope_table(ids, axes, number(text, "theta"), interleaved=not text.startswith("Liger"))


def is_liger(case: Mapping[str, Any]) -> bool:
    return "liger" in case["id"]


def heads_last(x_BHLD: Tensor) -> Tensor:
    return x_BHLD.transpose(1, 2)


def filled(case: Mapping[str, Any], module: nn.Module) -> nn.Module:
    assert_keys(case["keys"], module)
    return fill_by_rule(module)


def run_embednd(case: Mapping[str, Any]) -> Outputs:
    table = head_table(interleaved=True)
    cos, sin = table.cos_BLK, table.sin_BLK
    return {"out": torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2)).unsqueeze(1)}


def run_liger_embednd(case: Mapping[str, Any]) -> Outputs:
    table = head_table(interleaved=False)
    return {"cos": table.cos_BLK.repeat(1, 1, 2), "sin": table.sin_BLK.repeat(1, 1, 2)}


def run_apply_rope(case: Mapping[str, Any]) -> Outputs:
    table = head_table(interleaved=not is_liger(case))
    drawn = {name: heads_last(make_input(field(name, of="apply_rope"))) for name in ("q", "k")}
    return {name: heads_last(apply_rope(x_BLHD, table)) for name, x_BLHD in drawn.items()}


def run_attention(case: Mapping[str, Any]) -> Outputs:
    table = head_table(interleaved=not is_liger(case))
    q, k = (heads_last(make_input(field(name, of="apply_rope"))) for name in ("q", "k"))
    v = heads_last(make_input(field("v", of="attention")))
    return {"out": rotate_and_attend(q, k, v, table, full_attention)}


def run_rearrange(case: Mapping[str, Any]) -> Outputs:
    """The order of channels that turns interleaved pairs into halves, and back."""
    q = make_input(case["inputs"]["q"])
    order = torch.arange(q.shape[-1]).view(-1, 2).T.flatten()
    return {"out": q[..., order], "reverse": q[..., order.argsort()]}


def run_mlp_embedder(case: Mapping[str, Any]) -> Outputs:
    x = make_input(case["inputs"]["x"])
    return {"out0": filled(case, MLPEmbedder(x.shape[-1], case["inputs"]["hidden"]))(x)}


def run_last_layer(case: Mapping[str, Any]) -> Outputs:
    out_channels, width = case["keys"]["linear.weight"]
    layer = filled(case, LastLayer(width, out_channels))
    return {"out0": layer(make_input(case["inputs"]["x"]), make_input(case["inputs"]["vec"]))}


def run_rmsnorm(case: Mapping[str, Any]) -> Outputs:
    x = make_input(case["inputs"]["x"])
    return {"out0": filled(case, RMSNorm(x.shape[-1]))(x)}


def run_double_block(case: Mapping[str, Any]) -> Outputs:
    inputs, options = case["inputs"], case["inputs"]["kw"]
    img, txt, vec = (make_input(inputs[name]) for name in ("img", "txt", "vec"))
    width = img.shape[-1]
    block = DoubleStreamBlock(
        width,
        int(number(options, "heads")),
        int(width * number(options, "mlp_ratio")),
        qkv_bias="qkv_bias True" in options,
        fused_qkv="fused True" in options,
    )
    img_out, txt_out = filled(case, block)(img, txt, vec, block_table())
    return {"out0": img_out, "out1": txt_out}


def run_single_block(case: Mapping[str, Any]) -> Outputs:
    inputs, options = case["inputs"], case["inputs"]["kw"]
    x, vec = make_input(inputs["x"]), make_input(inputs["vec"])
    width, fused = x.shape[-1], "fused True" in options
    mlp_dim = int(width * number(options, "mlp_ratio"))
    block = SingleStreamBlock(width, int(number(options, "heads")), mlp_dim, fused_qkv=fused)
    return {"out0": filled(case, block)(x, vec, block_table())}


def run_pack(case: Mapping[str, Any]) -> Outputs:
    x, patch = make_input(case["inputs"]["x"]), case["inputs"]["patch_size"]
    packed = pack(x, patch)
    grid = patch_grid((x.shape[2], x.shape[3], x.shape[4]), patch)
    assert torch.equal(unpack(packed, grid, patch), x)
    return {"out": packed}


def run_prepare(case: Mapping[str, Any]) -> Outputs:
    """Tokens from a latent and its text; the text is given, or drawn with the shapes that came out."""
    x = make_input(field("x", of="prepare"))
    patch = math.isqrt(case["outputs"]["img"]["shape"][-1] // x.shape[1])
    if isinstance(case["inputs"].get("t5"), dict):
        txt, y_vec = make_input(case["inputs"]["t5"]), make_input(case["inputs"]["clip"])
    else:
        seeds, outputs = field("seeds", of="prepare"), case["outputs"]
        txt, y_vec = (seeded_randn(outputs[n]["shape"], s) for n, s in zip(("txt", "y_vec"), seeds, strict=True))
    tokens = make_tokens(x, txt, y_vec, patch)
    called = case["inputs"].get("t5_called_with")
    if called is not None:
        assert (called["added_tokens"] if isinstance(called, dict) else called[1]) == math.prod(tokens.grid)
    return {name: getattr(tokens, name) for name in ("img", "img_ids", "txt", "txt_ids", "y_vec")}


RUNNERS: dict[str, Callable[[Mapping[str, Any]], Outputs]] = {
    "embednd": run_embednd,
    "liger_embednd": run_liger_embednd,
    "apply_rope": run_apply_rope,
    "attention": run_attention,
    "rearrange_tensor": run_rearrange,
    "mlp_embedder": run_mlp_embedder,
    "last_layer": run_last_layer,
    "rmsnorm": run_rmsnorm,
    "fused_rmsnorm": run_rmsnorm,
    "double_block": run_double_block,
    "single_block": run_single_block,
    "pack": run_pack,
    "prepare": run_prepare,
}


def embeds_time(case: Mapping[str, Any]) -> bool:
    return isinstance(case.get("inputs"), dict) and "t" in case["inputs"]


@pytest.mark.parametrize("case", [c for c in cases_of(ITEM) if not embeds_time(c.values[0])])
def test_piece_equals_golden(case: dict[str, Any]) -> None:
    meta, _ = load_item(ITEM)
    called = max((name for name in RUNNERS if case["id"].startswith(name)), key=len, default=None)
    assert called is not None, f"nothing runs the case `{case['id']}`"
    got = RUNNERS[called](case)
    assert set(got) == set(case["outputs"])
    for name, output in case["outputs"].items():
        assert_close(meta, output, got[name])


@pytest.mark.parametrize("case", [c for c in cases_of(ITEM) if embeds_time(c.values[0])])
def test_timestep_embedding_equals_golden(case: dict[str, Any], note_repaired: NoteRepaired) -> None:
    """In half precision the reference rounds 1000 t before the sinusoids; those rows are checked against the formula.

    A row shows the defect when 1000 t is no number of the dtype of t. Rows that do not must equal the golden ones.
    """
    meta, _ = load_item(ITEM)
    (output,) = case["outputs"].values()
    dtype = getattr(torch, case["inputs"].get("t_dtype", "float32"))
    t = torch.tensor(case["inputs"]["t"], dtype=dtype)
    got = timestep_embedding(t, case["inputs"]["dim"])
    assert got.dtype == dtype
    rounded = (t * 1000.0).double() != t.double() * 1000.0
    if dtype == torch.float32 or not rounded.any():
        # fp32's exp differs in its last digit from processor to processor, and so does a frequency times 1000 t.
        assert_close(meta, output, got, slack=1000.0 * float(t.float().abs().max()) * 2.0**-24)
        return

    half = case["inputs"]["dim"] // 2
    frequency = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64) / half)
    angle = 1000.0 * t.double()[:, None] * frequency
    exact = torch.cat([angle.cos(), angle.sin()], dim=-1)
    # Rounding to the dtype of t is all that may differ, and in fp32 the angle itself, of up to 1000 rad.
    ulp = torch.finfo(dtype).eps
    assert float((got.double() - exact).abs().max()) <= ulp / 2 + 1e-4
    assert output["stride"] == 1
    golden = golden_tensor(meta, output).view(got.shape)
    assert torch.equal(got[~rounded].float(), golden[~rounded])
    if not torch.equal(got[rounded].float(), golden[rounded]):
        note_repaired(output["tensor"], f"1000 t rounded to {dtype} before the sinusoids")
