"""What Open-Sora's own override parser made of command lines, row by row, and what ours makes of them.

Verdicts: a row is EQUAL (sound there, the same here), RIGHT (unsound there, the value that was meant here), or
REFUSED (unsound there, or a key that never existed: exit 2 with a reason). Each row is judged by the schema of its own
config. Rows of configs that no command takes (sampling from a diffusion model) are named in NO_COMMAND.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from support.golden import load_json

from osora_cli.cli.overrides import OwnOption, fold
from osora_cli.config.load import config_name, load_config
from osora_cli.config.overrides import parse_structure
from osora_cli.config.registry import COMMANDS, Command
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.errors import UsageError

EQUAL, REFUSED = "equal", "refused"
ROWS = load_json("config_merge_args")["rows"]

# One line a row: argv, verdict, and for a row that is RIGHT here the values that were meant.
VERDICTS: dict[str, Any] = {
    "--lr 1e-4": EQUAL,
    "--optim.lr 1e-4": EQUAL,
    "--optim.lr 1": EQUAL,  # there an int, here the number 1.0
    "--epochs 3": EQUAL,
    "--epochs 3.0": {"epochs": 3},  # there: ValueError
    "--epochs 1e3": {"epochs": 1000},  # there: ValueError
    "--lr 1": EQUAL,
    "--seed abc": REFUSED,
    "--grad-checkpoint False": EQUAL,
    "--grad-checkpoint false": EQUAL,
    "--grad_checkpoint 0": EQUAL,  # there the int 0, which is false too
    "--grad-checkpoint no": {"grad_checkpoint": False},  # there: the text 'no', which is true
    "--ema-decay 0.99": {"ema_decay": 0.99},  # there: TypeError
    "--ema-decay None": EQUAL,
    "--ema_decay none": EQUAL,
    "--warmup-steps None": EQUAL,
    "--warmup-steps 100": EQUAL,
    "--dataset.data-path /a/b.csv": EQUAL,
    "--dataset.fps_max 16": EQUAL,
    "--dataset.fps_max 16.5": REFUSED,  # there: a float where frames are counted
    "--model.from_pretrained ./x.safetensors": EQUAL,
    "--model.from-pretrained None": EQUAL,
    "--pin_memory_cache_pre_alloc_numels None": EQUAL,
    "--pin_memory_cache_pre_alloc_numels [1,2]": {"pin_memory_cache_pre_alloc_numels": [1, 2]},  # there: characters
    "--bucket_config {'256px': {1: (1.0, 2)}}": {"bucket_config": {"256px": {1: (1.0, 2)}}},  # there: ValueError
    "--bucket_config.256px {1: (1.0, 2)}": EQUAL,
    "--bucket_config {'256px_ar1:1': {8: (1.0, 1)}}": {"bucket_config": {"256px_ar1:1": {8: (1.0, 1)}}},
    "--foo.bar 1": REFUSED,
    "--model.foo 1": REFUSED,  # there: a new key
    "--model.foo.bar 1": REFUSED,
    "--plugin zero1": EQUAL,
    "--plugin none": {"plugin": "none"},  # there None, which says the same
    "lr 1e-4": REFUSED,
    "-lr 1e-4": REFUSED,
    "--lr": REFUSED,  # there: dropped
    "--lr 1e-4 --seed": REFUSED,  # there: the flag dropped
    "--lr=1e-4": {"lr": 1e-4},  # there: dropped
    "--lr=1e-4 --seed 1": {"lr": 1e-4, "seed": 1},  # there: a key named `lr=1e_4`
    "--load /ck/epoch0-global_step10 --start-step 5 --start_epoch 1": EQUAL,
    "--optim.eps 1e-8 --optim.weight-decay 0.1 --optim.cls Foo": REFUSED,  # there is no optimizer Foo
    "--lr 1e-4 --lr 2e-4": EQUAL,
    "--dtype fp32 --outputs out_dir": EQUAL,
    "--num-workers 0 --prefetch-factor None": REFUSED,  # there is no null number of batches here
    "--num-workers 0 --prefetch-factor 2": EQUAL,
    "--mixed_image_ratio 0.5": EQUAL,
    "--mixed_image_ratio 1": EQUAL,
    "--vae_loss_config.perceptual_loss_weight 0": EQUAL,
    "--optim.betas (0.5, 0.9)": EQUAL,
    "--optim.betas [0.5,0.9]": EQUAL,
    "--lr_scheduler.warmup_steps 10": EQUAL,
    "--model.from_scratch False": EQUAL,
    "--dataset.memory-efficient True": EQUAL,
    "--dataset.memory-efficient yes": {"dataset.memory_efficient": True},  # there: the text 'yes'
    # the axes do not add up to the channels of a head, which ended there when the model was built
    "--model.axes_dim [8,20,20]": REFUSED,
    "--model.axes_dim (8, 20, 20)": REFUSED,
    "--model.depth 1 --model.depth_single_blocks 1 --model.hidden_size 96": REFUSED,
    "--grad_ckpt_settings (4, 4)": {"grad_ckpt_settings": (4, 4)},  # there: characters
    "--grad_ckpt_settings 12": REFUSED,  # there: characters
    "--plugin_config.tp_size 2": EQUAL,
    "--plugin_config.sp_size 2 --plugin_config.sequence_parallelism_mode all_to_all": EQUAL,
    "--dropout_ratio.t5 0.1": EQUAL,
    "--dropout_ratio 0.1": REFUSED,
    "--dropout_ratio None": REFUSED,  # there: an error once texts are dropped
    "--condition_config.i2v_head 0": EQUAL,
    "--condition_config.t2v 1.5": EQUAL,
    "--condition-config None": EQUAL,
    "--is_causal_vae False": EQUAL,
    "--grad_ckpt_buffer_size 1024": EQUAL,
    "--ae.scaling_factor 1.0 --ae.use_spatial_tiling False": EQUAL,
    "--patch_size 2 --model.patch_size 2": EQUAL,
    "--ae_spatial_compression 16": EQUAL,
    "--gen_loss_config.gen_start 2000 --disc_loss_config.disc_loss_type vanilla": EQUAL,
    "--discriminator None": REFUSED,  # a second stage without a discriminator is a first one
    # a key that never existed: there new_key became one, here it is refused
    **{
        f"--new_key {value}": REFUSED
        for value in ("5", "5.5", "true", "hello", "", "{'a': 1}", "1e-5", '[1, 2.5, "x"]', "007", "inf", "1_000")
    },
}
# The configs of Open-Sora's sampling: here samples come from the run that trains, and no command takes such a config.
NO_COMMAND = {
    "--sampling_option.num_steps 5",
    "--plugin None --plugin_ae None",
    "--sampling_option.seed 1 --save-dir out --motion_score 5",
}


def command_of(row: dict[str, Any]) -> Command | None:
    """The command that takes the row's config."""
    config = row["config"].removeprefix("configs/")
    if config.startswith("diffusion/train/"):
        return COMMANDS["train diffusion"]
    if config.startswith("vae/train/"):
        return COMMANDS["train vae-disc" if "disc" in config else "train vae"]
    return COMMANDS["infer reconstruct"] if config.startswith("vae/inference/") else None


def keys(row: dict[str, Any]) -> list[str]:
    return [word[2:].partition("=")[0].replace("-", "_") for word in row["argv"] if word.startswith("--")]


JUDGED = [row for row in ROWS if command_of(row) is not None]


def ours(row: dict[str, Any]) -> dict[str, Any]:
    """{key: value} that a command line sets in the preset of the row's config, as the schema has it."""
    command = command_of(row)
    assert command is not None
    folded = fold(["c.yaml", *row["argv"]], own={"json": OwnOption("--json", True)}, schemas=[command.schema])
    preset = row["config"].removeprefix("configs/").removesuffix(".py")
    config = load_config(preset, command.schema, folded.overrides, default=command.default).config
    return {override.key: at(config.model_dump(), override.key) for override in folded.overrides}


def at(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node[part]
    return node


def theirs(row: dict[str, Any]) -> dict[str, Any]:
    """{key: value} that the row's command line set there. What stayed as it was is not listed there."""
    changed = {**row["changed"], **row["changed_nested"]}
    return {key: ast.literal_eval(text) for key, (text, _) in changed.items()}


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: " ".join(row["argv"]))
def test_row(row: dict[str, Any]) -> None:
    verdict = VERDICTS.get(" ".join(row["argv"]), EQUAL if "error" not in row else REFUSED)
    if verdict == REFUSED:
        with pytest.raises(UsageError):
            ours(row)
        return
    got = ours(row)
    assert set(got) == set(keys(row)), "no flag is dropped"
    if verdict != EQUAL:
        assert got == verdict
        return
    unchanged = {key: value for key, value in got.items() if key not in theirs(row)}
    assert all(value is None or f"{value}" in " ".join(row["argv"]) for value in unchanged.values())
    assert {key: got[key] for key in theirs(row)} == theirs_as_ours(row)


def theirs_as_ours(row: dict[str, Any]) -> dict[str, Any]:
    """Lists that our schema keeps as tuples."""
    return {
        key: tuple(value) if isinstance(value, list) and key == "optim.betas" else value
        for key, value in theirs(row).items()
    }


def test_every_row_is_judged_or_named() -> None:
    if "OSORA_GOLDEN_DIR" not in os.environ:
        assert {" ".join(row["argv"]) for row in JUDGED} == set(VERDICTS)
        assert {" ".join(row["argv"]) for row in ROWS if command_of(row) is None} == NO_COMMAND


PARSED = [row for row in load_json("config_parse")["rows"] if "--ae_spatial_compression" not in row["argv"]]  # later


@pytest.mark.parametrize("row", PARSED, ids=lambda row: " ".join(row["argv"]))
def test_the_config_among_the_options(row: dict[str, Any]) -> None:
    """There the config had to come first, `--config x` was swallowed, and `-h2` ended in usage."""
    argv = row["argv"]
    config = next(word for word in argv if word.endswith(".py"))
    if "--config" in argv or any(word.startswith("-h") for word in argv):
        with pytest.raises(UsageError):
            fold(argv, own={}, schemas=[TrainVaeConfig])
        return
    folded = fold(argv, own={}, schemas=[TrainVaeConfig])
    assert folded.arguments == [config]
    assert config_name(Path(config)) == row["config_to_name"]


def test_structures_as_their_auto_convert_reads_them() -> None:
    for text, expected, kind in load_json("config_parse")["auto_convert"]["rows"]:
        if kind in ("list", "tuple", "dict"):
            assert parse_structure(text, "--x") == ast.literal_eval(expected), text
