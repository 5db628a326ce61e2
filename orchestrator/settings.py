"""Settings from the environment or a `.env` file; `nsa doctor` lists each with its source."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from jobs.validation import split
from orchestrator import artifact_url
from orchestrator.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder of the running sources: a checkout, or Ray's unpacked copy of one."""


class SettingsError(UserError):
    """An environment variable or a line of `.env` with a value that cannot be used."""


def default_home() -> Path:
    """`var/` in the checkout; `~/.nsa` for an installed package and for Ray's unpacked copy, which Ray deletes."""
    unpacked = any(part.startswith("_ray_pkg_") for part in CHECKOUT.parts)
    installed = not (CHECKOUT / "pyproject.toml").exists()
    return Path.home() / ".nsa" if unpacked or installed else CHECKOUT / "var"


class Settings(BaseSettings):
    """Environment variables `NSA_<FIELD>`; unset ones derive from `NSA_HOME`."""

    model_config = SettingsConfigDict(
        env_prefix="NSA_", env_file=CHECKOUT / ".env", extra="ignore", frozen=True, env_ignore_empty=True
    )

    home: Path = Field(default_factory=default_home, description="folder of the database, artifacts and service logs")
    database_url: str | None = Field(default=None, description="sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME")
    artifacts: Path | None = Field(default=None, description="folder of journals and artifacts, a folder a run")
    artifact_store: str | None = Field(
        default=None, description="URL of the store of points' files (s3://BUCKET/PREFIX, file:///PATH)"
    )
    ray_address: str | None = Field(
        default=None, description="Ray cluster to connect to (host:port); None: this machine"
    )
    ray_dashboard: str = Field(default="http://127.0.0.1:8265", description="Ray's job submission address")
    dashboard_port: int = Field(default=8501, ge=1, le=65535, description="port of the results dashboard")
    gates: Path | None = Field(default=None, description="YAML of go/no-go rules; None: the project's own")

    @field_validator("ray_dashboard")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("is not an HTTP address; write http://HOST:PORT")
        return value

    @field_validator("artifact_store")
    @classmethod
    def _is_a_store(cls, value: str | None) -> str | None:
        return artifact_url.check(value) if value else None

    @field_validator("home", "artifacts")
    @classmethod
    def _may_be_a_folder(cls, value: Path | None) -> Path | None:
        there = next((path for path in (value, *value.absolute().parents) if path.exists()), None) if value else None
        if there is not None and not there.is_dir():
            raise ValueError(f"{str(there)!r} is not a folder; name one")
        return value

    @cached_property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'nsa.db'}"

    @property
    def no_database_yet(self) -> bool:
        """Whether the database is a SQLite file that does not exist: nothing was ever stored."""
        scheme, _, path = self.database.partition(":///")
        return scheme == "sqlite" and not Path(path).exists()

    @cached_property
    def artifacts_dir(self) -> Path:
        return self.artifacts or self.home / "artifacts"

    @cached_property
    def artifact_store_url(self) -> str:
        """The store of points' files; by default the folder of the journals."""
        return self.artifact_store or f"file://{self.artifacts_dir.absolute()}"


def load_settings() -> Settings:
    """The settings of this process. Raises SettingsError: one line a mistake."""
    try:
        return Settings()
    except ValidationError as err:
        raise SettingsError("\n".join(map(_mistake, err.errors()))) from None


def _mistake(error: ErrorDetails) -> str:
    variable = f"NSA_{str(error['loc'][0]).upper().removeprefix('NSA_')}"
    return artifact_url.hide_credentials(": ".join(split(error, variable)))
