"""A text of the command line as a value of the field's type."""

from __future__ import annotations

from typing import Any

import pytest

from osora_cli.config.fields import resolve
from osora_cli.config.overrides import is_switch, parse_value, takes_many, truth
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.errors import UsageError


def parse(key: str, text: str) -> Any:
    target = resolve([TrainVaeConfig], key)
    assert target is not None
    return parse_value(target, text, f"--{key}")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("lr", "1e-5", 1e-5),
        ("lr", "1", 1),
        ("lr", "-1e-5", -1e-5),
        ("lr", "abc", "abc"),
        ("lr", "", ""),
        ("lr", "None", None),
        ("epochs", "3", 3),
        ("epochs", "007", 7),
        ("epochs", "1_000", 1000),
        ("epochs", "3.0", 3),
        ("epochs", "1e3", 1000),
        ("epochs", "1.5", 1.5),
        ("epochs", "None", "None"),
        ("async_io", "False", False),
        ("async_io", "on", True),
        ("async_io", "maybe", "maybe"),
        ("optim.adamw_mode", "true", True),
        ("exp_name", "007", "007"),
        ("exp_name", "1e-5", "1e-5"),
        ("exp_name", "true", "true"),
        ("exp_name", "[1]", "[1]"),
        ("exp_name", "null", None),
        ("outputs", "None", "None"),
        ("dataset.data_path", "123", "123"),
        ("plugin", "zero1", "zero1"),
        ("plugin", "None", "none"),
        ("optim.betas", "[0.9, 0.98]", [0.9, 0.98]),
        ("optim.betas", "(0.9, 0.98)", (0.9, 0.98)),
        ("optim.betas", "0.9,0.98", (0.9, 0.98)),
        ("optim.betas", "[1e-1, .98]", [0.1, 0.98]),
        ("pin_memory_cache_pre_alloc_numels", "[1,2]", [1, 2]),
        ("pin_memory_cache_pre_alloc_numels", "None", None),
        ("model.encoder.block_type", "ResBlock", "ResBlock"),
        ("model.encoder.block_type", "[ResBlock, EViT_GLU]", ["ResBlock", "EViT_GLU"]),
        ("model.encoder.temporal_downsample", "[true, false]", [True, False]),
        ("bucket_config", "{'256px': {1: (1.0, 2)}}", {"256px": {1: (1.0, 2)}}),
        ("bucket_config", '{"256px": {"1": [1.0, 2]}}', {"256px": {"1": [1.0, 2]}}),
        ("bucket_config", "{256px: {1: [1.0, 2]}}", {"256px": {1: [1.0, 2]}}),
        ("bucket_config.256px.1", "[[0.5, 0.5], 2]", [[0.5, 0.5], 2]),
        ("model", "{type: dc_ae, from_pretrained: null}", {"type": "dc_ae", "from_pretrained": None}),
        ("model.encoder", "null", None),
        ("load", "a,b", "a,b"),
        ("load", "[a, b]", ["a", "b"]),
    ],
)
def test_values(key: str, text: str, value: Any) -> None:
    got = parse(key, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("optim.betas", "[0.9, 0.98", "expected ',' or ']'"),
        ("bucket_config", "{'a': 1, 'a': 2}", "the key `a` is given twice"),
        ("bucket_config", "{a: 1, a: 2}", "the key `a` is given twice"),
        ("model", "{type: dc_ae", "expected ',' or '}'"),
        ("optim.betas", "&a [*a]", "an anchor contains itself"),
        ("model", "&a {b: *a}", "an anchor contains itself"),
        ("optim.betas", "1" * 5000, "is no number that can be read"),
        ("optim.betas", "[" + "1" * 5000 + "]", "is no number that can be read"),
        ("model", "{a: !!binary aGVsbG8=}", "could not determine a constructor"),
    ],
)
def test_lists_and_mappings_that_cannot_be_read(key: str, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(key, text)
    assert reason in caught.value.message
    assert caught.value.where == f"--{key}"


@pytest.mark.parametrize("text", ["{1, 2}", "b'x'", "...", "__import__('os')", "1+2j", "[" * 300])
def test_nothing_is_executed_and_odd_kinds_do_not_pass_as_lists(text: str) -> None:
    try:
        value = parse("optim.betas", text)
    except UsageError:
        return
    assert isinstance(value, (str, dict)), "the schema refuses these"


def test_kinds_of_fields() -> None:
    def target(key: str) -> Any:
        return resolve([TrainVaeConfig], key)

    assert is_switch(target("async_io"))
    assert is_switch(target("optim.adamw_mode"))
    assert not is_switch(target("lr"))
    assert takes_many(target("load"))
    assert not takes_many(target("optim.betas"))
    assert [truth(word) for word in ("TRUE", "no", "1", "0", "2")] == [True, False, True, False, None]
