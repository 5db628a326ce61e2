#!/usr/bin/env bash
# Install the project into a Python environment: what `make env` and the images run alike.
# usage: install.sh PYTHON [EXTRA ...]     e.g. install.sh .venv/bin/python dev
#
# A host with an NVIDIA driver gets the extra `gpu`, and with it the versions that ran on the cards
# (constraints-gpu.txt); any other gets those of constraints.txt.
# torch goes first, alone and pinned: a later package's requirement must not choose another build of it.
# A PyTorch that is already there (a GPU host's own) is kept, with its Triton.
# uv, where it is on the PATH, installs in a sixth of pip's time. It has settings of its own, and none of pip's. It does
# not see packages outside of the environment, where a kept PyTorch may be: those are pip's.
set -euo pipefail
python=${1:?usage: install.sh PYTHON [EXTRA ...]}
shift
here=$(cd "$(dirname "$0")/.." && pwd)
has_driver() { test -e /proc/driver/nvidia/version || nvidia-smi -L >/dev/null 2>&1; }

if [[ " $* " != *" gpu "* ]] && has_driver; then set -- "$@" gpu; fi
pins="$here/constraints.txt"
if [[ " $* " == *" gpu "* ]]; then pins="$here/constraints-gpu.txt"; fi
pinned() { sed -n "s/^$1==//p" "$pins"; }
extras=$(IFS=,; echo "$*")

kept=
if "$python" -c 'import torch' 2>/dev/null; then kept=kept; fi
if [ -z "$kept" ] && command -v uv >/dev/null; then
  install() { uv pip install -q --python "$python" "$@"; }
else
  install() { "$python" -m pip --disable-pip-version-check -qq install "$@"; }
fi
[ "$kept" ] || install --no-deps "torch==$(pinned torch)"

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
cp "$here/constraints-shared.txt" "$constraints"
"$python" - "$(pinned torch)" "$(pinned triton)" "$kept" >>"$constraints" <<'END'
import re
import sys
from importlib import metadata

torch, triton, kept = sys.argv[1:]
found = metadata.version("torch")
if kept and found.partition("+")[0] != torch:
    print(f"PyTorch {found} is kept; the pinned one is {torch} (make clean && make env)", file=sys.stderr)
print(f"torch=={found}")
if not any(re.match(r"(pytorch-)?triton\b", line) for line in metadata.requires("torch") or []):
    # Else PyTorch's own requirement decides, and another pin would contradict it.
    if not (kept and any(metadata.distributions(name="triton"))):
        print(f"triton=={triton}")
END
install -c "$constraints" -e "$here${extras:+[$extras]}"

# Plain `ray` commands send the token of this user's clusters, once there is one (docs/security.md); of itself Ray 2.60
# sends none to an address that it was given. A setting of the user's own stays.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cat >"$site/nsa_bench_token.pth" <<'END'
import os; os.path.exists(os.path.expanduser("~/.ray/auth_token")) and os.environ.setdefault("RAY_AUTH_MODE", "token")
END

# A driver too old for PyTorch's build, or a build without CUDA, is said now; in an image the code is not there yet.
if has_driver && [ -e "$here/jobs/hardware/driver.py" ]; then "$python" -m jobs.hardware.driver --warn || true; fi
