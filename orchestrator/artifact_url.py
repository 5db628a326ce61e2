"""Validation of the artifact store's URL, without contacting the store or importing its package."""

import importlib.util
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from fsspec.registry import known_implementations, registry

_FORMS = "write an absolute path, file:///PATH or s3://BUCKET/PREFIX"
_EXTRAS = {"s3": "pip install 'nsa-bench[s3]'", "s3a": "pip install 'nsa-bench[s3]'"}
_BUNDLED = ("file", "local", "ftp", "webhdfs", "hdfs", "arrow_hdfs", "dbfs", "sftp", "ssh", "smb")


def check(url: str) -> str:
    """The URL in the form that is stored: with a scheme, without a slash at the end.

    Raises ValueError, which names the fix and repeats no credentials: a relative path, an unknown or unfit scheme, a
    missing package, credentials.
    """
    if "://" not in url:
        if not Path(url).is_absolute():
            raise ValueError(f"is not absolute; {_FORMS}")
        url = f"file://{url}"
    scheme, _, rest = url.partition("://")
    if scheme in ("file", "local"):
        if not rest.startswith("/"):
            raise ValueError("names a host or a relative path; write file:///PATH with three slashes")
        check_folder(Path(rest))
        return f"file://{rest.rstrip('/') or '/'}"
    if "@" in rest or "?" in rest or "#" in rest:
        raise ValueError(
            "may hold credentials, which would be stored with every run; write SCHEME://PLACE/PREFIX alone and give "
            "credentials in the environment of the workers"
        )
    if scheme in known_implementations:
        package = known_implementations[scheme]["class"].partition(".")[0]
        if package == "fsspec" and scheme not in _BUNDLED:
            raise ValueError(f"the scheme {scheme!r} keeps nothing that another process can read; {_FORMS}")
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"needs the package {package}; {_EXTRAS.get(scheme, f'pip install {package}')}")
    elif scheme not in registry:  # those of other packages
        raise ValueError(f"unknown scheme {scheme!r}; {_FORMS}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as err:
        raise ValueError(f"{err}; {_FORMS}") from None
    if not parts.netloc or re.search(r"[\s\x00-\x1f]", url):
        raise ValueError(f"names no bucket or host; {_FORMS}")
    return url.rstrip("/")


def check_folder(path: Path) -> None:
    """Raise ValueError if a path is below a file, or is one, or its name is not UTF-8."""
    if str(path) != os.fsencode(path).decode(errors="replace"):
        raise ValueError("its name is not UTF-8, as journals and databases are; name another folder")
    # os.path.exists: Path.exists raises below a folder that may not be read
    nearest = next((each for each in (path, *path.parents) if os.path.exists(each)), None)
    if nearest is not None and not nearest.is_dir():
        raise ValueError(f"{str(nearest)!r} is not a folder; name one")


def is_local(url: str) -> bool:
    """Whether a checked URL is a folder, which other hosts may not see."""
    return url.startswith("file://")
