#!/usr/bin/env bash
# The tests with what they need around them: a private Docker engine where this machine can have one, ended afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS=1 PYTHONSAFEPATH=1
engine=tests/testbed/engine.sh
trap '"$engine" stop >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if "$engine" start; then
  eval "$("$engine" env)"
else
  echo "note: no Docker engine here; the tests that need one will say so" >&2
fi
.venv/bin/python -m pytest "$@"
