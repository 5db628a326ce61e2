"""GPU telemetry, and whether the installed PyTorch fits the driver, with stand-ins for it."""

import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from processes import wait_for

from jobs.hardware import driver as driver_module
from jobs.hardware import energy as energy_module
from jobs.hardware import nvml
from jobs.hardware.driver import Driver, misfit
from jobs.hardware.energy import Energy, EnergyMeter
from jobs.hardware.telemetry import GpuSampler, ProcessUsage, Sample, Telemetry, summarise_samples
from jobs.schema.quantities import (
    CPU_UTILIZATION,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_SM_CLOCK,
    GPU_UTILIZATION,
    RESIDENT_MEMORY,
)
from jobs.training.metrics import energy_per_token
from orchestrator.cli import doctor
from orchestrator.settings import Settings


def _refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver of one GPU at 80 %, power-capped, that does not report a temperature."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: f"handle{index}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle of {uuid}",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-1234{handle}",
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=80),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**30, total=80 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda _: 350_000,
        "nvmlDeviceGetClockInfo": lambda *_: 1755,
        "nvmlDeviceGetTemperature": _refuse,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=7), SimpleNamespace(pid=3)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.mark.parametrize(
    ("gpu", "limit", "throttled"),
    [
        ("0", None, 100),
        ("GPU-1234h", 500_000, 100),
        ("GPU-12345678-1234-1234-1234-123456789abc", 700_000, 0),  # its own limit
        ("MIG-1", None, 100),
    ],
)
def test_samples_become_metrics_with_units_and_a_text(
    driver: None, monkeypatch: pytest.MonkeyPatch, gpu: str, limit: int | None, throttled: float
) -> None:
    if limit:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementLimit", lambda _: limit)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", lambda _: 700_000)
    telemetry = Telemetry([gpu], period_s=0.01)
    telemetry.start()
    wait_for(lambda: len(telemetry.samples) >= 2, 20)
    summary = telemetry.stop()
    found = {metric.name: metric for metric in summary.metrics}
    assert (found["gpu_utilization"].value, found["gpu_utilization"].unit) == (80, "%")
    assert found["gpu_memory_used"].value == 3 * 1024
    assert found["gpu_power"].value == 350
    assert found["gpu_throttled"].value == throttled
    assert found["gpu_processes"].value == 2
    assert "gpu_temperature" not in found, "what the driver does not tell is no number"
    assert len(found["gpu_utilization"].samples) >= 2
    assert "software power cap" in summary.text
    assert "3 7" in summary.text


def test_without_a_gpu_or_a_driver_the_reason_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Telemetry([])
    idle.start()
    assert idle.stop().metrics == ()
    assert "uses no GPU" in idle.stop().text

    monkeypatch.setattr(pynvml, "nvmlInit", _refuse)
    blind = Telemetry(["0"])
    blind.start()
    summary = blind.stop()
    assert summary.metrics == ()
    assert "NVML is not available" in summary.text
    with pytest.raises(nvml.NvmlError, match="not available"):
        nvml.describe("0")


def test_readings_are_what_happened_since_the_last_one_by_rank(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    power = {"handle0": iter([100_000, 300_000] + [200_000] * 1000), "handle1": iter([50_000] * 1000)}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: next(power[handle]))
    telemetry = Telemetry(["0", "1"], period_s=0.1)
    assert telemetry.readings() == []
    telemetry.start()
    wait_for(lambda: len(telemetry.samples) >= 4, 20)  # two of each, whose mean is that of more
    first = telemetry.readings()
    telemetry.stop()
    last = telemetry.readings()
    assert [reading.rank for reading in first] == [0, 1]
    expected = {GPU_UTILIZATION: 80, GPU_POWER: 200, GPU_SM_CLOCK: 1755, GPU_MEMORY_USED: 3 * 1024}
    assert first[0].values == {quantity.name: value for quantity, value in expected.items()}
    assert first[0].units == {quantity.name: quantity.unit for quantity in expected}
    assert first[1].values[GPU_POWER.name] == 50
    assert all(reading.step > first[0].step for reading in last)
    assert telemetry.readings() == []


def test_energy_is_the_integral_of_the_power_of_all_gpus(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watts = {"handle0": iter([100, 300]), "handle1": iter([50, None, 50])}

    def power(handle: str) -> int:
        told = next(watts[handle])
        return _refuse() if told is None else 1000 * told

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", power)
    first, second = GpuSampler("0"), GpuSampler("1")
    samples = [first.sample(0, 7), second.sample(0, 7)]
    assert "gpu_energy" not in {metric.name for metric in summarise_samples(samples).metrics}
    samples += [first.sample(1, 9), second.sample(1, 9), second.sample(2, 11)]
    summary = summarise_samples(samples)
    [found] = [metric for metric in summary.metrics if metric.name == "gpu_energy"]
    assert (found.value, found.unit) == (400 + 200, "J")
    assert "GPU 0: 2 samples over 2.0 s" in summary.text
    assert "GPU 1: 3 samples over 4.0 s" in summary.text


def test_the_meter_sums_stretches_of_work_and_leaves_out_what_is_between(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([1_000, 5_000, 900_000, 906_000])  # mJ; between the stretches the card goes on
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda _: next(readings), raising=False)
    meter = EnergyMeter("0")
    meter.stop(7)
    for work in (10, 30):
        meter.start()
        meter.stop(work)
    assert meter.energy is None, "too short to tell"
    monkeypatch.setattr(energy_module, "LEAST_S", 0)
    assert (found := meter.energy) is not None
    assert (found.joules, found.work) == (4 + 6, 40)


def test_usage_of_a_process_tree_counts_its_children() -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = psutil.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: len(child.children()) == 1, 30)
        [busy] = child.children()
        usage, before = ProcessUsage([child.pid], cores=2), busy.cpu_times().user
        wait_for(lambda: busy.cpu_times().user > before + 0.5, 60)
        [whole] = usage.readings()
        assert 0 < whole.values[CPU_UTILIZATION.name] < 55, "one of two cores, and a little of the parent"
        assert 5 < whole.values[RESIDENT_MEMORY.name] < 500
        usage.follow([child.pid, busy.pid])
        time.sleep(0.3)
        both, one = usage.readings()
        assert [(r.rank, r.step) for r in (whole, both, one)] == [(0, 1), (0, 2), (1, 2)]
        assert both.values[RESIDENT_MEMORY.name] > one.values[RESIDENT_MEMORY.name] > 0
    finally:
        for process in [*child.children(), child]:
            process.kill()
    time.sleep(0.3)  # else too soon to tell
    wait_for(lambda: usage.readings() == [], 30, pause=0.5)  # ended, and not reaped yet
    child.wait()


def test_kept_samples_are_those_of_all_gpus_and_even_in_time() -> None:
    """A long point is sampled less often towards its end, and looks at two cards alternate."""
    looks = [(n, 0.2, 90.0) for n in range(2000)] + [(2000 + n, 2.0, 10.0) for n in range(600)]
    samples = [Sample(gpu, n, s, {GPU_UTILIZATION: use - int(gpu)}) for n, s, use in looks for gpu in ("0", "1")]
    [found] = [metric for metric in summarise_samples(samples).metrics if metric.name == "gpu_utilization"]
    assert len(found.samples) == 1000
    assert found.value == 10, "busy for 400 s of 1,600"
    assert {found.samples.count(value) // 25 for value in (90.0, 89.0)} <= {4, 5}
    assert {found.samples.count(value) // 25 for value in (10.0, 9.0)} <= {14, 15}


def test_energy_per_token_is_that_of_all_ranks_or_none() -> None:
    one, other = Energy(100.0, 50, 3.0), Energy(200.0, 50, 3.0)
    [found] = energy_per_token([one, other])
    assert (found.value, found.samples, found.unit) == (6.0, (2.0, 4.0), "J/tok")
    assert energy_per_token([one, None]) == []
    assert energy_per_token([None]) == []


A100_HOST, CARD, ANCIENT = Driver("535.183.01", "12.2"), Driver("580.159.04", "13.0"), Driver("470.82.01", "11.4")


@pytest.mark.parametrize(
    ("pytorch", "cuda", "host", "fix"),
    [
        ("2.11.0+cu128", "12.8", A100_HOST, None),  # any minor version
        ("2.13.0+cu132", "13.2", CARD, None),
        ("2.13.0+cpu", None, None, None),
        ("2.11.0+cu130", "13.0", A100_HOST, "build cu126 .*; or update the driver to 580 or newer$"),
        ("2.13.0+cpu", None, A100_HOST, "install PyTorch's build cu126"),
        ("2.13.0+cpu", None, ANCIENT, "^update the driver to 580 or newer$"),
    ],
)
def test_a_build_runs_on_a_driver_of_its_major_version_or_newer_or_gets_a_fix(
    pytorch: str, cuda: str | None, host: Driver | None, fix: str | None
) -> None:
    found = misfit(pytorch, cuda, host)
    assert (found is None) == (fix is None)
    if found is not None and fix is not None and host is not None:
        assert f"PyTorch {pytorch} is built " in found.problem
        assert host.version in found.problem
        assert re.search(fix, found.fix)


def test_doctor_and_make_say_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"nvmlInit": None, "nvmlShutdown": None, "nvmlSystemGetDriverVersion": "535.183.01"}
    for name, value in (answers | {"nvmlSystemGetCudaDriverVersion_v2": 12020}).items():
        monkeypatch.setattr(pynvml, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = {finding.name: finding for finding in doctor.findings(Settings())}["gpu"]
    error = driver_module.main([])
    assert (misfitting := misfit("2.11.0+cu130", "13.0", A100_HOST)) is not None
    assert error == f"error: device: {misfitting.problem}; {misfitting.fix}"
    assert found.health is doctor.Health.MISSING
    assert (found.detail.removesuffix("; jobs here run on the CPU"), found.fix) == misfitting
    assert driver_module.main(["--warn"]) is None
    out, err = capsys.readouterr()
    assert (out, err) == ("", error.replace("error:", "warning:", 1) + "\n")


@pytest.mark.parametrize(("usable", "error"), [(True, None), (False, f"error: device: {driver_module._NO_GPU}")])
def test_without_a_driver_the_host_is_named_and_a_usable_gpu_is_no_error(
    monkeypatch: pytest.MonkeyPatch, usable: bool, error: str | None
) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    assert driver_module.main([]) == error
    assert driver_module.main(["--warn"]) is None
