"""The configs that come with osora: each is valid, and the seed's hold the seed's values."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from support.golden import load_json

from osora_cli.config.freeze import to_plain
from osora_cli.config.load import load_config
from osora_cli.config.presets import find_preset, is_preset, nearest_preset, preset_names, preset_root
from osora_cli.config.registry import COMMANDS
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.config.vae_disc import TrainVaeDiscConfig
from osora_cli.errors import ConfigError


def both(mine: Any, theirs: Any) -> tuple[Any, Any]:
    """The two values cut down to the keys that are in both, tuples as lists."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        pairs = {key: both(mine[key], theirs[key]) for key in theirs if key in mine}
        return {k: a for k, (a, _) in pairs.items()}, {k: b for k, (_, b) in pairs.items()}
    if isinstance(theirs, (list, tuple)) and isinstance(mine, list):
        return mine, [both(a, b)[1] for a, b in zip(mine, theirs, strict=True)] if len(mine) == len(theirs) else theirs
    return mine, theirs


@pytest.mark.parametrize(
    ("name", "schema"), [("video_dc_ae", TrainVaeConfig), ("video_dc_ae_disc", TrainVaeDiscConfig)]
)
def test_video_dc_ae_has_the_values_of_the_seed(name: str, schema: type[TrainVaeConfig]) -> None:
    golden = ast.literal_eval(load_json("config_resolved")["configs"][f"configs/vae/train/{name}.py"]["repr"])
    plain = to_plain(load_config(None, schema, default=f"vae/train/{name}").config)
    assert set(golden) <= set(plain), "every key of the seed's config is one of ours"
    mine, theirs = both(plain, golden)
    assert mine == theirs
    assert set(mine["model"]) == set(golden["model"])
    assert set(mine["optim"]) == set(golden["optim"])


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_every_preset_is_valid_for_the_command_that_it_opens_with(command: Any) -> None:
    root = preset_root()
    assert root is not None
    group = command.default.rpartition("/")[0]
    own = []
    for name in (n for n in preset_names() if n.rpartition("/")[0] == group):
        head = (root / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:8]
        assert head[0].startswith("# ")
        named = [c.name for line in head for c in COMMANDS.values() if f"osora {c.name} " in line]
        assert named, f"{name} opens with its command"
        if command.name == named[0]:
            load_config(name, command.schema, default=command.default)
            own.append(name)
    assert command.default in own


def test_names_in_a_tree_of_ones_own(tmp_path: Path) -> None:
    for name in ("a/x/one", "a/y/one", "b/two", "three"):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "a/notes.md").touch()
    assert preset_names(tmp_path) == ["a/x/one", "a/y/one", "b/two", "three"]

    def found(name: str, group: str = "") -> str | None:
        preset = find_preset(name, group, tmp_path)
        return preset[0] if preset else None

    assert found("two") == found("b/two") == found("configs/b/two.yaml") == found("two.yml") == "b/two"
    assert found("one", "a/y") == "a/y/one"
    assert found("three", "b") == "three"
    assert found("four") is None
    with pytest.raises(ConfigError, match="`one` is the short name of 2 presets") as caught:
        found("one", "b")
    assert caught.value.allowed == "`a/x/one`, `a/y/one`"


def test_is_and_nearest() -> None:
    assert is_preset("video_dc_ae", "vae/train")
    assert not is_preset("video_dc", "vae/train")
    for group in ("vae/train", "vae/inference"):
        assert nearest_preset("video_dcae", group) == f"{group}/video_dc_ae"
    assert nearest_preset("xyz") is None
