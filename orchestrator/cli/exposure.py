"""Who else reaches the local Ray cluster: whether it asks for its token, and on which addresses it listens."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass

import psutil

from orchestrator.execute import ray_token
from orchestrator.settings import LOOPBACK, Settings

_OPEN = "runs code for everyone who reaches it, as it was started without a token"


@dataclass(frozen=True)
class Exposure:
    """Something that others reach, and what to do about it."""

    what: str
    fix: str


def token_place() -> str | None:
    """The file or variable with the token of this user's clusters; None if they are to ask for none."""
    return str(ray_token.token_file() or "RAY_AUTH_TOKEN") if ray_token.wanted() else None


def exposures(settings: Settings, ray_pid: int | None) -> list[Exposure]:
    """Parts of the cluster that others reach; `ray_pid`: its process, if `nsa up` started it."""
    found = []
    if not asks_for_token(settings):
        again = "nsa down; nsa up" if ray_token.wanted() else "nsa down; unset RAY_AUTH_MODE; nsa up"
        found.append(Exposure(f"the cluster at {settings.ray_dashboard} {_OPEN}", again))
    if ray_pid is not None and (ports := _ports_of_all_addresses(ray_pid)):
        fix = "nsa down; nsa up" if settings.ray_host == LOOPBACK else "let only the cluster's hosts through a firewall"
        listed = ", ".join(map(str, ports[:8])) + (", ..." if len(ports) > 8 else "")
        found.append(Exposure(f"Ray listens on other addresses than loopback (ports {listed})", fix))
    if problem := ray_token.problem():
        found.append(Exposure(problem, "nsa down; remove the file; nsa up"))
    return found


def asks_for_token(settings: Settings) -> bool:
    """Whether the cluster at NSA_RAY_DASHBOARD refuses those without its token; True if none answers."""
    url = f"{settings.ray_dashboard.rstrip('/')}/api/authentication_mode"
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return json.load(answer).get("authentication_mode") != "disabled"
    except urllib.error.HTTPError as err:
        return err.code != 404  # a Ray older than its tokens
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return True


def _ports_of_all_addresses(pid: int) -> list[int]:
    """The TCP ports on which a process or its children listen beyond loopback."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []
    ports = set()
    for process in family:
        try:
            sockets = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        ports |= {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN and not _loopback(one.laddr.ip)}
    return sorted(ports)


def _loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")
