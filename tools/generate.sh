#!/usr/bin/env bash
# Write the Python stubs of protos/ under the directory $1, which becomes exactly what the protos say:
# a stub whose .proto is gone is removed there. Without $1: protos/gen.
#
# Service stubs are made for *_service.proto only; the grpc plugin leaves an empty module for the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-protos/gen}")
export PATH="$PWD/.venv/bin:$PATH" # protoc looks for its mypy plugins there

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
shopt -s nullglob
protos=(protos/stagekeeper/v1/*.proto)
services=(protos/stagekeeper/v1/*_service.proto)
if [ ${#protos[@]} -eq 0 ]; then
    echo "generate: no .proto file in protos/stagekeeper/v1" >&2
    exit 1
fi

python -m grpc_tools.protoc -Iprotos --python_out="$fresh" --mypy_out="quiet:$fresh" "${protos[@]}"
if [ ${#services[@]} -gt 0 ]; then
    python -m grpc_tools.protoc -Iprotos \
        --grpc_python_out="$fresh" --mypy_grpc_out="quiet:$fresh" "${services[@]}"
fi
package=stagekeeper/v1
echo '"""The generated stubs of the contract in protos/stagekeeper/v1. Do not edit: `make gen`."""' \
    >"$fresh/$package/__init__.py"
touch "$fresh/$package/py.typed"

mkdir -p "$out/$package"
for old in "$out/$package"/*; do
    if [ -f "$old" ] && [ ! -e "$fresh/$package/${old##*/}" ]; then rm "$old"; fi
done
for new in "$fresh/$package"/*; do # an unchanged file keeps its time, and running programs their modules
    if ! cmp -s "$new" "$out/$package/${new##*/}"; then cp "$new" "$out/$package/"; fi
done
