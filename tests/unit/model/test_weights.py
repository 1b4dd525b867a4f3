"""Weights from every kind of source, what does not fit, and what is no weights at all."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dc_ae import small_config
from torch import Tensor, nn

from osora_cli.errors import CheckpointError, SetupError
from osora_cli.model.build import build_model
from osora_cli.model.weights import load_weights

State = dict[str, Tensor]


@pytest.fixture
def source() -> State:
    return {key: value.clone() for key, value in build_model(small_config(), seed=1).state_dict().items()}


@pytest.fixture
def target() -> nn.Module:
    return build_model(small_config(), seed=2)


def check_loaded(model: nn.Module, want: State) -> None:
    got = model.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[key], want[key]) for key in want)


def write_shards(
    folder: Path, state: State, index: str, shards: int = 3, name: str = "model-{:05d}.safetensors"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    where = {key: name.format(number % shards + 1) for number, key in enumerate(state)}
    for file in sorted(set(where.values())):
        part = {key: value for key, value in state.items() if where[key] == file}
        if file.endswith(".bin"):
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": where}))


def test_safetensors_file(tmp_path: Path, source: State, target: nn.Module) -> None:
    save_file(source, tmp_path / "w.safetensors", metadata={"format": "pt"})
    report = load_weights(target, tmp_path / "w.safetensors")
    check_loaded(target, source)
    assert report.fits
    assert sorted(report.loaded) == sorted(source)
    assert f"all {len(source)} tensors" in report.text()


@pytest.mark.parametrize(
    ("index", "name"),
    [
        ("model.safetensors.index.json", "model-{:05d}.safetensors"),
        ("model.safetensors.index.json", "model-{:05d}-of-00003.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model-{:05d}.bin"),
        ("diffusion_pytorch_model.safetensors.index.json", "diffusion-{}.safetensors"),
    ],
)
@pytest.mark.parametrize("below", ["", "model"])
def test_sharded_folder(tmp_path: Path, source: State, target: nn.Module, index: str, name: str, below: str) -> None:
    write_shards(tmp_path / "w" / below, source, index, name=name)
    load_weights(target, tmp_path / "w")
    check_loaded(target, source)


def test_an_index_itself(tmp_path: Path, source: State, target: nn.Module) -> None:
    write_shards(tmp_path, source, "a.index.json")
    write_shards(tmp_path, source, "b.index.json")
    load_weights(target, tmp_path / "a.index.json")
    check_loaded(target, source)
    with pytest.raises(CheckpointError, match=r"has 2 indexes: a\.index\.json, b\.index\.json"):
        load_weights(target, tmp_path)


def test_a_folder_with_one_file(tmp_path: Path, source: State, target: nn.Module) -> None:
    save_file(source, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    load_weights(target, tmp_path)
    check_loaded(target, source)


@pytest.mark.parametrize("name", ["ema.safetensors", "ema.pt"])
def test_the_average_of_a_checkpoint(tmp_path: Path, source: State, target: nn.Module, name: str) -> None:
    write_shards(tmp_path / "model", source, "model.safetensors.index.json")
    average = {key: value + 1 for key, value in source.items()}
    with pytest.raises(CheckpointError, match="no average"):
        load_weights(target, tmp_path, ema=True)
    save_file(average, tmp_path / name) if name.endswith("safetensors") else torch.save(average, tmp_path / name)
    load_weights(target, tmp_path, ema=True)
    check_loaded(target, average)
    load_weights(target, tmp_path)
    check_loaded(target, source)


def test_a_run_by_its_latest(tmp_path: Path, source: State, target: nn.Module) -> None:
    write_shards(tmp_path / "epoch0-global_step1" / "model", source, "model.safetensors.index.json")
    write_shards(tmp_path / "epoch0-global_step2" / "model", {}, "model.safetensors.index.json")
    (tmp_path / "latest").write_text("epoch0-global_step1\n")
    load_weights(target, tmp_path)
    check_loaded(target, source)


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("levels", [(), ("state_dict",), ("model",), ("model", "state_dict")])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(
    tmp_path: Path, source: State, target: nn.Module, ending: str, levels: tuple[str, ...], zipped: bool
) -> None:
    data: Any = source
    for level in reversed(levels):
        data = {level: data, "epoch": 3}
    torch.save(data, tmp_path / f"w{ending}", _use_new_zipfile_serialization=zipped)
    load_weights(target, tmp_path / f"w{ending}")
    check_loaded(target, source)


def test_the_average_inside_a_torch_file(tmp_path: Path, source: State, target: nn.Module) -> None:
    average = {key: value + 1 for key, value in source.items()}
    torch.save({"model": source, "ema": average}, tmp_path / "w.pt")
    load_weights(target, tmp_path / "w.pt", ema=True)
    check_loaded(target, average)
    load_weights(target, tmp_path / "w.pt")
    check_loaded(target, source)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_levels_of_wrappers_are_dropped_on_both_sides(
    tmp_path: Path, source: State, target: nn.Module, prefix: str
) -> None:
    save_file({prefix + key: value for key, value in source.items()}, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    check_loaded(target, source)
    wrapped = nn.Module()
    wrapped.module = build_model(small_config(), seed=5)
    load_weights(wrapped, tmp_path / "w.safetensors")
    check_loaded(wrapped.module, source)


def test_values_take_the_networks_dtype(tmp_path: Path, source: State) -> None:
    save_file({key: value.to(torch.bfloat16) for key, value in source.items()}, tmp_path / "w.safetensors")
    model = build_model(small_config())
    load_weights(model, tmp_path / "w.safetensors")
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    check_loaded(model, {key: value.to(torch.bfloat16).float() for key, value in source.items()})


@pytest.fixture
def misfit(tmp_path: Path, source: State) -> Path:
    """Two keys less, one more, one of another shape."""
    state = dict(source)
    del state["encoder.project_in.conv.bias"]
    del state["decoder.project_out.op_list.0.weight"]
    state["decoder.extra.weight"] = torch.zeros(3, 2)
    state["encoder.project_in.conv.weight"] = torch.zeros(8, 4, 3, 3, 3)
    save_file(state, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_every_misfit_is_listed_and_nothing_touched(misfit: Path, target: nn.Module) -> None:
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(target, misfit)
    message = caught.value.message
    for line in (
        "2 missing in the file:",
        "encoder.project_in.conv.bias [8]",
        "decoder.project_out.op_list.0.weight [8]",
        "1 unknown to the model:",
        "decoder.extra.weight [3, 2]",
        "1 of another shape:",
        "encoder.project_in.conv.weight [8, 4, 3, 3, 3] in the file, [8, 3, 3, 3, 3] in the model",
    ):
        assert line in message
    assert "strict_load: false" in str(caught.value.hint)
    assert caught.value.exit_code == 4
    check_loaded(target, before)


def test_without_strict_what_fits_is_loaded_and_the_rest_reported(
    misfit: Path, source: State, target: nn.Module
) -> None:
    before = {key: value.clone() for key, value in target.state_dict().items()}
    report = load_weights(target, misfit, strict=False)
    assert not report.fits
    assert list(report.missing) == ["encoder.project_in.conv.bias", "decoder.project_out.op_list.0.weight"]
    assert report.unexpected == {"decoder.extra.weight": (3, 2)}
    assert report.misshapen == {"encoder.project_in.conv.weight": ((8, 4, 3, 3, 3), (8, 3, 3, 3, 3))}
    kept = {*report.missing, *report.misshapen}
    check_loaded(target, {key: before[key] if key in kept else source[key] for key in source})


def test_all_keys_of_another_model_are_listed(tmp_path: Path, source: State, target: nn.Module) -> None:
    save_file({f"vae.{key}": value for key, value in source.items()}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_weights(target, tmp_path / "w.safetensors")
    assert all(f"  {key} " in caught.value.message for key in source)
    assert all(f"  vae.{key} " in caught.value.message for key in source)


def test_optional_keys_may_be_missing(tmp_path: Path) -> None:
    class Extended(nn.Module):
        optional_keys = frozenset({"extra.weight"})

        def __init__(self) -> None:
            super().__init__()
            self.base, self.extra = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    model = Extended()
    save_file({"base.weight": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    before = model.extra.weight.clone()
    report = load_weights(model, tmp_path / "w.safetensors")
    assert report.allowed_missing == {"extra.weight": (2, 2)}
    assert torch.equal(model.extra.weight, before)
    assert torch.equal(model.base.weight, torch.ones(2, 2))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3\n"


@pytest.mark.parametrize("ending", [".safetensors", ".pt", ".bin"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS, "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n  <html>", "a web page"),
        (b"", "empty"),
        (bytes(4096), "begins with zeros"),
        (b"hello, world, this is no weights file", "no safetensors file|cannot be read as weights"),
    ],
)
def test_what_is_no_weights(tmp_path: Path, target: nn.Module, content: bytes, message: str, ending: str) -> None:
    path = tmp_path / f"w{ending}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(target, path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("left", [0.0001, 0.5, 0.999])
@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_files_that_are_cut_short(tmp_path: Path, source: State, target: nn.Module, ending: str, left: float) -> None:
    path = tmp_path / f"w{ending}"
    save_file(source, path) if ending == ".safetensors" else torch.save(source, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * left)])
    with pytest.raises(CheckpointError, match="cut short"):
        load_weights(target, path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_torch_file_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: nn.Module, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": Harmful()}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="cannot be read as weights: it is no torch file of tensors"):
        load_weights(target, tmp_path / "w.pt")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("data", [[1, 2], {"epoch": 3}, {"model": {"w": torch.zeros(1), "n": 3}}, {}, torch.zeros(3)])
def test_torch_files_without_a_state_dict(tmp_path: Path, target: nn.Module, data: Any) -> None:
    torch.save(data, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        load_weights(target, tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "sub/w.safetensors", "..", "", 3, None])
def test_an_index_does_not_lead_elsewhere(tmp_path: Path, source: State, target: nn.Module, name: Any) -> None:
    folder = tmp_path / "w"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file(source, place / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(source, name)}))
    with pytest.raises(CheckpointError, match="not beside it"):
        load_weights(target, folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(tmp_path: Path, target: nn.Module, text: str) -> None:
    (tmp_path / "model.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="no index of weights"):
        load_weights(target, tmp_path)


def test_missing_shards_are_named(tmp_path: Path, source: State, target: nn.Module) -> None:
    write_shards(tmp_path, source, "model.safetensors.index.json")
    for number in (1, 3):
        (tmp_path / f"model-{number:05d}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 2 files .*model-00001\.safetensors, model-00003\.safetensors"):
        load_weights(target, tmp_path)


def test_a_key_in_two_shards(tmp_path: Path, source: State, target: nn.Module) -> None:
    write_shards(tmp_path, source, "model.safetensors.index.json", shards=2)
    save_file(source, tmp_path / "model-00002.safetensors")
    with pytest.raises(CheckpointError, match="twice"):
        load_weights(target, tmp_path)


def test_folders_without_weights(tmp_path: Path, source: State, target: nn.Module) -> None:
    with pytest.raises(CheckpointError, match="no index, and 0 files"):
        load_weights(target, tmp_path)
    for name in ("a", "b"):
        save_file(source, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"2 files that may be weights: a\.safetensors, b\.safetensors"):
        load_weights(target, tmp_path)


@pytest.mark.parametrize("name", ["nowhere.safetensors", "org/repo/model.safetensors"])
def test_a_path_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: nn.Module, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=f"`{name}` do not exist"):
        load_weights(target, name)


def test_the_hub_by_its_own_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: State, target: nn.Module
) -> None:
    save_file(source, tmp_path / "w.safetensors")
    asked = []

    def download(repo_id: str, filename: str, local_dir: str | None) -> str:
        asked.append((repo_id, filename))
        return str(tmp_path / "w.safetensors")

    card = SimpleNamespace(card_data=SimpleNamespace(license="apache-2.0"))
    client = SimpleNamespace(hf_hub_download=download, HfApi=lambda: SimpleNamespace(model_info=lambda _: card))
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    load_weights(target, "hf://org/repo/sub/w.safetensors")
    check_loaded(target, source)
    assert asked == [("org/repo", "sub/w.safetensors")]


def test_the_hub_without_its_client(monkeypatch: pytest.MonkeyPatch, target: nn.Module) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SetupError) as caught:
        load_weights(target, "hf://org/repo/w.safetensors")
    assert "pip install huggingface_hub" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["hf://", "hf://org", "hf://org/repo", "hf://org/repo/"])
def test_names_that_are_no_file_of_the_hub(target: nn.Module, name: str) -> None:
    with pytest.raises(CheckpointError, match="names no file of the hub"):
        load_weights(target, name)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, source: State, target: nn.Module, value: float) -> None:
    key = next(reversed(source))
    source[key].view(-1)[-1] = value
    save_file(source, tmp_path / "spoilt.safetensors")
    with pytest.raises(CheckpointError, match=f"spoilt.*{re.escape(key)}.*not finite"):
        load_weights(target, tmp_path / "spoilt.safetensors")
