"""Compiled blocks: the same numbers, one compilation a class and shape, state-dict keys as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from osora_cli.config.models.flux import FluxConfig
from osora_cli.model.build import build_model
from osora_cli.model.latents import TextBundle, predict_velocity
from osora_cli.model.mmdit import MMDiT, attention
from osora_cli.model.mmdit import compiled as module
from osora_cli.model.mmdit.compiled import BlockCompiler, obstacle
from osora_cli.model.mmdit.host_buffer import HostBuffer


def model(**changes: object) -> MMDiT:
    sizes = {"hidden_size": 16, "num_heads": 1, "axes_dim": [4, 6, 6], "vec_in_dim": 8, "context_in_dim": 8}
    config = FluxConfig(
        in_channels=4,
        patch_size=1,
        use_liger_rope=True,
        fused_qkv=False,
        **{**sizes, "depth": 1, "depth_single_blocks": 1, **changes},
    )
    made = build_model(config, seed=1)
    assert isinstance(made, MMDiT)
    return made


def run(net: MMDiT, batch: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x, t = torch.randn(batch, 4, 2, 2, 3, generator=draw), torch.rand(batch, generator=draw)
    text = TextBundle(torch.randn(batch, 5, 8, generator=draw), torch.randn(batch, 8, generator=draw))
    return predict_velocity(net, x, t, text, patch_size=1)


def gradients(net: MMDiT) -> tuple[Tensor, list[Tensor]]:
    out = run(net)
    out.square().mean().backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    for p in net.parameters():
        p.grad = None
    return out.detach(), found


def same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]], tolerance: float) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=tolerance)
    assert len(one[1]) == len(other[1]) > 0
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("depth", [0, pytest.param(2, marks=pytest.mark.sweep)])
def test_same_numbers_with_recomputation_and_host_memory_and_one_compilation_for_all_blocks(depth: int) -> None:
    net = model(depth=depth, depth_single_blocks=2)
    net.enable_grad_checkpoint(True, HostBuffer(1 << 16))
    want, keys = gradients(net), list(net.state_dict())
    compiler = BlockCompiler("aot_eager")
    compiler.attach(net, 1)
    same(gradients(net), want, 1e-6)
    same(gradients(net), want, 1e-6)
    assert compiler.graphs == [*["DoubleStreamBlock 2 x 17"] * (depth > 0), "SingleStreamBlock 2 x 17"]
    assert list(net.state_dict()) == keys
    with torch.no_grad():
        run(net, batch=3)  # of evaluation: it compiles nothing
    assert len(compiler.graphs) == 1 + (depth > 0)
    BlockCompiler.detach(net)
    assert torch.equal(run(net), want[0])


def test_room_for_the_shapes() -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=8):
        BlockCompiler("aot_eager").attach(model(depth=0), 3)
        assert config.recompile_limit == 3 + module.SPARE_SHAPES
        BlockCompiler("aot_eager").attach(model(depth=0), 1)
        assert config.recompile_limit == 3 + module.SPARE_SHAPES  # another model may need them still


def test_what_stands_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert obstacle(torch.device("cpu")) == "there is no C++ compiler"
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert obstacle(torch.device("cpu")) is None
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "Triton" in str(obstacle(torch.device("cuda")))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # by what inductor imports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_the_numbers(dtype: torch.dtype) -> None:
    net = model().to(dtype)
    want = gradients(net)
    compiler = BlockCompiler("inductor")
    compiler.attach(net, 1)
    same(gradients(net), want, 1e-5 if dtype is torch.float32 else 0.03)
    assert len(compiler.graphs) == 2


def test_the_order_of_attention_kernels_is_traced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel is taken is CUDA's matter; here the order itself goes through eager and compiled code."""
    if not attention._HAS_ORDER:
        pytest.skip("this torch has no order that it can trace")
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
    assert not attention.takes_order(v)
    plain = attention.full_attention(q, k, v)
    monkeypatch.setattr(attention, "takes_order", lambda x: True)
    before = torch._C._get_sdp_priority_order()
    compiled = torch.compile(attention.full_attention, backend="eager", fullgraph=True)
    for attend in (attention.full_attention, compiled):
        torch.testing.assert_close(attend(q, k, v), plain)
        assert torch._C._get_sdp_priority_order() == before
