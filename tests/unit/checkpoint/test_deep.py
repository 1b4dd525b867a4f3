"""`--deep`: values that no digest can object to, since they were written as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import SHAPES, contents, tensors, whole
from support.opensora import write_async, write_sync

from osora_cli.checkpoint import deep
from osora_cli.checkpoint.contents import CheckpointContents, Counters
from osora_cli.checkpoint.findings import Report
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.checkpoint.verify import verify, verify_run
from osora_cli.errors import ConfigError

Tables = dict[str, dict[str, torch.Tensor]]


def consistent(update: int) -> Tables:
    """As a training leaves them: the weights are their masters rounded."""
    tables = tensors(update)
    tables["model"].update({key: value.to(torch.bfloat16) for key, value in tables["master"].items()})
    return tables


def store_one(run: Path, update: int, tables: Tables, **change: Any) -> Path:
    made = contents(update, groups={name: whole(table) for name, table in tables.items()})
    for name, value in change.items():
        setattr(made, name, value)
    store = CheckpointStore(run, async_io=True)
    store.save(made)
    store.finish()
    store.close()
    return run / f"epoch0-global_step{update}"


def told(report: Report) -> dict[str, str]:
    """Check -> the first thing it found, or its status."""
    return {check.name: str(check.findings[0]) if check.findings else check.status for check in report.checks}


def test_a_good_one_is_ok_and_says_what_was_looked_at(tmp_path: Path) -> None:
    first = store_one(tmp_path, 1, consistent(1))
    second = store_one(tmp_path, 2, consistent(2))
    seen: list[tuple[int, int]] = []
    report = verify(second, "deep", progress=lambda *step: seen.append(step))
    assert report.verdict == "ok"
    checks = told(report)
    assert [checks[n] for n in ("values", "masters", "ema", "previous")] == ["passed"] * 4
    assert checks["network"] == "skipped"
    assert seen[-1][0] == seen[-1][1]
    assert told(verify(first, "deep"))["previous"] == "skipped"
    assert [row.verdict for row in verify_run(tmp_path, "deep").rows] == ["ok", "ok"]


def _set(group: str, key: str, value: float) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        tables[group][key].view(-1)[-1] = value

    return change


def _reshape_ema(tables: Tables) -> None:
    tables["ema"]["mid.weight"] = tables["ema"]["mid.weight"].reshape(47, 61)


def _rename_ema(tables: Tables) -> None:
    tables["ema"]["mid.wait"] = tables["ema"].pop("mid.weight")


@pytest.mark.parametrize(
    ("change", "check", "what"),
    [
        (_set("optimizer", "state.2.exp_avg", float("nan")), "values", "`state.2.exp_avg` has 1 values that are not"),
        (_set("ema", "logit", float("inf")), "values", "tensor `logit` has 1 values that are not finite"),
        (_set("optimizer", "state.5.exp_avg_sq", -1e-30), "values", "`state.5.exp_avg_sq` has 1 values that are neg"),
        (_set("model", "decoder.weight", 0.0), "masters", "`decoder.weight` differs from its master in 1 of 4773"),
        (_set("master", "encoder.conv.bias", 3.0), "masters", "`encoder.conv.bias` differs from its master in 1 of 13"),
        (_reshape_ema, "ema", "`mid.weight` has shape [47, 61], the weight [61, 47]"),
        (_rename_ema, "ema", "`mid.wait` has no weight"),
    ],
)  # fmt: skip
def test_what_the_values_must_satisfy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tables], None], check: str, what: str
) -> None:
    monkeypatch.setattr(deep, "CHUNK", 1000)  # faults behind the first chunk are found too
    tables = consistent(3)
    change(tables)
    folder = store_one(tmp_path, 3, tables)
    assert verify(folder).verdict == "ok", "each byte is as it was written"
    report = verify(folder, "deep")
    assert report.verdict == "damaged"
    assert what in told(report)[check]
    assert [name for name, c in told(report).items() if c not in ("passed", "skipped")] == [check]


def with_disc(update: int) -> Tables:
    """A second stage's: the discriminator has batch norm's running statistics beside what is trained."""
    tables, disc = consistent(update), consistent(update + 10)
    running = {"main.3.running_mean": torch.linspace(0, 1, 7), "main.3.num_batches_tracked": torch.tensor(update)}
    return {**tables, "discriminator": {**disc["model"], **running}, "disc_master": disc["master"]}


def _drop_disc(tables: Tables) -> None:
    del tables["discriminator"]["mid.weight"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_set("discriminator", "decoder.weight", 0.0), "`decoder.weight` differs from its master in 1 of 4773"),
        (_set("disc_master", "encoder.conv.bias", 3.0), "`encoder.conv.bias` differs from its master in 1 of 13"),
        (_drop_disc, "`mid.weight` has no weight in discriminator/"),
    ],
)
def test_the_discriminator_against_its_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tables], None], what: str
) -> None:
    monkeypatch.setattr(deep, "CHUNK", 1000)
    assert told(verify(store_one(tmp_path, 2, with_disc(2)), "deep"))["masters"] == "passed"
    tables = with_disc(3)
    change(tables)
    folder = store_one(tmp_path, 3, tables)
    assert verify(folder).verdict == "ok"
    report = verify(folder, "deep")
    assert report.verdict == "damaged"
    assert what in told(report)["masters"]
    assert [name for name, c in told(report).items() if c not in ("passed", "skipped")] == ["masters"]


def test_large_values_that_overflow_only_their_sum_are_finite(tmp_path: Path) -> None:
    tables = consistent(3)
    tables["optimizer"]["state.0.exp_avg_sq"].fill_(3e38)
    assert verify(store_one(tmp_path, 3, tables), "deep").verdict == "ok"


@pytest.mark.parametrize(("lr", "verdict"), [(1e-4, "damaged"), (0.0, "ok")])
def test_a_stale_snapshot(tmp_path: Path, lr: float, verdict: str) -> None:
    """The buffers of the first save, stored again under a later step. Only a learning rate of 0 explains that."""
    store_one(tmp_path, 1, consistent(1))
    tables = {**consistent(2), **{g: consistent(1)[g] for g in ("master", "model")}}
    groups = {"optimizer": [{"lr": lr, "params": list(range(len(SHAPES)))}]}
    folder = store_one(tmp_path, 2, tables, param_groups=groups)
    report = verify(folder, "deep")
    assert report.verdict == verdict
    assert "master.safetensors: is bit for bit that of epoch0-global_step1" in told(report)["previous"]


def test_a_stale_optimizer(tmp_path: Path) -> None:
    store_one(tmp_path, 1, consistent(1))
    old = {k: v for k, v in consistent(1)["optimizer"].items() if not k.endswith(".step")}
    tables = consistent(2)
    tables["optimizer"].update(old)
    report = verify(store_one(tmp_path, 2, tables), "deep")
    assert "optimizer: is bit for bit that of" in told(report)["previous"]


def test_weights_against_the_network_of_the_config(tmp_path: Path) -> None:
    folder = store_one(tmp_path, 3, consistent(3))
    held = {key: tuple(value.shape) for key, value in consistent(3)["model"].items()}

    def check(wanted: dict[str, tuple[int, ...]]) -> tuple[str, str]:
        report = verify(folder, "deep", networks=lambda run: {"model": wanted})
        return report.verdict, told(report)["network"]

    assert check(held) == ("ok", "passed")
    assert check({**held, "more": (2,)}) == (
        "incomplete",
        "model: tensor `more` is missing: the config's network has it",
    )
    verdict, text = check({**held, "logit": (3,)})
    assert verdict == "damaged"
    assert "`logit` has shape [], the config's network [3]" in text
    held.pop("mid.weight")
    assert "`mid.weight` is not in the config's network" in check(held)[1]

    def no_config(run: Path) -> Any:
        raise ConfigError("no config.yaml")

    report = verify(folder, "deep", networks=no_config)
    assert report.verdict == "ok"
    assert "no config.yaml" in next(c for c in report.checks if c.name == "network").detail


def test_damaged_bytes_are_not_looked_at_any_deeper(tmp_path: Path) -> None:
    folder = store_one(tmp_path, 3, consistent(3))
    path = folder / "master.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    report = verify(folder, "deep")
    assert report.verdict == "damaged"
    assert told(report)["values"] == "skipped"


@pytest.mark.parametrize("write", [write_async, write_sync])
def test_open_soras_own(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Complete at most, but values and masters are looked at."""
    folder = write(tmp_path / "epoch0-global_step7", 7)
    report = verify(folder, "deep")
    assert report.verdict == "complete"
    assert told(report)["masters"] == "passed"
    shutil.copytree(folder, tmp_path / "epoch0-global_step9")
    stale = tmp_path / "epoch0-global_step9"
    other = write(tmp_path / "other/epoch0-global_step9", 9)
    for name in ("running_states.json", "lr_scheduler", "sampler"):
        shutil.copy(other / name, stale / name)
    shutil.rmtree(stale / "optimizer")
    shutil.copytree(other / "optimizer", stale / "optimizer")
    report = verify(stale, "deep")
    assert report.verdict == "damaged"
    assert "is bit for bit that of epoch0-global_step7" in told(report)["previous"]


def test_a_run_without_optimizer_state_and_without_masters(tmp_path: Path) -> None:
    """An fp32 run at its first update: little to compare, no crash."""
    made = CheckpointContents(Counters(0, 1, 1, None, 1), {"model": whole({"w": torch.ones(3)})})
    store = CheckpointStore(tmp_path, async_io=True)
    store.save(made)
    store.finish()
    store.close()
    report = verify(tmp_path / "epoch0-global_step1", "deep")
    assert report.verdict == "ok"
    assert told(report)["masters"] == "skipped"
