"""The MMDiT under FSDP2: one rank is enough to show what reaches the blocks, and in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.mmdit import inputs_for, small_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.attention import full_attention


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: MMDiT) -> MMDiT:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    for block in [*model.double_blocks, *model.single_blocks]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The model casts its own inputs: time and positions have to come in as they are.
    root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=root)
    return model


@pytest.mark.usefixtures("one_rank")
def test_rotation_tables_stay_fp32_in_half_precision_blocks() -> None:
    model = small_model(use_liger_rope=True, cond_embed=True)
    # Far positions: in bfloat16 their cosines would be wrong in the third digit.
    inputs = inputs_for(model.config)
    inputs["img_ids"] = inputs["img_ids"] + 300
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        seen.append((q_BLHD, k_BLHD))
        return full_attention(q_BLHD, k_BLHD, v_BLHD)

    with torch.no_grad():
        whole = small_model(use_liger_rope=True, cond_embed=True).bfloat16()
        whole.attend = attend
        want = whole(**inputs)
        model.attend = attend
        got = sharded(model)(**inputs)
    assert got.dtype == torch.bfloat16
    first, split = seen[0], seen[len(seen) // 2]
    assert all(torch.equal(a, b) for a, b in zip(first, split, strict=True))
    assert torch.equal(got, want)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_arrive_in_fp32(recompute: bool) -> None:
    whole = small_model().bfloat16()
    inputs = inputs_for(whole.config)
    whole(**inputs).float().square().mean().backward()
    model = sharded(small_model())
    model.enable_grad_checkpoint(recompute)
    model(**inputs).float().square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None, name
        assert p.grad.dtype == torch.float32
        # The blocks' gradients of the conditioning vector are bfloat16 and added up in another order.
        assert float((p.grad.to_local() - q.grad).norm()) <= 2e-2 * float(q.grad.float().norm()), name
