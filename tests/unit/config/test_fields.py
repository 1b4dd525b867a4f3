"""What the schema says about its fields."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from osora_cli.config.base import Float, Int
from osora_cli.config.fields import describe, nearest, resolve, walk
from osora_cli.config.registry import COMMANDS
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_every_field_has_help_a_type_and_a_name_of_its_own(command: Any) -> None:
    specs = list(walk(command.schema))
    assert len({spec.key for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.type_text
        if spec.path[-1] != "type":
            assert spec.help, f"{spec.key} has no help"
            assert not spec.help.endswith("."), spec.key
        assert resolve([command.schema], spec.key.replace("_", "-")) == resolve([command.schema], spec.key)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lr", ("lr",)),
        ("optim.weight-decay", ("optim", "weight_decay")),
        ("model.encoder.width_list", ("model", "encoder", "width_list")),
        ("model", ("model",)),
        ("bucket-config.256px_ar1:1.32", ("bucket_config", "256px_ar1:1", 32)),
        ("bucket_config.256px", ("bucket_config", "256px")),
        ("bucket_config.256px.32.0", None),
        ("optim.lrr", None),
        ("lr.x", None),
        ("", None),
        ("optim.", None),
        (".lr", None),
    ],
)
def test_dotted_names(name: str, path: tuple[str | int, ...] | None) -> None:
    target = resolve([TrainVaeConfig], name)
    assert (target.path if target else None) == path


def test_a_name_may_be_of_one_of_several_schemas() -> None:
    assert resolve([TrainVaeConfig], "save_dir") is None
    target = resolve([TrainVaeConfig, ReconstructConfig], "save_dir")
    assert target is not None
    assert target.annotations == (str,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dataset.data_pth", "dataset.data_path"),
        ("data_path", "dataset.data_path"),
        ("optim.learning_rate", "lr"),
        ("learning_rate", "lr"),
        ("ema", "ema_decay"),
        ("ckpt-evry", "ckpt_every"),
        ("model.encoder.widht_list", "model.encoder.width_list"),
        ("qqq", None),
    ],
)
def test_the_nearest_name(name: str, expected: str | None) -> None:
    assert nearest(name, [TrainVaeConfig]) == expected


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (bool, "true or false"),
        (Int | None, "a whole number, or null"),
        (None | Float, "a number, or null"),
        (Literal["a", "b"], "one of `a`, `b`"),
        (Literal[True], "true"),
        (tuple[Float, Float], "a list of 2 numbers"),
        (tuple[Float, Int], "a list [a number, a whole number]"),
        (list[str] | str, "a list of texts or text"),
        (dict[str, int], "a mapping"),
    ],
)
def test_types_in_words(annotation: Any, text: str) -> None:
    assert describe(annotation) == text
