"""Whether the installed PyTorch fits the host's NVIDIA driver, with stand-ins for the driver."""

from __future__ import annotations

import re

import pynvml
import pytest
import torch

from jobs.hardware import driver
from jobs.hardware.driver import Driver, misfit
from orchestrator.cli import doctor
from orchestrator.settings import Settings

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
    error = driver.main([])
    assert (misfitting := misfit("2.11.0+cu130", "13.0", A100_HOST)) is not None
    assert error == f"error: device: {misfitting.problem}; {misfitting.fix}"
    assert found.health is doctor.Health.MISSING
    assert (found.detail.removesuffix("; jobs here run on the CPU"), found.fix) == misfitting
    assert driver.main(["--warn"]) is None
    out, err = capsys.readouterr()
    assert (out, err) == ("", error.replace("error:", "warning:", 1) + "\n")


@pytest.mark.parametrize(("usable", "error"), [(True, None), (False, f"error: device: {driver._NO_GPU}")])
def test_without_a_driver_the_host_is_named_and_a_usable_gpu_is_no_error(
    monkeypatch: pytest.MonkeyPatch, usable: bool, error: str | None
) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    assert driver.main([]) == error
    assert driver.main(["--warn"]) is None
