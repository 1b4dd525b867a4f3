"""Open-Sora's Python configs: what is read, and that nothing is ever executed."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.golden import load_json

from osora_cli.config.convert import convert_config, likely_command, write_new
from osora_cli.config.layers import read_layers
from osora_cli.config.load import load_config
from osora_cli.config.opensora import read_python
from osora_cli.config.schema import TrainVaeConfig
from osora_cli.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read(text: str) -> dict[str, Any]:
    return read_python(write("c.py", text), "c.py").data


def test_every_allowed_form() -> None:
    text = '''
"""What this config is for."""
# a comment
_size = 8
lr: float = 1e-5
warm = both = 2 * _size + 1
model = dict(
    type="dc_ae",
    width=[_size * 2, 64, *[1, 2]],
    tiles=dict(overlap=1 / 4, sizes=(256, -32)),
)
more = {**model, "type": "flux", 1: None}
again = dict(**model, extra=True)
names = ["a"] + ["b"] * 2
text = "out" "puts/" + "x"
powers = (2**10, 7 // 2, 7 % 4, +3.0)
kept = list(names)
pair = tuple([1, 2])
pass
'''
    assert read(text) == {
        "lr": 1e-5,
        "warm": 17,
        "both": 17,
        "model": {"type": "dc_ae", "width": [16, 64, 1, 2], "tiles": {"overlap": 0.25, "sizes": [256, -32]}},
        "more": {"type": "flux", "width": [16, 64, 1, 2], "tiles": {"overlap": 0.25, "sizes": [256, -32]}, 1: None},
        "again": {
            "type": "dc_ae",
            "width": [16, 64, 1, 2],
            "tiles": {"overlap": 0.25, "sizes": [256, -32]},
            "extra": True,
        },
        "names": ["a", "b", "b"],
        "text": "outputs/x",
        "powers": [1024, 3, 3, 3.0],
        "kept": ["a", "b", "b"],
        "pair": [1, 2],
    }


REFUSED = {
    "import os": "import os",
    "lr = __import__('os').system('touch harm')": "would have to be run",
    "lr = open('harm', 'w')": "would have to be run",
    "lr = eval('1')": "would have to be run",
    "lr = (lambda: 1)()": "would have to be run",
    "lr = [x for x in (1, 2)]": "would have to be run",
    "lr = f'{1}'": "would have to be run",
    "lr = model.x": "would have to be run",
    "lr = (1, 2)[0]": "would have to be run",
    "lr = 1 if True else 2": "would have to be run",
    "lr = 1 < 2": "would have to be run",
    "lr = not True": "would have to be run",
    "lr = {1, 2}": "would have to be run",
    "lr = b'x'": "would have to be run",
    "lr = ...": "would have to be run",
    "lr = 1j": "would have to be run",
    "lr = '%d' % 3": "would have to be run",
    "lr = missing": "`missing` is not assigned before this line",
    "lr = -'x'": "is no number",
    "lr = 1 / 0": "division",
    "lr = 10 ** 10 ** 10": "too large",
    "lr = 2 ** 1000 * 2 ** 1000": "no value of a config",
    "lr = (-8) ** 0.5": "no value of a config",
    "lr = 1e300 ** 2": "Result too large|out of range",
    "lr = 'x' * 10 ** 9": "too long",
    "lr = [0] * 10 ** 9": "too long",
    "a, b = 1, 2": "no plain name",
    "a.b = 1": "no plain name",
    "lr += 1": "would have to be run",
    "if True:\n    lr = 1": "would have to be run",
    "def f():\n    pass": "would have to be run",
    "print('x')": "would have to be run",
    "m = dict([('a', 1)])": "takes names",
    "m = {True: 1}": "no name of a key",
    "m = {'a': 1, 'a': 2}": "given twice",
    "m = {**[1]}": "no dict",
    "m = [*{'a': 1}]": "no list",
    "m = list(3)": "no list",
    "lr = = 1": "not a Python config",
    "lr = 1\0": "not a Python config",
    "lr = " + "(" * 5000 + ")" * 5000: "nested too deeply|too many nested|not a Python config",
    "lr = " + "+".join(["1"] * 20000): "nested too deeply|not a Python config",
}


@pytest.mark.parametrize("text", list(REFUSED), ids=lambda text: repr(text[:40]))
def test_everything_else_is_refused_with_its_line(text: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]) as said:
        read("first = 1\n" + text + "\n")
    assert (said.value.where or "").startswith("c.py")
    assert not (here / "harm").exists()


def test_names_of_names_cannot_explode() -> None:
    lines = ["a0 = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n + 1} = [{', '.join([f'a{n}'] * 10)}]" for n in range(9)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100000 values"):
        read("a = [0] * 1000\nb = [a] * 1000\n")


def test_faults_are_named_with_the_line_of_the_value() -> None:
    write("c.py", "lr = 1e-5\nmodel = dict(\n    type='dc_ae',\n    in_chanels=3,\n)\nepochs = 'many'\n")
    with pytest.raises(ConfigError) as said:
        load_config("c.py", TrainVaeConfig)
    text = said.value.text() if hasattr(said.value, "text") else str(said.value.__dict__)
    assert "c.py:4" in text
    assert "c.py:6" in text
    assert "in_channels" in text


def test_bases_of_either_kind() -> None:
    write("base.py", "lr = 1e-5\noptim = dict(lr=3e-5, betas=(0.9, 0.98))\nbucket_config = {'256px': {32: (1.0, 1)}}\n")
    write("middle.yaml", "_base_: base.py\nepochs: 7\n")
    write("top.py", "_base_ = ['middle.yaml']\nbucket_config = {'_delete_': True, '128px': {16: (1.0, 2)}}\n")
    config = load_config("top.py", TrainVaeConfig).config
    assert (config.lr, config.epochs, config.optim.betas) == (1e-5, 7, (0.9, 0.98))
    assert config.bucket_config == {"128px": {16: (1.0, 2)}}
    write("top.py", "_base_ = 'nowhere.py'\n")
    with pytest.raises(ConfigError, match=r"names `nowhere\.py`, which is not there"):
        read_layers(Path("top.py"))


def test_the_path_of_an_open_sora_config_means_the_preset() -> None:
    loaded = load_config("configs/vae/train/video_dc_ae.py", TrainVaeConfig, default="vae/train/video_dc_ae")
    assert loaded.path.name == "video_dc_ae.yaml"
    assert "taking the preset" in loaded.notes[0]


def as_source(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


GOLDEN = load_json("config_resolved")["configs"]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_reference_configs_resolve_to_the_same_values(name: str) -> None:
    """Text of the same shape: each value is written as Python and read back."""
    values = ast.literal_eval(GOLDEN[name]["repr"])
    assert lists(read(as_source(values))) == lists(values)


def lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return [lists(item) for item in value] if isinstance(value, (list, tuple)) else value


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(value=_PLAIN)
def test_any_plain_value_comes_back(value: Any) -> None:
    path = Path("any.py")
    path.write_text(f"key = {value!r}\n", encoding="utf-8")
    assert read_python(path, "any.py").data == {"key": value}


def test_convert_checks_and_keeps_the_values() -> None:
    write(
        "a.py",
        "lr = 5e-5\nvae_loss_config = dict(perceptual_loss_weight=0.5)\nbucket_config = {'256px': {32: (1, 1)}}\n",
    )
    converted = convert_config(Path("a.py"))
    assert converted.command.name == "train vae"
    path = write("b.yaml", converted.yaml)
    assert load_config(path, TrainVaeConfig).config == load_config("a.py", TrainVaeConfig).config
    with pytest.raises(ConfigError, match="does not exist"):
        convert_config(Path("none.py"))
    with pytest.raises(UsageError, match="exists already"):
        write_new(path, "x", replace=False)
    write_new(path, "x", replace=True)
    assert path.read_text() == "x"
    write("a.py", "lr = 5e-5\nmodle = dict(type='dc_ae')\n")
    with pytest.raises(ConfigError, match="modle"):
        convert_config(Path("a.py"))


def test_the_likely_command() -> None:
    assert likely_command(["model", "vae_loss_config", "lr"]).name == "train vae"
    assert likely_command(["save_dir", "batch_size", "model"]).name == "infer reconstruct"
