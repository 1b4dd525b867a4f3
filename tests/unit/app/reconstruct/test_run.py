"""A reconstruction from clips to videos: lengths, sizes, rates, pieces, windows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.clips import frame_numbers, make_clip, pictures, real_clip
from support.recon import WINDOW, config, scores, write_table

from osora_cli.app.reconstruct.output import ClipSink
from osora_cli.app.reconstruct.pieces import cut
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.data.media import probe, read_frames, write_video
from osora_cli.errors import RunError


def test_whole_clips_keep_frames_rate_and_size(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    calls: list[tuple[int, int, str, float]] = []
    said: list[str] = []
    result = reconstruct(
        config(table, run, tmp_path / "out"), progress=lambda *call: calls.append(call), notify=said.append
    )
    assert [clip.name for clip in result.clips] == ["a_b_1", "a_b_1_2", "ünï"]
    for score, source in zip(result.clips, clips, strict=True):
        info = probe(source)
        for place in (score.orig, score.recn):
            written = probe(tmp_path / "out" / place)
            assert (written.num_frames, written.height, written.width) == (info.num_frames, info.height, info.width)
            assert written.fps == pytest.approx(info.fps, abs=0.001)
        assert (score.frames, score.height, score.width) == (info.num_frames, info.height, info.width)
        assert frame_numbers(read_frames(tmp_path / "out" / score.orig, range(score.frames))) == [*range(score.frames)]
        assert 5 < score.psnr < 40
        assert score.ssim is not None
        assert -1 < score.ssim < 1
    assert [call[0] for call in calls if call[3] == 1] == [1, 2, 3]
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    # Two pieces before the last one of each long clip.
    assert [call[3] for call in calls if call[2] == str(clips[0])] == pytest.approx([8 / 19, 16 / 19, 1])
    assert {call[1] for call in calls} == {3}
    assert {call[2] for call in calls} == {str(clip) for clip in clips}
    assert said == [f"weights: {run / 'epoch0-global_step5'}, update 5, averaged weights (EMA)"]
    assert result.weights == said[0].removeprefix("weights: ")


def test_a_long_clip_in_pieces_has_every_frame_once_and_no_other(tmp_path: Path, run: Path) -> None:
    clip = make_clip(tmp_path / "long.mp4", frames=45, size=(64, 48))
    out = [tmp_path / "one", tmp_path / "many"]
    results = [reconstruct(config(clip, run, o, batch_size=b)) for o, b in zip(out, (1, 5), strict=True)]
    assert frame_numbers(read_frames(out[0] / "orig/long.mp4", range(45))) == [*range(45)]
    assert results[0].protocol["frames_per_piece"] == 8
    assert scores(results[0]) == pytest.approx(scores(results[1]), abs=1e-3)
    # The pieces together say what the net says of each of them: frames 0-7, 8-15, ..., and the last 8.
    parts = []
    for start, stop, skip in cut(45, 8):
        part = read_frames(clip, range(start, stop))
        write_video(tmp_path / "part.mp4", part, 24, lossless=True)
        alone = reconstruct(config(tmp_path / "part.mp4", run, tmp_path / "part")).clips[0]
        parts.append((alone.psnr, skip))
    mean_mse = np.mean([10 ** (-psnr / 10) for psnr, _ in parts[:-1]])
    assert parts[-1][1] == 3
    assert results[0].clips[0].psnr == pytest.approx(-10 * math.log10(mean_mse), abs=0.3)


def test_windows_are_the_buckets_and_always_the_same(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    first, second = (
        reconstruct(config(table, run, tmp_path / name, bucket_config=WINDOW, batch_size=size))
        for name, size in (("one", 1), ("two", 4))
    )
    # The third clip has 3 frames and the bucket takes 8.
    assert [clip.row for clip in first.clips] == [0, 1]
    assert [(c.row, "needs 8 frames, it has 3" in c.reason) for c in first.left_out] == [(2, True)]
    for score in first.clips:
        assert (score.frames, score.height, score.width) == (8, 32, 32)
        assert probe(tmp_path / "one" / score.recn).num_frames == 8
    # fps_max is 16: the first clip is thinned from 25 to every second frame.
    assert first.clips[0].fps == 12.5
    assert probe(tmp_path / "one" / first.clips[0].orig).fps == 12.5
    # The encoder's threads do not always take the same decisions: the same frames, up to its losses.
    originals = [read_frames(tmp_path / name / "orig/a_b_1.mp4", range(8)) for name in ("one", "two")]
    assert np.abs(originals[0].astype(int) - originals[1].astype(int)).mean() < 3
    assert [c.constant_colour_psnr for c in first.clips] == [c.constant_colour_psnr for c in second.clips]
    assert scores(first) == pytest.approx(scores(second), abs=1e-3)
    other = reconstruct(config(table, run, tmp_path / "three", bucket_config=WINDOW, seed=43))
    assert scores(other) != pytest.approx(scores(first), abs=1e-3)


def test_one_clip_does_not_depend_on_the_others(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    every = reconstruct(config(table, run, tmp_path / "all", bucket_config=WINDOW))
    one = reconstruct(config(table, run, tmp_path / "one", bucket_config=WINDOW, num_samples=1))
    assert [clip.row for clip in one.clips] == [0]
    assert one.left_out == []
    assert one.clips[0].psnr == pytest.approx(every.clips[0].psnr, abs=1e-3)


def test_a_folder_and_stills(tmp_path: Path, run: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make_clip(data / "v.mp4", frames=6, size=(64, 48))
    image = pictures(1, (70, 50))[0]
    Image.fromarray(image).save(data / "s.png")
    (data / "notes.txt").write_text("no clip")
    (data / "zz.mp4").write_bytes(b"no video")
    result = reconstruct(config(data, run, tmp_path / "out"))
    assert [(c.name, c.frames, c.fps is None) for c in result.clips] == [("s", 1, True), ("v", 6, False)]
    assert [Path(c.path).name for c in result.left_out] == ["zz.mp4"]
    still = result.clips[0]
    assert still.flicker is None
    with Image.open(tmp_path / "out" / still.orig) as opened:
        assert np.array_equal(np.asarray(opened), image)
    with Image.open(tmp_path / "out" / still.recn) as opened:
        assert opened.size == (70, 50)
    windowed = reconstruct(config(data, run, tmp_path / "out2", bucket_config={"32px_ar1:1": {1: [1.0, 1]}}))
    assert [(c.name, c.frames, c.height) for c in windowed.clips] == [("s", 1, 32)]


def test_tiled_reconstruction_is_close_to_untiled(tmp_path: Path, run: Path) -> None:
    clip = make_clip(tmp_path / "c.mp4", frames=20, size=(96, 64))
    plain, tiled = (
        reconstruct(config(clip, run, tmp_path / name, model=model)).clips[0]
        for name, model in (("plain", {}), ("tiled", {"use_spatial_tiling": True, "use_temporal_tiling": True}))
    )
    assert tiled.frames == 20
    assert tiled.psnr == pytest.approx(plain.psnr, abs=0.5)


def test_bf16(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    exact, rounded = (reconstruct(config(clips[2], run, tmp_path / d, dtype=d)) for d in ("fp32", "bf16"))
    assert rounded.protocol["dtype"] == "bf16"
    assert scores(rounded) == pytest.approx(scores(exact), abs=0.3)


def test_a_real_clip(tmp_path: Path, run: Path) -> None:
    window = {"32px_ar1:1": {8: [1.0, 1]}}
    data = real_clip("bikes").parent
    result = reconstruct(config(data, run, tmp_path / "out", bucket_config=window))
    assert {"bigbuckbunny", "bikes", "carphone_pristine", "carphone_distorted"} <= {clip.name for clip in result.clips}
    assert all(math.isfinite(clip.psnr) for clip in result.clips)


def _spoil_above(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    """The net gives NaN for what is as high as that or higher."""
    real = ClipSink.add

    def add(self: ClipSink, original: torch.Tensor, rebuilt: torch.Tensor, *rest: Any, **named: Any) -> None:
        spoilt = rebuilt.shape[-2] >= height
        real(self, original, torch.full_like(rebuilt, math.nan) if spoilt else rebuilt, *rest, **named)

    monkeypatch.setattr(ClipSink, "add", add)


def test_a_reconstruction_that_is_not_finite_is_told(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = [make_clip(tmp_path / f"c{height}.mp4", frames=8, size=(64, height)) for height in (48, 64)]
    table = write_table(tmp_path / "t.csv", clips)
    _spoil_above(monkeypatch, 64)
    result = reconstruct(config(table, run, tmp_path / "out"))
    assert any("1 of 2 clips" in note and "c64" in note for note in result.notes)
    assert result.mean["psnr"] == pytest.approx(result.clips[0].psnr)
    _spoil_above(monkeypatch, 0)
    with pytest.raises(RunError, match="2 of 2 clips hold values that are not finite"):
        reconstruct(config(table, run, tmp_path / "all"))
