"""Mistakes in specs: each gives one line with field, value and fix, before anything runs."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from travelling import CPU

from jobs.schema.point import Machine
from jobs.specs.fit import ACTS_ON
from jobs.specs.kinds import kinds
from jobs.specs.load import load_spec, parse_spec
from jobs.specs.spec import SpecError
from nsa_core import NSAConfig, nsa_attention
from nsa_core.functional import BRANCHES
from nsa_core.routes import Branch

HEADS = {"query_heads": 4, "kv_heads": 2, "head_dim": 16}
SCALING = {"kind": "scaling", "name": "t", "implementations": ["chunked"], "lengths": [64], "shape": HEADS}
BENCH = {"kind": "bench", "name": "t", "implementations": ["chunked", "dense"], "shapes": [HEADS], "lengths": [64]}
DECODE = {**SCALING, "kind": "decode"}
TRAIN: dict[str, Any] = {"kind": "train", "name": "t", "seq_len": 32, "steps": 10, "optimizer": {"warmup_steps": 2}}
RANKS = TRAIN | {"device": "cpu", "ranks": 2, "batch": 8}
SOAK = TRAIN | {"kind": "soak", "minutes": 0.06, "piece_minutes": 0.03, "checkpoints": {"every": 5}}
TINY = {"name": "t", "preset": "tiny", "implementations": ["chunked"], "lengths": [32]}
PROFILE, ESTIMATE = {"kind": "profile"} | TINY, {"kind": "estimate"} | TINY
NEEDLE = {"kind": "needle"} | TINY | {"tokens": 64, "steps": 20, "needles": 1, "alphabet": 8}
TOOLCHAIN = {"kind": "toolchain"} | TINY
CASE: dict[str, Any] = {"preset": "tiny", "lengths": [32]}
BACKWARD = {"kind": "backward", "name": "t", "implementations": ["chunked"], "cases": [CASE]}
OWN = {"layers": 3, "dim": 48, "heads": 6, "kv_heads": 2, "nsa": {"window": 64}}
OWN_CASE = {"model": OWN | {"vocab_size": 256}, "lengths": [16]}
LEARNED = {"model": OWN | {"vocab_size": 256, "nsa": {"compress": "mlp"}}, "lengths": [16]}
MODEL_SHAPE = {**HEADS, "layers": 1, "ffn_dim": 32, "vocab_size": 64}
FORCED = {"workload": "model", "shape": MODEL_SHAPE, "implementations": ["dense-sdpa-flash"]}
PLAN = {"steps": 50_000, "tokens_per_step": 4096, "hours": 24, "tokens_per_second": 50}

MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    # spec, overrides, the line expected
    (SCALING, {"kind": "scalling"}, r"kind: 'scalling' .*use one of .*scaling"),
    (SCALING, {"kind": "backends"}, r"kind: 'backends' is no job kind; use kind: branches with 'backends: "),
    (SCALING, {"lenghts": [1]}, r"lenghts: unknown key \(value \[1\]\); .*spelling"),
    (SCALING, {"lengths": [64, -5]}, r"lengths\.1: -5: .*greater than or equal to 1"),
    (SCALING, {"lengths": ["256"]}, r"lengths\.0: '256': .*integer; write a whole number in digits"),
    (SCALING, {"name": "my run"}, r"name: 'my run': .*; begin with a letter or digit"),
    (SCALING, {"resources": {"num_gpus": 1.5}}, r"resources\.num_gpus: 1\.5: .*whole number; use 1, or a fraction"),
    (SCALING, {"lengths": [64, 128, 64]}, r"lengths: \[64, 128, 64\]: 64 appears more than once; name each once"),
    (SCALING, {"implementations": ["flash9"]}, r"implementations: \['flash9'\]: 'flash9' .*use .*chunked.*dense"),
    (SCALING, {"nsa": {"windw": 8}}, r"nsa\.windw: unknown key \(value 8\); use .*window"),
    (SCALING, {"shape": None}, r"preset: missing; use one of tiny, m7c_125m, small_128, or give a model, or a shape"),
    (SCALING, {"shape": None, "preset": "huge"}, r"preset: 'huge': .*use one of tiny, m7c_125m"),
    (SCALING, {"shape": MODEL_SHAPE}, r"shape\.\w+: \d+: has no meaning for workload attention; remove it"),
    (SCALING, {"workload": "model"}, r"shape\.layers: missing; workload model needs it"),
    (SCALING, FORCED, r"implementations: 'dense-sdpa-flash': is for workload attention alone; use dense"),
    (SCALING, {"env": {"A B": "1"}}, r"env\.A B: 'A B': is no name of a variable; use letters"),
    (SCALING, {"env": [{}, {"TMPDIR": "/x"}]}, r"env\.1\.TMPDIR: 'TMPDIR': is set for each point by .*; remove it"),
    (SCALING, {"env": {"CUDA_LAUNCH_BLOCKING": 1}}, r"env\.CUDA_LAUNCH_BLOCKING: 1: .*; write a text, in quotes"),
    (SCALING, {"env": {"TORCH_LOGS": "x" * 390}}, r"env: .*has 401 characters; use at most 400 in all"),
    (SCALING, {"python": "bin/python"}, r"python: 'bin/python': is not an absolute path; give"),
    (BENCH, {"lengths": [96]}, r"lengths: 96: use a divisor of tokens = 32768, or a length beyond it"),
    (BENCH, {"lengths": [1], "tokens": 2**21}, r"tokens: 2097152: use at most 1048576, 1,048,576 sequences of 1$"),
    (DECODE, {"nsa": {"compress": "mlp"}}, r"nsa\.compress: 'mlp': is learned by a layer; use mean, or workload"),
    (DECODE, {"workload": "model"}, r"shape: is of attention alone; give a preset or a model"),
    (TRAIN, {"plan": PLAN}, r"plan\.tokens_per_second: 50 contradicts 50,000 steps of 4,096 .*2,370 tok/s.*set .*2371"),
    (TRAIN, {"optimizer": {"warmup_steps": 10}}, r"optimizer\.warmup_steps: 10: .*use at most 9"),
    (TRAIN, {"restarts": 1}, r"restarts: 1: there is no checkpoint to restart from; add 'checkpoints: {every: N}', or"),
    (TRAIN, {"checkpoints": {"every": 13}}, r"checkpoints\.every: 13: is more than the 10 steps; use fewer"),
    (TRAIN, {"backend": "warp"}, r"backend: 'warp': there is no such backend; use .*chunked"),
    (TRAIN, {"model": OWN | {"kv_head": 2}}, r"model\.kv_head: unknown key \(value 2\); use layers, dim, heads"),
    (TRAIN, {"model": OWN | {"heads": 5}}, r"model\.head_dim: missing; dim 48 is no multiple of heads 5"),
    (TRAIN, {"model": OWN | {"kv_heads": 4}}, r"model\.kv_heads: 4: use a divisor of "),
    (TRAIN, {"model": OWN | {"vocab_size": 99}}, r"model\.vocab_size: 99: the text has 256 tokens; use so many"),
    (TRAIN, {"model": OWN, "preset": "tiny"}, r"preset: model is given as well; keep one of the two"),
    (TRAIN, {"model": OWN, "nsa": {"window": 32}}, r"nsa: model has its own; keep one of the two"),
    (TRAIN, {"model": OWN, "attention": ["dense"]}, r"model\.nsa\.window: 64: changes nothing of dense attention"),
    (TRAIN, {"data": {"dataset": "a/b"}}, r"data\.dataset: 'a/b': needs a tokenizer; add 'tokenizer: gpt2' or a tok"),
    (TRAIN, {"data": {"tokenizer": "gpt2"}}, r"data\.tokenizer: 'gpt2': there are no documents; add a dataset, or"),
    (TRAIN, {"data": {"path": "x", "text_field": "b"}}, r"data\.text_field: 'b': has no effect without a tokenizer"),
    (TRAIN, {"data": {"path": "x", "tokenizer_path": "y"}}, r"data\.tokenizer_path: 'y': y cannot be read here"),
    (RANKS, {"batch": 3, "micro_batch": 2}, r"batch: 3: is not micro_batch 2 × ranks 2 × accumulation; use 4"),
    (RANKS, {"device": "auto"}, r"device: 'auto': 2 ranks need GPUs or none; use cuda or cpu"),
    (
        *(RANKS, {"device": "cuda", "compile": True, "cuda_graphs": True, "micro_batch": 1}),
        r"cuda_graphs: true: a step's 4 passes would overwrite each other's gradients; use micro_batch 4, or leave it",
    ),
    (RANKS, {"parallel": "replicate", "bucket_mb": 10}, r"bucket_mb: 10: replicate has no buckets; .*parallel: ddp"),
    (RANKS, {"ranks": 4, "context_parallel": 3}, r"context_parallel: 3: use a divisor of the 4 ranks, and .* of 6"),
    (RANKS, {"context_parallel": 2, "compile": True}, r"compile: true: ranks that exchange keys within a pass cannot"),
    (SOAK, {"piece_minutes": 0.5}, r"piece_minutes: 0\.5: is more than the 0\.06 minutes; use fewer"),
    (SOAK, {"alert_gb": 70}, r"alert_gb: 70: is above limit_gb 65, which ends the point; exchange them"),
    (SOAK, {"deadlines": {"point_s": 1}}, r"deadlines\.point_s: 1: would end 0\.06 minutes .*, which are 3\.6 s"),
    (NEEDLE, {"needles": 9}, r"needles: 9: each needs a key of its own; use at most alphabet = 8"),
    (NEEDLE, {"needles": 9, "alphabet": 9}, r"lengths: 32: has no room for 9 needles"),
    (NEEDLE, {"tokens": 500}, r"tokens: 500: is no multiple of the length 32; use 512"),
    (NEEDLE, {"preset": None, "model": OWN, "layers": 2}, r"layers: 2: model has its own; leave it out, or set model"),
    (NEEDLE, {"preset": None, "model": OWN | {"vocab_size": 99}}, r"model\.vocab_size: 99: has no effect"),
    (
        PROFILE,
        {"checkpointing": True, "passes": ["forward"]},
        r"checkpointing: True: changes nothing of a forward pass; leave it out",
    ),
    (ESTIMATE, {"preset": None}, r"preset: missing; use one of .*, or give a model"),
    (
        *(ESTIMATE, {"preset": None, "model": OWN}),
        r"model\.vocab_size: missing: there is no text to tell it; give it, 256 for bytes",
    ),
    (TOOLCHAIN, {}, r"env: one toolchain has nothing to compare with; name two"),
    (TOOLCHAIN, {"python": ["/b/python", None]}, r"python: null, .*, must be the first; put it first$"),
    (
        BACKWARD,
        {"cases": [CASE, CASE]},
        r"cases: 'all tiny \d+ layers S=32' appears more than once; leave it out",
    ),
    (BACKWARD, {"bisect": {}, "timing": {"warmup": 9}}, r"timing: a search times nothing; leave it out"),
    (
        *(BACKWARD, {"cases": [CASE | {"branches": ["slc"]}], "nsa": {"compress": "mlp"}}),
        r"nsa\.compress: 'mlp': the selected branch alone does not train it",
    ),
    (BACKWARD, {"cases": [OWN_CASE], "nsa": {"window": 32}}, r"nsa: cases\.0\.model\.nsa is given as well; keep one"),
    (
        *(BACKWARD, {"cases": [OWN_CASE | {"branches": ["cmp"]}]}),
        r"cases\.0\.model\.nsa\.window: 64: changes nothing of branch",
    ),
    (BACKWARD, {"cases": [LEARNED]}, r"cases\.0\.lengths: 16: leaves a .* cases\.0\.model\.nsa\.cmp_block = 32"),
    ({"name": "t"}, {}, r"kind: missing; begin the spec with 'kind: ' and one of backward, bench, .*toolchain, train"),
]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _load(tmp_path: Path, data: dict[str, Any], *overrides: str) -> Any:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.dump(data, Dumper=_Dumper, sort_keys=False))
    return load_spec(file, overrides)


@pytest.mark.parametrize(("spec", "change", "line"), MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_a_mistake_is_one_line_with_field_value_and_fix(
    tmp_path: Path, spec: dict[str, Any], change: dict[str, Any], line: str
) -> None:
    with pytest.raises(SpecError) as caught:
        _load(tmp_path, {**spec, **change}).all_points({None: CPU})
    assert "\n" not in str(caught.value)
    assert caught.match(f"^{line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: a\nname: b", r"name: given twice, in lines 2 and 3; keep one of the two"),
        ("shape: {head_dim: 8, head_dim: 8}", r"head_dim: given twice, in lines 2 and 2; keep one of the two"),
        ("tokens: 0512", r"0512: YAML reads 330 in line 2; write it in decimal digits, or a text in quotes"),
        ("minutes: 1:30", r"1:30: YAML reads 90 in line 2; write it in decimal digits, or a text in quotes"),
        (f"seed: {'9' * 5000}", r"spec: .* is not YAML \(.*\); mend its syntax"),
        ("seed: 2001-02-30", r"spec: .* is not YAML \(day is out of range for month\); mend its syntax"),
    ],
    ids=["twice", "twice-in-a-line", "octal", "base 60", "digits", "date"],
)
def test_what_is_not_read_is_told_in_a_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"kind: scaling\n{text}\n")
    with pytest.raises(SpecError, match=f"^{line}$") as caught:
        load_spec(file)
    assert len(str(caught.value)) < 1_000


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_a_spec_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.yaml")
    with pytest.raises(
        SpecError, match=r"^spec: '.*x\.yaml' cannot be read \(is not a regular file\); give the path of a YAML file$"
    ):
        load_spec(tmp_path / "x.yaml")


def test_overrides_reach_into_sections_and_may_have_an_exponent_without_a_dot(tmp_path: Path) -> None:
    assert _load(tmp_path, TRAIN, "optimizer.learning_rate=1e-3").optimizer.learning_rate == 1e-3
    with pytest.raises(SpecError, match=r"^steps: 1e\+30: .*write a whole number in digits"):
        _load(tmp_path, TRAIN, "steps=1e30")
    with pytest.raises(SpecError, match=r"^0100: YAML reads 64 .*write it in decimal digits"):
        _load(tmp_path, TRAIN, "steps=0100")


H200 = {"torch": "2.11", "triton": "3.6", "capability": "9.0"}
KERNELS = [
    # implementation, dtype, head dim, the host's fingerprint, the mistake (None: none)
    ("dense-sdpa-cudnn", "bfloat16", 128, H200, None),
    ("dense-flash-attn-4", "bfloat16", 128, H200 | {"flash-attn-4": "4.0"}, None),
    ("dense-flash-attn-4", "bfloat16", 128, H200, "not installed on .*: pip install flash-attn-4; use .*dense, dense-"),
    ("dense-flash-attn-4", "bfloat16", 128, H200 | {"capability": "8.0", "flash-attn-4": "4"}, r"this one has 8\.0"),
    ("dense-torch-varlen", "bfloat16", 512, H200, "head dims up to 256 there, not 512"),
    ("dense-flash-attn-4", "bfloat16", 128, {}, None),  # no fingerprint of the host
    ("triton", "float32", 192, H200, None),
    ("triton", "float32", 192, H200 | {"capability": "8.0"}, r"its tiles hold head dims up to 128 there, not"),
    ("triton", "bfloat16", 512, H200, r"its tiles hold head dims up to 256 there, not \d+; use .*chunked"),
]


@pytest.mark.parametrize(("implementation", "dtype", "dim", "fingerprint", "mistake"), KERNELS)
def test_kernels_are_looked_for_where_the_points_will_run(
    tmp_path: Path, implementation: str, dtype: str, dim: int, fingerprint: dict[str, str], mistake: str | None
) -> None:
    shape = {"query_heads": 4, "kv_heads": 2, "head_dim": dim}
    spec = _load(tmp_path, {**SCALING, "implementations": [implementation], "shape": shape, "dtype": dtype})
    machine = Machine("cuda", "NVIDIA card", 140 * 2**30, fingerprint)
    if mistake is None:
        assert {point.axes.implementation for point in spec.points(machine)} == {implementation}
    else:
        with pytest.raises(SpecError, match=rf"^implementations: '{implementation}': .*{mistake}"):
            spec.points(machine)
    with pytest.raises(SpecError, match=r"it (runs on cuda|needs a GPU), .*; use .*chunked.*dense, dense-sdpa-flash$"):
        spec.points(CPU)


def test_a_kind_that_cannot_be_imported_stops_only_its_own_specs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jobs.train", None)  # its import raises ImportError
    assert _load(tmp_path, SCALING).kind == "scaling"
    with pytest.raises(ImportError, match=r"jobs\.train"):
        _load(tmp_path, TRAIN)


CONFIGS = Path(__file__).parents[3] / "jobs" / "configs"
READY = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yaml"))]
WITH_NSA = [name for name, module in kinds().items() if "nsa" in module.Spec.model_fields]
SMALL = NSAConfig(8, 4, 16, slc_count=4, window=16)
OTHER = {"cmp_block": 4, "cmp_stride": 8, "slc_block": 8, "slc_count": 5, "init_blocks": 0, "local_blocks": 1}


def _attend(branch: Branch, config: NSAConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 128, heads, 8, generator=generator) for heads in (2, 1, 1))
    return nsa_attention(q, k, v, torch.ones(1, 128, 2, 3), config, backend="naive", branches=(branch,))


@pytest.mark.parametrize("branch", BRANCHES)
def test_the_table_is_what_the_operator_does(branch: Branch) -> None:
    whole = _attend(branch, SMALL)
    changed = {
        name: not torch.equal(whole, _attend(branch, replace(SMALL, **{name: value})))
        for name, value in (OTHER | {"window": 8}).items()
    }
    assert changed == {name: branch in ACTS_ON[name] for name in changed}
    assert set(ACTS_ON) == {field.name for field in fields(NSAConfig)} == {*changed, "compress", "slots"}


def _refused(data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", WITH_NSA)
def test_every_kind_refuses_what_its_points_lack(kind: str) -> None:
    """As slots on a CPU, and anything of dense attention."""
    base = next(data for data in READY if data["kind"] == kind) | {"device": "cpu", "nsa": {"slots": "exact"}}
    base.pop("cuda_graphs", None)  # which a CPU has not
    named = next(key for key in ("implementations", "backends", "attention") if key in kinds()[kind].Spec.model_fields)
    packed = "a decoding step has none" if kind == "decode" else "only Triton's kernels pack them"
    base[named] = ["nsa"] if named == "attention" else ["chunked"]
    assert _refused(base).startswith(f"nsa.slots: 'exact': {packed}")
    if kind in ("branches", "backward"):  # of NSA alone
        return
    dense = {named: ["dense"], "nsa": {"window": 32}} | ({"peers": ["dense-pytorch"]} if kind == "peers" else {})
    assert _refused(base | dense).startswith("nsa.window: 32: changes nothing of dense attention; leave it out, or add")


@pytest.mark.parametrize(
    ("backends", "branches", "nsa", "message"),
    [
        (
            *(["chunked"], ["win"], {"slc_count": 4, "slots": "exact"}),
            "nsa.slc_count: 4: changes nothing of branch win; leave it out, slots as well, or measure slc or all, too",
        ),
        (["flash"], ["win", "cmp"], {"cmp_block": 16}, "nsa.cmp_block: 16: changes nothing of branch win; "),
        (["naive"], ["slc"], {"window": 32}, "nsa.window: 32: changes nothing of branch slc; leave it out, or measure"),
        (["naive"], ["cmp"], {"cmp_block": 128, "slc_block": 128}, None),  # which must not be shorter
        (["naive"], ["win"], {"cmp_block": 24, "cmp_stride": 12, "slc_block": 24}, "nsa.cmp_block: 24: changes"),
        (["naive", "triton"], ["slc"], {"slots": "exact"}, None),
    ],
)
def test_a_field_must_act_on_a_branch(
    backends: list[str], branches: list[str], nsa: dict[str, Any], message: str | None
) -> None:
    shape = {"query_heads": 4, "kv_heads": 2, "head_dim": 16}
    data = {"kind": "branches", "name": "t", "backends": backends, "branches": branches, "shape": shape, "nsa": nsa}
    data |= {"lengths": [64], "dtype": "bfloat16"}
    if message is None:
        parse_spec(data)
    else:
        assert _refused(data).startswith(message)
