#!/usr/bin/env bash
# Install the project into a Python environment: what `make env` and the images run alike.
# usage: install.sh PYTHON [EXTRA ...]     e.g. install.sh .venv/bin/python dev
#
# torch goes first, alone and pinned: a later package's requirement must not choose another build of it.
# A PyTorch that is already there (a GPU host's own) is kept.
set -euo pipefail
python=${1:?usage: install.sh PYTHON [EXTRA ...]}
shift
extras=$(IFS=,; echo "$*")
here=$(cd "$(dirname "$0")/.." && pwd)
pip() { "$python" -m pip --disable-pip-version-check -qq "$@"; }

if ! "$python" -c 'import torch' 2>/dev/null; then
  pip install --no-deps "torch==$(sed -n 's/^torch==//p' "$here/constraints.txt")"
fi
pip install -c "$here/constraints.txt" -e "$here${extras:+[$extras]}"
