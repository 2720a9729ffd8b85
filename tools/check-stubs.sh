#!/usr/bin/env bash
# Fails when the committed stubs are not what proto/ generates.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/proto.sh "$fresh" 2>/dev/null
diff -r --exclude=__init__.py --exclude=__pycache__ "$fresh/rollfarm/v1" rollfarm/v1 ||
  { echo "The stubs differ from proto/. Run: make proto" >&2; exit 1; }
