"""The MMDiT as a whole: options, inputs, initialisation, precision, and tokens that are split."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.golden import seeded_randn
from support.mmdit import inputs_for, small_config, small_model
from torch import Tensor

from osora_cli.errors import ConfigError
from osora_cli.model.build import build_model
from osora_cli.model.mmdit import MMDiT
from osora_cli.model.mmdit.attention import RMSNorm, full_attention
from osora_cli.model.mmdit.rope import RopeTable


def relative_l2(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


# ---- initialisation ----------------------------------------------------------------------------------------------


def check_fresh(model: MMDiT) -> None:
    for name, p in model.named_parameters():
        if name.endswith("scale"):
            assert bool((p == 1).all()), name
        elif name.startswith("cond_in."):
            assert not bool(p.any()), name
        else:
            # PyTorch's Linear: uniform within 1 / sqrt(fan in), biases too.
            fan_in = model.get_submodule(name.rpartition(".")[0]).in_features
            bound = fan_in**-0.5
            assert 0.5 * bound < float(p.detach().abs().max()) <= bound, name


def test_only_the_condition_embedding_starts_at_zero() -> None:
    torch.manual_seed(0)
    check_fresh(MMDiT(small_config(cond_embed=True, guidance_embed=True)))


def build_from_seed(seed: int, **changes: Any) -> MMDiT:
    with torch.device("meta"):
        model = MMDiT(small_config(**changes))
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(7.0)
    model.reset_parameters(seed)
    return model


def test_reset_parameters_after_a_build_without_storage() -> None:
    model = build_from_seed(3, cond_embed=True, guidance_embed=True)
    check_fresh(model)
    # Each tensor's values come from the seed and its key: other parts, or other draws before, change nothing.
    torch.rand(7)
    other = build_from_seed(3, depth=1).state_dict()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.items())
    key = "double_blocks.0.img_mlp.0.weight"
    assert not torch.equal(build_from_seed(4).state_dict()[key], other[key])
    # Linear's own initialisation has the same spread.
    torch.manual_seed(0)
    by_torch = MMDiT(small_config()).state_dict()[key].std()
    assert abs(float(other[key].std() / by_torch) - 1) < 0.05


def test_a_fresh_condition_embedding_is_neutral() -> None:
    """Weights trained without a condition, extended by one: the same function at the start."""
    plain = small_model()
    extended = MMDiT(small_config(cond_embed=True))
    missing, unexpected = extended.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == MMDiT.optional_keys
    assert not unexpected
    inputs = inputs_for(extended.config)
    with torch.no_grad():
        with_cond = extended(**inputs)
        inputs.pop("cond")
        assert torch.equal(with_cond, plain(**inputs))


def test_the_builder_gives_a_seeded_model_and_refuses_what_does_not_fit() -> None:
    config = small_config().model_dump()
    model = build_model(config, seed=3, dtype=torch.bfloat16)
    want = build_from_seed(3).bfloat16().state_dict()
    assert all(torch.equal(value, want[key]) for key, value in model.state_dict().items())
    assert all(p.is_meta for p in build_model(config, device="meta").parameters())
    with pytest.raises(ConfigError, match="`5` does not divide hidden_size `48`"):
        build_model(config | {"num_heads": 5})


# ---- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", [1, 2])
def test_condition_and_guidance_change_the_output(patch: int) -> None:
    model = small_model(patch_size=patch, cond_embed=True, guidance_embed=True)
    assert model.cond_in.in_features == 16 + patch**2
    inputs = inputs_for(model.config)
    with torch.no_grad():
        out = model(**inputs)
        assert out.shape == inputs["img"].shape
        for name in ("cond", "guidance", "timesteps", "y_vec", "txt"):
            assert relative_l2(model(**inputs | {name: inputs[name] * 0.5}), out) > 1e-3, name


def test_inputs_that_do_not_fit_the_options() -> None:
    plain, both = small_model(), small_model(cond_embed=True, guidance_embed=True)
    inputs = inputs_for(both.config)
    with pytest.raises(ValueError, match="img has 2 dimensions"):
        plain(**inputs_for(plain.config) | {"img": torch.zeros(3, 16)})
    with pytest.raises(ValueError, match="txt has 4 dimensions"):
        plain(**inputs_for(plain.config) | {"txt": torch.zeros(1, 2, 3, 12)})
    with pytest.raises(ValueError, match="cond was given, but cond_embed is False"):
        plain(**inputs_for(plain.config), cond=inputs["cond"])
    with pytest.raises(ValueError, match="cond_embed is True, but no cond was given"):
        both(**inputs | {"cond": None})
    with pytest.raises(ValueError, match="no guidance was given"):
        both(**inputs | {"guidance": None})
    with torch.no_grad():
        given = plain(**inputs_for(plain.config), guidance=torch.full((2,), 4.0))
        assert torch.equal(given, plain(**inputs_for(plain.config)))


def test_samples_do_not_mix() -> None:
    model = small_model(use_liger_rope=True)
    inputs = inputs_for(model.config, batch=3)
    with torch.no_grad():
        together = model(**inputs)
        for index in range(3):
            alone = model(**{name: value[index : index + 1] for name, value in inputs.items()})
            assert torch.allclose(together[index : index + 1], alone, atol=1e-6)


def test_order_of_tokens_does_not_matter_when_ids_follow() -> None:
    model = small_model()
    inputs = inputs_for(model.config)
    order = torch.randperm(inputs["img"].shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(**inputs)
        shuffled = model(**inputs | {name: inputs[name][:, order] for name in ("img", "img_ids")})
        assert torch.allclose(shuffled, out[:, order], atol=1e-6)
        moved = model(**inputs | {"img": inputs["img"][:, order]})
        assert relative_l2(moved, out[:, order]) > 1e-3


@pytest.mark.parametrize(("depth", "single"), [(0, 0), (1, 0), (0, 1)])
def test_depths_of_zero(depth: int, single: int) -> None:
    model = small_model(depth=depth, depth_single_blocks=single)
    model.enable_grad_checkpoint(True)
    inputs = inputs_for(model.config)
    model(**inputs).sum().backward()


# ---- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused_qkv": False, "use_liger_rope": True}])
def test_bfloat16_is_near_fp32(options: dict[str, Any]) -> None:
    model = small_model(cond_embed=True, guidance_embed=True, **options)
    inputs = inputs_for(model.config)
    with torch.no_grad():
        want = model(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(**inputs)
        half = model.bfloat16()(**inputs)
    assert half.dtype == mixed.dtype == torch.bfloat16
    assert relative_l2(half, want) < 2e-2
    assert relative_l2(mixed, want) < 2e-2


def test_time_reaches_the_sinusoids_in_fp32() -> None:
    """Of a model in half precision, too: times that bfloat16 would merge give different vectors."""
    model = small_model().bfloat16()
    y_vec = torch.zeros(2, model.config.vec_in_dim)
    times = torch.tensor([0.8984, 0.8991])
    assert times.bfloat16().unique().numel() == 1
    with torch.no_grad():
        first, second = model.condition_vector(times, y_vec)
    assert relative_l2(first, second) > 1e-2


def test_rms_norm_rounds_before_its_scale() -> None:
    x = seeded_randn((2, 5, 3, 16), 1).bfloat16()
    norm = RMSNorm(16)
    torch.nn.init.normal_(norm.scale)
    want = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm.bfloat16()(x), want * norm.scale)
    assert not bool(norm(torch.zeros(1, 16, dtype=torch.bfloat16)).any())


def test_attention_is_softmax_over_all_tokens() -> None:
    q, k, v = (seeded_randn((2, 7, 3, 16), seed) for seed in (1, 2, 3))
    weights = torch.einsum("blhd,bmhd->bhlm", q, k).div(4).softmax(-1)
    assert torch.allclose(full_attention(q, k, v), torch.einsum("bhlm,bmhd->blhd", weights, v), atol=1e-6)


# ---- tokens over ranks -------------------------------------------------------------------------------------------


class GatherOverThreads:
    """Attention for threads that each hold a part of the tokens: every query meets the keys of all of them."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.parts: list[tuple[Tensor, Tensor] | None] = [None] * ranks
        self.local = threading.local()

    def __call__(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        self.barrier.wait()
        self.parts[self.local.rank] = (k_BLHD, v_BLHD)
        self.barrier.wait()
        keys, values = zip(*(part for part in self.parts if part is not None), strict=True)
        return full_attention(q_BLHD, torch.cat(keys, dim=1), torch.cat(values, dim=1))


@pytest.mark.parametrize("liger", [True, False])
def test_tokens_may_be_split_when_attention_joins_them(liger: bool) -> None:
    """Image and text cut into unequal parts: only `attend` knows of the other parts."""
    model = small_model(use_liger_rope=liger)
    inputs = inputs_for(model.config)
    vec = model.condition_vector(inputs["timesteps"], inputs["y_vec"])
    img, txt = model.img_in(inputs["img"]), model.txt_in(inputs["txt"])
    with torch.no_grad():
        want = model.run_blocks(img, txt, vec, model.rope(inputs["txt_ids"], inputs["img_ids"]))

    gather = GatherOverThreads(2)
    model.attend = gather
    cuts_img, cuts_txt = [slice(0, 11), slice(11, None)], [slice(0, 4), slice(4, None)]
    out: list[Tensor] = [torch.empty(0)] * 2

    def run(rank: int) -> None:
        gather.local.rank = rank
        at_img, at_txt = cuts_img[rank], cuts_txt[rank]
        rope: RopeTable = model.rope(inputs["txt_ids"][:, at_txt], inputs["img_ids"][:, at_img])
        with torch.no_grad():
            out[rank] = model.run_blocks(img[:, at_img], txt[:, at_txt], vec, rope)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.allclose(torch.cat(out, dim=1), want, atol=1e-6)


# ---- compilation -------------------------------------------------------------------------------------------------


def test_forward_traces_as_one_graph() -> None:
    """No part of the model falls back to Python under torch.compile, with checkpointing on as in training."""
    model = small_model(depth=1, depth_single_blocks=1, use_liger_rope=True)
    model.enable_grad_checkpoint(True)
    inputs = inputs_for(model.config)
    traced = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    assert torch.allclose(traced, model(**inputs), atol=1e-6)
