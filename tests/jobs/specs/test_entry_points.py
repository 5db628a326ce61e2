"""Kinds and implementations of other distributions: found, run and hashed; broken ones are reported and harmless."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from travelling import CPU, HEADS, NSA, QUICK, quiet, travelled

from jobs.schema.axes import Axes, check_values
from jobs.schema.point import Machine
from jobs.specs.kinds import kind_module, kinds, offered_kinds
from jobs.specs.load import parse_spec
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig, available_backends, nsa_attention
from nsa_core.backends import chunked
from nsa_core.errors import BackendError
from orchestrator import provenance
from orchestrator.cli import doctor
from orchestrator.settings import Settings

KIND = """
from typing import Literal
from jobs.schema import point
from jobs.schema.axes import Axes, Axis
from jobs.schema.point import Measurement, Metric, Point
from jobs.schema.quantities import TIME
from jobs.specs.spec import JobSpec

QUANTITIES = (TIME,)

class Case(point.Case):
    number: int

class Spec(JobSpec):
    kind: Literal["acme"]
    number: int

    def points(self, machine):
        return [Point("acme", "one", Case(number=self.number), Axes(implementation="acme", device=machine.device))]

def measure(case, beat):
    beat("acme")
    return Measurement((Metric("time", "ms", float(case.number)),))
"""
IMPLEMENTATION = """
from nsa_core.backends.chunked import compressed, select, selected, window

def unavailable(device, dtype):
    return None if device.type == "cpu" else f"it runs on the cpu, not on {device.type}"
"""
SPEC = {"kind": "acme", "name": "t", "number": 3}
SCALING: dict[str, Any] = {"kind": "scaling", "name": "t", "implementations": ["acme-nsa"], "passes": ["forward"]}
SCALING |= {"lengths": [64], "shape": HEADS, "nsa": NSA, "timing": QUICK}
Install = Callable[..., Path]

BROKEN_KINDS = [
    # the module, the problem
    ("import nowhere", r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
    (KIND.replace("def measure", "def measured"), "lacks measure"),
    (KIND.replace("class Case(point.Case)", "class Case"), r"has a Case that is not a jobs\.schema\."),
    (KIND.replace("(TIME,)", '("time",)'), "cannot be used: QUANTITIES: 'time': is not a Quantity"),
    (KIND + 'AXES = (Axis("seq_len", "whole", "S"),)', ".* the name is taken"),
]


@pytest.mark.parametrize(("text", "problem"), BROKEN_KINDS, ids=[case[1][:40] for case in BROKEN_KINDS])
def test_a_broken_kind_is_reported_and_harmless(install: Install, text: str, problem: str) -> None:
    name = "acme"
    install("broken", {"kind": text}, jobs={name: "broken.kind"})
    good = KIND.replace("acme", "good")
    install("good", {"kind": good}, jobs={"good": "good.kind"})
    assert {each.name: bool(each.problem) for each in offered_kinds()} == {"acme": True, "good": False}
    with pytest.raises(SpecError, match=rf"^kind: '{name}', offered by broken 1\.2, {problem}.*; mend or"):
        parse_spec({**SPEC, "kind": name})
    assert {"good", "scaling"} <= set(kinds()) - {"acme"}
    findings = {finding.name: finding for finding in doctor.findings(Settings())}
    assert findings[f"kind {name}"].health is doctor.Health.BROKEN
    assert (findings["kind good"].health, findings["kind good"].detail) == (doctor.Health.OK, "good 1.2")


def test_an_implementation_from_outside_is_found_and_measured(install: Install) -> None:
    install("acme", {"nsa": IMPLEMENTATION}, implementations={"acme-nsa": "acme.nsa"})
    (point,) = parse_spec(SCALING).points(CPU)
    assert (point.axes.implementation, point.estimate_bytes) == ("acme-nsa", None)
    result = kind_module("scaling").measure(travelled(point), quiet)
    assert {metric.name for metric in result.metrics} >= {"time", "oracle_error"}
    cuda = Machine("cuda", "card", 8 * 2**30)
    with pytest.raises(SpecError, match=r"^implementations: 'acme-nsa': it runs on the cpu, not on cuda; use "):
        parse_spec(SCALING).points(cuda)
    findings = {finding.name: finding for finding in doctor.findings(Settings())}
    assert findings["implementation acme-nsa"].detail == "acme 1.2"


BROKEN_IMPLEMENTATIONS = [
    ("import nowhere", "acme-nsa", r"cannot be imported \(ModuleNotFoundError"),
    ("from nsa_core.backends.chunked import window, select", "acme-nsa", "lacks unavailable, compressed, selected"),
    (IMPLEMENTATION, "chunked", "has a name that nsa_core uses itself"),
    (IMPLEMENTATION, "nsa", "has a name that nsa_core uses itself"),
]


@pytest.mark.parametrize(("text", "name", "problem"), BROKEN_IMPLEMENTATIONS)
def test_a_broken_implementation_is_reported_and_harmless(install: Install, text: str, name: str, problem: str) -> None:
    install("broken", {"nsa": text}, implementations={name: "broken.nsa"})
    install("good", {"nsa": IMPLEMENTATION}, implementations={"good": "good.nsa"})
    (finding,) = (found for found in doctor.findings(Settings()) if found.name == f"implementation {name}")
    assert finding.health is doctor.Health.BROKEN
    assert finding.fix == "mend or uninstall broken"
    assert available_backends(torch.device("cpu"), torch.float32)["good"] is None
    x = torch.randn(1, 64, 2, 8)
    nsa_attention(x, x, x, torch.rand(1, 64, 2, 3), NSAConfig(**SCALING["nsa"]), backend="good")
    if name == "chunked":
        assert chunked.__name__ == "nsa_core.backends.chunked"
        return
    with pytest.raises(BackendError, match=rf"broken 1\.2 offers it, but {problem}.*; use one of auto, reference"):
        nsa_attention(x, x, x, torch.rand(1, 64, 2, 3), NSAConfig(**SCALING["nsa"]), backend=name)


def test_a_result_depends_on_the_sources_from_outside(install: Install) -> None:
    modules, groups = {"kind": KIND, "nsa": IMPLEMENTATION}, {"jobs": {"acme": "acme.kind"}}
    package = install("acme", modules, **groups, implementations={"acme-nsa": "acme.nsa"})
    kind, implementation = parse_spec(SPEC), parse_spec(SCALING)
    own = parse_spec({**SCALING, "implementations": ["chunked"]})
    before = provenance.code_hash()
    hashes = [provenance.code_hash(spec=spec) for spec in (kind, implementation, own)]
    assert hashes[2] == before
    assert hashes[0] == hashes[1] != before
    (package / "helper.py").write_text("x = 1\n")
    changed = [provenance.code_hash(spec=spec) for spec in (kind, implementation, own)]
    assert changed[0] != hashes[0]
    assert changed[1] != hashes[1]
    assert changed[2] == before


@pytest.mark.parametrize("axes", [Axes(batch=0), Axes(seq_len=2**63), Axes(layers=True), Axes(dtype="a\0b")])
def test_a_coordinate_that_no_database_keeps_is_refused_before_anything_is_measured(axes: Axes) -> None:
    check_values(Axes(implementation="naive", seq_len=2**63 - 1, batch=1), ())
    with pytest.raises(ValueError, match=r"^Axes\.\w+: .*: use "):
        check_values(axes, ())
