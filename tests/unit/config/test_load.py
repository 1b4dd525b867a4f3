"""Configs from files: bases, precedence, presets, and everything that is wrong said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from osora_cli.config.base import Section
from osora_cli.config.faults import ConfigFaults
from osora_cli.config.load import Loaded, config_name, load_config
from osora_cli.config.overrides import Override
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig
from osora_cli.errors import ConfigError

DEFAULT = "vae/train/video_dc_ae"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def load(name: str | Path | None, *overrides: Override) -> Loaded[TrainVaeConfig]:
    return load_config(name, TrainVaeConfig, overrides, default=DEFAULT)


def faults(name: str, *overrides: Override) -> dict[str, str]:
    """{place: message, allowed and hint} of everything that is wrong with a config."""
    with pytest.raises(ConfigFaults) as caught:
        load(name, *overrides)
    return {fault.where or "": f"{fault.message} | {fault.allowed} | {fault.hint}" for fault in caught.value.faults}


# ---- bases ----------------------------------------------------------------------------------------------------------


def test_a_base_is_merged_and_the_file_wins(here: Path) -> None:
    write("base.yaml", "lr: 1.0e-3\nepochs: 7\noptim: {eps: 1.0e-6, betas: [0.5, 0.6]}\n")
    write("sub/c.yaml", "_base_: ../base.yaml\nlr: 2.0e-3\noptim: {betas: [0.7, 0.8]}\n")
    config = load("sub/c.yaml").config
    assert (config.lr, config.epochs, config.optim.eps, config.optim.betas) == (2e-3, 7, 1e-6, (0.7, 0.8))


def test_later_bases_win_over_earlier_ones(here: Path) -> None:
    write("a.yaml", "lr: 1.0\nseed: 1\nepochs: 1\n")
    write("b.yaml", "lr: 2.0\nseed: 2\n")
    write("c.yaml", "_base_: [a.yaml, b.yaml]\nlr: 3.0\n")
    config = load("c.yaml").config
    assert (config.lr, config.seed, config.epochs) == (3.0, 2, 1)


def test_a_base_may_be_a_preset(here: Path) -> None:
    write("c.yaml", "_base_: video_dc_ae\nepochs: 3\n")
    config = load("c.yaml").config
    assert (config.epochs, config.ckpt_every, config.model.model_name) == (3, 3000, "dc-ae-f32t4c128")
    write("d.yaml", "_base_: vae/train/video_dc_ae\n")
    assert load("d.yaml").config.ckpt_every == 3000


def test_delete_replaces_instead_of_merging(here: Path) -> None:
    write("base.yaml", "bucket_config: {256px: {1: [1.0, 2]}}\nplugin_config: {overlap_allgather: true}\n")
    write("merged.yaml", "_base_: base.yaml\nbucket_config: {512px: {8: [1.0, 1]}}\n")
    write("replaced.yaml", "_base_: base.yaml\nbucket_config: {_delete_: true, 512px: {8: [1.0, 1]}}\n")
    assert sorted(load("merged.yaml").config.bucket_config) == ["256px", "512px"]
    replaced = load("replaced.yaml").config
    assert sorted(replaced.bucket_config) == ["512px"]
    assert replaced.plugin_config.overlap_allgather is True
    write("again.yaml", "_base_: replaced.yaml\nbucket_config: {_delete_: false, 768px: {1: [1.0, 1]}}\n")
    assert sorted(load("again.yaml").config.bucket_config) == ["512px", "768px"]
    write("bad.yaml", "_base_: base.yaml\nbucket_config:\n  _delete_: 3\n")
    with pytest.raises(ConfigError, match="`_delete_` is `3`") as caught:
        load("bad.yaml")
    assert caught.value.where == "bad.yaml:3"


def test_null_replaces_a_section_and_a_section_replaces_null(here: Path) -> None:
    coder = "{width_list: [8], depth_list: [1], temporal_downsample: [false]}"
    write("base.yaml", f"model: {{encoder: {coder}}}\n")
    write("c.yaml", "_base_: base.yaml\nmodel: {encoder: null}\n")
    write("d.yaml", f"_base_: c.yaml\nmodel: {{encoder: {coder}}}\n")
    assert load("c.yaml").config.model.encoder is None
    encoder = load("d.yaml").config.model.encoder
    assert encoder is not None
    assert encoder.width_list == [8]


def test_a_diamond_is_no_circle_but_a_circle_is(here: Path) -> None:
    write("root.yaml", "epochs: 5\n")
    write("l.yaml", "_base_: root.yaml\n")
    write("r.yaml", "_base_: root.yaml\n")
    write("c.yaml", "_base_: [l.yaml, r.yaml]\n")
    assert load("c.yaml").config.epochs == 5
    write("x.yaml", "epochs: 1\n_base_: y.yaml\n")
    write("y.yaml", "_base_: x.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: `x\.yaml` -> `y\.yaml` -> `x\.yaml`") as caught:
        load("x.yaml")
    assert caught.value.where == "y.yaml:1"
    write("self.yaml", "_base_: self.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load("self.yaml")


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("lr: 1\n_base_: gone.yaml\n", "`_base_` names `gone.yaml`, which is not there", "c.yaml:2"),
        ("_base_:\n- 3\n", "`_base_` is `[3]`", "c.yaml:1"),
        ("optim:\n  _base_: x.yaml\n", "`optim._base_` stands inside a section", "c.yaml:2"),
    ],
)
def test_bases_that_are_wrong(here: Path, text: str, message: str, where: str) -> None:
    write("c.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load("c.yaml")
    assert message in caught.value.message
    assert caught.value.where == where


# ---- what the schema finds ------------------------------------------------------------------------------------------


def test_all_faults_at_once_each_with_its_place_and_the_nearest_name(here: Path) -> None:
    write("base.yaml", "epochs: many\n")
    write("c.yaml", "_base_: base.yaml\noptim:\n  lrr: 1\n  betas: [0.5]\ndataset:\n  data-pth: x\nplugin: zero9\n")
    found = faults("c.yaml", Override(("seed",), -1, "--seed"), Override(("learning_rat",), 1, "--learning_rat"))
    assert found == {
        "base.yaml:1": "`epochs` is `many` | a whole number >= 1 | None",
        "c.yaml:3": "`optim.lrr` is not a key of this config | None | did you mean `optim.lr`?",
        "c.yaml:4": "`optim.betas.1` is missing | `optim.betas` is a list of 2 numbers >= 0 and < 1 | None",
        "c.yaml:6": "`dataset.data-pth` is not a key of this config | None | did you mean `dataset.data_path`?",
        "c.yaml:7": "`plugin` is `zero9` | one of `none`, `ddp`, `zero1`, `zero2`, `zero3`, `hybrid` | None",
        "--seed": "`seed` is `-1` | a whole number >= 0 | None",
        "--learning_rat": "`learning_rat` is not a key of this config | None | did you mean `lr`?",
    }


def test_one_fault_has_its_parts_and_many_are_one_message(here: Path) -> None:
    write("c.yaml", "lr: -1\n")
    with pytest.raises(ConfigFaults) as caught:
        load("c.yaml")
    error = caught.value
    assert (error.message, error.where, error.allowed) == ("`lr` is `-1`", "c.yaml:1", "a number >= 0, or null")
    write("c.yaml", "lr: -1\nepochs: 0\n")
    with pytest.raises(ConfigFaults, match="2 things are wrong in the config"):
        load("c.yaml")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lr: 1e-5", "lr", 1e-5),
        ("lr: '1e-5'", "lr", 1e-5),
        ("max_steps: 1e3", "max_steps", 1000),
        ("max_steps: 1000.0", "max_steps", 1000),
        ("plugin: null", "plugin", "none"),
        ("async_io: yes", "async_io", True),
        ("async_io: 'False'", "async_io", False),
        ("ema_decay: null", "ema_decay", None),
        ("load: a", "load", "a"),
        ("load: [a, b]", "load", ["a", "b"]),
    ],
)
def test_values_that_yaml_reads_as_something_else(here: Path, text: str, key: str, value: object) -> None:
    write("c.yaml", text)
    assert getattr(load("c.yaml").config, key) == value


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("max_steps: 1.5", "`max_steps` is `1.5` | a whole number >= 1, or null | None"),
        ("max_steps: true", "`max_steps`: `True` is a truth value, a number is needed | None | None"),
        ("lr: .inf", "`lr` is `inf` | a number >= 0, or null | None"),
        ("lr: .nan", "`lr` is `nan` | a number >= 0, or null | None"),
        ("optim: {betas: [0, 7]}", "`optim.betas.1` is `7` | `optim.betas` is a list of 2 numbers >= 0 and < 1 | None"),
        ("async_io: 3", "`async_io` is `3` | true or false | None"),
        ("async_io: null", "`async_io` is `null` | true or false | None"),
        ("exp_name: 007", "`exp_name` is `7` | text, or null | write it in quotes"),
        ("optim: 3", "`optim` is `3` | a mapping, the optimizer | None"),
        ("load: [1]", "`load.0` is `1` | `load` is a list of texts, or text, or null | write it in quotes"),
        (
            "bucket_config: {256px: {x: [1.0, 1]}}",
            "`bucket_config.256px.x` is `[1.0, 1]` | a list [a number or a list of 2 numbers >= 0 and <= 1, "
            "a whole number >= 1] | None",
        ),
        (
            "bucket_config: {256px: {1: [1.0, 0]}}",
            "`bucket_config.256px.1.1` is `0` | "
            "`bucket_config` is a mapping, {resolution: {frames: [probability, batch size]}} | None",
        ),
        ("model: {encoder: {depth_list: [1], temporal_downsample: [true]}}",
         "`model.encoder.width_list` is missing | a list of whole numbers | None"),
    ],
)  # fmt: skip
def test_values_that_are_refused(here: Path, text: str, fault: str) -> None:
    write("c.yaml", text)
    assert faults("c.yaml") == {"c.yaml:1": fault}


class _Cat(Section):
    type: Literal["cat"] = "cat"
    lives: int = Field(9, description="how many")


class _Dog(Section):
    type: Literal["dog"] = "dog"
    tricks: list[str] = Field([], description="what it can")


class _Zoo(Section):
    pet: Annotated[_Cat | _Dog, Field(discriminator="type")] = Field(default_factory=_Cat, description="the pet")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pet: {type: dog, tricks: 3}", "`pet.tricks` is `3` | a list of texts | None"),
        ("pet: {type: bird}", "`pet.type` is `bird` | `cat`, `dog` | None"),
        ("pet: {lives: 3}", "`pet.type` is missing | `cat`, `dog` | None"),
        ("pet: {type: dog, trick: []}", "`pet.trick` is not a key of this config | None | did you mean `pet.tricks`?"),
    ],
)
def test_sections_told_apart_by_type(here: Path, text: str, fault: str) -> None:
    write("c.yaml", text)
    with pytest.raises(ConfigFaults) as caught:
        load_config("c.yaml", _Zoo)
    assert [f"{f.message} | {f.allowed} | {f.hint}" for f in caught.value.faults] == [fault]


def test_a_change_of_type_over_a_base_points_to_delete(here: Path) -> None:
    write("base.yaml", "pet: {type: cat, lives: 3}\n")
    write("c.yaml", "_base_: base.yaml\npet: {type: dog}\n")
    with pytest.raises(ConfigFaults, match="`_delete_: true` in `pet`") as caught:
        load_config("c.yaml", _Zoo)
    assert caught.value.where == "base.yaml:1"


# ---- the command line on top ----------------------------------------------------------------------------------------


def test_the_command_line_wins(here: Path) -> None:
    write("c.yaml", "lr: 1.0\nbucket_config: {256px_ar1:1: {32: [1.0, 1]}}\noptim: {eps: 1.0e-3}\n")
    config = load(
        "c.yaml",
        Override(("lr",), 2.0, "--lr"),
        Override(("lr",), 3.0, "--lr"),
        Override(("bucket_config", "256px-ar1:1", 32), [0.5, 2], "--bucket-config.256px-ar1:1.32"),
        Override(("bucket_config", "512px", 1), [1.0, 1], "--bucket-config.512px.1"),
    ).config
    assert config.lr == 3.0
    assert config.bucket_config == {"256px_ar1:1": {32: (0.5, 2)}, "512px": {1: (1.0, 1)}}
    assert config.optim.eps == 1e-3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_whole_section_replaces_and_its_keys_are_set_in_it(here: Path, order: tuple[int, int]) -> None:
    write("c.yaml", "model: {model_name: x, from_pretrained: a}\n")
    both = (
        Override(("model",), {"type": "dc_ae", "strict_load": False}, "--model"),
        Override(("model", "from_pretrained"), "b", "--model.from-pretrained"),
    )
    model = load("c.yaml", *(both[i] for i in order)).config.model
    assert (model.model_name, model.from_pretrained, model.strict_load) == (None, "b", False)


def test_a_key_below_a_plain_value_is_refused(here: Path) -> None:
    write("c.yaml", "bucket_config: {256px: 3}\n")
    with pytest.raises(ConfigError, match=r"`bucket_config.256px.1` cannot be set: `bucket_config.256px` is `3`"):
        load("c.yaml", Override(("bucket_config", "256px", 1), [1.0, 1], "--bucket-config.256px.1"))


def test_a_fault_in_a_value_of_the_command_line_names_the_flag(here: Path) -> None:
    write("c.yaml", "epochs: 2\n")
    found = faults("c.yaml", Override(("optim",), {"eps": "x"}, "--optim"))
    assert found == {"--optim": "`optim.eps` is `x` | a number > 0 | None"}


# ---- which config ---------------------------------------------------------------------------------------------------


def test_no_config_means_the_first_of_the_command(here: Path) -> None:
    loaded = load(None)
    assert loaded.name == "vae_train_video_dc_ae"
    assert loaded.notes == ["no CONFIG given: taking the preset `vae/train/video_dc_ae`"]


@pytest.mark.parametrize("name", ["video_dc_ae", "vae/train/video_dc_ae", "video_dc_ae.yaml"])
def test_presets_by_name(here: Path, name: str) -> None:
    loaded = load(name)
    assert (loaded.name, loaded.config.ckpt_every) == ("vae_train_video_dc_ae", 3000)
    assert loaded.notes == ["config: the preset `vae/train/video_dc_ae`"]


def test_a_path_below_configs_that_is_not_here_is_the_preset(here: Path) -> None:
    loaded = load("configs/vae/train/video_dc_ae.yaml")
    assert loaded.notes == [
        "`configs/vae/train/video_dc_ae.yaml` is not in this folder: taking the preset `vae/train/video_dc_ae`"
    ]
    write("configs/vae/train/video_dc_ae.yaml", "epochs: 1\n")
    loaded = load("configs/vae/train/video_dc_ae.yaml")
    assert (loaded.config.ckpt_every, loaded.notes) == (1000, []), "a file that is here wins"


@pytest.mark.parametrize("name", ["/configs/vae/train/video_dc_ae.yaml", "../video_dc_ae", "my/video_dc_ae.yaml"])
def test_a_path_of_ones_own_never_means_a_preset(here: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(name)


def test_what_is_not_there(here: Path) -> None:
    with pytest.raises(ConfigError, match="the config `video_dcae` does not exist") as caught:
        load("video_dcae")
    assert caught.value.hint == "did you mean `vae/train/video_dc_ae`?"
    assert "`vae/train/video_dc_ae`" in str(caught.value.allowed)
    with pytest.raises(ConfigError) as caught:
        load("lr=1e-5")
    assert caught.value.hint == "values are given with dashes: `--lr=1e-5`"
    write("outputs/run/config.yaml", "epochs: 1\n")
    with pytest.raises(ConfigError, match="is a folder") as caught:
        load("outputs/run")
    assert caught.value.hint == "its config is `outputs/run/config.yaml`"
    with pytest.raises(ConfigError, match="no CONFIG is given, and the preset `vae/none` is not there"):
        load_config(None, ReconstructConfig, default="vae/none")


def test_other_kinds_of_files(here: Path) -> None:
    write("c.json", '{"lr": 1e-5, "bucket_config": {"256px": {"32": [1.0, 1]}}}')
    assert load("c.json").config.bucket_config == {"256px": {32: (1.0, 1)}}
    write("c.toml", "")
    with pytest.raises(ConfigError, match=r"of the kind `\.toml`"):
        load("c.toml")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("configs/diffusion/train/stage1.yaml", "diffusion_train_stage1"),
        ("a/configs/b/configs/c/d.yaml", "c_d"),
        ("lib/osora_cli/presets/demo/vae.yaml", "demo_vae"),
        ("mine/experiment.v2.yaml", "experiment.v2"),
        ("x.yaml", "x"),
    ],
)
def test_the_name_for_run_folders(path: str, name: str) -> None:
    assert config_name(Path(path)) == name
