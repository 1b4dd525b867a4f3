"""LPIPS of reconstructions: with weights by rule, without any, with the real ones."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.clips import make_clip, pictures, real_clip
from support.golden import fill_by_rule, rule_tensor
from support.recon import TRAINING, config, weights, write_table

from osora_cli.app.reconstruct.clips import ClipPlan
from osora_cli.app.reconstruct.lpips import LpipsMetric
from osora_cli.app.reconstruct.output import ClipSink, Files
from osora_cli.app.reconstruct.run import reconstruct
from osora_cli.app.reconstruct.scores import ClipScore, frame_lpips
from osora_cli.data.media import read_frames, write_video
from osora_cli.errors import SetupError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.lpips_weights import FILE_NAME, cache_dir, load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS, SCALE, SHIFT


def lpips_rule(key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Weights as of the golden LPIPS: wider convolutions, heads that are not negative, the constants kept."""
    if key.startswith("scaling_layer."):
        return torch.tensor(SHIFT if key.endswith("shift") else SCALE).view(shape)
    drawn = rule_tensor(key, shape, dtype)
    if key.startswith("lin"):
        return drawn.abs()
    return drawn * 2 * math.sqrt(2) if len(shape) > 1 else drawn


@pytest.fixture(scope="module")
def ruled() -> LPIPS:
    net = LPIPS()
    with torch.no_grad():
        fill_by_rule(net, rule=lpips_rule)
    return net


def score_parts(folder: Path, parts: list[tuple[torch.Tensor, torch.Tensor, int]], lpips: LPIPS | None) -> ClipScore:
    """The score of a clip that comes in parts: uint8 original, float reconstruction, frames that came before."""
    for side in ("orig", "recn"):
        (folder / side).mkdir(parents=True, exist_ok=True)
    length = sum(len(original) - skip for original, _, skip in parts)
    _, _, height, width = parts[0][0].shape
    plan = ClipPlan("c", 0, "c.mp4", Path("c.mp4"), np.arange(length), (height, width), False, 24.0, False)
    sink = ClipSink(plan, Files(folder, ("orig", "recn")), (1, 2), shown=True, lpips=lpips)
    for original, rebuilt, skip in parts:
        sink.add(original, rebuilt, (4, 1, 2, 2), skip)
    score = sink.finish()
    assert sink.picture is not None
    assert ("LPIPS" in sink.picture.title) == (score.lpips is not None)
    return score


def test_lpips_is_the_mean_over_frames_of_the_clamped_float_output(tmp_path: Path, ruled: LPIPS) -> None:
    original = torch.from_numpy(pictures(5, (64, 48))).permute(0, 3, 1, 2)
    noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
    rebuilt = original / 127.5 - 1 + 0.4 * noise
    assert rebuilt.abs().max() > 1.2
    # The last part begins two frames early: they count once.
    parts = [(original[:3], rebuilt[:3], 0), (original[1:], rebuilt[1:], 2)]
    ruled.chunk_pixels = 2 * 48 * 64
    score = score_parts(tmp_path, parts, ruled)
    ruled.chunk_pixels = 2**19
    alone = [ruled(a[None] / 127.5 - 1, b[None].clamp(-1, 1)).item() for a, b in zip(original, rebuilt, strict=True)]
    assert min(alone) > 0.01
    assert max(alone) > 1.01 * min(alone)
    assert score.lpips == pytest.approx(np.mean(alone), rel=1e-5)
    assert score_parts(tmp_path, parts, None).lpips is None


def test_lpips_of_equal_clips_is_0_and_of_too_small_ones_not_defined(tmp_path: Path, ruled: LPIPS) -> None:
    original = torch.from_numpy(pictures(3, (64, 48))).permute(0, 3, 1, 2)
    assert frame_lpips(ruled, original / 255, original / 255).tolist() == [0, 0, 0]
    assert score_parts(tmp_path, [(original, original / 127.5 - 1, 0)], ruled).lpips == pytest.approx(0, abs=1e-6)
    small = original[..., :14, :]
    score = score_parts(tmp_path, [(small, small / 127.5 - 1, 0)], ruled)
    assert (score.lpips, score.ssim) == (None, pytest.approx(1))
    whole = original[..., :16, :]
    assert score_parts(tmp_path, [(whole, whole / 127.5 - 1, 0)], ruled).lpips is not None


def test_lpips_in_metrics_json(
    tmp_path: Path, run: Path, clips: list[Path], ruled: LPIPS, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = LpipsMetric(ruled, tmp_path / "lpips.safetensors", "ab" * 32)
    monkeypatch.setattr("osora_cli.app.reconstruct.run.find_lpips", lambda wanted, notes: metric)
    table = write_table(tmp_path / "t.csv", [clips[2], make_clip(tmp_path / "d.mp4", frames=4, size=(64, 48))])
    result = reconstruct(config(table, run, tmp_path / "out", lpips=True))
    written = json.loads(result.metrics.read_text())
    values = [clip["lpips"] for clip in written["clips"]]
    assert len(values) == 2
    assert min(values) > 0
    assert written["mean"]["lpips"] == pytest.approx(np.mean(values))
    assert written["protocol"]["lpips"] == {
        "net": "VGG16",
        "weights": "LPIPS 0.1",
        "path": str(tmp_path / "lpips.safetensors"),
        "sha256": "ab" * 32,
        "input_range": [-1, 1],
        "dtype": "fp32",
        "mean": "mean over frames",
    }
    # Against the net itself, on a clip that fits it exactly.
    frames = pictures(8, (64, 64))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    (score,) = reconstruct(config(tmp_path / "c.mp4", run, tmp_path / "one", lpips=True)).clips
    model = DcAe(TRAINING.model)
    model.load_state_dict(weights(105))
    given = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        rebuilt = model(given)[0].clamp(-1, 1)
        alone = [ruled(given[:, :, i], rebuilt[:, :, i]).item() for i in range(8)]
    assert score.lpips == pytest.approx(np.mean(alone), rel=1e-4)


def test_lpips_without_its_weights(
    tmp_path: Path, run: Path, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("OSORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    left_out = reconstruct(config(clips[2], run, tmp_path / "null", lpips=None))
    (note,) = left_out.notes
    assert "LPIPS is left out" in note
    assert "`osora weights fetch lpips-vgg`" in note
    written = json.loads(left_out.metrics.read_text())
    assert written["notes"] == [note]
    assert (written["mean"]["lpips"], written["protocol"]["lpips"]) == (None, None)
    assert left_out.clips[0].lpips is None
    assert reconstruct(config(clips[2], run, tmp_path / "false", lpips=False)).notes == []

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("the net is built")

    monkeypatch.setattr("osora_cli.app.reconstruct.net.build_model", built)
    with pytest.raises(SetupError, match="not on this machine") as caught:
        reconstruct(config(clips[2], run, tmp_path / "true", lpips=True))
    assert caught.value.exit_code == 5
    assert "`osora weights fetch lpips-vgg`" in str(caught.value)
    assert "`--no-lpips`" in str(caught.value)
    # A file that is damaged is no weights either.
    (tmp_path / "cache" / FILE_NAME).write_bytes(b"not these")
    with pytest.raises(SetupError, match="cannot be read"):
        reconstruct(config(clips[2], run, tmp_path / "true", lpips=True))
    assert not (tmp_path / "true").exists()
    monkeypatch.undo()
    monkeypatch.setenv("OSORA_CACHE", str(tmp_path / "cache"))
    (note,) = reconstruct(config(clips[2], run, tmp_path / "damaged", lpips=None)).notes
    assert "cannot be read" in note
    assert "`osora weights fetch lpips-vgg`" in note


def test_lpips_with_its_real_weights(tmp_path: Path, run: Path) -> None:
    try:
        path = locate_lpips()
    except SetupError:
        pytest.skip(f"the LPIPS weights are not in `{cache_dir()}`: osora weights fetch lpips-vgg")
    window = {"32px_ar1:1": {8: [1.0, 1]}}
    data = real_clip("carphone_pristine")
    found, asked = (
        reconstruct(config(data, run, tmp_path / name, bucket_config=window, lpips=wanted))
        for name, wanted in (("null", None), ("true", True))
    )
    assert found.notes == []
    assert found.clips[0].lpips == asked.clips[0].lpips == found.mean["lpips"]
    assert found.protocol["lpips"]["path"] == path
    assert found.protocol["lpips"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    # The videos are the same frames after rounding and coding: about the same distance.
    sides = [read_frames(tmp_path / "null" / p, range(8)) for p in (found.clips[0].orig, found.clips[0].recn)]
    a, b = (torch.from_numpy(side).permute(0, 3, 1, 2).float() / 127.5 - 1 for side in sides)
    assert found.clips[0].lpips == pytest.approx(load_lpips(path)(a, b).mean().item(), rel=0.3)
