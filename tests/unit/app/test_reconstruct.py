from __future__ import annotations

import csv
import hashlib
import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support.clips import cut_bytes, frame_numbers, make_clip, pictures, real_clip
from support.golden import fill_by_rule, rule_tensor
from support.tiny import CONFIG

from osora_cli.app.recon_input import ClipPlan, unique_names
from osora_cli.app.recon_model import LpipsMetric, find_autoencoder, trained_size
from osora_cli.app.recon_output import ClipScore, ClipSink, frame_lpips
from osora_cli.app.recon_run import cut
from osora_cli.app.reconstruct import ReconstructResult, reconstruct
from osora_cli.checkpoint.contents import CheckpointContents
from osora_cli.checkpoint.counters import Counters
from osora_cli.checkpoint.store import CheckpointStore
from osora_cli.config.freeze import write_config
from osora_cli.config.models.dc_ae import DcAeConfig
from osora_cli.config.schema import ReconstructConfig, TrainVaeConfig
from osora_cli.data.media import probe, read_frames, write_video
from osora_cli.errors import CheckpointError, ConfigError, DataError, SetupError, UsageError
from osora_cli.model.dc_ae.autoencoder import DcAe
from osora_cli.model.lpips_weights import FILE_NAME, cache_dir, load_lpips, locate_lpips
from osora_cli.model.perceptual import LPIPS, SCALE, SHIFT
from osora_cli.tensors import TensorShard

TRAINING = TrainVaeConfig.model_validate({**CONFIG, "bucket_config": {"32px_ar1:1": {8: [1.0, 2]}}})
WINDOW = {"32px_ar1:1": {8: [1.0, 1]}}


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights that let some of the picture through: every tensor of unit gain, in place of near zero."""
    model = DcAe(TRAINING.model)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        fan_in = max(1, value[0].numel()) if value.dim() > 1 else 1
        scale = 0.5 / math.sqrt(fan_in) if value.dim() > 1 else 0.1
        state[key] = torch.randn(value.shape, generator=generator) * scale
    return state


def make_run(folder: Path, steps: tuple[int, ...] = (5,), ema: bool = True) -> Path:
    """A run with its config and checkpoints of these updates, as a training leaves it."""
    folder.mkdir(parents=True)
    write_config(TRAINING, folder)
    store = CheckpointStore(folder, async_io=False)
    for step in steps:
        sharded = {"model": [TensorShard.whole(key, value) for key, value in weights(step).items()]}
        if ema:
            sharded["ema"] = [TensorShard.whole(key, value) for key, value in weights(100 + step).items()]
        store.save(CheckpointContents(Counters(0, step, step, 1, step), sharded))
    store.finish()
    store.close()
    return folder


def write_table(path: Path, files: list[Path]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps"])
        for clip in files:
            try:
                info = probe(clip)
                facts = [info.num_frames, info.height, info.width, info.fps if math.isfinite(info.fps) else ""]
            except DataError:
                facts = [20, 64, 96, 24.0]
            frames, height, width, fps = facts
            writer.writerow([clip, "a clip", frames, height, width, height / width, height * width, fps])
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Clips of sizes and lengths that no stride divides, of two rates, with names that need care."""
    folder = tmp_path_factory.mktemp("clips")
    (folder / "sub").mkdir()
    return [
        make_clip(folder / "a b#1.mp4", frames=19, size=(70, 50), fps=25),
        make_clip(folder / "sub" / "a b#1.mov", frames=19, size=(66, 98), fps=30, rotate=90),
        make_clip(folder / "-ünï.mkv", frames=3, size=(64, 64), fps=12),
    ]


def config(data: Path, weights_from: Path | None, save_dir: Path, **more: Any) -> ReconstructConfig:
    model = more.pop("model", {})
    if weights_from is not None:
        model = {"from_pretrained": str(weights_from), **model}
    given = {"dataset": {"data_path": str(data)}, "model": model, "save_dir": str(save_dir)}
    # Without LPIPS unless a test asks: whether its weights are on the machine must not matter.
    return ReconstructConfig.model_validate({**given, "dtype": "fp32", "lpips": False, **more})


def scores(result: ReconstructResult) -> list[float]:
    return [clip.psnr for clip in result.clips]


def test_whole_clips_keep_frames_rate_and_size(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    calls: list[tuple[int, int, str]] = []
    result = reconstruct(config(table, run, tmp_path / "out"), progress=lambda *call: calls.append(call))
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
    assert sorted(call[0] for call in calls) == [1, 2, 3]
    assert {call[1] for call in calls} == {3}
    assert {call[2] for call in calls} == {str(clip) for clip in clips}


def test_numbers_are_those_of_the_float_output(tmp_path: Path, run: Path) -> None:
    """Against the net itself, on a clip that fits it exactly."""
    frames = pictures(8, (64, 64))
    write_video(tmp_path / "c.mp4", frames, 24, lossless=True)
    result = reconstruct(config(tmp_path / "c.mp4", run, tmp_path / "out"))
    model = DcAe(TRAINING.model)
    model.load_state_dict(weights(105))
    given = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 255
    with torch.no_grad():
        rebuilt = (model((given - 0.5) / 0.5)[0] / 2 + 0.5).clamp(0, 1)
    mse = (given.double() - rebuilt.double()).square().mean().item()
    (score,) = result.clips
    assert score.psnr == pytest.approx(-10 * math.log10(mse), abs=1e-4)
    assert result.mean["psnr"] == score.psnr
    change = (rebuilt - given).double().diff(dim=2).abs().mean().item()
    assert score.flicker == pytest.approx(change, abs=1e-6)
    flat = (given - given.mean((2, 3, 4), keepdim=True)).square().mean().item()
    assert score.constant_colour_psnr == pytest.approx(-10 * math.log10(flat), abs=1e-4)
    assert score.latent_numbers == 4 * 4 * 32 * 32
    assert score.latent_numbers <= score.block_numbers <= 1.05 * score.latent_numbers
    assert score.block_mean_psnr > score.constant_colour_psnr
    video = read_frames(tmp_path / "out" / score.recn, range(8)).astype(float) / 255
    assert np.abs(video - rebuilt[0].permute(1, 2, 3, 0).numpy()).mean() < 0.02


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


@pytest.mark.parametrize(
    ("length", "chunk", "expected"),
    [
        (5, 8, [(0, 5, 0)]),
        (8, 8, [(0, 8, 0)]),
        (9, 8, [(0, 8, 0), (1, 9, 7)]),
        (20, 8, [(0, 8, 0), (8, 16, 0), (12, 20, 4)]),
        (3, 1, [(0, 1, 0), (1, 2, 0), (2, 3, 0)]),
    ],
)
def test_cut(length: int, chunk: int, expected: list[tuple[int, int, int]]) -> None:
    assert cut(length, chunk) == expected


def test_every_frame_of_any_length_comes_once() -> None:
    for length in range(1, 70):
        for chunk in (1, 2, 8, 13):
            frames = [i for start, stop, skip in cut(length, chunk) for i in range(start + skip, stop)]
            assert frames == list(range(length))


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


def test_clips_that_cannot_be_read_are_named_and_leave_nothing(tmp_path: Path, run: Path) -> None:
    whole = make_clip(tmp_path / "whole.mkv", frames=40)
    broken = cut_bytes(whole, tmp_path / "broken.mkv", 0.5)
    held = probe(broken).num_frames
    assert 4 < held < 32
    table = write_table(tmp_path / "t.csv", [whole, whole, broken])
    lines = table.read_text().splitlines()
    lines[2] = lines[2].replace("whole.mkv", "missing.mkv")
    lines[3] = lines[3].replace(f",{held},", ",40,")
    table.write_text("\n".join(lines) + "\n")
    # A file that is shorter than its row says is used as it is; a window that it cannot fill is not made up.
    result = reconstruct(config(table, run, tmp_path / "out"))
    assert [(clip.row, clip.frames) for clip in result.clips] == [(0, 40), (2, held)]
    assert [(c.row, "does not exist" in c.reason) for c in result.left_out] == [(1, True)]
    dataset = {"data_path": str(table), "fps_max": 30}
    window = {"32px_ar1:1": {32: [1.0, 1]}}
    result = reconstruct(config(table, run, tmp_path / "out2", bucket_config=window, dataset=dataset))
    assert [clip.row for clip in result.clips] == [0]
    assert [(c.row, f"it holds {held}" in c.reason) for c in result.left_out] == [(1, False), (2, True)]
    assert sorted(p.name for p in (tmp_path / "out2" / "recn").iterdir()) == ["whole.mp4"]


def test_a_clip_that_breaks_off_in_the_middle_leaves_no_files(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from osora_cli.app import recon_input
    from osora_cli.data.media import MediaError

    data = tmp_path / "data"
    data.mkdir()
    for name in ("a", "b"):
        make_clip(data / f"{name}.mp4", frames=30, size=(64, 48))

    def failing(path: Path, indices: list[int]) -> np.ndarray:
        if Path(path).stem == "a" and indices[-1] > 20:
            raise MediaError(path, "frame 21 cannot be decoded")
        return read_frames(path, indices)

    monkeypatch.setattr(recon_input, "read_frames", failing)
    monkeypatch.setattr("osora_cli.app.recon_run._READ_BYTES", 1)
    result = reconstruct(config(data, run, tmp_path / "out"))
    assert [clip.name for clip in result.clips] == ["b"]
    assert result.left_out[0].reason == "frame 21 cannot be decoded"
    files = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert files == ["metrics.json", "orig/b.mp4", "recn/b.mp4", "side_by_side.png"]


def test_metrics_json_holds_numbers_and_protocol(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    result = reconstruct(config(table, run, tmp_path / "out"))
    written = json.loads(result.metrics.read_text())
    assert written == result.to_json()
    assert written["mean"]["psnr"] == pytest.approx(np.mean(scores(result)))
    assert written["mean"]["ssim"] == pytest.approx(np.mean([clip.ssim for clip in result.clips]))
    protocol = written["protocol"]
    assert protocol["data"]["kind"] == "table"
    assert len(protocol["data"]["digest"]) == 32
    assert protocol["weights"] == {"path": str(run / "epoch0-global_step5"), "step": 5, "ema": True}
    assert protocol["data_range"] == 1.0
    assert protocol["torch"] == torch.__version__
    assert (protocol["clips"], protocol["frames"]) == (3, 41)
    assert protocol["sizes"] == ["64x64", "66x98", "70x50"]
    assert protocol["extent"] == "whole"
    assert protocol["window"] is None
    with Image.open(result.picture) as picture:
        assert min(picture.size) > 300


def test_averaged_weights_are_taken_where_there_are_any(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    plain = make_run(tmp_path / "plain", ema=False)
    got = {}
    for name, source, use in (("ema", run, True), ("own", run, False), ("none", plain, True)):
        result = reconstruct(config(clips[0], source, tmp_path / name, use_ema=use))
        got[name] = result.clips[0].psnr
        assert result.protocol["weights"]["ema"] == (name == "ema")
    assert got["own"] == got["none"] != got["ema"]


def test_weights_of_a_file_are_the_same_weights(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(weights(105), file)
    architecture = TRAINING.model.model_dump(include={"encoder", "decoder", "latent_channels"})
    # Nothing says what length a bare file was trained on: the tile's is taken.
    architecture["temporal_tile_size"] = 8
    from_file = reconstruct(config(clips[1], file, tmp_path / "file", model=architecture))
    from_run = reconstruct(config(clips[1], run, tmp_path / "run"))
    assert from_file.clips[0].psnr == from_run.clips[0].psnr
    assert from_file.protocol["weights"] == {"path": str(file), "step": None, "ema": False}
    inside = next((run / "epoch0-global_step5").glob("ema.safetensors"), None)
    if inside is not None:
        assert reconstruct(config(clips[1], inside, tmp_path / "inside")).clips[0].psnr == from_run.clips[0].psnr
    with pytest.raises(ConfigError, match="no architecture"):
        reconstruct(config(clips[1], file, tmp_path / "nothing"))
    (tmp_path / "hub").mkdir()
    shutil.copy(file, tmp_path / "hub" / "model.safetensors")
    from_folder = reconstruct(config(clips[1], tmp_path / "hub", tmp_path / "folder", model=architecture))
    assert from_folder.clips[0].psnr == from_run.clips[0].psnr


def test_a_checkpoint_that_lacks_a_part_is_no_folder_of_weights(tmp_path: Path, clips: list[Path]) -> None:
    checkpoint = make_run(tmp_path / "run") / "epoch0-global_step5"
    (checkpoint / "running_states.json").unlink()
    assert list(checkpoint.rglob("*.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        reconstruct(config(clips[1], checkpoint, tmp_path / "out"))
    assert caught.value.exit_code == 4


def test_the_newest_checkpoint_that_verifies_is_taken_and_others_are_named(tmp_path: Path, clips: list[Path]) -> None:
    run = make_run(tmp_path / "run", steps=(3, 6))
    result = reconstruct(config(clips[2], run, tmp_path / "new"))
    assert result.protocol["weights"]["step"] == 6
    shard = next((run / "epoch0-global_step6" / "model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = reconstruct(config(clips[2], run, tmp_path / "old"))
    assert result.protocol["weights"]["step"] == 3
    assert any("epoch0-global_step6" in note for note in result.notes)
    with pytest.raises(CheckpointError):
        reconstruct(config(clips[2], run / "epoch0-global_step6", tmp_path / "bad"))
    assert not (tmp_path / "bad").exists()


def test_an_architecture_that_contradicts_the_run_is_refused(run: Path) -> None:
    own = TRAINING.model.model_dump(include={"encoder", "decoder", "latent_channels"})

    def found(**model: Any) -> DcAeConfig:
        return find_autoencoder(DcAeConfig.model_validate({"from_pretrained": str(run), **model})).config

    assert found().encoder == found(**own).encoder == found(latent_channels=4).encoder == TRAINING.model.encoder
    with pytest.raises(ConfigError, match="latent_channels` is `8` here and `4` there") as caught:
        found(latent_channels=8)
    assert "leave `model.latent_channels` out" in str(caught.value)
    with pytest.raises(ConfigError, match="architecture is not that of the run"):
        found(model_name="dc-ae-f32t4c128")
    assert found(temporal_tile_size=16).temporal_tile_size == 16


def test_tiles_are_of_the_trained_size_unless_given(run: Path) -> None:
    def found(**model: Any) -> Any:
        return find_autoencoder(DcAeConfig.model_validate({"from_pretrained": str(run), **model}))

    tiled = found(use_spatial_tiling=True, use_temporal_tiling=True)
    assert (tiled.config.spatial_tile_size, tiled.config.temporal_tile_size, tiled.notes) == (32, 8, [])
    given = found(use_spatial_tiling=True, spatial_tile_size=64)
    assert given.config.spatial_tile_size == 64
    assert len(given.notes) == 1
    assert "trained on 32 px" in given.notes[0]
    assert found().chunk == 8


def test_trained_size_is_the_longest_and_largest_of_the_buckets() -> None:
    size = trained_size({"256px": {1: [0.5, 1], 33: [1.0, 1]}, "512px_ar16:9": {17: [1.0, 1]}}, 32)
    assert size is not None
    assert (size.frames, size.edge) == (33, 512)
    assert trained_size({}, 32) is None


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


def test_a_second_run_replaces_its_own_files_and_no_others(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    out = tmp_path / "out"
    (out / "orig").mkdir(parents=True)
    foreign = [out / "orig" / "mine.mp4", out / "notes.txt", out / "orig" / "other"]
    for path in foreign:
        path.write_text("mine")
    first = reconstruct(config(clips[0], run, out))
    second = reconstruct(config(clips[0], run, out, use_ema=False))
    assert scores(first) != scores(second)
    assert all(path.read_text() == "mine" for path in foreign)
    names = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file() and p not in foreign)
    assert names == ["metrics.json", "orig/a_b_1.mp4", "recn/a_b_1.mp4", "side_by_side.png"]
    assert json.loads((out / "metrics.json").read_text())["mean"]["psnr"] == second.mean["psnr"]


def test_no_usable_clip_ends_with_3_before_anything_is_made(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    table = write_table(tmp_path / "t.csv", clips)
    with pytest.raises(DataError, match="none of 3 clips") as caught:
        reconstruct(config(table, run, tmp_path / "out", bucket_config={"512px": {8: [1.0, 1]}}))
    assert caught.value.exit_code == 3
    assert "in no bucket" in str(caught.value)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x.mp4").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for data in (bad, tmp_path / "empty", tmp_path / "absent.csv"):
        with pytest.raises(DataError):
            reconstruct(config(data, run, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_missing_weights(tmp_path: Path, clips: list[Path]) -> None:
    with pytest.raises(ConfigError, match="no weights are given"):
        reconstruct(config(clips[0], None, tmp_path / "out"))
    for name in ("absent", "absent.safetensors", "epoch*-global_step*"):
        with pytest.raises(CheckpointError):
            reconstruct(config(clips[0], tmp_path / name, tmp_path / "out"))
    with pytest.raises(ConfigError, match="no clips are given"):
        reconstruct(ReconstructConfig.model_validate({"model": {"from_pretrained": str(make_run(tmp_path / "r"))}}))


def test_an_output_folder_that_cannot_be_made(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="cannot write") as caught:
        reconstruct(config(clips[0], run, tmp_path / "file"))
    assert caught.value.exit_code == 5


def test_a_full_disk_is_said_and_leaves_no_half_video(tmp_path: Path, run: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), dtype=np.uint8)
    write_video(tmp_path / "noise.mp4", noise, 24, lossless=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SetupError, match=r"cannot write to .*File too large"):
            reconstruct(config(tmp_path / "noise.mp4", run, tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_the_input_is_never_overwritten(tmp_path: Path, run: Path, clips: list[Path]) -> None:
    (tmp_path / "orig").mkdir()
    clip = Path(shutil.copy(clips[0], tmp_path / "orig" / "clip.mp4"))
    before = clip.read_bytes()
    with pytest.raises(UsageError, match="in the folder that the reconstruction is written to"):
        reconstruct(config(tmp_path / "orig", run, tmp_path))
    assert clip.read_bytes() == before


def test_a_real_clip(tmp_path: Path, run: Path) -> None:
    window = {"32px_ar1:1": {8: [1.0, 1]}}
    data = real_clip("bikes").parent
    result = reconstruct(config(data, run, tmp_path / "out", bucket_config=window))
    assert {"bigbuckbunny", "bikes", "carphone_pristine", "carphone_distorted"} <= {clip.name for clip in result.clips}
    assert all(math.isfinite(clip.psnr) for clip in result.clips)


def test_unique_names() -> None:
    assert unique_names(["a/x.mp4", "b/X.mov", "c/x_2.mp4", "../..", "-.mp4", "d/x.mp4"]) == [
        "x",
        "X_2",
        "x_2_2",
        "clip",
        "clip_2",
        "x_3",
    ]
    long = unique_names(["é" * 300 + ".mp4", "é" * 300 + ".mkv"])
    assert len(set(long)) == 2
    assert all(len(name.encode()) < 240 for name in long)


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
    sink = ClipSink(plan, folder, shown=True, lpips=lpips)
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
    monkeypatch.setattr("osora_cli.app.reconstruct.find_lpips", lambda wanted, notes: metric)
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

    monkeypatch.setattr("osora_cli.app.recon_model.build_model", built)
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
