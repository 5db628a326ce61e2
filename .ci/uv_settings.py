"""Prints what `pip config list` says of where packages come from as settings of uv, for a shell to evaluate.

uv reads no setting of pip. Fails with a setting's name where uv has none that stands for it: pip must install then.
"""

import ast
import shlex
import sys

# pip's setting -> uv's variable and what separates its values
OF_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
WITHOUT_EFFECT = {
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-compile",
    "progress-bar",
    "retries",
    "root-user-action",
}
SECTIONS = ["global", "install", ":env:"]  # the weakest first


def settings(listed: str) -> dict[str, str]:
    """Variables of uv, from what `pip config list` printed."""
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in SECTIONS:
        for key, _, value in lines:
            of, _, name = key.rpartition(".")
            if of != section or name in WITHOUT_EFFECT:
                continue
            if name not in OF_UV:
                raise SystemExit(f"{key}: uv has no setting that stands for it")
            variable, separator = OF_UV[name]
            found[variable] = separator.join(ast.literal_eval(value).split())
    return found


for variable, value in settings(sys.stdin.read()).items():
    print(f"export {variable}={shlex.quote(value)}")
