from __future__ import annotations

import os
from pathlib import Path

import pytest

from osora_cli.data import presence
from osora_cli.data.presence import Presence


@pytest.mark.parametrize("list_after", [1, 3, 10**9])
def test_answers_are_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, list_after: int) -> None:
    monkeypatch.setattr(presence, "_LIST_AFTER", list_after)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("a.mp4", "sub/b, c.mp4", "sub/-x\n.mp4"):
        (tmp_path / name).touch()
    (tmp_path / "link.mp4").symlink_to("a.mp4")
    (tmp_path / "broken.mp4").symlink_to("nothing")
    names = ["a.mp4", "./a.mp4", "sub/b, c.mp4", "sub/-x\n.mp4", "link.mp4", "broken.mp4", "sub", "sub/", "sub/.."]
    names += ["no", "no/a.mp4", "a.mp4/x", "", "/", "sub/no.mp4", "sub//b, c.mp4", "nul\0.mp4"]
    known = Presence()
    for _ in range(3):
        for name in [*names, *(str(tmp_path / name) for name in names)]:
            assert known.exists(name) == os.path.exists(name), name


def test_a_folder_that_is_asked_for_often_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(20):
        (tmp_path / f"{i}.mp4").touch()
    monkeypatch.setattr(presence, "_LIST_AFTER", 4)
    asked: list[str] = []
    exists = os.path.exists
    monkeypatch.setattr(presence.os.path, "exists", lambda path: asked.append(path) or exists(path))
    known = Presence()
    assert all(known.exists(f"{tmp_path}/{i}.mp4") for i in range(20))
    assert len(asked) == 4
    assert not any(known.exists(f"{tmp_path}/gone/{i}.mp4") for i in range(20))
    assert len(asked) == 4
