"""Reports what is chosen on a GPU by the Triton that this process finds, and how that is explained."""

import json
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jobs.schema.point import Machine
from jobs.specs.fit import backend_reasons
from nsa_core import available_backends
from nsa_core.backends import default, resolve
from nsa_core.backends.triton import Heads, triton_version
from nsa_core.errors import BackendError
from nsa_core.memory import predicts
from nsa_core.projections import in_compiled_training
from orchestrator.cli import doctor

CUDA, HALF = torch.device("cuda"), torch.bfloat16


def look() -> dict[str, Any]:
    """Answers by who was asked."""
    found: dict[str, Any] = {"auto": default(CUDA, HALF), "reason": available_backends(CUDA, HALF)["triton"]}
    found["predicts"] = predicts("triton")
    try:
        resolve("triton", ("cmp", "slc", "win", "select"), CUDA, HALF)
    except BackendError as err:
        found["named"] = str(err)
    with patch("torch.compiler.is_compiling", lambda: True), FakeTensorMode():
        found["fused training"] = in_compiled_training(torch.empty(4, 4, dtype=HALF, device=CUDA))
    machine = Machine("cuda", "A100", 80 * 2**30, {"capability": "8.0", "triton": triton_version() or ""})
    found["job"] = backend_reasons(machine, HALF, Heads(64, 2))["triton"]
    triton = doctor._triton()
    return found | {"doctor": [str(triton.health), triton.detail]}


if __name__ == "__main__":
    print(json.dumps(look()))
