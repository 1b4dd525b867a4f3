"""Checkpoints as Open-Sora itself writes them, made from the facts of its format."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import SHAPES, optimizer_state, weights

from osora_cli.checkpoint.headers import ITEMSIZE


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


def write_async(folder: Path, update: int) -> Path:
    """`--async-io`: HybridAdam's int step is pickled, one log line a file."""
    _common(folder, update)
    state: dict[str, Any] = optimizer_state(update)
    half = len(SHAPES) // 2
    weight_map = {}
    for number in range(len(SHAPES)):
        state[f"state.{number}.step"] = update
        weight_map[str(number)] = f"optimizer-{1 + (number >= half):05d}.safetensors"
    for file in sorted(set(weight_map.values())):
        part = {k: v for k, v in state.items() if weight_map[k.split(".")[1]] == file}
        write_safetensors(folder / "optimizer" / file, part)
    index = folder / "optimizer/optimizer.safetensors.index.json"
    write_index(index, weight_map, param_groups="pytorch_optim_group.bin")
    write_safetensors(folder / "ema.safetensors", weights(update + 500, torch.bfloat16))
    (folder / "async_file_io.log").write_text("All tasks are completed\n" * 5)
    return folder


def write_sync(folder: Path, update: int, *, flat_ema: bool = False) -> Path:
    """Without `--async-io`: torch.save of the optimizer and the EMA, which under ZeRO is rank 0's flat part."""
    _common(folder, update)
    table = optimizer_state(update)
    state: dict[int, dict[str, Any]] = {}
    for number in range(len(SHAPES)):
        state[number] = {name: table[f"state.{number}.{name}"] for name in ("exp_avg", "exp_avg_sq")}
        state[number]["step"] = update
    torch.save(state, folder / "optimizer/pytorch_optim-00001.bin")
    weight_map = {str(number): "pytorch_optim-00001.bin" for number in state}
    write_index(folder / "optimizer/pytorch_optim.bin.index.json", weight_map, param_groups="pytorch_optim_group.bin")
    ema = weights(update + 500, torch.bfloat16)
    if flat_ema:
        ema = {key: value.reshape(-1)[: max(1, value.numel() // 2)].clone() for key, value in ema.items()}
    torch.save(ema, folder / "ema.pt")
    return folder
