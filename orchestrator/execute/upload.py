"""The upload of a Ray job: its spec, the files that the spec names and, from a checkout, the sources; nothing else."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.settings import PACKAGES, SOURCES, Installation, installation
from orchestrator.terminal import warn

LIMIT = 100 * 2**20  # bytes before compression; Ray keeps an upload in its head's memory
SUFFIXES = (".csv", ".j2", ".mako", ".py", ".sql", ".svg", ".typed", ".yaml")  # as pyproject.toml
_ELSEWHERE = "put it on storage that all workers share and give its absolute path"


@dataclass(frozen=True)
class Upload:
    """Files to send."""

    files: Mapping[str, Path]  # source by path in the job's working directory, relative and with "/"
    spec: str | None = None  # path of the spec there; None if it is not sent

    def write(self, package: Path) -> int:
        """Write the zip file that Ray unpacks. Returns its size in bytes. Raises UserError: a file cannot be read."""
        with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, source in sorted(self.files.items()):
                try:  # without times and modes: Ray keeps equal packages once
                    archive.writestr(zipfile.ZipInfo(name), source.read_bytes(), zipfile.ZIP_DEFLATED)
                except (OSError, UnicodeError) as err:  # also of a name that is not UTF-8
                    raise UserError(f"upload: {str(source)!r}: cannot be sent ({err}); mend or rename it") from None
        return package.stat().st_size


def collect(spec: JobSpec, spec_file: Path | None = None) -> Upload:
    """The upload of a job that is submitted from the current folder, with `spec_file` if the job reads that.

    A file keeps its path relative to this folder; a spec that lies elsewhere is put at the top. Raises UserError: one
    leads out of the current folder or cannot be read, or all are too large.
    """
    here = Path.cwd()
    files = dict(sources()) if installation() is Installation.CHECKOUT else {}

    def add(field: str, name: str, source: Path) -> None:
        other = files.setdefault(name, source)
        if other is not source and not other.samefile(source):
            fix = "move it to a folder of another name"
            raise UserError(f"{field}: {name!r}: would replace {other} of the package; {fix}")

    name = None
    if spec_file is not None:
        inside = Path(os.path.relpath(spec_file, here))
        name = spec_file.name if ".." in inside.parts else inside.as_posix()
        add("spec", name, here / spec_file)
    for field, path in spec.paths().items():
        for source in () if path.is_absolute() else _named(field, path, here):
            add(field, source.as_posix(), here / source)
    sizes = {name: source.stat().st_size for name, source in files.items()}
    if (total := sum(sizes.values())) > LIMIT:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"upload: {total / 2**20:.0f} MiB in {len(files)} files from {here}, the largest {largest!r}: "
            f"at most {LIMIT // 2**20} MiB are sent with a job; put large data on storage that all workers share, and "
            "give its absolute path in the spec"
        )
    return Upload(files, name)


def sources(root: Path = SOURCES) -> Iterator[tuple[str, Path]]:
    """Python files and package data of the packages that a job imports, with their paths relative to `root`."""
    for package in PACKAGES:
        for path in (root / package).rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _named(field: str, path: Path, here: Path) -> list[Path]:
    """Files at or below a relative path of a spec, relative to `here`. Raises UserError."""
    if ".." in path.parts:
        raise UserError(f"{field}: {str(path)!r}: leads out of the folder that is sent; {_ELSEWHERE}")
    if not os.path.exists(path):  # Path.exists raises for a path that is too long
        raise UserError(f"{field}: {str(path)!r}: there is no such file in {here}; correct it, or {_ELSEWHERE}")

    def refuse(err: OSError) -> None:
        raise UserError(f"{field}: {err.filename!r}: cannot be read ({err.strerror}); make it readable")

    found = [path]
    if path.is_dir():
        # os.walk does not follow links to folders, which may lead in a circle: below, they are refused.
        found = [
            Path(folder, name)
            for folder, folders, names in os.walk(path, onerror=refuse)
            for name in (*names, *(f for f in folders if os.path.islink(f"{folder}/{f}")))
        ]
    sendable = []
    for file in sorted(found):
        real = Path(os.path.realpath(file))
        if not real.is_relative_to(here.resolve()):
            raise UserError(f"{field}: '{file}': is a link to {real}, out of the folder that is sent; {_ELSEWHERE}")
        if real.is_dir():
            raise UserError(f"{field}: '{file}': is a link to a folder; remove the link, or name that folder itself")
        if unsendable := problem(file):
            warn(f"{field}: {str(file)!r}: {unsendable}; it is left out")
        else:
            sendable.append(file)
    if not sendable:
        raise UserError(f"{field}: {str(path)!r}: holds no files; name a file, or a folder with some")
    return sendable


def problem(path: Path) -> str | None:
    """Why Ray cannot send what lies at a path, relative to the folder that a job is submitted from; None if it can."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    return None if path.is_file() or path.is_dir() else "is neither a file nor a folder"
