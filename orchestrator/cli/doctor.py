"""The checks of `nsa doctor`: each setting with its source, and each part of the installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import queue
import shutil
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

from jobs.hardware.driver import misfit_here
from jobs.process import compiler_cache
from jobs.process.stacks import py_spy
from jobs.specs.kinds import offered_kinds
from orchestrator.cli import services
from orchestrator.cli.services import ServiceStatus
from orchestrator.database_url import hide_password
from orchestrator.errors import UserError
from orchestrator.execute import ray_token, upload
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore
from orchestrator.run.driver import database_problem
from orchestrator.settings import Installation, Settings, installation
from orchestrator.store import Store, StoreError

_FROM_CHECKOUT = installation() is Installation.CHECKOUT
_INSTALL = "make env" if _FROM_CHECKOUT else "pip install nsa-bench"
_INSTALL_GPU = "pip install '.[gpu]'" if _FROM_CHECKOUT else "pip install 'nsa-bench[gpu]'"
_STORE_S = 20.0
_FOLDERS = 10_000  # of the current one that are looked through: more is no folder to send


class Health(StrEnum):
    """`MISSING`: an optional part is not there; `BROKEN`: no job can run before it is fixed."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check, with a fix where it is not OK."""

    name: str
    health: Health
    detail: str
    fix: str = ""


def setting_rows(settings: Settings) -> list[tuple[str, str, str, str]]:
    """Environment variable, effective value (passwords masked), source and meaning of each setting."""
    effective = {"database_url": hide_password(settings.database), "artifacts": str(settings.artifacts_dir)}
    effective["artifact_store"] = settings.artifact_store_url
    rows = []
    for name, field in Settings.model_fields.items():
        variable, value = f"NSA_{name.upper()}", effective.get(name) or str(getattr(settings, name))
        source = ".env" if name in settings.model_fields_set else "default"
        source = "environment" if variable in os.environ else source
        rows.append((variable, value, source, field.description or ""))
    return rows


def findings(settings: Settings) -> list[Finding]:
    """Run all checks; a failed check is a finding, never an exception."""
    ray, dashboard = services.status(settings)
    return [
        Finding("python", Health.OK, f"{sys.version.split()[0]} at {sys.executable}"),
        *_pytorch(),
        _compiler_caches(),
        *_ray(settings, ray),
        _database(settings),
        _artifacts(settings),
        _artifact_store(settings),
        _pyspy(),
        _dashboard(dashboard),
        *_working_dir(),
    ]


def _working_dir() -> list[Finding]:
    """Files here at which `ray job submit --working-dir .` hangs, or ends in a traceback."""
    for folder, folders, files in islice(os.walk("."), _FOLDERS):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *files]:
            if reason := upload.problem(path := Path(folder, name)):
                detail = f"{str(path)!r}: {reason}: `ray job submit` cannot send this folder"
                return [Finding("working dir", Health.MISSING, detail, "move it away; `nsa submit` leaves it out")]
    return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pytorch() -> list[Finding]:
    """PyTorch, the GPU, the kernels, and the kinds, implementations and peers of other installed distributions."""
    try:
        import torch

        from jobs.adapters import offered_peers
        from nsa_core.backends import TORCH, offered
    except (ImportError, OSError) as err:
        detail = str(err).partition("\n")[0] if _version("torch") else "not installed"
        return [Finding("torch", Health.BROKEN, detail, _INSTALL)]
    version = _version("torch") or torch.__version__
    note = "" if version in TORCH else ", this version was not"
    rows = [Finding("torch", Health.OK, f"{version}; tested: {TORCH}{note}"), _gpu(), _triton(), *_dense()]
    for group, plugins in (("kind", offered_kinds()), ("implementation", offered()), ("peer", offered_peers())):
        for one in plugins:
            health = Health.OK if one.problem is None else Health.BROKEN
            detail = f"{one.package} {one.version}" + (f": {one.problem}" if one.problem else "")
            rows.append(Finding(f"{group} {one.name}", health, detail, f"mend or uninstall {one.package}"))
    return rows


def _gpu() -> Finding:
    import torch

    try:
        problem = misfit_here()
        count = torch.cuda.device_count() if problem is None else 0
        names = {torch.cuda.get_device_name(i) for i in range(count)}
    except (OSError, RuntimeError) as err:
        return Finding("gpu", Health.BROKEN, str(err).partition("\n")[0], "check the driver with nvidia-smi")
    if problem is not None:
        return Finding("gpu", Health.MISSING, f"{problem.problem}; jobs here run on the CPU", problem.fix)
    if not count:
        return Finding("gpu", Health.MISSING, "no CUDA device here; jobs run on the CPU or on the cluster's workers")
    return Finding("gpu", Health.OK, f"{count} × {', '.join(sorted(names))}")


def _triton() -> Finding:
    import torch

    from nsa_core.backends import TRITON, available_backends, triton_version

    version, reason = triton_version(), available_backends(torch.device("cuda"), torch.bfloat16)["triton"]
    if version is None:
        return Finding("triton", Health.MISSING, "not installed: auto takes chunked, on a GPU, too", _INSTALL_GPU)
    if reason is not None:
        return Finding("triton", Health.MISSING, f"auto takes chunked instead: {reason}")
    return Finding("triton", Health.OK, f"{version}; tested: {TRITON}; auto takes it on a GPU")


def _dense() -> list[Finding]:
    """The kernels of dense attention, and the two of them that are installed by themselves."""
    import torch

    from nsa_core.backends.dense import available_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = available_kernels(device, torch.bfloat16, 64)  # each with the reason why it cannot run here
    if usable := [name for name, reason in kernels.items() if reason is None]:
        rows = [Finding("dense", Health.OK, f"kernels for half precision: {', '.join(usable)}")]
    else:
        rows = [Finding("dense", Health.MISSING, "no fused kernel for half precision here", _INSTALL)]
    for kernel in ("flash-attn-4", "flash-attn-2"):
        if reason := kernels[kernel]:
            rows.append(Finding(kernel, Health.MISSING, f"{reason}; PyTorch's own kernels serve meanwhile"))
        else:
            rows.append(Finding(kernel, Health.OK, "dense attention and the window branch can take it"))
    return rows


def _ray(settings: Settings, ray: ServiceStatus) -> list[Finding]:
    """Ray with its cluster, and who can use that."""
    version = _version("ray")
    if ray.healthy:
        cluster = Finding("ray", Health.OK, f"{version}; cluster at {ray.url}")
    else:
        problem = f"{version}; no cluster answers at {ray.url}"
        cluster = Finding("ray", Health.MISSING, problem, "nsa up, or set NSA_RAY_DASHBOARD")
    try:
        file, found = ray_token.token_file(), services.exposures(settings, ray.pid)
    except UserError as err:
        return [cluster, Finding("ray access", Health.MISSING, str(err))]
    detail = f"by the token in {file or 'RAY_AUTH_TOKEN'}"
    if file is not None and not os.path.exists(file):
        detail = f"by a token, which `nsa up` will write to {file}"
    if found:
        detail, fixes = "; ".join(one.what for one in found), dict.fromkeys(one.fix for one in found)
        return [cluster, Finding("ray access", Health.MISSING, detail, "; ".join(fixes))]
    return [cluster, Finding("ray access", Health.OK, detail)]


def _database(settings: Settings) -> Finding:
    try:
        Store.open(settings.database, create=False, readonly=True).close()
    except StoreError as err:
        health = Health.MISSING if settings.no_database_yet else Health.BROKEN
        return Finding("database", health, str(err), "nsa db upgrade")
    if problem := database_problem(settings):
        return Finding("database", Health.MISSING, problem)
    return Finding("database", Health.OK, hide_password(settings.database))


def _compiler_caches() -> Finding:
    caches = compiler_cache.folders(Path("(a folder of each point)"))
    systems = [compiler_cache.network_file_system(Path(folder)) for folder in caches.values()]
    detail = ", ".join(f"{name}={folder}" for name, folder in caches.items())
    if system := next(filter(None, systems), None):
        return Finding("compiler caches", Health.MISSING, f"{detail}: on {system}", f"unset {' and '.join(caches)}")
    return Finding("compiler caches", Health.OK, detail)


def _artifacts(settings: Settings) -> Finding:
    folder = settings.artifacts_dir
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.access(existing, os.W_OK):
        fix = "set NSA_ARTIFACTS to a writable folder"
        return Finding("artifacts", Health.BROKEN, f"{folder} is not writable", fix)
    free = shutil.disk_usage(existing).free / 2**30
    return Finding("artifacts", Health.OK, f"{folder}, {free:.0f} GiB free")


def _artifact_store(settings: Settings) -> Finding:
    url, name = settings.artifact_store_url, "artifact store"
    if settings.artifact_store is None:
        return Finding(name, Health.OK, f"{url}, the folder of the journals")
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write() -> None:
        try:
            ArtifactStore(url).check_writable()
            answers.put("")
        except ArtifactError as err:
            answers.put(str(err))

    threading.Thread(target=write, daemon=True).start()  # a store that hangs must not hang the doctor
    try:
        problem = answers.get(timeout=_STORE_S)
    except queue.Empty:
        problem = f"{url} did not answer within {_STORE_S:g} s"
    if problem:
        return Finding(name, Health.BROKEN, problem, "correct NSA_ARTIFACT_STORE, or the store's credentials")
    return Finding(name, Health.OK, f"{url}, can be written")


def _pyspy() -> Finding:
    if py_spy():
        return Finding("py-spy", Health.OK, _version("py-spy") or "")
    detail = "not installed: `nsa diagnose --attach` shows no stacks, those of a hang are Python's alone"
    return Finding("py-spy", Health.MISSING, detail, "pip install py-spy")


def _dashboard(dashboard: ServiceStatus) -> Finding:
    if importlib.util.find_spec("streamlit") is None:
        return Finding("dashboard", Health.BROKEN, "streamlit is not installed", _INSTALL)
    if not dashboard.healthy:
        return Finding("dashboard", Health.MISSING, f"not running at {dashboard.url}", "nsa up")
    return Finding("dashboard", Health.OK, dashboard.url)
