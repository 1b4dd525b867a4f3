"""The native engine: masters, gradients, clipping, skipped updates, shards."""

import copy

import pytest
import torch
from torch import nn

from osora_cli.engine.base import OptimSettings
from osora_cli.engine.native import NativeEngine, NativeTrained, make_engine
from osora_cli.engine.ranks import Ranks
from osora_cli.engine.settings import PluginSettings
from osora_cli.errors import ConfigError, SetupError

OPTIM = OptimSettings(lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def prepared(dtype: str) -> NativeTrained:
    trained = NativeEngine(torch.device("cpu"), dtype, "none").prepare(network(), OPTIM)
    assert isinstance(trained, NativeTrained)
    return trained


def state(trained: NativeTrained) -> list[torch.Tensor]:
    shards = [*trained.model_shards(), *trained.master_shards(), *trained.optimizer_shards()]
    return [s.tensor.clone() for s in shards]


def batch(seed: int, trained: NativeTrained) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(trained.compute_dtype)


def micro_step(trained: NativeTrained, seed: int, scale: float = 1.0) -> None:
    trained.backward(trained.module(batch(seed, trained)).float().pow(2).mean() * scale)


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_fp32_is_torchs_own_adamw(clip: float) -> None:
    trained = prepared("fp32")
    reference = network()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0)
    for step in range(4):
        micro_step(trained, step)
        got = trained.update(1e-2, clip).grad_norm
        optimizer.zero_grad()
        reference(batch(step, trained)).pow(2).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or 1e9)
        optimizer.step()
        torch.testing.assert_close(got, norm)
    for a, b in zip(trained.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_learning_rate_of_the_call_is_the_one_used() -> None:
    trained = prepared("fp32")
    before = state(trained)
    micro_step(trained, 0)
    trained.update(0.0, 1.0)
    moved = [k.key for k, a, b in zip(trained.model_shards(), before, state(trained), strict=False) if not a.equal(b)]
    assert moved == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]


def test_bf16_working_weights_are_the_rounded_masters() -> None:
    trained = prepared("bf16")
    for step in range(3):
        micro_step(trained, step)
        trained.update(1e-2, 1.0)
    working = {s.key: s.tensor for s in trained.model_shards()}
    for shard in trained.master_shards():
        assert shard.dtype is torch.float32
        assert working[shard.key].dtype is torch.bfloat16
        assert torch.equal(working[shard.key], shard.tensor.to(torch.bfloat16))
        assert not torch.equal(shard.tensor, shard.tensor.to(torch.bfloat16).float())


def test_bf16_accumulates_gradients_in_fp32() -> None:
    trained = prepared("bf16")
    # 1 + 256 * 2**-9: in bf16 each addend would round away.
    for scale in [1.0] + [2.0**-9] * 256:
        micro_step(trained, 0, scale)
    accumulated = trained._masters[0].tensor.grad
    assert accumulated is not None
    assert accumulated.dtype is torch.float32
    once = prepared("bf16")
    micro_step(once, 0, 1.0)
    single = once._masters[0].tensor.grad
    assert single is not None
    large = single.abs() > 1e-3
    torch.testing.assert_close((accumulated / single)[large], torch.full_like(single[large], 1.5), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_non_finite_gradient_changes_nothing(dtype: str) -> None:
    trained = prepared(dtype)
    micro_step(trained, 0)
    trained.update(1e-2, 1.0)
    before = state(trained)
    trained.module.eval()  # the batch norm's own statistics are not the optimizer's affair
    bad = batch(1, trained)
    bad[0, 0] = float("nan")
    trained.backward(trained.module(bad).float().mean())
    result = trained.update(1e-2, 1.0)
    assert result.skipped.item() == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, state(trained), strict=True))
    micro_step(trained, 2)
    assert trained.update(1e-2, 1.0).skipped.item() == 0.0
    assert not all(torch.equal(a, b) for a, b in zip(before, state(trained), strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_put_back_goes_on_bit_for_bit(dtype: str) -> None:
    trained = prepared(dtype)
    for step in range(2):
        micro_step(trained, step)
        trained.update(1e-2, 1.0)
    kept = [
        (s.key, s.tensor.clone())
        for s in [*trained.model_shards(), *trained.master_shards(), *trained.optimizer_shards()]
    ]
    other = prepared(dtype)
    targets = [*other.model_shards(), *other.master_shards(), *other.optimizer_shards()]
    for (key, tensor), target in zip(kept, targets, strict=True):
        assert key == target.key
        target.tensor.copy_(tensor)
    other.masters_changed()
    for t in (trained, other):
        micro_step(t, 9)
        t.update(1e-2, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(state(trained), state(other), strict=True))


def test_shards_carry_plain_names_and_whole_shapes() -> None:
    trained = prepared("bf16")
    assert [s.key for s in trained.model_shards()] == list(network().state_dict())
    assert [s.key for s in trained.master_shards()] == [n for n, _ in network().named_parameters()]
    assert trained.optimizer_shards()[0].key == "state.0.step"
    assert trained.optimizer_shards()[0].shape == ()
    assert all(s.is_whole for s in trained.optimizer_shards())
    assert trained.param_groups()[0]["params"] == list(range(6))


def test_frozen_parameters_have_no_optimizer_state() -> None:
    module = copy.deepcopy(network())
    for p in module[0].parameters():
        p.requires_grad_(False)
    trained = NativeEngine(torch.device("cpu"), "bf16", "none").prepare(module, OPTIM)
    assert [s.key for s in trained.master_shards()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert len(trained.optimizer_shards()) == 12


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine `x`"):
        make_engine(engine="x", plugin="none", dtype="fp32", device="cpu", deterministic=False)
    if not torch.cuda.is_available():
        with pytest.raises(SetupError, match="no GPU"):
            make_engine(engine="auto", plugin="none", dtype="fp32", device="cuda", deterministic=False)


def test_several_processes_need_a_plugin_that_joins_them() -> None:
    two = Ranks(0, 2)
    with pytest.raises(ConfigError, match="`plugin: none` trains in one process, and 2 were started"):
        make_engine(engine="auto", plugin="none", dtype="fp32", device="cpu", deterministic=False, ranks=two)


@pytest.mark.parametrize(
    ("plugin", "settings", "message"),
    [
        ("ddp", PluginSettings(replicate=2), "`replicate` goes with parameters that are sharded"),
        ("zero1", PluginSettings(cpu_offload=True), "`cpu_offload` goes with parameters that are sharded"),
        ("zero2", PluginSettings(replicate=2), "3 ranks cannot be split into `2` equal groups"),
    ],
)
def test_settings_that_the_ranks_cannot_follow(plugin: str, settings: PluginSettings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(
            engine="native", plugin=plugin, dtype="fp32", device="cpu", deterministic=False, ranks=Ranks(0, 3),
            settings=settings,
        )  # fmt: skip
