#!/usr/bin/env bash
# Makes .venv with everything Penstock needs, on a machine with CUDA or without. Safe to run again: finished steps are skipped.
#
# The order matters on a machine without CUDA: torch first and alone (its CPU wheel), then everything with ordinary dependencies,
# then the packages whose own pins would pull CUDA builds, without dependencies. torchvision must not be in site-packages
# (its registry wheel is a CUDA build whose ops registry breaks every transformers model import): it lies in a side folder that
# only the SGLang server process has on its path.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
HERE=configs/environment
PIP="$VENV/bin/python -m pip install --quiet --disable-pip-version-check"

if nvidia-smi -L >/dev/null 2>&1; then KIND=cuda; else KIND=cpu; fi
STAMPS="$VENV/.penstock"
LOG="$VENV/setup.log"

fail() { echo "setup: $1" >&2; exit 1; }

step() { # step NAME FINGERPRINT_INPUT COMMAND...
    local name=$1 stamp; shift
    stamp="$STAMPS/$(printf '%s' "$name" | tr -c 'a-z0-9\n' '-').$(printf '%s' "$KIND $1" | cksum | cut -d' ' -f1)"; shift
    if [ -e "$stamp" ]; then echo "  done before  $name"; return; fi
    local start=$SECONDS
    printf '  installing   %s ...' "$name"
    if ! "$@" >>"$LOG" 2>&1; then echo; tail -n 15 "$LOG" >&2; fail "$name failed; the whole log is $LOG"; fi
    touch "$stamp"
    echo " $((SECONDS - start)) s"
}

command -v "$PYTHON" >/dev/null || fail "$PYTHON not found; install Python 3.11 or 3.12, or call: make setup PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
    || fail "$("$PYTHON" --version) found, Penstock needs 3.11 or 3.12: call make setup PYTHON=python3.11"

echo "Penstock setup: $VENV, $KIND, $("$PYTHON" --version)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
mkdir -p "$STAMPS"; : >>"$LOG"

PROJECT=$(cat pyproject.toml "$HERE/constraints.txt" | cksum)
step "torch 2.13.0" "torch==2.13.0" $PIP torch==2.13.0
if [ "$KIND" = cuda ]; then
    step "penstock, engines, tools" "$PROJECT" $PIP -e ".[gpu,test,dev]"
else
    step "penstock, ray, prefect, mlflow, megatron-core" "$PROJECT" $PIP -c "$HERE/constraints.txt" -e ".[cpu,test,dev]"
    step "sglang 0.5.21" "sglang==0.5.21" $PIP --no-deps \
        sglang==0.5.21 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 soundfile==0.13.1
    step "torchvision, beside (SGLang imports it)" "torchvision==0.28.0" $PIP --no-deps --target "$VENV/sglang-site" torchvision==0.28.0
fi
"$VENV/bin/python" - "$KIND" <<'PY' || fail "another package has replaced torch; remove $VENV and run make setup again"
import sys
from importlib.metadata import version
found = version("torch")
sys.exit(not found.startswith("2.13.0") or (sys.argv[1] == "cpu" and "+cpu" not in found and "cu" in found))
PY
echo "Penstock is installed: $VENV/bin/penstock, or penstock after: source $VENV/bin/activate"
