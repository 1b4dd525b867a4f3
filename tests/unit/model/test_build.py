"""Networks from config sections: the registry, devices and dtypes, the seed, weights to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dc_ae import small_config
from torch import nn

from osora_cli.config.base import Section
from osora_cli.errors import CheckpointError, ConfigError, SetupError
from osora_cli.model.build import REGISTRY, build_model
from osora_cli.model.perceptual import LPIPS

DISCRIMINATOR = {"type": "N_Layer_discriminator_3D"}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", [kind for kind, entry in REGISTRY.items() if not entry.loads_itself])
def test_every_registered_network_has_a_section_and_a_seeded_start(kind: str) -> None:
    assert issubclass(REGISTRY[kind].section, Section)
    module, _, name = REGISTRY[kind].network.partition(":")
    network = getattr(__import__(module, fromlist=[name]), name)
    assert callable(network.reset_parameters)


def test_a_section_and_a_mapping_give_the_same() -> None:
    config = small_config()
    one, two = build_model(config, seed=3), build_model(config.model_dump(), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))


@pytest.mark.parametrize("config", [small_config().model_dump(), DISCRIMINATOR])
def test_the_seed_decides_and_nothing_else(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = build_model(config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn from the global generator
    torch.manual_seed(5)
    two, other = build_model(config, seed=1), build_model(config, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(state(one).values(), state(other).values(), strict=True))


def test_meta_gives_shapes_without_memory() -> None:
    model = build_model({"type": "dc_ae", "model_name": "dc-ae-f32t4c128"}, device="meta", dtype=torch.bfloat16)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == 459_462_147
    assert {(p.device.type, p.dtype) for p in parameters} == {("meta", torch.bfloat16)}


def test_meta_loads_nothing() -> None:
    model = build_model(small_config(from_pretrained="nowhere.safetensors"), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_bf16_is_rounded_fp32() -> None:
    one, half = build_model(small_config(), seed=1), build_model(small_config(), seed=1, dtype=torch.bfloat16)
    for a, b in zip(state(one).values(), state(half).values(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)


def test_buffers_have_their_values() -> None:
    model = build_model(DISCRIMINATOR)
    buffers = dict(model.named_buffers())
    assert buffers
    assert all(bool((v == 1).all()) for k, v in buffers.items() if k.endswith("running_var"))
    assert all(not v.any() for k, v in buffers.items() if k.endswith(("running_mean", "num_batches_tracked")))


def test_weights_to_start_from(tmp_path: Path) -> None:
    source = build_model(small_config(), seed=9)
    save_file(state(source), tmp_path / "w.safetensors")
    model = build_model(small_config(from_pretrained=str(tmp_path / "w.safetensors")), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(state(source).values(), state(model).values(), strict=True))


def test_weights_of_another_model_are_refused_unless_told(tmp_path: Path) -> None:
    source = build_model(small_config(), seed=9)
    weights = state(source)
    del weights["encoder.project_in.conv.bias"]
    save_file(weights, tmp_path / "w.safetensors")
    path = str(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.project_in\.conv\.bias"):
        build_model(small_config(from_pretrained=path))
    model = build_model(small_config(from_pretrained=path, strict_load=False))
    assert torch.equal(
        state(model)["decoder.project_in.main.conv.weight"], weights["decoder.project_in.main.conv.weight"]
    )


@pytest.mark.parametrize("kind", ["dcae", "dc_aee", "", "None"])
def test_unknown_types_are_told_with_the_nearest(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"model type `{kind}`") as caught:
        build_model({"type": kind})
    assert "dc_ae" in str(caught.value.allowed)
    if kind.startswith("dc"):
        assert caught.value.hint == "did you mean `dc_ae`?"


def test_a_section_of_an_unknown_type() -> None:
    class Other(Section):
        type: str = "flax"

    with pytest.raises(ConfigError, match="model type `flax`") as caught:
        build_model(Other())
    assert caught.value.hint == "did you mean `flux`?"


def test_unknown_keys_and_wrong_types_are_told() -> None:
    with pytest.raises(ConfigError, match="latent_chanels") as caught:
        build_model({"type": "dc_ae", "latent_chanels": 3, "in_channels": "many"})
    assert "in_channels" in caught.value.message


def test_lpips_is_built_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights only its shapes can be had; where they are missing the error says how to get them."""
    monkeypatch.setenv("OSORA_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with torch.device("meta"):
        expected = LPIPS().state_dict()
    shapes = build_model({"type": "LPIPS"}, device="meta").state_dict()
    assert {k: v.shape for k, v in shapes.items()} == {k: v.shape for k, v in expected.items()}
    assert all(v.is_meta for v in shapes.values())
    with pytest.raises(SetupError, match="LPIPS weights are not on this machine") as said:
        build_model({"type": "LPIPS"})
    assert "osora weights fetch lpips-vgg" in (said.value.hint or "")
