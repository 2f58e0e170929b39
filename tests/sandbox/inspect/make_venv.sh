#!/usr/bin/env bash
# A virtual environment of its own for Inspect AI, which is never a dependency of quintain: .cache/inspect-venv
set -euo pipefail
cd "$(dirname "$0")/../../.."
venv=.cache/inspect-venv
pins="inspect-ai==0.3.285 docker==7.2.0 pydantic==2.14.4"
if [ "$(cat "$venv/.pins" 2>/dev/null)" = "$pins" ]; then exit 0; fi
python=${1:-python3}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/pip" install -q --disable-pip-version-check $pins
echo "$pins" >"$venv/.pins"
