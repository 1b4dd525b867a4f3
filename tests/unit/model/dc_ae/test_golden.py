"""Golden vectors of the Video DC-AE: blocks, small nets with gradients, tiles, the full net, the released keys.

What a case is made of comes from the item: a block is known by its keys, a defect of the reference by sizes that do
not fit together. Where a case pins such a defect, the repaired behaviour is checked and the case is listed at the end
of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from support.dc_ae import tiled_decode, tiled_encode
from support.golden import (
    assert_close,
    assert_keys,
    cases_of,
    fill_by_rule,
    golden_tensor,
    load_item,
    load_json,
    make_input,
)
from torch import Tensor, nn

from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.errors import ConfigError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.dc_ae.blocks import (
    DecoderProjectIn,
    DecoderProjectOut,
    DownBlock,
    EncoderProjectOut,
    GLUMBConv,
    LiteMLA,
    UpBlock,
    build_block,
)
from osora_cli.model.dc_ae.layers import SPACE, SPACE_TIME, ConvLayer, RMSNorm3d, add_duplicated, average_shortcut
from osora_cli.model.dc_ae.padding import reconstruct_any_size

Case = dict[str, Any]
Note = Callable[[str, str], None]


def block_of(case: Case) -> nn.Module:
    """The block that has the case's keys, with the case's arguments."""
    keys, kwargs = case["keys"], case["kwargs"]
    if "main.conv1.conv.weight" in keys:
        return build_block("ResBlock", kwargs["channels"], "silu")
    if "context_module.main.qkv.conv.weight" in keys:
        scaled = any(".aggreg." in key for key in keys)
        return build_block("EViTS5_GLU" if scaled else "EViT_GLU", kwargs["channels"], "silu")
    if "qkv.conv.weight" in keys:
        return LiteMLA(kwargs["in_channels"], dim=kwargs["dim"], scales=tuple(kwargs["scales"]))
    if "inverted_conv.conv.weight" in keys:
        return GLUMBConv(kwargs["in_channels"], expand=kwargs["expand_ratio"])
    if set(keys) == {"weight", "bias"}:
        return RMSNorm3d(kwargs["num_features"])
    if "conv.weight" in keys:
        stride = kwargs["stride"]
        return ConvLayer(
            kwargs["cin"],
            kwargs["cout"],
            kernel=kwargs["kernel"],
            stride=tuple(stride) if isinstance(stride, list) else (stride,) * 3,
        )
    sizes = (kwargs["cin"], kwargs["cout"])
    if "temporal_downsample" in kwargs:
        return DownBlock(*sizes, kwargs["temporal_downsample"])
    if "temporal_upsample" in kwargs:
        return UpBlock(*sizes, kwargs["temporal_upsample"])
    if "main.op_list.0.conv.weight" in keys:
        return EncoderProjectOut(*sizes)
    if "op_list.2.conv.weight" in keys:
        return DecoderProjectOut(*sizes, act="relu")
    assert "main.conv.weight" in keys, keys
    return DecoderProjectIn(*sizes)


def shortcut_of(case: Case, x_BCTHW: Tensor) -> Tensor:
    """The shortcut that a case without keys asks for. Bare (un)shuffles are shortcuts with groups of one."""
    kwargs = case.get("kwargs") or {}
    channels = x_BCTHW.shape[1]
    temporal = kwargs.get("temporal_downsample", kwargs.get("temporal_upsample", True))
    factors = SPACE_TIME if temporal and x_BCTHW.shape[2] > 1 else SPACE
    if "temporal_downsample" in kwargs or "unshuffle" in case["cls"]:
        return average_shortcut(x_BCTHW, kwargs.get("cout", channels * 8), factors)
    size = [n * f for n, f in zip(x_BCTHW.shape[2:], factors, strict=True)]
    out = torch.zeros(x_BCTHW.shape[0], kwargs.get("cout", channels // 8), *size)
    return add_duplicated(out, x_BCTHW, factors)


@pytest.mark.parametrize("case", cases_of("dcae_blocks"))
def test_block(case: Case) -> None:
    meta, _ = load_item("dcae_blocks")
    x = make_input(case["inputs"]["x"])
    with torch.no_grad():
        if case.get("keys"):
            block = fill_by_rule(block_of(case))
            assert_keys(case["keys"], block)
            out = block(x)
        else:
            out = shortcut_of(case, x)
    assert_close(meta, case["outputs"]["out"], out)


def model_of(case: Case) -> DcAe:
    tiling = {key: value for key, value in case.get("tiling", {}).items() if key in DcAeConfig.model_fields}
    model = DcAe(DcAeConfig(**case["config"], **case.get("options", {}), **tiling))
    fill_by_rule(model)
    if "keys" in case:
        assert_keys(case["keys"], model)
    return model


def watch(model: DcAe, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the modules that `outputs` names give, filled by every forward pass."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(name, output)

    for name, module in model.named_modules():
        if name in outputs:
            module.register_forward_hook(keep(name))
    return seen


def check_refused(model: DcAe, x: Tensor) -> None:
    """A clip that would come back shorter is refused in the net's own forward, and padded by reconstruction."""
    with pytest.raises(ConfigError, match="does not come back"):
        model(x)
    with torch.no_grad():
        rebuilt, _ = reconstruct_any_size(model, x)
    assert rebuilt.shape == x.shape


@pytest.mark.parametrize("case", [c for c in cases_of("dcae_tiny") if "loss" not in c.values[0]])
def test_small_net(case: Case, note_repaired: Note) -> None:
    meta, _ = load_item("dcae_tiny")
    model, x = model_of(case), make_input(case["inputs"]["x"])
    outputs = case["outputs"]
    seen = watch(model, outputs)
    with torch.no_grad():
        z = model.encode(x)
        assert_close(meta, outputs["z"], z)
        assert_close(meta, outputs["rec"], model.decode(z))
    for name, value in seen.items():
        # The reference runs a batch clip by clip, and its record is that of the last.
        assert_close(meta, outputs[name], value[-outputs[name]["shape"][0] :])
    if outputs["rec"]["shape"] == list(x.shape):
        with torch.no_grad():
            rec, posterior, latent = model(x)
        assert posterior is None
        assert_close(meta, outputs["rec"], rec)
        assert_close(meta, outputs["z"], latent)
    else:
        check_refused(model, x)
        note_repaired(
            f"{meta['item']} {outputs['rec']['tensor']}",
            f"{x.shape[2]} frames come back as {outputs['rec']['shape'][2]}",
        )


@pytest.mark.parametrize("case", [c for c in cases_of("dcae_tiny") if "loss" in c.values[0]])
def test_gradients(case: Case) -> None:
    meta, _ = load_item("dcae_tiny")
    model, x = model_of(case), make_input(case["inputs"]["x"])
    outputs = case["outputs"]
    rec, _, z = model(x)
    per_frame = (x - rec).square().mean((1, 3, 4), keepdim=True)
    loss = ((x - rec).abs() + 0.5 * per_frame).sum() / (x.shape[0] * x.shape[2])
    loss.backward()
    assert_close(meta, outputs["loss"], loss.reshape(1))
    assert_close(meta, outputs["z"], z)
    assert_close(meta, outputs["rec"], rec)
    grads = {name: value.grad for name, value in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    for name in outputs:
        if name.startswith("grad:"):
            assert_close(meta, outputs[name], grads[name.removeprefix("grad:")])
    for name, norm in case.get("grad_norms", {}).items():
        assert float(grads[name].norm()) == pytest.approx(norm, rel=5e-4), name


@pytest.mark.parametrize("case", cases_of("dcae_tiling"))
def test_tiles(case: Case, note_repaired: Note) -> None:
    meta, _ = load_item("dcae_tiling")
    model, config = model_of(case), case["config"]
    x, z_given = make_input(case["inputs"]["x"]), make_input(case["inputs"]["z_for_decode"])
    with torch.no_grad():
        z, rec = model.encode(x), model.decode(z_given)
    tiling, out = case["tiling"], case["outputs"]
    stale = [
        axis
        for axis, ratio in (
            ("spatial", config["spatial_compression_ratio"]),
            ("temporal", config["time_compression_ratio"]),
        )
        if tiling[f"use_{axis}_tiling"] and tiling[f"{axis}_tile_latent_size"] * ratio != tiling[f"{axis}_tile_size"]
    ]
    time, space = model.time_compression_ratio, model.spatial_compression_ratio
    frames = z_given.shape[2] * time if z_given.shape[2] > 1 else 1
    if stale:
        assert list(z.shape[3:]) == [n // space for n in x.shape[3:]]
        with torch.no_grad():
            torch.testing.assert_close(z, tiled_encode(model, x), rtol=0, atol=1e-5)
            torch.testing.assert_close(rec, tiled_decode(model, z_given), rtol=0, atol=1e-5)
        note_repaired(
            f"{meta['item']} {out['z']['tensor']}", f"the latent tile in {stale[0]} is not that of the sample tile"
        )
        return
    assert_close(meta, out["z"], z)
    if out["rec"]["shape"][2] == frames:
        assert_close(meta, out["rec"], rec)
    else:
        latent = tiling["temporal_tile_size"] // time
        stride = latent - round(latent * tiling["tile_overlap_factor"])
        # Without an overlap the forerunner of the lost tile is longer now, so that all of its frames may differ.
        same = out["rec"]["shape"][2] - (1 if stride < latent else 1 + latent * time)
        check_no_frame_lost(meta, out["rec"], rec, frames, same)
        with torch.no_grad():
            torch.testing.assert_close(rec, tiled_decode(model, z_given), rtol=0, atol=1e-5)
        note_repaired(
            f"{meta['item']} {out['rec']['tensor']}", f"{out['rec']['shape'][2]} of {frames} frames are decoded"
        )


def check_no_frame_lost(
    meta: Mapping[str, Any], output: Mapping[str, Any], rec: Tensor, frames: int, same: int
) -> None:
    """All frames are there, and the first `same` are the reference's."""
    assert rec.shape[2] == frames
    assert frames > output["shape"][2]
    kept, rows, columns = output["shape"][2:]
    cut = rec[:, :, :kept]
    assert list(cut.shape) == output["shape"]
    stride = output["stride"]
    index = torch.arange(0, cut.numel(), stride)
    compared = index // (rows * columns) % kept < same
    error = (cut.reshape(-1)[::stride] - golden_tensor(meta, output)).abs()[compared].max()
    assert error <= meta["tolerance"]["atol_rel_to_absmax"] * output["absmax"]


@pytest.fixture(scope="module")
def full_net() -> DcAe:
    with torch.device("meta"):
        model = DcAe(DcAeConfig(model_name="dc-ae-f32t4c128"))
    return fill_by_rule(model.to_empty(device="cpu")).eval()  # type: ignore[return-value]


@pytest.mark.parametrize("case", cases_of("dcae_full"))
def test_full_net(case: Case, full_net: DcAe, note_repaired: Note) -> None:
    meta, _ = load_item("dcae_full")
    x, outputs = make_input(case["inputs"]["x"]), case["outputs"]
    seen = watch(full_net, outputs)
    with torch.no_grad():
        z = full_net.encode(x)
        rec = full_net.decode(z)
        made = {**seen, "z": z, "rec": rec}
        made["rec_of_random_z"] = full_net.decode(make_input(case["inputs"]["random_z"]))
    assert set(made) == set(outputs)
    for name, output in outputs.items():
        assert_close(meta, output, made[name])
    if list(rec.shape) != list(x.shape):
        with pytest.raises(ConfigError, match="does not come back"):
            full_net(x)
        note_repaired(f"{meta['item']} {outputs['rec']['tensor']}", f"{x.shape[2]} frames come back as {rec.shape[2]}")


def test_keys_of_released_weights() -> None:
    manifest = load_json("manifests/dc_ae_f32t4c128")
    with torch.device("meta"):
        model = DcAe(DcAeConfig(model_name="dc-ae-f32t4c128"))
    assert_keys({key: shape for key, (shape, _) in manifest["state_dict"].items()}, model)
    assert sum(p.numel() for p in model.parameters()) == manifest["total_params"] == 459_462_147
    assert [name for name, _ in model.named_buffers()] == manifest["buffers"] == []
    assert all(p.is_contiguous() for p in model.parameters())
