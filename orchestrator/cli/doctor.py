"""The checks of `nsa doctor`: each setting with its source, and each part of the installation."""

import importlib.util
import os
import shutil
import sys
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from jobs.hardware.driver import misfit_here
from jobs.hardware.machine import installed
from jobs.process import compiler_cache
from jobs.process.post_mortem import py_spy
from jobs.specs.kinds import offered_kinds
from orchestrator.cli import services
from orchestrator.cli.services import Service
from orchestrator.database_url import hide_password
from orchestrator.errors import UserError
from orchestrator.execute import ray_access, upload
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore
from orchestrator.run.driver import database_problem
from orchestrator.settings import Installation, Settings, installation
from orchestrator.store import Store, StoreError

_FROM_CHECKOUT = installation() is Installation.CHECKOUT
_INSTALL = "make env" if _FROM_CHECKOUT else "pip install nsa-bench"
_INSTALL_GPU = "pip install '.[gpu]'" if _FROM_CHECKOUT else "pip install 'nsa-bench[gpu]'"
_UNSENT = (".git", ".venv", "venv", "__pycache__")  # by Ray (RAY_RUNTIME_ENV_DEFAULT_EXCLUDES)
_FOLDERS = 10_000  # of the current one that are looked through: more is no folder to send


class Health(StrEnum):
    """`MISSING`: an optional part is not there; `BROKEN`: no job can run before it is fixed."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


class Finding(NamedTuple):
    """The result of one check, with a fix where it is not OK."""

    name: str
    health: Health
    detail: str
    fix: str = ""


OK, MISSING, BROKEN = Health.OK, Health.MISSING, Health.BROKEN


def setting_rows(settings: Settings) -> list[tuple[str, str, str, str]]:
    """Environment variable, effective value (passwords masked), source and meaning of each setting."""
    effective = {"database_url": hide_password(settings.database), "artifacts": str(settings.artifacts_dir)}
    effective["artifact_store"] = settings.artifact_store_url
    if settings.webhook:  # who knows all of it can write there
        effective["webhook"] = f"{settings.webhook.partition('://')[0]}://{urlsplit(settings.webhook).hostname}/***"
    rows = []
    for name, field in Settings.model_fields.items():
        variable, value = f"NSA_{name.upper()}", effective.get(name) or str(getattr(settings, name))
        from_file = ".env" if name in settings.model_fields_set else "default"
        rows.append((variable, value, "environment" if variable in os.environ else from_file, field.description or ""))
    return rows


def findings(settings: Settings) -> list[Finding]:
    """Run all checks; a failed check is a finding, never an exception."""
    ray, dashboard = services.local_services(settings)
    return [
        Finding("python", OK, f"{sys.version.split()[0]} at {sys.executable}"),
        *_pytorch(),
        _compiler_caches(),
        *_ray(settings, ray),
        _database(settings),
        *_artifacts(settings),
        *_tools(dashboard),
        *_working_dir(),
    ]


def _pytorch() -> list[Finding]:
    """PyTorch, the GPU, the kernels, and the kinds, implementations and peers of other installed distributions."""
    try:
        import torch

        from jobs.adapters import offered_peers
        from nsa_core.backends import offered
        from nsa_core.backends.triton import TORCH
    except (ImportError, OSError) as err:
        detail = str(err).partition("\n")[0] if installed("torch") else "not installed"
        return [Finding("torch", BROKEN, detail, _INSTALL)]
    version = installed("torch") or torch.__version__
    note = "" if version in TORCH else ", this version was not"
    rows = [Finding("torch", OK, f"{version}; tested: {TORCH}{note}"), _gpu(), _triton(), *_dense()]
    for group, plugins in (("kind", offered_kinds()), ("implementation", offered()), ("peer", offered_peers())):
        for one in plugins:
            detail = f"{one.package} {one.version}" + (f": {one.problem}" if one.problem else "")
            health = BROKEN if one.problem else OK
            rows.append(Finding(f"{group} {one.name}", health, detail, f"mend or uninstall {one.package}"))
    return rows


def _gpu() -> Finding:
    import torch

    try:
        problem = misfit_here()
        names = [] if problem else [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except (OSError, RuntimeError) as err:
        return Finding("gpu", BROKEN, str(err).partition("\n")[0], "check the driver with nvidia-smi")
    if problem is not None:
        return Finding("gpu", MISSING, f"{problem.problem}; jobs here run on the CPU", problem.fix)
    if not names:
        return Finding("gpu", MISSING, "no CUDA device here; jobs run on the CPU or on the cluster's workers")
    return Finding("gpu", OK, f"{len(names)} × {', '.join(sorted(set(names)))}")


def _triton() -> Finding:
    import torch

    from nsa_core.backends import available_backends
    from nsa_core.backends.triton import TRITON, triton_version

    version, reason = triton_version(), available_backends(torch.device("cuda"), torch.bfloat16)["triton"]
    if version is None:
        return Finding("triton", MISSING, "not installed: auto takes chunked, on a GPU, too", _INSTALL_GPU)
    if reason is not None:
        return Finding("triton", MISSING, f"auto takes chunked instead: {reason}")
    return Finding("triton", OK, f"{version}; tested: {TRITON}; auto takes it on a GPU")


def _dense() -> list[Finding]:
    """The kernels of dense attention, and the two of them that are installed by themselves."""
    import torch

    from nsa_core.backends.dense import available_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = available_kernels(device, torch.bfloat16, 64)  # each with the reason why it cannot run here
    rows = [Finding("dense", MISSING, "no fused kernel for half precision here", _INSTALL)]
    if usable := [name for name, reason in kernels.items() if reason is None]:
        rows = [Finding("dense", OK, f"kernels for half precision: {', '.join(usable)}")]
    for kernel in ("flash-attn-4", "flash-attn-2"):
        if reason := kernels[kernel]:
            rows.append(Finding(kernel, MISSING, f"{reason}; PyTorch's own kernels serve meanwhile"))
        else:
            rows.append(Finding(kernel, OK, "dense attention and the window branch can take it"))
    return rows


def _ray(settings: Settings, ray: Service) -> list[Finding]:
    """Ray with its cluster, and who can use that."""
    version = installed("ray")
    cluster = Finding("ray", OK, f"{version}; cluster at {ray.url}")
    if not ray.healthy:
        fix = "nsa up, or set NSA_RAY_DASHBOARD"
        cluster = Finding("ray", MISSING, f"{version}; no cluster answers at {ray.url}", fix)
    try:
        file, found = ray_access.token_file(), services.exposures(settings, ray.pid)
    except UserError as err:
        return [cluster, Finding("ray access", MISSING, str(err))]
    if found:
        whats, fixes = zip(*found, strict=True)
        return [cluster, Finding("ray access", MISSING, "; ".join(whats), "; ".join(dict.fromkeys(fixes)))]
    detail = f"by the token in {file or 'RAY_AUTH_TOKEN'}"
    if file is not None and not os.path.exists(file):
        detail = f"by a token, which `nsa up` will write to {file}"
    return [cluster, Finding("ray access", OK, detail)]


def _database(settings: Settings) -> Finding:
    try:
        with Store.open(settings.database, create=False, readonly=True):
            pass
    except StoreError as err:
        return Finding("database", MISSING if settings.no_database_yet else BROKEN, str(err), "nsa db upgrade")
    problem = database_problem(settings)
    return Finding("database", MISSING if problem else OK, problem or hide_password(settings.database))


def _compiler_caches() -> Finding:
    caches = compiler_cache.folders(Path("(a folder of each point)"))
    systems = [compiler_cache.network_file_system(Path(folder)) for folder in caches.values()]
    detail = ", ".join(f"{name}={folder}" for name, folder in caches.items())
    if system := next(filter(None, systems), None):
        return Finding("compiler caches", MISSING, f"{detail}: on {system}", f"unset {' and '.join(caches)}")
    return Finding("compiler caches", OK, detail)


def _artifacts(settings: Settings) -> list[Finding]:
    """The folder of the journals, and the artifact store."""
    folder, url, name = settings.artifacts_dir, settings.artifact_store_url, "artifact store"
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if os.access(existing, os.W_OK):
        free = shutil.disk_usage(existing).free / 2**30
        rows = [Finding("artifacts", OK, f"{folder}, {free:.0f} GiB free")]
    else:
        fix = "set NSA_ARTIFACTS to a writable folder"
        rows = [Finding("artifacts", BROKEN, f"{folder} is not writable", fix)]
    if settings.artifact_store is None:
        return [*rows, Finding(name, OK, f"{url}, the folder of the journals")]
    try:
        ArtifactStore(url).check_writable()
    except ArtifactError as err:
        return [*rows, Finding(name, BROKEN, str(err), "correct NSA_ARTIFACT_STORE, or the store's credentials")]
    return [*rows, Finding(name, OK, f"{url}, can be written")]


def _tools(dashboard: Service) -> list[Finding]:
    """py-spy and the dashboard."""
    rows = [Finding("py-spy", OK, installed("py-spy") or "")]
    if not py_spy():
        detail = "not installed: `nsa diagnose --attach` shows no stacks, those of a hang are Python's alone"
        rows = [Finding("py-spy", MISSING, detail, "pip install py-spy")]
    if importlib.util.find_spec("streamlit") is None:
        return [*rows, Finding("dashboard", BROKEN, "streamlit is not installed", _INSTALL)]
    if not dashboard.healthy:
        return [*rows, Finding("dashboard", MISSING, f"not running at {dashboard.url}", "nsa up")]
    return [*rows, Finding("dashboard", OK, dashboard.url)]


def _working_dir() -> list[Finding]:
    """Files here at which `ray job submit --working-dir .` hangs, or ends in a traceback."""
    found = []
    for folder, folders, files in islice(os.walk("."), _FOLDERS):
        folders[:] = [name for name in folders if name not in _UNSENT]
        for path in (Path(folder, name) for name in [*folders, *files]):
            if reason := upload.problem(path):
                detail = f"{str(path)!r}: {reason}: `ray job submit` cannot send this folder"
                found.append(Finding("working dir", MISSING, detail, "move it away; `nsa submit` leaves it out"))
    return found[:10]
