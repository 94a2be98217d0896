#!/usr/bin/env bash
# Makes .venv with this checkout and everything that it needs, on a machine with CUDA or without. Safe to run again: it continues where
# it was interrupted. The steps are those of `penstock setup` (flows/install/command.py).
#
# Variables: VENV, PYTHON, and SETUP_OPTIONS for `penstock setup`, such as --cpu or --torch-index URL.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}

fail() { echo "setup: $1" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || fail "$PYTHON not found; install Python 3.11 or 3.12, or call: make setup PYTHON=/path/to/python3.11"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
    || fail "$("$PYTHON" --version) found, Penstock needs 3.11 or 3.12: call make setup PYTHON=python3.11"

# An interrupted `python -m venv` may have left an interpreter without pip: run it again then, which repairs the environment.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv "$VENV" || fail "no virtual environment in $VENV: $PYTHON -m venv failed"

# shellcheck disable=SC2086 # SETUP_OPTIONS are several words
PYTHONPATH=. "$VENV/bin/python" -m penstock setup --with test,dev,docs ${SETUP_OPTIONS:-}
echo "The command is $VENV/bin/penstock; or penstock, after: source $VENV/bin/activate"
