"""`engine: colossalai` where it cannot be: said before anything is built. The engine itself: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from osora_cli.engine import colossal_install
from osora_cli.engine.colossal_install import check_colossal
from osora_cli.engine.native import make_engine
from osora_cli.engine.settings import PluginSettings
from osora_cli.errors import ConfigError, SetupError


@pytest.mark.skipif(colossal_install.is_installed(), reason="colossalai is installed")
def test_not_installed_is_exit_5_with_the_cure() -> None:
    with pytest.raises(SetupError, match="colossalai is not installed") as caught:
        make_engine(engine="colossalai", plugin="zero2", dtype="bf16", device="cpu", deterministic=False)
    assert caught.value.exit_code == 5
    assert "pip install --no-deps colossalai==0.5.0" in str(caught.value)


def test_zero_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colossal_install, "is_installed", lambda: True)
    with pytest.raises(SetupError, match="ZeRO needs CUDA, and this runs on the CPU"):
        check_colossal("zero2", PluginSettings(), "cpu")
    check_colossal("ddp", PluginSettings(), "cpu")
    check_colossal("zero1", PluginSettings(), "cuda")


def test_plugins_and_settings_that_it_does_not_have() -> None:
    with pytest.raises(ConfigError, match="no `plugin: zero3`"):
        check_colossal("zero3", PluginSettings(), "cuda")
    with pytest.raises(ConfigError, match="`replicate` is of the native engine"):
        check_colossal("zero2", PluginSettings(replicate=2), "cuda")


def test_auto_is_native_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colossal_install, "is_installed", lambda: True)
    engine = make_engine(engine="auto", plugin="zero2", dtype="fp32", device="cpu", deterministic=False)
    assert engine.name == "native"
    assert engine.device == torch.device("cpu")
