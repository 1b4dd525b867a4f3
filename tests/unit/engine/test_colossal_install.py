"""`engine: colossalai` where it cannot be: said before anything is built. The engine itself: tests/gpu."""

from __future__ import annotations

import sys
from pathlib import Path

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


LOADS = "class Booster: ...\n"
ADAM = "class HybridAdam:\n    def __init__(self, *args, **kwargs):\n        raise RuntimeError('nvcc is not there')\n"


# torch's own, when its sharded optimizer is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"__init__.py": "raise ImportError('libcudart.so.12: not found')"}, "does not load: ImportError: libcudart"),
        ({"__init__.py": "raise OSError('undefined symbol')"}, "does not load: OSError: undefined symbol"),
        ({"__init__.py": "", "booster/__init__.py": LOADS}, "has no kernel here: No module named 'colossalai.nn'"),
        (
            {"__init__.py": "", "booster/__init__.py": LOADS, "nn/__init__.py": "", "nn/optimizer/__init__.py": ADAM},
            "HybridAdam has no kernel here: nvcc is not there",
        ),
    ],
)
def test_auto_is_native_where_it_is_installed_and_broken(
    files: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One note says why; who asks for it by name gets the error."""
    for name, text in files.items():
        path = tmp_path / "colossalai" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in [n for n in sys.modules if n.partition(".")[0] == "colossalai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("osora_cli.engine.native.begin_on", lambda device, deterministic: None)
    gpu = torch.device("cuda", 0)
    engine = make_engine(engine="auto", plugin="zero2", dtype="bf16", device=gpu, deterministic=False)
    assert engine.name == "native"
    (note,) = engine.notes
    assert note.startswith("engine native in place of colossalai: colossalai")
    assert reason in note
    for name in [n for n in sys.modules if n.partition(".")[0] == "colossalai"]:
        monkeypatch.delitem(sys.modules, name)


def test_auto_is_native_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colossal_install, "is_installed", lambda: True)
    engine = make_engine(engine="auto", plugin="zero2", dtype="fp32", device="cpu", deterministic=False)
    assert engine.name == "native"
    assert engine.device == torch.device("cpu")
