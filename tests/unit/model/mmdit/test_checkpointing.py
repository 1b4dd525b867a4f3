"""Gradient checkpointing: which blocks, the same gradients, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mmdit import inputs_for, small_model
from torch import Tensor

from osora_cli.model.mmdit import MMDiT

SETTINGS = [None, (0, 0), (1, 0), (0, 2), (100, 100)]


def gradients(model: MMDiT, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Gradients of parameters and of the image tokens, and the elements that were kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack_hook(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    model.zero_grad()
    inputs = inputs | {"img": inputs["img"].clone().requires_grad_()}
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        out = model(**inputs)
    elements = sum(kept.values())
    out.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert inputs["img"].grad is not None
    return grads | {"img": inputs["img"].grad}, elements


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("options", [{"fused_qkv": True}, {"fused_qkv": False, "use_liger_rope": True}])
def test_gradients_are_equal_and_less_is_kept(settings: tuple[int, int] | None, options: dict[str, Any]) -> None:
    model = small_model(grad_ckpt_settings=settings, cond_embed=True, **options)
    inputs = inputs_for(model.config, grid=(3, 1, 5), num_text=3)
    plain, kept_plain = gradients(model, inputs)
    model.enable_grad_checkpoint(True)
    recomputed, kept = gradients(model, inputs)
    assert plain.keys() == recomputed.keys()
    assert len(plain) == len(list(model.parameters())) + 1
    for name, grad in plain.items():
        scale = float(grad.abs().max())
        assert float((recomputed[name] - grad).abs().max()) <= 1e-5 * max(scale, 1e-6), name
    if settings == (0, 0):
        assert kept == kept_plain
    else:
        assert kept < kept_plain
    model.enable_grad_checkpoint(False)
    assert gradients(model, inputs)[1] == kept_plain


@pytest.mark.parametrize("settings", SETTINGS)
def test_only_the_first_blocks_are_run_twice(settings: tuple[int, int] | None) -> None:
    model = small_model(grad_ckpt_settings=settings)
    model.enable_grad_checkpoint(True)
    runs = [0] * 5
    for index, block in enumerate([*model.double_blocks, *model.single_blocks]):

        def count(*args: Any, index: int = index) -> None:
            runs[index] += 1

        norm = block.pre_norm if hasattr(block, "pre_norm") else block.img_norm1
        norm.register_forward_hook(count)
    inputs = inputs_for(model.config)
    model(**inputs).sum().backward()
    double, single = settings or (2, 3)
    assert runs == [1 + (i < double) for i in range(2)] + [1 + (i < single) for i in range(3)]
    runs[:] = [0] * 5
    with torch.no_grad():
        model(**inputs)
    assert runs == [1] * 5
