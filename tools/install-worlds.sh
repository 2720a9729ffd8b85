#!/usr/bin/env bash
# Make (or complete) the environment of the worlds that do not fit beside the farm: tools/install-worlds.sh [VENV], by
# default .venv-worlds. verifiers 0.1 pins libraries that the farm has newer, OpenEnv's server brings a web interface,
# and TextWorld is large. Takes 1 GB. Running it again does what is missing.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-worlds}
python=$venv/bin/python

if [ ! -x "$python" ]; then
    echo "install-worlds: making $venv" >&2
    "${PYTHON:-python3}" -m venv "$venv"
fi
echo "install-worlds: installing rollfarm with textworld and verifiers, and OpenEnv (the first time some minutes)" >&2
"$python" -m pip --disable-pip-version-check install --quiet --progress-bar off \
    --editable "$root[textworld,verifiers]" openenv==0.10.0 textworld==1.7.0 verifiers==0.1.14 >&2
