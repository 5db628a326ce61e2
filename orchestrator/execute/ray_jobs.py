"""Ray's own list of jobs, by HTTP: without Ray, which pages do not import."""

import http.client
import json
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import UserError
from orchestrator.execute import ray_access
from orchestrator.settings import LOOPBACKS, Settings

_ANSWER_S = 2.0


def ray_jobs(settings: Settings, token: str | None = None) -> list[dict[str, Any]] | None:
    """Ray's jobs, with `submission_id`, `status`, `message`, `start_time` and `end_time` [ms since 1970].

    None if no cluster answers, or it refuses the token: by default this user's.
    """
    request = urllib.request.Request(f"{settings.ray_dashboard.rstrip('/')}/api/jobs/")
    with suppress(UserError, OSError, ValueError, http.client.HTTPException):
        if token := ray_access.token() if token is None else token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        # A host with http_proxy and no no_proxy would ask the proxy for its own loopback.
        local = urlsplit(request.full_url).hostname in LOOPBACKS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if local else None))
        with opener.open(request, timeout=_ANSWER_S) as answer:
            found = json.load(answer)
        return [job for job in found if isinstance(job, dict)] if isinstance(found, list) else None
    return None
