#!/usr/bin/env bash
# Check a machine with an NVIDIA card, in less than four minutes: bash tests/gpu/run.sh
#
# Its Python needs torch; what else is missing there is taken from build/gpu-packages, which
# `bash tests/gpu/carry.sh 3.12` fills on a machine with a package index, for a Python of that version.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
paths=""
for path in protos/gen services clients .; do
    paths="$paths${paths:+:}$PWD/$path"
done
if [ -d build/gpu-packages ]; then
    paths="$paths:$PWD/build/gpu-packages"
fi
export PYTHONPATH="$paths"
exec "$python" -m tests.gpu.check_card "$@"
