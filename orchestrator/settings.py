"""Settings from the environment or a `.env` file; `nsa doctor` lists them with where each value came from."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[1]


class SettingsError(UserError):
    """An environment variable or a line of `.env` with a value that cannot be used."""


def default_home() -> Path:
    """`var/` in the checkout; `~/.nsa` for code that Ray unpacked into a folder that will be deleted."""
    unpacked = any(part.startswith("_ray_pkg_") for part in _CHECKOUT.parts)
    installed = not (_CHECKOUT / "pyproject.toml").exists()
    return Path.home() / ".nsa" if unpacked or installed else _CHECKOUT / "var"


class Settings(BaseSettings):
    """Environment variables `NSA_<FIELD>`; unset ones derive from `NSA_HOME`."""

    model_config = SettingsConfigDict(env_prefix="NSA_", env_file=_CHECKOUT / ".env", extra="ignore", frozen=True)

    home: Path = Field(default_factory=default_home, description="folder of the database, artifacts and service logs")
    database_url: str | None = Field(None, description="SQLAlchemy URL: sqlite:///PATH or postgresql+psycopg://...")
    artifacts: Path | None = Field(None, description="folder of journals and artifacts, a folder a run")
    ray_address: str | None = Field(None, description="Ray cluster to connect to (host:port); None: the local one")
    ray_dashboard: str = Field("http://127.0.0.1:8265", description="Ray's job submission address")
    dashboard_port: int = Field(8501, ge=1, le=65535, description="port of the results dashboard")
    gates: Path | None = Field(None, description="YAML of go/no-go rules; None: the project's own")

    @cached_property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'nsa.db'}"

    @cached_property
    def artifacts_dir(self) -> Path:
        return self.artifacts or self.home / "artifacts"


def load_settings() -> Settings:
    """The settings of this process. Raises SettingsError, one line a mistake."""
    try:
        return Settings()  # pyright: ignore[reportCallIssue]  (every field has a default)
    except ValidationError as err:
        lines = [f"NSA_{str(e['loc'][0]).upper().removeprefix('NSA_')}: {e['input']!r}: {e['msg']}" for e in err.errors()]
        raise SettingsError("\n".join(lines)) from None
