#!/usr/bin/env bash
# Regenerates the committed stubs in rollfarm/v1 from proto/.
#
# The generator is the oldest runtime we support, so that the stubs load beside any protobuf from 5.29 to 7; the .pyi
# generator needs a newer protobuf than it, hence two tool environments.
# usage: tools/proto.sh [DIR]     writes to DIR instead of the checkout (for the drift check)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-python3}
install() { # NAME PACKAGE...
  local venv=.tools/$1; shift
  [ -e "$venv/installed" ] && return
  "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet "$@" && touch "$venv/installed"
}
install protoc grpcio-tools==1.71.2 "setuptools<81"
install mypy-protobuf mypy-protobuf==5.1.0
mkdir -p "$out/rollfarm/v1"
.tools/protoc/bin/python -m grpc_tools.protoc -I proto \
  --plugin=protoc-gen-mypy=.tools/mypy-protobuf/bin/protoc-gen-mypy \
  --plugin=protoc-gen-mypy_grpc=.tools/mypy-protobuf/bin/protoc-gen-mypy_grpc \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  proto/rollfarm/v1/*.proto
