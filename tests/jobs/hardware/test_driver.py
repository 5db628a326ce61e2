"""Whether the installed PyTorch fits the host's NVIDIA driver, with stand-ins for the driver."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from jobs.hardware import driver
from jobs.hardware.driver import Driver, installed_driver, misfit
from orchestrator.cli import doctor
from orchestrator.settings import Settings

A100_HOST = Driver("535.183.01", "12.2")
LOADED = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: gcc 12.3.0\n"


def answer(monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: int | None) -> None:
    """Let NVML answer with a driver's version and the CUDA version that it supports (12020: 12.2); None: an error."""

    def answers(value: Any) -> Any:
        def give() -> Any:
            if value is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
            return value

        return give

    monkeypatch.setattr(pynvml, "nvmlInit", answers(None if version is None else True))
    monkeypatch.setattr(pynvml, "nvmlShutdown", answers(True))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", answers(version))
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", answers(cuda))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "_LOADED", tmp_path / "no driver is loaded")


@pytest.mark.parametrize(
    ("version", "cuda", "found"),
    [
        ("535.183.01", 12020, Driver("535.183.01", "12.2")),
        ("550.54.15", None, Driver("550.54.15", "12.x")),  # no CUDA library beside the driver
        (None, None, None),
    ],
)
def test_nvml_or_the_kernel_tells_the_driver_and_its_cuda(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: int | None, found: Driver | None
) -> None:
    answer(monkeypatch, version, cuda)
    assert installed_driver() == found
    if found is None:
        driver._LOADED.write_text(LOADED)
        assert installed_driver() == Driver("550.54.15", "12.x")


CARD = Driver("580.159.04", "13.0")
ANCIENT = Driver("470.82.01", "11.4")


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


def test_doctor_and_make_say_the_same(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "535.183.01", 12020)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = {finding.name: finding for finding in doctor.findings(Settings())}["gpu"]
    error = driver.main([])
    assert error == f"error: device: {misfit('2.11.0+cu130', '13.0', A100_HOST)}"
    assert found.health is doctor.Health.MISSING
    assert found.detail.removesuffix("; jobs here run on the CPU") in error
    assert found.fix in error
    assert driver.main(["--warn"]) is None
    out, err = capsys.readouterr()
    assert (out, err) == ("", error.replace("error:", "warning:", 1) + "\n")


def test_a_usable_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert driver.main([]) is None
    assert driver.main(["--warn"]) is None
