"""The instruments: clock, memory, statistics, environment; and what importing and probing them costs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch

from jobs.hardware import machine
from jobs.hardware.environment import environment
from jobs.hardware.machine import probe
from jobs.hardware.stats import summarize
from jobs.measure import clock
from jobs.measure.clock import TimingSpec, measure_time
from jobs.measure.memory import graph_memory, measure_peak, tensor_bytes
from jobs.schema.quantities import TIME
from jobs.training.live import training_flops_per_token, visited_keys
from nsa_core import NSAConfig
from nsa_core.backends.triton import triton_version
from nsa_core.model import ModelConfig

CPU = torch.device("cpu")


def test_a_summary_has_median_samples_percentiles_and_interval() -> None:
    samples = (5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 9.0, 8.0)
    metric = summarize(TIME, samples, "test")
    assert (metric.value, metric.samples) == (5.0, samples)
    assert (metric.p10, metric.p90) == pytest.approx((1.8, 8.2))
    assert metric.ci_low is not None
    assert metric.ci_high is not None
    assert 1 < metric.ci_low < 5 < metric.ci_high < 9


def test_the_clock_warms_up_until_three_runs_are_alike_and_samples_for_as_long_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, now = iter([90, 20, 10, 11.4, 10.5, 10.4, *[10] * 9]), 0.0

    def call() -> None:
        nonlocal now
        now += next(runs) / 1000

    monkeypatch.setattr(clock, "perf_counter", lambda: now)
    beats: list[tuple[object, ...]] = []
    plan = TimingSpec(repeats=2, min_s=0.045, max_s=10, warmup=9)
    timing = measure_time(call, CPU, plan, lambda *beat: beats.append(beat))
    assert timing.samples_ms == pytest.approx([10] * 5)
    assert beats[-6:] == [*(("time", done, 2) for done in range(5)), ("timed", 50)]
    assert timing.method == "performance counter; 6 warm-up runs (steady), 5 samples"


class _SlowEvent:
    """As torch.cuda.Event, by a clock that tells a tenth of the time."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = clock.perf_counter()

    def elapsed_time(self, end: Self) -> float:
        return 1000 * (end.at - self.at) / 10


def test_the_events_that_time_calls_also_time_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now, beats = 0.0, []

    def call() -> None:
        nonlocal now
        now += 0.1

    monkeypatch.setattr(clock, "perf_counter", lambda: now)
    monkeypatch.setattr(clock, "l2_filler", lambda device: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "Event", _SlowEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    plan = TimingSpec(repeats=4, min_s=0, max_s=10, warmup=1)
    timing = measure_time(call, torch.device("cuda"), plan, lambda *beat: beats.append(beat), before=call)
    assert timing.samples_ms == pytest.approx([10] * 4)
    assert beats[-1] == ("timed", pytest.approx(80, abs=1))  # of 800 that passed


@pytest.mark.parametrize(("busy", "tries", "milliseconds"), [(0, 1, 3000), (1, 2, 3000), (9, 3, 2000)])
def test_calls_in_a_row_are_timed_again_where_others_code_might_slow_the_clock_of_samples(
    monkeypatch: pytest.MonkeyPatch, busy: int, tries: int, milliseconds: float
) -> None:
    """In `busy` of the tries a call between the samples takes 10 ms, and one in a row 50."""
    now, phases = 0.0, ["none"]

    def call() -> None:
        nonlocal now
        now += 0.05 if phases[-1] == "repeat" and phases.count("repeat") <= busy else 0.01

    def beat(phase: str, done: int = 0, total: int = 0) -> None:
        phases.extend([phase] if phase != phases[-1] else [])
        claimed.append(done)

    claimed: list[int] = []
    plugin = SimpleNamespace(module=__name__)
    monkeypatch.setattr(clock, "entry_points", lambda group: [plugin] if group.endswith(".peers") else [])
    monkeypatch.setattr(clock, "perf_counter", lambda: now)
    timing = measure_time(call, CPU, TimingSpec(repeats=2, min_s=0, warmup=1), beat)
    assert timing.samples_ms == pytest.approx([10, 10])
    assert phases[1:] == ["warm-up", "time", "timed", "repeat", "timed"] * tries + ["repeated"]
    assert claimed[-1] == pytest.approx(milliseconds, abs=11)


def test_peak_memory_is_exact_and_counts_neither_inputs_nor_what_was_freed_before_the_peak() -> None:
    x = torch.ones(2**18)  # 1 MiB, resident

    def call() -> torch.Tensor:
        first = x + 1  # 1 MiB
        both = torch.cat((first, first))  # 3 MiB at the peak
        del first
        return both[:1] + x  # 2 MiB + 1 MiB

    peak = measure_peak(call, CPU, tensor_bytes([x]))
    assert peak.extra == 3 * 2**20
    assert peak.allocated == 4 * 2**20
    assert {m.name: m.value for m in peak.metrics()}["peak_extra_memory"] == 3.0


def test_memory_of_cuda_graphs_is_that_of_their_pools_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "device", "segment_pool_id", "total_size", "allocated_size"
    pools = (1, (0, 3), 100, 30), (1, (0, 3), 20, 0), (1, (0, 0), 1000, 1), (0, (0, 3), 5000, 2)
    segments = [dict(zip(keys, pool, strict=True)) for pool in pools]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert graph_memory(torch.device("cuda", 1)) == (120, 90)


def test_the_machine_is_probed_and_a_missing_gpu_named() -> None:
    found = probe("cpu")
    assert found.device == "cpu"
    assert found.memory_bytes > 2**28
    assert found.fingerprint["torch"] == torch.__version__
    assert found.fingerprint.get("triton") == triton_version()
    if not torch.cuda.is_available():
        assert probe("auto").device == "cpu"
        with pytest.raises(ValueError, match="device: 'cuda': no CUDA device is visible here; use device: cpu"):
            probe("cuda")


@pytest.mark.parametrize(
    ("limit", "usage", "cached"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_control_groups_limit_counts_and_its_cached_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str, cached: str
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    without = machine.host_memory()
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / usage).write_text("900\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 100\n{cached} 700\nactive_file 100\n")
    assert machine.host_memory() == 800 < without
    (tmp_path / limit).write_text("max\n")
    assert machine.host_memory() > 2**20


def test_the_environment_records_settings_and_withholds_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NSA_DATABASE_URL", "postgresql://user:hunter2@host/db")
    found = environment(CPU)
    assert found["variables"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert found["packages"]["torch"].startswith("2.")
    assert found["arithmetic"]["matmul.fp32_precision"] == torch.backends.cuda.matmul.fp32_precision
    assert found["arithmetic"]["deterministic_algorithms"] is False
    assert "hunter2" not in str(found)


def test_flops_follow_the_weights_and_the_keys_that_are_visited() -> None:
    shape = {"vocab_size": 100, "dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn_dim": 16}
    dense = ModelConfig(**shape, attention="dense")
    assert visited_keys(dense, 9) == 5
    weights = 8 * (8 + 8 + 4 + 4) + 3 * 8 * 16 + 100 * 8
    assert training_flops_per_token(dense, 9) == 6 * weights + 12 * 8 * 5
    small = NSAConfig(cmp_block=4, cmp_stride=4, slc_block=4, slc_count=3, window=2)
    # Position t of 0..7 sees (t+1)//4 compressed tokens, all t+1 <= 12 selected ones and at most 2 of the window.
    assert visited_keys(ModelConfig(**shape, nsa=small), 8) == pytest.approx((6 + 36 + 15) / 8)
    # With two blocks, positions 8..11 see one whole block and 1..4 tokens of their own.
    fewer = NSAConfig(cmp_block=4, cmp_stride=4, slc_block=4, slc_count=2, init_blocks=0, local_blocks=1, window=1)
    selected = 36 + (5 + 6 + 7 + 8)
    assert visited_keys(ModelConfig(**shape, nsa=fewer), 12) == pytest.approx((15 + selected + 12) / 12)


IMPORTS = """
import sys
from jobs.hardware.machine import probe
print(probe("cpu").fingerprint["torch"], "torch" in sys.modules)
from jobs.specs.kinds import kinds
assert {"scaling", "train", "drill"} <= set(kinds())
import jobs.hardware.telemetry, jobs.hardware.machine
print([name for name in ("ray", "sqlalchemy", "streamlit", "orchestrator", "dashboard") if name in sys.modules])
import orchestrator.judge.analysis, orchestrator.judge.branches
long = ("scipy", "sympy", "torch.distributed.checkpoint", "torch.distributed.fsdp")
print([name for name in long if name in sys.modules])
"""


def test_jobs_import_none_of_the_packages_above_them_nor_what_few_runs_need() -> None:
    """Nor does the probe of a CPU import PyTorch."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{torch.__version__} False", "[]", "[]"]
