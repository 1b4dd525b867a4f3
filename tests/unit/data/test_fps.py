from __future__ import annotations

import io
import math
import random

import numpy as np
import pandas as pd
import pytest
from support.golden import load_json

from osora_cli.data.crop import draw_frame_indices, draw_interval
from osora_cli.data.fps import add_caption_suffix, frame_intervals, map_target_fps
from osora_cli.errors import DataError

# -- rate -> interval --------------------------------------------------------------------------------------------------


def test_rates_are_mapped_as_golden() -> None:
    rows = load_json("data_map_target_fps")["rows"]
    assert len(rows) > 100
    for fps, fps_max, (new_fps, interval) in rows:
        got = map_target_fps(float(fps), fps_max)
        assert got == (new_fps, interval), (fps, fps_max)
        # A rate below the limit stays the float that it is, one that is thinned becomes an int: captions print it so.
        thinned = not math.isnan(float(fps)) and float(fps) >= fps_max
        assert isinstance(got[0], int) or not thinned


def test_intervals_of_an_array_are_those_of_its_values() -> None:
    for fps_max in (8, 16, 23.976, 24, 30, None):
        fps = np.array([0.5, 8, 12, 15.999, 16, 23.976, 24, 25, 29.97, 30, 59.94, 60, 120, 1000, math.nan, math.inf])
        assert frame_intervals(fps, fps_max).tolist() == [map_target_fps(float(f), fps_max)[1] for f in fps]


def test_a_limit_of_none_uses_every_frame() -> None:
    assert map_target_fps(59.94, None) == (59.94, 1)


# -- captions ----------------------------------------------------------------------------------------------------------


def test_captions_are_as_golden() -> None:
    item = load_json("data_text_postfix")
    table = pd.read_csv(io.StringIO(item["csv"]))
    for fps_max, motion, row, text, interval, _ in item["rows"]:
        clip = table.iloc[row]
        new_fps, k = map_target_fps(float(clip.fps), fps_max)
        score = float(clip.score_vmafmotion) if motion else None
        assert (add_caption_suffix(clip.text, new_fps, fps_max, score), k) == (text, interval), (fps_max, motion, row)


# -- frames ------------------------------------------------------------------------------------------------------------


def test_frames_are_drawn_as_golden() -> None:
    rows = load_json("data_temporal_crop")["rows"]
    assert any(isinstance(wanted, str) for *_, wanted in rows)
    for total, frames, interval, seed, wanted in rows:
        rng = random.Random(seed)
        if isinstance(wanted, str):
            with pytest.raises(DataError, match=f"{total} frames, {frames} are needed"):
                draw_frame_indices(total, frames, interval, rng)
        else:
            assert draw_frame_indices(total, frames, interval, rng).tolist() == wanted, (total, frames, interval, seed)


def test_frames_stay_inside_the_clip_and_rise() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        frames, interval = rng.randint(1, 40), rng.randint(1, 6)
        total = rng.randint(frames, 400)
        indices = draw_frame_indices(total, frames, interval, rng)
        assert len(indices) == frames
        assert indices[0] >= 0
        assert indices[-1] < total
        assert (np.diff(indices) >= 1).all()


def test_the_drawn_interval_leaves_room_for_the_frames() -> None:
    rng = random.Random(1)
    drawn = {draw_interval(100, 30, 8, rng) for _ in range(200)}
    assert drawn == {1, 2, 3}
    assert {draw_interval(1000, 10, 4, rng) for _ in range(200)} == {1, 2, 3, 4}
    assert draw_interval(5, 30, 8, rng) == 1
