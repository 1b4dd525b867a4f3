#!/usr/bin/env bash
# Everything that wants one large GPU, in parts, each with a time limit and a short table at its end:
#
#     tests/gpu/one.sh DIR [PART ...]       parts: tests net step train colossal checkpoint mmdit diffusion fits learn
#
# DIR takes what is made (some 40 GB, removed part by part). CLIPS names a table of clips of 256 px and more, 100 frames
# and longer, for train, colossal and fits; LEARN_ARGS goes to learn.
set -uo pipefail
dir=$1
shift
mkdir -p "$dir"
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

part() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    timeout "$limit" "$@"
    echo "== $name: exit code $?, $((SECONDS - began)) s"
}

fit() { # NAME COMMAND PRESET [FLAG ...]
    local name=$1
    shift
    part "fits $name" 150 "$python" -m osora_cli train "$@" --dataset.data-path "$CLIPS" --dataset.fps-max 60 \
        --outputs "$dir" --exp-name "$name" --max-steps 6 --log-every 1 --ckpt-every 1000000 --num-workers 4 --quiet
    grep -o 'peak memory [0-9.]* GiB' "$dir/$name/log.txt" | tail -1
}

for part in "${@:-tests}"; do
    case $part in
    tests) part tests 300 "$python" -m pytest -q -m gpu tests/gpu tests/unit/checkpoint ;;
    net) part net 120 "$python" tests/benchmarks/dc_ae_net.py --profile "$dir/kernels.txt" ;;
    step) part step 150 "$python" tests/benchmarks/step_parts.py --stage both --steps 12 ;;
    train) part train 200 "$python" tests/benchmarks/train_vae_full.py "$CLIPS" --updates 40 --dir "$dir/train" ;;
    colossal)
        part colossal 200 "$python" -m osora_cli train vae vae/train/video_dc_ae --engine colossalai \
            --dataset.data-path "$CLIPS" --outputs "$dir" --exp-name colossal --async-io --max-steps 16 --log-every 1 \
            --ckpt-every 10 --num-workers 6
        part verify 60 "$python" -m osora_cli ckpt verify "$dir/colossal"
        part resume 100 "$python" -m osora_cli resume "$dir/colossal" --max-steps 18
        ;;
    checkpoint)
        part checkpoint 250 "$python" tests/benchmarks/checkpoint.py --folder "$dir" --saves 3
        part checkpoint_io 100 "$python" tests/benchmarks/checkpoint_io.py --folder "$dir" --rounds 2
        ;;
    mmdit) part mmdit 250 "$python" tests/benchmarks/train_diffusion_full.py model ;;
    diffusion) part diffusion 200 "$python" tests/benchmarks/train_diffusion_full.py run --updates 16 --dir "$dir/diffusion" ;;
    fits)
        for size in 96f 512px; do
            fit "stage1_$size" vae "vae/train/video_dc_ae_$size"
            fit "stage2_$size" vae-disc "vae/train/video_dc_ae_disc_$size" --from-pretrained "$dir/stage1_$size"
        done
        ;;
    learn) part learn 1500 "$python" tests/benchmarks/learn_small_ae.py --dir "$dir/learn" ${LEARN_ARGS:-} ;;
    *)
        echo "no part $part" >&2
        exit 2
        ;;
    esac
    rm -rf "$dir"/*/epoch* "$dir/train" "$dir/diffusion"
done
