"""Settings from the environment or a `.env` file; `nsa doctor` lists each with its source."""

import difflib
import ipaddress
import os
import re
from contextlib import suppress
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import AfterValidator, Field, HttpUrl, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobs.specs.user_files import is_missing
from jobs.specs.validation import split
from orchestrator import artifact_url
from orchestrator.database_url import sqlite_path, sqlite_url
from orchestrator.errors import UserError

SOURCES = Path(__file__).resolve().parents[1]  # the folder that the packages are imported from
LOOPBACK = "127.0.0.1"  # the address that no other host reaches
LOOPBACKS = (LOOPBACK, "localhost", "::1")  # its names in a URL
PACKAGES = ("nsa_core", "jobs", "orchestrator")  # the packages that a job imports
_NO_SETTINGS = ("NSA_DASHBOARD_PASSWORD",)  # of docker-compose.yml


class Installation(Enum):
    """The sorts of places that the packages can be imported from."""

    CHECKOUT = "a checkout: pyproject.toml lies beside the packages"
    INSTALLED = "an environment: pip installed a wheel into it"
    UPLOADED = "Ray's unpacked copy of a job's upload, which Ray deletes"


def installation(sources: Path = SOURCES) -> Installation:
    """The sort of place that `sources` is."""
    if "/_ray_pkg_" in str(sources):
        return Installation.UPLOADED
    try:  # by name: a careless package may leave a pyproject.toml of its own in site-packages
        ours = 'name = "nsa-bench"' in (sources / "pyproject.toml").read_text("utf-8")
    except OSError:
        ours = False
    return Installation.CHECKOUT if ours else Installation.INSTALLED


def example_spec(name: str = "demo") -> str:
    """The path to type for a ready spec: in a checkout, or (`nsa init` writes it) beside an installed package."""
    return f"{'jobs/configs' if installation() is Installation.CHECKOUT else 'specs'}/{name}.yaml"


class SettingsError(UserError):
    """An environment variable or a line of `.env` with a value that cannot be used."""


def default_home() -> Path:
    """`var/` in a checkout; elsewhere `~/.nsa`, which outlives an environment and an upload."""
    if installation() is Installation.CHECKOUT:
        return SOURCES / "var"
    try:
        return Path.home() / ".nsa"
    except RuntimeError:
        raise SettingsError("NSA_HOME: is not set, and this user has no home; set it to a folder for results") from None


def env_file() -> Path | None:
    """The `.env` to read: the checkout's, or the current folder's where the package is installed.

    None for an upload, as the settings of a Ray job are the cluster's, and an uploaded `.env` is the submitter's.
    """
    match installation():
        case Installation.CHECKOUT:
            return SOURCES / ".env"
        case Installation.INSTALLED:
            with suppress(FileNotFoundError):  # the current folder was deleted
                return None if "/_ray_pkg_" in str(Path.cwd()) else Path.cwd() / ".env"
    return None


class Settings(BaseSettings):
    """Environment variables `NSA_<FIELD>`; unset ones derive from `NSA_HOME`."""

    model_config = SettingsConfigDict(env_prefix="NSA_", extra="ignore", frozen=True, env_ignore_empty=True)

    home: Path = Field(
        default_factory=default_home,
        validate_default=True,
        description="folder of the database, artifacts and service logs",
    )
    database_url: str | None = Field(default=None, description="sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME")
    artifacts: Path | None = Field(default=None, description="folder of journals and artifacts, a folder a run")
    artifact_store: Annotated[str, AfterValidator(artifact_url.check)] | None = Field(
        default=None, description="URL of the store of points' files (s3://BUCKET/PREFIX, file:///PATH)"
    )
    ray_address: str | None = Field(
        default=None, description="Ray cluster to connect to (host:port); None: this machine"
    )
    ray_dashboard: str = Field(default="http://127.0.0.1:8265", description="Ray's job submission address")
    ray_host: str = Field(
        default=LOOPBACK, description="address of this host that a cluster of `nsa up` is reached at by other nodes"
    )
    dashboard_port: int = Field(default=8501, ge=1, le=65535, description="port of the results dashboard")
    gates: Path | None = Field(default=None, description="YAML of go/no-go rules; None: the project's own")
    person: Annotated[str, Field(max_length=200)] | None = Field(
        default=None, description="who submits runs, as lists of runs show it; None: this user"
    )
    webhook: str | None = Field(
        default=None, description="URL that is told of a run's end, a NO-GO, a regression; None: nobody is"
    )

    @field_validator("ray_dashboard", "webhook")
    @classmethod
    def _check_http(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            HttpUrl(value)
        except ValidationError:
            raise ValueError("is not an HTTP address; write http://HOST:PORT") from None
        if "@" in urlsplit(value).netloc:
            raise ValueError("holds a user or a password, which it may not; write http://HOST:PORT")
        return value

    @field_validator("ray_host")
    @classmethod
    def _check_one_interface(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(LOOPBACK if value == "localhost" else value)
        except ValueError:
            raise ValueError(f"is not an IP address; write {LOOPBACK}, or the address of an interface") from None
        if address.is_unspecified or (address.is_loopback and str(address) != LOOPBACK):
            raise ValueError(f"is not the address of one interface; write one, or {LOOPBACK} for this host alone")
        return str(address)

    @field_validator("home", "artifacts", "gates")
    @classmethod
    def _check_path(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        try:
            value = value and value.expanduser()  # no shell does it in a `.env`
        except RuntimeError:
            raise ValueError("begins with ~, and there is no such home; write an absolute path") from None
        if value is not None and info.field_name != "gates":
            artifact_url.check_folder(value)
        return value

    @cached_property
    def database(self) -> str:
        return self.database_url or sqlite_url(self.home / "nsa.db")

    @property
    def no_database_yet(self) -> bool:
        """Whether the database is a SQLite file that does not exist: nothing was ever stored.

        False for one that cannot be looked at, as another user's: opening it tells why.
        """
        path = sqlite_path(self.database)
        return path is not None and is_missing(path)

    @cached_property
    def artifacts_dir(self) -> Path:
        return self.artifacts or self.home / "artifacts"

    @cached_property
    def artifact_store_url(self) -> str:
        """The store of points' files; by default the folder of the journals."""
        return self.artifact_store or f"file://{self.artifacts_dir.absolute()}"


def misspelled() -> list[str]:
    """One line for each variable of the environment or `.env` that nothing reads, but almost has a setting's name."""
    settings, names = [f"NSA_{name.upper()}" for name in Settings.model_fields], {*os.environ}
    if file := env_file():
        with suppress(OSError, UnicodeDecodeError):  # whoever loads the settings says it
            names.update(dotenv_values(file))
    lines = []
    for name in sorted(names):
        if not name.upper().startswith("NSA") or name.upper() in (*settings, *_NO_SETTINGS):
            continue
        if near := difflib.get_close_matches(name.upper(), settings, n=1, cutoff=0.85):
            lines.append(f"{name}: is no setting, and nothing reads it; write {near[0]}, or remove it")
    return lines


def check_current_folder() -> None:
    """Raise SettingsError if the current folder was deleted: PyTorch's math library would end the process there."""
    try:
        Path.cwd()
    except OSError as err:
        raise SettingsError(f"current folder: cannot be used ({err.strerror}); change to another (cd)") from None


def load_settings() -> Settings:
    """The settings of this process: its environment, then `env_file`. Raises SettingsError: one line a mistake."""
    file = env_file()
    # Empty, it wins over .env: a turn of a comparison tells nobody.
    silent = {"webhook": None} if os.environ.get("NSA_WEBHOOK") == "" else {}
    try:
        return Settings(_env_file=file, _env_file_encoding="utf-8", **silent)  # pyright: ignore[reportCallIssue] - BaseSettings has them
    except ValidationError as err:
        lines = []
        for error in err.errors():
            name = f"NSA_{str(error['loc'][0]).upper().removeprefix('NSA_')}"
            if name == "NSA_WEBHOOK":  # who knows all of it can write there
                error["input"] = "(withheld)"
            lines.append(": ".join(split(error, name)))
        text = re.sub(r"(://)\S*@", r"\1***@", "\n".join(lines))  # credentials in a URL
        raise SettingsError(re.sub(r"(://[^\s?#'\"]*[?#])[^\s'\"]+", r"\1***", text)) from None
    except (OSError, UnicodeDecodeError) as err:
        raise SettingsError(f".env: '{file}': cannot be read ({err}); make it readable UTF-8 text") from None
