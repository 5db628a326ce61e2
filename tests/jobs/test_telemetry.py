"""GPU telemetry, with a stand-in for the driver."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from jobs.measure import nvml
from jobs.measure.telemetry import Telemetry


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


@pytest.mark.parametrize("gpu", ["0", "GPU-1234"])
def test_samples_become_metrics_with_units_and_a_text(driver: None, gpu: str) -> None:
    telemetry = Telemetry([gpu], period_s=0.01)
    telemetry.start()
    time.sleep(0.1)
    summary = telemetry.stop()
    found = {metric.name: metric for metric in summary.metrics}
    assert (found["gpu_utilization"].value, found["gpu_utilization"].unit) == (80, "%")
    assert found["gpu_memory_used"].value == 3 * 1024
    assert found["gpu_power"].value == 350
    assert found["gpu_throttled"].value == 100
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


def test_visible_gpus_follow_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 3")
    assert nvml.visible_gpus() == ["GPU-a", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvml.visible_gpus() == []
