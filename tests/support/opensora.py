"""Checkpoints as Open-Sora itself writes them, made from the facts of its format."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Literal

import torch
from support.checkpoints import SHAPES, optimizer_state, weights

from osora_cli.checkpoint.headers import ITEMSIZE

Adam = Literal["hybrid", "torch"]  # HybridAdam under the zero plugins counts steps in an int, torch's in a tensor


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    """In the given order; what is no tensor becomes pickled bytes in a U8 tensor, named in `non_tensor_keys`."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}
    plain = {key: pickle.dumps(value) for key, value in tensors.items() if not isinstance(value, torch.Tensor)}
    metadata = {"format": "pt"} | ({"non_tensor_keys": json.dumps(list(plain))} if plain else {})
    table: dict[str, Any] = {"__metadata__": metadata}
    blobs: list[bytes] = []
    position = 0
    for key, value in tensors.items():
        if key in plain:
            blob, dtype, shape = plain[key], "U8", [len(plain[key])]
        else:
            dtype, shape = names[value.dtype], list(value.shape)
            blob = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert len(blob) % ITEMSIZE[dtype] == 0
        table[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(blob)]}
        position += len(blob)
        blobs.append(blob)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def write_index(path: Path, weight_map: dict[str, str], **metadata: Any) -> None:
    index = {"metadata": {"total_size": 1.5, **metadata}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n")


def _common(folder: Path, update: int) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "optimizer").mkdir()
    states = {"epoch": 0, "step": update, "global_step": update, "batch_size": None, "actual_update_step": update}
    (folder / "running_states.json").write_text(json.dumps(states, indent=4))
    torch.save({"last_epoch": update, "base_lrs": [1e-4]}, folder / "lr_scheduler")
    torch.save({"seed": 42, "epoch": 0, "last_micro_batch_access_index": update}, folder / "sampler")
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": list(range(len(SHAPES)))}]
    torch.save(groups, folder / "optimizer/pytorch_optim_group.bin")
    model = weights(update, torch.bfloat16)
    write_safetensors(folder / "model/model-00001.safetensors", model)
    write_index(folder / "model/model.safetensors.index.json", dict.fromkeys(model, "model-00001.safetensors"))
    masters = {f"module.{key}": value for key, value in weights(update).items()}
    write_safetensors(folder / "master.safetensors", masters)


def write_async(folder: Path, update: int, *, adam: Adam = "hybrid") -> Path:
    """`--async-io`: HybridAdam's int step is pickled, one log line a file."""
    _common(folder, update)
    state: dict[str, Any] = optimizer_state(update)
    half = len(SHAPES) // 2
    weight_map = {}
    for number in range(len(SHAPES)):
        state[f"state.{number}.step"] = _step(update, adam)
        weight_map[str(number)] = f"optimizer-{1 + (number >= half):05d}.safetensors"
    for file in sorted(set(weight_map.values())):
        part = {k: v for k, v in state.items() if weight_map[k.split(".")[1]] == file}
        write_safetensors(folder / "optimizer" / file, part)
    index = folder / "optimizer/optimizer.safetensors.index.json"
    write_index(index, weight_map, param_groups="pytorch_optim_group.bin")
    write_safetensors(folder / "ema.safetensors", weights(update + 500, torch.bfloat16))
    (folder / "async_file_io.log").write_text("All tasks are completed\n" * 5)
    return folder


def _step(update: int, adam: Adam) -> Any:
    return update if adam == "hybrid" else torch.tensor(float(update))


def add_discriminator(folder: Path, update: int, *, adam: Adam = "hybrid") -> dict[str, torch.Tensor]:
    """The second stage's: `.bin` in both modes. Returns its weights."""
    generator = torch.Generator().manual_seed(3000 + update)
    table = {f"main.{n}.weight": torch.randn(5, 3, generator=generator) for n in range(3)}
    for name in ("discriminator", "disc_optimizer"):
        (folder / name).mkdir()
    files = dict(
        zip(table, ["pytorch_model-00001.bin", "pytorch_model-00001.bin", "pytorch_model-00002.bin"], strict=True)
    )
    for file in set(files.values()):
        torch.save({k: v for k, v in table.items() if files[k] == file}, folder / "discriminator" / file)
    write_index(folder / "discriminator/pytorch_model.bin.index.json", files)
    state = {
        n: {"step": _step(update, adam), "exp_avg": value / 2, "exp_avg_sq": value**2}
        for n, value in enumerate(table.values())
    }
    torch.save(state, folder / "disc_optimizer/pytorch_optim-00001.bin")
    weight_map = {str(n): "pytorch_optim-00001.bin" for n in state}
    group = "pytorch_optim_group.bin"
    write_index(folder / "disc_optimizer/pytorch_optim.bin.index.json", weight_map, param_groups=group)
    torch.save([{"lr": 1e-4, "betas": (0.5, 0.9), "params": [0, 1, 2]}], folder / "disc_optimizer" / group)
    torch.save({"last_epoch": update}, folder / "disc_lr_scheduler")
    return table


def load_as_opensora(folder: Path, *, model: str = "model", optimizer: str = "optimizer") -> dict[str, Any]:
    """What Open-Sora's loader (ColossalAI's, underneath) makes of a checkpoint, by the steps that it takes.

    One file matching `*.index.*json` in each folder; the files of its weight map, sorted; safetensors where the
    index's name says so; of optimizers `state.{i}.{name}` in three parts with plain values unpickled, and the groups
    by the index's metadata; EMA and masters by safetensors' own loader, else torch.load.
    """
    from safetensors.torch import load_file

    def shards(part: str) -> tuple[dict[str, Any], list[Path]]:
        (index_file,) = (folder / part).glob("*.index.*json")
        index = json.loads(index_file.read_text())
        return index["metadata"], [folder / part / name for name in sorted(set(index["weight_map"].values()))]

    weights: dict[str, torch.Tensor] = {}
    for path in shards(model)[1]:
        weights.update(load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True))
    metadata, paths = shards(optimizer)
    states: dict[int, dict[str, Any]] = {}
    for path in paths:
        assert path.suffix == ".safetensors"
        for key, value in load_file(path).items():
            start, number, name = key.split(".")
            assert start == "state"
            states.setdefault(int(number), {})[name] = value
    ema = folder / "ema.safetensors"
    master = folder / "master.safetensors"
    return {
        "running_states": json.loads((folder / "running_states.json").read_text()),
        "model": weights,
        "states": states,
        "param_groups": torch.load(folder / optimizer / metadata["param_groups"], weights_only=True),
        "ema": load_file(ema) if ema.exists() else torch.load(folder / "ema.pt", weights_only=True),
        "master": load_file(master) if master.exists() else None,
        "lr_scheduler": torch.load(folder / "lr_scheduler", weights_only=True),
        "sampler": torch.load(folder / "sampler", weights_only=True),
    }


def write_sync(folder: Path, update: int, *, flat_ema: bool = False, adam: Adam = "hybrid") -> Path:
    """Without `--async-io`: torch.save of the optimizer and the EMA, which under ZeRO is rank 0's flat part."""
    _common(folder, update)
    table = optimizer_state(update)
    state: dict[int, dict[str, Any]] = {}
    for number in range(len(SHAPES)):
        state[number] = {name: table[f"state.{number}.{name}"] for name in ("exp_avg", "exp_avg_sq")}
        state[number]["step"] = _step(update, adam)
    torch.save(state, folder / "optimizer/pytorch_optim-00001.bin")
    weight_map = {str(number): "pytorch_optim-00001.bin" for number in state}
    write_index(folder / "optimizer/pytorch_optim.bin.index.json", weight_map, param_groups="pytorch_optim_group.bin")
    ema = weights(update + 500, torch.bfloat16)
    if flat_ema:
        ema = {key: value.reshape(-1)[: max(1, value.numel() // 2)].clone() for key, value in ema.items()}
    torch.save(ema, folder / "ema.pt")
    return folder
