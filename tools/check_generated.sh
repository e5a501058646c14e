#!/usr/bin/env bash
# Fail when the committed stubs in protos/gen are not what `make gen` would write now.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
tools/generate.sh "$fresh"
if ! diff -r --exclude=__pycache__ "$fresh/stagekeeper" protos/gen/stagekeeper; then
    echo "gen-check: protos/gen is stale; run 'make gen' and commit the result" >&2
    exit 1
fi
echo "gen-check: protos/gen is fresh"
