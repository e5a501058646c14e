#!/usr/bin/env bash
# Put what Stagekeeper imports into build/gpu-packages, for a machine without a package index whose
# Python has torch: bash tests/gpu/carry.sh 3.12
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1:?the version of the Python over there, such as 3.12}
python=${PYTHON:-.venv/bin/python}
mapfile -t packages < <("$python" -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))')
rm -rf build/gpu-packages
"$python" -m pip install --quiet --target build/gpu-packages --only-binary=:all: \
    --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    --constraint constraints.txt "${packages[@]}"
du -sh build/gpu-packages
