"""Ask Ray's dashboard by HTTP, for pages, which do not import Ray."""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from orchestrator.errors import UserError
from orchestrator.execute import ray_access
from orchestrator.settings import LOOPBACKS, Settings

_ANSWER_S = 2.0
_MOST = 64 << 20  # bytes of a list of jobs


def get(url: str, token: str | None = None, most: int = 4096) -> tuple[int, bytes]:
    """Status and text, up to `most` bytes, of the answer at `url`; 0 if no HTTP server answers."""
    try:
        request = urllib.request.Request(url)
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        # A host with http_proxy and no no_proxy asked the proxy for its own loopback: `nsa up` waited in vain.
        local = urlsplit(url).hostname in LOOPBACKS
        proxies = urllib.request.ProxyHandler({} if local else None)
        context = ssl.create_default_context()
        if local:  # a certificate is for the name that browsers use, not for loopback
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(proxies, urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=_ANSWER_S) as answer:
            return answer.status, answer.read(most)
    except urllib.error.HTTPError as err:
        return err.code, b""
    except (OSError, http.client.HTTPException, ValueError):  # also of a server that speaks no HTTP
        return 0, b""


def asks_for_token(settings: Settings) -> bool:
    """Whether the cluster at NSA_RAY_DASHBOARD refuses those without its token; True if none answers."""
    code, text = get(f"{settings.ray_dashboard.rstrip('/')}/api/authentication_mode")
    return code != 404 and b'"disabled"' not in text  # 404: a Ray older than its tokens


def ray_jobs(settings: Settings, token: str | None = None) -> list[dict[str, Any]] | None:
    """Ray's jobs, with `submission_id`, `status`, `message`, `start_time` and `end_time` [ms since 1970].

    None if no cluster answers, or it refuses the token: by default this user's.
    """
    with suppress(UserError, OSError, ValueError):
        token = ray_access.token() if token is None else token
        found = json.loads(get(f"{settings.ray_dashboard.rstrip('/')}/api/jobs/", token, _MOST)[1])
        return [job for job in found if isinstance(job, dict)] if isinstance(found, list) else None
    return None
