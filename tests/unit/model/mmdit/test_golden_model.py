"""Whole MMDiTs against golden vectors: outputs, block outputs, tables, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import assert_close, assert_keys, cases_of, fill_by_rule, load_item, make_input, seeded_randn
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from osora_cli.config.models.flux import FluxConfig, patch_grid
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.packing import image_ids, pack, text_ids
from osora_cli.model.mmdit.rope import RopeTable

# Arguments of the reference's constructor that say where weights come from, not what the model is.
NOT_THE_MODEL = ("from_pretrained", "cache_dir")


def build(case: dict[str, Any]) -> MMDiT:
    config = FluxConfig(**{key: value for key, value in case["config"].items() if key not in NOT_THE_MODEL})
    model = MMDiT(config)
    if case.get("keys"):
        assert_keys(case["keys"], model)
    assert sum(p.numel() for p in model.parameters()) == case["n_params"]
    fill_by_rule(model)
    return model


def draw(spec: dict[str, Any]) -> Tensor:
    if spec.get("fn") == "torch.rand":
        return torch.rand(spec["shape"], generator=torch.Generator().manual_seed(spec["seed"]))
    assert "fn" not in spec
    return make_input(spec)


def inputs_of(case: dict[str, Any]) -> dict[str, Tensor]:
    spec, patch = case["inputs"], case["config"]["patch_size"]
    latent = draw(spec["latent"])
    batch, _, *size = latent.shape
    inputs = {
        "img": pack(latent, patch),
        "img_ids": image_ids(patch_grid((size[0], size[1], size[2]), patch), batch),
        "txt": draw(spec["txt"]),
        "txt_ids": text_ids(spec["txt"]["shape"][1], batch),
        "y_vec": draw(spec["y_vec"]),
        "timesteps": draw(spec["timesteps"]),
    }
    if "cond" in spec:
        inputs["cond"] = pack(draw(spec["cond"]), patch)
    if "guidance" in spec:
        inputs["guidance"] = torch.full((batch,), float(spec["guidance"].removeprefix("full(").removesuffix(")")))
    return inputs


def record_blocks(model: MMDiT) -> dict[str, Tensor]:
    """What each block put out in the next forward, under the golden outputs' names."""
    seen: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, tuple):
                seen[f"{name}.img"], seen[f"{name}.txt"] = output
            else:
                seen[name] = output

        return keep

    for kind in ("double_blocks", "single_blocks"):
        for index, block in enumerate(getattr(model, kind)):
            block.register_forward_hook(hook(f"{kind}.{index}"))
    return seen


def tables(rope: RopeTable) -> dict[str, Tensor]:
    """The rotation table in the two forms that the reference keeps it in."""
    cos, sin = rope.cos_BLK, rope.sin_BLK
    if rope.interleaved:
        return {"pe": torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2)).unsqueeze(1)}
    return {"pe_cos": torch.cat([cos, cos], dim=-1), "pe_sin": torch.cat([sin, sin], dim=-1)}


@pytest.mark.parametrize("case", cases_of("mmdit"))
def test_model_equals_golden(case: dict[str, Any]) -> None:
    meta, _ = load_item("mmdit")
    model, inputs = build(case), inputs_of(case)
    got = record_blocks(model)
    out = model(**inputs)
    got["out"] = out
    got["vec"] = model.condition_vector(inputs["timesteps"], inputs["y_vec"], inputs.get("guidance"))
    got |= tables(model.rope(inputs["txt_ids"], inputs["img_ids"]))
    grads: dict[str, Tensor] = {}
    if case.get("grad_target"):
        loss = mse_loss(out, seeded_randn(out.shape, case["grad_target"]["seed"]))
        loss.backward()
        got["loss"] = loss.reshape(1)
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        got |= {f"grad:{key}": grad for key, grad in grads.items()}

    assert set(case["outputs"]) <= set(got)
    for name, output in case["outputs"].items():
        assert_close(meta, output, got[name])

    relative = meta["tolerance"]["atol_rel_to_absmax"]
    assert set(case.get("grads") or {}) == set(grads)
    for key, want in (case.get("grads") or {}).items():
        norm = want["grad_norm"]
        assert float(grads[key].norm()) == pytest.approx(norm, rel=relative, abs=1e-7), key
        # A mean of n values is at most norm / sqrt(n), which is the scale that its error is measured against.
        assert float(grads[key].mean()) == pytest.approx(
            want["grad_mean"], rel=0, abs=relative * norm / grads[key].numel() ** 0.5
        ), key
