"""Ray's job submission for `nsa submit`, `logs` and `cancel`; like `ray job submit`, with provenance added."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jobs.schema.plain_text import in_a_line
from jobs.specs.load import load_spec
from orchestrator.cli.services import asks_for_token, ray_answers
from orchestrator.errors import UserError
from orchestrator.execute import ray_token
from orchestrator.execute.upload import collect
from orchestrator.provenance import git_state
from orchestrator.settings import Settings
from orchestrator.terminal import warn

if TYPE_CHECKING:
    from ray.job_submission import JobStatus, JobSubmissionClient

T = TypeVar("T")

_REASON = 300  # characters


class SubmissionError(UserError):
    """The cluster cannot be reached or does not know the job. One line: field, value, fix."""


@dataclass(frozen=True)
class Submitted:
    """A job that Ray has accepted.

    Attributes:
        job: Ray's submission id.
        upload_bytes: size of the package that was sent.
    """

    job: str
    upload_bytes: int


def submit(settings: Settings, spec: Path, overrides: Sequence[str] = (), more: Sequence[str] = ()) -> Submitted:
    """Submit `python -m jobs SPEC` with the spec and the files that it names; from a checkout, with the sources too.

    Args:
        overrides: KEY=VALUE of the spec.
        more: further arguments of `python -m jobs`, as `--resume RUN`.

    Raises:
        SpecError: the spec or an override is wrong.
        UserError: a file that the spec names cannot be sent.
        SubmissionError: no cluster answers, or it does not take the job.
    """
    upload = collect(load_spec(spec, overrides), spec)
    args = ["python", "-m", "jobs", str(upload.spec)]
    for item in overrides:
        args += ["--set", item]
    args += more
    client = _client(settings)
    if not asks_for_token(settings):
        warn(f"warning: the cluster at {settings.ray_dashboard} asks for no token: whoever reaches it runs code there")
    with tempfile.TemporaryDirectory(prefix="nsa-upload-") as folder:
        size = upload.write(package := Path(folder) / "upload.zip")
        runtime_env = {"working_dir": str(package), "env_vars": git_state().variables}
        job = _answered(
            lambda: client.submit_job(entrypoint=shlex.join(args), runtime_env=runtime_env),
            f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: did not take the job",
            "look at `nsa status`",
        )
        return Submitted(job, size)


def follow(settings: Settings, submission_id: str) -> Iterator[str]:
    """The job's log as it grows, until the job ends."""
    stream = _client(settings).tail_job_logs(submission_id)
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                text = _known(lambda: loop.run_until_complete(anext(stream)), submission_id)
            except StopAsyncIteration:
                return
            yield text
    finally:
        loop.close()


def log(settings: Settings, submission_id: str) -> str:
    """The job's log so far."""
    return _known(lambda: _client(settings).get_job_logs(submission_id), submission_id)


def job_status(settings: Settings, submission_id: str) -> JobStatus:
    """The job's status."""
    return _known(lambda: _client(settings).get_job_status(submission_id), submission_id)


def stop(settings: Settings, submission_id: str) -> bool:
    """Ask Ray to stop the job; its driver then cancels the remaining points. False if it had ended already."""
    return _known(lambda: _client(settings).stop_job(submission_id), submission_id)


def no_cluster(settings: Settings) -> SubmissionError:
    """The error of an address at which no cluster answers."""
    return SubmissionError(
        f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: no Ray cluster answers there; start one with `nsa up`, "
        "or run without one: python -m jobs SPEC --local"
    )


def _client(settings: Settings) -> JobSubmissionClient:
    if not ray_answers(settings):
        raise no_cluster(settings)
    ray_token.send_it()
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(settings.ray_dashboard)
    except AuthenticationError:
        raise SubmissionError(
            f"RAY_AUTH_TOKEN: the cluster at {settings.ray_dashboard} asks for another token than this user's; "
            "set it to the owner's, or start a cluster of your own: nsa up with another NSA_RAY_DASHBOARD"
        ) from None
    except Exception as err:  # also of what Ray's client takes for an answer of its server without a look
        raise SubmissionError(
            f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: does not answer as Ray's job server does "
            f"({in_a_line(err, _REASON)}); give the address of a cluster's dashboard, or start one with `nsa up`"
        ) from None


def _known(call: Callable[[], T], submission_id: str) -> T:
    return _answered(call, f"job: {submission_id!r}", "`ray job list` lists the jobs")


def _answered(call: Callable[[], T], what: str, fix: str) -> T:
    """The answer to a call of Ray's client. Raises SubmissionError if Ray refuses, times out or returns garbage."""
    try:
        return call()
    except StopAsyncIteration:
        raise
    except Exception as err:
        raise SubmissionError(f"{what}: {in_a_line(err, _REASON)}; {fix}") from None
