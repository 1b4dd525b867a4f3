"""argv taken apart: every form that a value may have, at every place, and everything that is wrong at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osora_cli.cli.overrides import Folded, OwnOption, fold
from osora_cli.config.faults import ConfigFaults
from osora_cli.config.schema import TrainVaeConfig

OWN = {
    "json": OwnOption("--json", True),
    "print-config": OwnOption("--print-config", True),
    "resume": OwnOption("--resume", False),
    "num-jobs": OwnOption("--num-jobs", False),
    "o": OwnOption("--num-jobs", False),
}
ALIASES = {"from-pretrained": "model.from_pretrained"}


def folded(*argv: str, most: int = 1) -> Folded:
    return fold(argv, own=OWN, schemas=[TrainVaeConfig], aliases=ALIASES, max_arguments=most)


def values(*argv: str) -> dict[str, Any]:
    """{key: value} of the overrides in argv, the last of equal ones."""
    return {override.key: override.value for override in folded(*argv).overrides}


def faults(*argv: str) -> list[str]:
    """What is wrong, as `message | allowed | hint`."""
    with pytest.raises(ConfigFaults) as caught:
        folded(*argv)
    return [f"{fault.message} | {fault.allowed} | {fault.hint}" for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lr", "1e-5"], {"lr": 1e-5}),
        (["--lr=1e-5"], {"lr": 1e-5}),
        (["--optim.weight-decay", "0.1"], {"optim.weight_decay": 0.1}),
        (["--optim.weight_decay=0.1"], {"optim.weight_decay": 0.1}),
        (["--lr-scheduler.warmup_steps", "3"], {"lr_scheduler.warmup_steps": 3}),
        (["--async-io"], {"async_io": True}),
        (["--async_io", "True"], {"async_io": True}),
        (["--async-io", "false"], {"async_io": False}),
        (["--async-io=False"], {"async_io": False}),
        (["--async-io=0"], {"async_io": False}),
        (["--no-async-io"], {"async_io": False}),
        (["--no_async_io"], {"async_io": False}),
        (["--model.no-use-spatial-tiling"], {"model.use_spatial_tiling": False}),
        (["--no-model.use-spatial-tiling"], {"model.use_spatial_tiling": False}),
        (["--async-io", "--lr", "1e-5"], {"async_io": True, "lr": 1e-5}),
        (["--lr", "1e-5", "--async-io"], {"async_io": True, "lr": 1e-5}),
        (["--lr", "1", "--lr", "2"], {"lr": 2}),
        (["--async-io", "--no-async-io"], {"async_io": False}),
        (["--ema-decay", "None"], {"ema_decay": None}),
        (["--ema-decay", "null"], {"ema_decay": None}),
        (["--seed", "-1"], {"seed": -1}),
        (["--lr", "-1e-5"], {"lr": -1e-5}),
        (["--lr", "-.5"], {"lr": -0.5}),
        (["--exp-name=--odd"], {"exp_name": "--odd"}),
        (["--exp-name=-x=y"], {"exp_name": "-x=y"}),
        (["--exp-name="], {"exp_name": ""}),
        (["--exp-name", ""], {"exp_name": ""}),
        (["--exp-name", "007"], {"exp_name": "007"}),
        (["--exp-name", "-"], {"exp_name": "-"}),
        (["--dataset.data-path", "123"], {"dataset.data_path": "123"}),
        (["--optim.betas", "[0.5, 0.9]"], {"optim.betas": [0.5, 0.9]}),
        (["--bucket-config.256px_ar1:1.32", "[1.0, 2]"], {"bucket_config.256px_ar1:1.32": [1.0, 2]}),
        (["--model", "{type: dc_ae}"], {"model": {"type": "dc_ae"}}),
        (["--from-pretrained", "x"], {"model.from_pretrained": "x"}),
        (["--from_pretrained=x", "--model.from-pretrained", "x"], {"model.from_pretrained": "x"}),
        (["--from-pretrained", "x", "--from-pretrained", "y"], {"model.from_pretrained": "y"}),
        (["--load", "a"], {"load": "a"}),
        (["--load", "a", "b", "c", "--lr", "1"], {"load": ["a", "b", "c"], "lr": 1}),
        (["--load=a"], {"load": "a"}),
    ],
)
def test_forms(argv: list[str], expected: dict[str, Any]) -> None:
    assert values(*argv) == expected
    assert folded(*argv).argv == []


def test_any_place_in_the_line_gives_the_same() -> None:
    parts = (["my.yaml"], ["--lr", "1e-5"], ["--async-io"], ["--json"], ["--resume", "auto"])
    for order in itertools.permutations(parts):
        found = folded(*itertools.chain(*order))
        assert {o.key: o.value for o in found.overrides} == {"lr": 1e-5, "async_io": True}
        assert sorted(found.options) == ["--json", "--resume=auto"]
        assert found.arguments == ["my.yaml"]
        assert found.argv[-2:] == ["--", "my.yaml"]


def test_options_of_the_command_itself() -> None:
    assert folded("--print_config", "--num_jobs", "3").options == ["--print-config", "--num-jobs=3"]
    assert folded("-o", "3").options == ["--num-jobs=3"]
    assert folded("--json", "False").options == []
    assert folded("--json", "--json=false").options == []
    assert folded("--json", "true").options == ["--json"]


def test_two_dashes_end_the_options() -> None:
    assert folded("--lr", "1", "--", "--odd.yaml").arguments == ["--odd.yaml"]
    assert folded("--load", "a", "--", "b").arguments == ["b"]
    assert values("--async-io", "--", "True") == {"async_io": True}


@pytest.mark.parametrize("config", ["c.yaml", "c.yml", "c.py"])
def test_a_config_behind_several_checkpoints_is_no_checkpoint(config: str) -> None:
    found = folded("--load", "a", "b", config)
    assert found.overrides[0].value == ["a", "b"]
    assert found.arguments == [config]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lrr", "1"], ["`--lrr` is not an option | None | did you mean `--lr`?"]),
        (["--learning-rate", "1"], ["`--learning-rate` is not an option | None | did you mean `--lr`?"]),
        (["--dataset.data-pth=x"],
         ["`--dataset.data-pth` is not an option | None | did you mean `--dataset.data-path`?"]),
        (["--data-path", "x"], ["`--data-path` is not an option | None | did you mean `--dataset.data-path`?"]),
        (["--print-confg"], ["`--print-confg` is not an option | None | did you mean `--print-config`?"]),
        (["--from-pretraned", "x"], ["`--from-pretraned` is not an option | None | did you mean `--from-pretrained`?"]),
        (["--config", "c.yaml"], ["`--config` is not an option | None | CONFIG is given without a flag"]),
        (["--qqqq"], ["`--qqqq` is not an option | None | None"]),
        (["-lr", "1"], ["`-lr` is not an option | None | did you mean `--lr`?"]),
        (["--lr"], ["`--lr` has no value | None | None"]),
        (["--lr", "--seed", "1"],
         ["`--lr` has no value | None | a value that begins with a dash is given as `--lr=--seed`"]),
        (["--lr", "--"], ["`--lr` has no value | None | None"]),
        (["--load"], ["`--load` has no value | None | None"]),
        (["--resume"], ["`--resume` has no value | None | None"]),
        (["--json=maybe"], ["`--json` is `maybe` | True or False | None"]),
        (["c.yaml", "--async-io", "Flase"], ["`--async-io` is `Flase` | True or False | None"]),
        (["--async-io", "Flase", "c.yaml"], ["`--async-io` is `Flase` | True or False | None"]),
        (["--no-async-io", "True"],
         ["`--no-async-io` takes no value, `True` follows it | `--no-async-io`, or `--async-io True` | None"]),
        (["--no-async-io=1"],
         ["`--no-async-io` takes no value, `1` follows it | `--no-async-io`, or `--async-io 1` | None"]),
        (["--no-ema-decay"], ["`--no-ema-decay` is not an option | None | did you mean `--ema-decay None`?"]),
        (["--no-epochs"], ["`--no-epochs` is not an option | None | did you mean `--epochs`?"]),
        (["c.yaml", "lr", "1e-4"],
         ["`lr` is one argument too many | None | did you mean `--lr`?",
          "`1e-4` is one argument too many | None | a list is given in one word: `[0.9, 0.98]`"]),
        (["c.yaml", "lr=1e-4"], ["`lr=1e-4` is one argument too many | None | did you mean `--lr=1e-4`?"]),
        (["c.yaml", "--optim.betas", "0.9", "0.98"],
         ["`0.98` is one argument too many | None | a list is given in one word: `[0.9, 0.98]`"]),
        (["--from-pretrained", "x", "--model.from_pretrained", "y"],
         ["`--from-pretrained` is `x` and `--model.from_pretrained` is `y`: they are the same setting | None | "
          "give one of them"]),
        (["--optim.leaning-rate", "1"],
         ["`--optim.leaning-rate` is not an option | keys of `optim`: adamw_mode, betas, cls, eps, lr, weight_decay | "
          "None"]),
        (["--lr.x", "1"], ["`--lr.x` is not an option | None | None"]),
        (["--bucket-config.256px.1.0", "1"],
         ["`--bucket-config.256px.1.0` is not an option | None | did you mean `--bucket-config`?"]),
    ],
)  # fmt: skip
def test_what_is_wrong(argv: list[str], expected: list[str]) -> None:
    assert faults(*argv) == expected


def test_everything_that_is_wrong_is_said_at_once() -> None:
    assert len(faults("--lrr", "1", "--seed", "--sed", "2", "a", "b", "--optim.betas", "[1")) == 5


_FLAGS = st.sampled_from(
    [["--lr", "1e-5"], ["--lr=2"], ["--async-io"], ["--async-io", "False"], ["--no-async-io"], ["--seed", "-3"],
     ["--json"], ["--resume", "auto"], ["--optim.betas", "[0.1, 0.2]"], ["--load=x"], ["--exp_name", "c"]]
)  # fmt: skip


@given(st.lists(_FLAGS, max_size=8))
def test_no_flag_is_ever_dropped_and_the_last_wins(flags: list[list[str]]) -> None:
    found = folded(*itertools.chain(*flags))
    expected: dict[str, Any] = {}
    for flag in flags:
        alone = folded(*flag)
        expected |= {o.key: o.value for o in alone.overrides}
        assert set(alone.options) <= set(found.options)
    assert {o.key: o.value for o in found.overrides} == expected
    assert len(found.overrides) + len(found.options) == len(flags)


@given(st.lists(st.text(alphabet="-=.lra_ 10N[]{}:'\"", max_size=8), max_size=6))
def test_any_line_folds_or_is_refused(argv: list[str]) -> None:
    found: Folded | ConfigFaults
    try:
        found = folded(*argv)
    except ConfigFaults as error:
        found = error
    assert isinstance(found, Folded) or all(fault.message for fault in found.faults)
