"""Pretrained parts: the list, refusals, and the hub's client stood in for where it cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from osora_cli.app import weights
from osora_cli.errors import SetupError, UsageError
from osora_cli.model.hub import hub_download


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


class Hub(ModuleType):
    """A client that writes a file where it is told to, and remembers what was asked."""

    def __init__(self, said: list[str], licence: str | None = "apache-2.0") -> None:
        super().__init__("huggingface_hub")
        self.said, self.licence = said, licence

    def HfApi(self) -> SimpleNamespace:
        card = SimpleNamespace(license=self.licence) if self.licence else None
        return SimpleNamespace(model_info=lambda repo: SimpleNamespace(card_data=card))

    def hf_hub_download(self, repo_id: str, filename: str, local_dir: str | None) -> str:
        assert any("licence" in line for line in self.said), "fetched before the licence was shown"
        path = Path(local_dir or ".") / filename
        path.write_text(repo_id)
        return str(path)


def test_list_says_what_is_there(cache: Path, tmp_path: Path) -> None:
    names = [status.source.name for status in weights.list_weights()]
    assert names == ["lpips-vgg", "dc-ae-f32t4c128", "hunyuan_vae", "open-sora-v2", "open-sora-v2-dc-ae"]
    assert all(status.path is None for status in weights.list_weights())
    assert all(status.source.licence for status in weights.list_weights())
    cache.mkdir()
    (cache / "lpips-vgg.safetensors").touch()
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "hunyuan_vae.safetensors").touch()
    there = {status.source.name: status.path for status in weights.list_weights() if status.path}
    assert there == {
        "lpips-vgg": cache / "lpips-vgg.safetensors",
        "hunyuan_vae": Path("ckpts/hunyuan_vae.safetensors"),
    }


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="osora weights fetch lpips-vgg") as caught:
        weights.fetch("lpips_vgg")
    assert caught.value.exit_code == 2


def test_hub_fetch_shows_the_licence_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(said))
    path = weights.fetch("hunyuan_vae", tmp_path / "to", said.append)
    assert path == tmp_path / "to" / "hunyuan_vae.safetensors"
    assert path.read_text() == "hpcai-tech/Open-Sora-v2"
    assert "Tencent" in said[0]
    assert "licence of hpcai-tech/Open-Sora-v2: apache-2.0" in said
    said.clear()
    assert weights.fetch("hunyuan_vae", tmp_path / "to", said.append) == path
    assert said == [f"`{path}` is there"]


def test_a_card_without_a_licence_is_said(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(said, licence=None))
    assert weights.fetch("dc-ae-f32t4c128", progress=said.append).parent == cache
    assert any("not declared" in line for line in said)


def test_without_the_client_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SetupError, match="python -m pip install huggingface_hub") as caught:
        weights.fetch("hunyuan_vae")
    assert caught.value.exit_code == 5


def test_no_network_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub([])

    def fail(**_: object) -> str:
        raise ConnectionError("no route to the hub\nand a long story")

    hub.hf_hub_download = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(SetupError, match=r"did not give `hf://a/b/c`: no route to the hub\n"):
        hub_download("a/b", "c", tmp_path)


def test_no_room_is_said_before_fetching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(SetupError, match=r"1\.0 GB free, `open-sora-v2` takes 24\.0 GB"):
        weights.fetch("open-sora-v2", tmp_path)
