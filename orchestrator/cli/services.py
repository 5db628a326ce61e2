"""The local services behind `nsa up`: a Ray head and the dashboard. `nsa down` stops them by their own pids.

Other Ray clusters on the host are left alone: only processes started here are stopped.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import psutil

from jobs.specs.user_files import is_missing
from orchestrator.database_url import sqlite_path, sqlite_url
from orchestrator.errors import UserError
from orchestrator.execute import ray_access
from orchestrator.execute.ray_access import folder_of_a_new_cluster, local_address, remove_folder
from orchestrator.execute.ray_http import asks_for_token, get
from orchestrator.settings import LOOPBACK, SOURCES, Installation, Settings, installation
from orchestrator.terminal import warn

_READY_S = 90.0
_STOP_S = 40.0


class Service(NamedTuple):
    """A local process with a page at `url` that answers at `path` below it; only its own answer has `says` in it."""

    name: str
    command: tuple[str, ...]
    url: str
    port: int
    path: str
    says: str
    files: Path  # its log and its pid file, without their suffixes

    @property
    def healthy(self) -> bool:
        return answers(self.url + self.path, self.says)

    @property
    def pid(self) -> int | None:
        """Its pid if it was started here; None if it is gone, even if another process has its number now."""
        try:
            record = json.loads(self.files.with_suffix(".pid.json").read_text())
            process = psutil.Process(record["pid"])
            same = abs(process.create_time() - psutil.boot_time() - record["started"]) < 2
            return process.pid if same and process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, KeyError, psutil.Error):
            return None


def local_services(settings: Settings, *ray_options: str) -> list[Service]:
    """Ray and the dashboard of this machine, in starting order."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    ray += [f"--node-ip-address={settings.ray_host}", "--port=0", f"--dashboard-host={LOOPBACK}"]
    ray_port = urlsplit(settings.ray_dashboard).port or 8265
    ray += [f"--dashboard-port={ray_port}", "--dashboard-agent-listen-port=0"]
    ray += ["--min-worker-port=0", "--max-worker-port=0"]  # any: Ray's own range is one for all clusters of a host
    app = SOURCES / "dashboard" / "app.py"  # its settings lie beside it, in .streamlit/
    dashboard = [sys.executable, "-m", "streamlit", "run", str(app), "--server.headless=true"]
    dashboard += [f"--server.address={LOOPBACK}", f"--server.port={settings.dashboard_port}"]
    dashboard += ["--browser.gatherUsageStats=false", "--global.developmentMode=false"]  # which refuses a port
    server: dict[str, Any] = {}  # Streamlit's section, of the user's files
    for folder in ("~", SOURCES if installation() is Installation.CHECKOUT else settings.home):
        with suppress(OSError, ValueError, TypeError, RuntimeError):  # RuntimeError: a user without a home
            file = Path(folder).expanduser() / ".streamlit" / "config.toml"
            server |= tomllib.loads(file.read_text()).get("server", {})
    path = quote(os.environ.get("STREAMLIT_SERVER_BASE_URL_PATH") or str(server.get("baseUrlPath", ""))).strip("/")
    scheme = "https" if os.environ.get("STREAMLIT_SERVER_SSL_CERT_FILE") or server.get("sslCertFile") else "http"
    dashboard_url = f"{scheme}://127.0.0.1:{settings.dashboard_port}" + (f"/{path}" if path else "")
    ray_url, port, home = settings.ray_dashboard.rstrip("/"), settings.dashboard_port, settings.home
    page = Service("dashboard", tuple(dashboard), dashboard_url, port, "/_stcore/health", "ok", home / "dashboard")
    with suppress(OSError, ValueError, KeyError):  # one that runs has the path of the shell that started it
        if page.pid is not None:
            url = json.loads(page.files.with_suffix(".pid.json").read_text())["url"]
            page = page._replace(url=url, port=urlsplit(url).port)
    return [Service("ray", (*ray, *ray_options), ray_url, ray_port, "/api/version", "ray_version", home / "ray"), page]


def up(settings: Settings, *, num_cpus: int | None = None, num_gpus: int | None = None) -> list[Service]:
    """Start the services that are not running, and return all once they answer.

    Raises UserError: a folder or the token cannot be written or kept from others, a port is taken, NSA_RAY_HOST is no
    address of this host, or a service did not answer in time.
    """
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UserError(f"NSA_HOME: '{settings.home}': cannot be made ({err.strerror}); name another") from None
    interfaces = [address.address for each in psutil.net_if_addrs().values() for address in each]
    if settings.ray_host not in {address.partition("%")[0] for address in interfaces}:
        raise UserError(
            f"NSA_RAY_HOST: '{settings.ray_host}': is no address of this host; name one, or leave it unset for loopback"
        )
    if was_open := ray_access.token_is_enabled() and ray_access.token_problem():
        warn(f"warning: {was_open}; from now on they cannot. Where one may have: remove it, then nsa down, nsa up")
    folder = folder_of_a_new_cluster(settings)
    with socket.create_server((LOOPBACK, 0)) as server:
        client_port = server.getsockname()[1]  # Ray Client's of one user would otherwise share 10001, and its calls
    options = {"num-cpus": num_cpus, "num-gpus": num_gpus, "temp-dir": folder, "ray-client-server-port": client_port}
    services = local_services(settings, *(f"--{name}={value}" for name, value in options.items() if value is not None))
    with _alone(settings):
        begun = [service for service in services if service.pid is None]
        for service in begun:  # a port that another process holds, whatever it says there: it would get our calls
            with socket.socket() as probe:
                taken = probe.connect_ex((LOOPBACK, service.port)) == 0
            if taken or answers(service.url + service.path):
                raise _taken(service)
        for service in begun:
            _start(settings, service)
    for service in services:
        _await(settings, service, noted=service.name == "ray" and service in begun)
    return services


def down(settings: Settings) -> list[str]:
    """Stop the services that `up` started, last first, and remove Ray's folder. Returns the names of the stopped.

    Raises UserError if NSA_HOME cannot be entered or written.
    """
    if is_missing(settings.home):  # so nothing was started there
        return []
    with _alone(settings):
        stopped = [s.name for s in reversed(local_services(settings)) if _stop(s)]
        remove_folder(settings)
    return stopped


def answers(url: str, says: str = "") -> bool:
    """Whether an HTTP server at `url` answers with a text that has `says` in it; a refusal (401, 403) counts."""
    code, text = get(url)
    return code in (401, 403) or (200 <= code < 300 and says.encode() in text)


def service_env(settings: Settings) -> dict[str, str]:
    """The services' environment: absolute paths, so that they write where this shell's commands read."""
    file = sqlite_path(settings.database)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "NSA_HOME": str(settings.home.resolve()),
        "NSA_DATABASE_URL": sqlite_url(file.absolute()) if file and file.name else settings.database,
        "NSA_ARTIFACTS": str(settings.artifacts_dir.resolve()),
        **({"NSA_ARTIFACT_STORE": settings.artifact_store} if settings.artifact_store else {}),
        **({"NSA_CHECKOUT": str(SOURCES)} if installation() is Installation.CHECKOUT else {}),
        **({"NSA_GATES": str(settings.gates.resolve())} if settings.gates else {}),
        **({"NSA_WEBHOOK": settings.webhook} if settings.webhook else {}),
    }


@contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """Keep other processes from starting or stopping this home's services meanwhile: they wait.

    Of two that start at once each would start a cluster, and only one of these would be known, and stopped.
    """
    try:
        with (settings.home / "services.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as err:  # also of a service's log or pid file
        what = f"{err.strerror}: '{err.filename}'" if err.filename else err.strerror
        raise UserError(
            f"NSA_HOME: '{settings.home}': services cannot be started or stopped there ({what}); "
            "name a folder of your own"
        ) from None


def _taken(service: Service) -> UserError:
    return UserError(
        f"{service.name}: {service.url} is already in use by a process that `nsa up` did not start; "
        "stop it, or set NSA_RAY_DASHBOARD / NSA_DASHBOARD_PORT to another port"
    )


def _start(settings: Settings, service: Service) -> None:
    environment = service_env(settings)
    if service.name == "ray":
        # Ray binds to loopback alone in its mode for one host, which this variable chooses, whatever the system.
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = str(int(settings.ray_host != LOOPBACK))
        environment |= ray_access.environment_of_a_cluster()
    with service.files.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            service.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=SOURCES if installation() is Installation.CHECKOUT else settings.home,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time() - psutil.boot_time()  # the wall clock may be set meanwhile
    record = {"pid": process.pid, "started": started, "url": service.url}
    service.files.with_suffix(".pid.json").write_text(json.dumps(record))


def _await(settings: Settings, service: Service, noted: bool) -> None:
    """Wait for a service to answer; `noted`: also for Ray to note its address, as its node comes after it answers."""
    deadline = time.monotonic() + _READY_S
    while not (service.healthy and (not noted or local_address(settings))):
        dead = service.pid is None
        if dead or time.monotonic() > deadline:
            why = "exited" if dead else f"did not answer within {_READY_S:.0f} s"
            raise UserError(f"{service.name}: {why} at {service.url}; see {service.files.with_suffix('.log')}")
        time.sleep(0.2)
    if service.port not in _ports(service.pid):  # another process was faster
        raise _taken(service)


def _ports(pid: int | None, *, beyond_loopback: bool = False) -> list[int]:
    """The TCP ports on which a process or its children listen, or those of them that other hosts reach."""
    ports = set()
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):  # it may end meanwhile
                for one in process.net_connections(kind="tcp"):
                    loopback = ip_address(one.laddr.ip.removeprefix("::ffff:")).is_loopback
                    if one.status == psutil.CONN_LISTEN and not (beyond_loopback and loopback):
                        ports.add(one.laddr.port)
    return sorted(ports)


def _stop(service: Service) -> bool:
    pid = service.pid
    if pid is None:  # its file may be of another host with this home
        return False
    service.files.with_suffix(".pid.json").unlink(missing_ok=True)
    alive: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
        process = psutil.Process(pid)
        family = [*process.children(recursive=True), process]
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=_STOP_S)
    for survivor in alive:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()
    psutil.wait_procs(alive, timeout=5)
    return True


def exposures(settings: Settings, ray_pid: int | None) -> list[tuple[str, str]]:
    """Parts of the cluster that others reach, and what to do; `ray_pid`: its process, if `nsa up` started it."""
    found = []
    if not asks_for_token(settings):
        again = "nsa down; nsa up" if ray_access.token_is_enabled() else "nsa down; unset RAY_AUTH_MODE; nsa up"
        what = "runs code for everyone who reaches it, as it was started without a token"
        found.append((f"the cluster at {settings.ray_dashboard} {what}", again))
    if ray_pid is not None and (ports := _ports(ray_pid, beyond_loopback=True)):
        fix = "nsa down; nsa up" if settings.ray_host == LOOPBACK else "let only the cluster's hosts through a firewall"
        listed = ", ".join(map(str, ports[:8])) + (", ..." if len(ports) > 8 else "")
        found.append((f"Ray listens on other addresses than loopback (ports {listed})", fix))
    if problem := ray_access.token_problem():
        found.append((problem, "nsa down; remove the file; nsa up"))
    return found
