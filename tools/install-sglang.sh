#!/usr/bin/env bash
# Make (or complete) the environment of the SGLang adapter on CPU: tools/install-sglang.sh [VENV], by default .venv-sglang.
# SGLang's own wheel requires CUDA's libraries, so it is installed without what it requires, beside the part of that which
# it needs on CPU. Takes 2.6 GB, a third of it triton. Running it again does what is missing.
#
# With a GPU none of this is needed: install sglang==0.5.23 and rollfarm in an environment of yours.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-sglang}
python=$venv/bin/python
torch=${TORCH:-torch==2.13.0}
sglang=0.5.23
# What SGLang imports on CPU, at the versions that it asks for.
needs=(
    aiohttp apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill einops fastapi gguf interegular ipython jsonschema
    msgspec numpy openai==2.8.0 orjson packaging partial-json-parser pillow prometheus-client psutil pybase64 pydantic
    python-multipart pyzmq regex requests sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tqdm transformers==5.19.0
    triton uvicorn uvloop watchfiles xgrammar==0.2.7
)

step() { echo "install-sglang: $*" >&2; }
installed() { "$python" -c "from importlib.metadata import version; assert version('$1').startswith('${2:-}')" 2>/dev/null; }
install() { "$python" -m pip --disable-pip-version-check install --quiet --progress-bar off "$@" >&2; }

if [ ! -x "$python" ]; then
    step "making $venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
if ! installed torch; then
    step "installing $torch"
    # shellcheck disable=SC2086 # TORCH may hold pip's options too
    install $torch
fi
step "installing what SGLang imports on CPU, and rollfarm (the first time some minutes)"
install "${needs[@]}" --editable "$root"
installed sglang "$sglang" || install --no-deps "sglang==$sglang"
# Its registrations name operators that only CUDA's build has; SGLang takes no more than image transformations from it.
installed torchvision || install --no-deps torchvision==0.28.0
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import torchvision' 2>/dev/null || : >"$packages/torchvision/_meta_registrations.py"
cp "$root/tools/sgl_kernel.py" "$packages/"
step "checking"
SGLANG_USE_CPU_ENGINE=1 "$python" - 2>/dev/null <<'PYTHON' || { step "SGLang does not import; see: $python -c 'import sglang.srt.entrypoints.http_server'"; exit 1; }
from importlib.metadata import version

import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import transformers

print(f"install-sglang: ready: sglang {version('sglang')}, transformers {transformers.__version__}")
PYTHON
