#!/usr/bin/env bash
# Writes the lock files in configs/environment/lock: one for each Python version, with and without CUDA. Needs uv (pip install uv) and a
# package index, but no GPU and only one Python: uv resolves for other versions and platforms from metadata.
# Versions that are locked already are kept where possible; UV_OPTIONS=--upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/../.."
TORCH=2.13.0
for python in 3.11 3.12; do
    for kind in cpu cuda; do
        extra=$kind
        [ "$kind" = cpu ] || extra=gpu
        lock=configs/environment/lock/$kind-py$python.txt
        # sglang 0.5.21 has wheels for glibc 2.34 and newer only.
        # shellcheck disable=SC2086 # UV_OPTIONS are several words
        uv pip compile pyproject.toml --extra "$extra" --extra gs --extra az --extra test --extra dev --extra docs \
            -c <(echo "torch==$TORCH") --python-version "$python" --python-platform x86_64-manylinux_2_35 \
            --no-header --no-annotate --quiet --output-file "$lock" ${UV_OPTIONS:-} >/dev/null
        if [ "$kind" = cpu ]; then # torch's CPU wheel has no CUDA packages, unlike the wheel that uv reads
            sed -i -E '/^(torch==|nvidia-|cuda-)/d' "$lock"
        fi
        sed -i "1i # Written by configs/environment/lock.sh: Python $python, $kind" "$lock"
        echo "$lock: $(grep -c == "$lock") packages"
    done
done
