"""A Triton that the kernels were not run with, on a card: everything is computed, without the project's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
METADATA = "Metadata-Version: 2.1\nName: triton\nVersion: 3.10.1\n"
LOOK = """
import json, sys, torch
from dataclasses import replace
from jobs.hardware.machine import probe
from nsa_core.routes import route_of
from nsa_core import NSAConfig, nsa_attention
from nsa_core.errors import BackendError
from nsa_core.model import PRESETS, NSATransformer

device, half = torch.device(sys.argv[1]), torch.bfloat16
torch.manual_seed(0)
heads = (12, 2, 2)
q, k, v = (torch.randn(1, 1500, n, 64, device=device, dtype=half, requires_grad=True) for n in heads)
gates = torch.rand(1, 1500, 12, 3, device=device, dtype=half)

def run(backend):
    out = nsa_attention(q, k, v, gates, NSAConfig(), backend=backend)
    return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

made, found = [], {"problem": probe(sys.argv[1]).fingerprint.get("triton-problem")}
found["attention"] = route_of(lambda: made.extend(run("auto")))
found["same"] = all(torch.equal(a, b) for a, b in zip(made, run("chunked"), strict=True))
try:
    run("triton")
except BackendError as err:
    found["named"] = str(err)
model = NSATransformer(replace(PRESETS["m7c_125m"], layers=1, vocab_size=512)).to(device).train()
tokens = torch.randint(512, (2, 301), device=device)
compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
losses = []
for call in (model, compiled):
    with torch.autocast(device.type, half):
        found["training"] = route_of(lambda: losses.append(call(tokens[:, :-1], tokens[:, 1:])))
    losses[-1].backward()
found["losses"] = [loss.item() for loss in losses]
layer = model.blocks[0].attention.to(half)
x, cache = torch.randn(1, 1500, 768, device=device, dtype=half), layer.new_cache()
with torch.no_grad():
    layer(x, cache)
    found["step"] = route_of(lambda: layer(x[:, :1], cache))
found["kernels"] = [name for name in sys.modules if name.startswith("nsa_core.kernels.")]
print(json.dumps(found))
"""


def look(folder: Path, device: str) -> dict[str, Any]:
    info = folder / "triton-3.10.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-c", LOOK, device]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_untested_triton_leaves_a_card_to_the_chunked_backend(tmp_path: Path) -> None:
    found = look(tmp_path, "cuda")
    branches = ("cmp", "select", "slc", "win")
    assert found["attention"] == found["training"] == dict.fromkeys(branches, "chunked")
    assert found["step"] == {"cmp": "decode", "select": "chunked", "slc": "decode", "win": "decode"}
    assert found["same"]
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-2)
    assert "Triton 3.10.1 is untested, the kernels were run with 3.6 to 3.9" in found["problem"]
    assert found["problem"] in found["named"]
    assert not [name for name in found["kernels"] if "runtime" not in name], "no kernel is imported"
