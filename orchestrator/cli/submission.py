"""Ray's job submission for `nsa submit`, `resolve`, `logs` and `cancel`; like `ray job submit`, with provenance.

A run is cancelled by stopping its job; where its driver is gone already, its unfinished points are marked.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from jobs.schema.plain_text import in_a_line
from jobs.schema.states import PointState, RunState
from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError, card_of
from orchestrator.cli import console
from orchestrator.cli.interleave import IN_UPLOAD, sources_at
from orchestrator.cli.services import local_services
from orchestrator.errors import UserError
from orchestrator.execute import ray_access
from orchestrator.execute.ray_cluster import ACCELERATOR, card_types
from orchestrator.execute.ray_http import asks_for_token
from orchestrator.execute.upload import Upload, collect, sources
from orchestrator.judge.rules import READY_SPECS
from orchestrator.judge.steps import Step
from orchestrator.provenance import git_state, user
from orchestrator.run import driver
from orchestrator.run.order import labels
from orchestrator.settings import LOOPBACKS, Settings
from orchestrator.store import Store, queries
from orchestrator.store.journal import NAME, Journal, JournalError, JournalHeld, read
from orchestrator.store.records import EventRecord, OutcomeRecord, Record, RunEndRecord
from orchestrator.store.store import LeaseHeld
from orchestrator.terminal import say, warn

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_MOST_NODES = 10_000  # Ray's own limit
_REASON = 300  # characters


class SubmissionError(UserError):
    """The cluster cannot be reached or does not know the job. One line: field, value, fix."""


def submit(settings: Settings, spec: Path, overrides: Sequence[str] = (), more: Sequence[str] = ()) -> str:
    """Submit `python -m jobs SPEC` with the spec and the files that it names; from a checkout, with the sources too.

    `more` are further arguments, as `--resume RUN`. Returns the job's submission id. Raises SpecError; UserError: a
    file that the spec names cannot be sent; SubmissionError: no cluster answers, or it does not take the job.
    """
    upload = collect(load_spec(spec, overrides), spec)
    args = ["python", "-m", "jobs", str(upload.spec), *set_options(overrides), *more]
    return _submit(settings, upload, args)


def submit_turns(
    settings: Settings, spec: Path, commit: str, overrides: Sequence[str], turns: int, more: Sequence[str]
) -> str:
    """Submit `nsa compare --interleave SPEC --at COMMIT` as one job, which itself holds what a point needs.

    `more` are further options. Returns and raises as `submit`; UserError also if this checkout has no such commit, or
    the spec does not say what to hold.
    """
    checked = load_spec(spec, overrides)
    if checked.device == "auto":  # it would hold no GPU, and measure on the CPU without a word
        raise UserError("device: 'auto': a job of turns must hold what it measures on; use cuda or cpu")
    upload, needs = collect(checked, spec), checked.resources
    # The job holds the resources of one point, on the right card.
    held = ["resources.workers=1", *(["resources.accelerator_type=null"] if needs.accelerator_type else [])]
    options = ["--turns", str(turns), *more, *set_options([*overrides, *held])]
    gpus = float(checked.device == "cuda") if needs.num_gpus is None else needs.num_gpus
    holds: dict[str, Any] = {"entrypoint_num_cpus": needs.num_cpus, "entrypoint_num_gpus": gpus}
    if needs.accelerator_type:
        holds["entrypoint_resources"] = {ACCELERATOR + card_of(needs.accelerator_type)[0]: 0.001}
    with sources_at({"--at": commit}) as [found]:
        at = str(found.state.commit)
        sent = {f"{IN_UPLOAD}/{at}/{name}": path for name, path in sources(found.folder)}
        nsa = "from orchestrator.cli.commands import main; main()"
        args = ["python", "-c", nsa, "compare", "--interleave", str(upload.spec), "--at", at, "--local", *options]
        return _submit(settings, replace(upload, files={**upload.files, **sent}), args, **holds)


def _submit(settings: Settings, upload: Upload, args: Sequence[str], **holds: Any) -> str:
    client = _client(settings)
    if not asks_for_token(settings):
        warn(f"warning: the cluster at {settings.ray_dashboard} asks for no token: whoever reaches it runs code there")
    with tempfile.TemporaryDirectory(prefix="nsa-upload-") as folder:
        size = upload.write(package := Path(folder) / "upload.zip")
        person = settings.person or user()
        variables = {**git_state().variables, **({"NSA_PERSON": person} if person else {})}
        runtime_env = {"working_dir": str(package), "env_vars": variables}
        with _answering(f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: did not take the job", "look at `nsa status`"):
            job = client.submit_job(entrypoint=shlex.join(args), runtime_env=runtime_env, **holds)
    say(f"submitted {job} (upload: {size / 2**20:.2f} MiB)")
    return job


def set_options(overrides: Sequence[str]) -> list[str]:
    """The arguments of `python -m jobs` that override keys of the spec."""
    return [item for override in overrides for item in ("--set", override)]


def log(settings: Settings, submission_id: str, *, follow: bool = True) -> Iterator[str]:
    """The job's log as it grows, until the job ends; without `follow` what it has so far."""
    if not follow:
        with _answering(f"job: {submission_id!r}"):
            yield _client(settings).get_job_logs(submission_id)
        return
    stream = _client(settings).tail_job_logs(submission_id)
    loop = asyncio.new_event_loop()
    try:
        while True:
            with _answering(f"job: {submission_id!r}"):
                text = loop.run_until_complete(anext(stream, None))
            if text is None:
                return
            yield text
    finally:
        loop.close()


def follow(settings: Settings, submission_id: str) -> int:
    """Print the job's log until the job ends. Returns the exit code of its driver; 1 if it was stopped."""
    for text in log(settings, submission_id):
        say(text, end="")
    with _answering(f"job: {submission_id!r}"):
        job = _client(settings).get_job_info(submission_id)
    return 0 if job.status == "SUCCEEDED" else job.driver_exit_code or 1


def cancel_run(settings: Settings, store: Store, run_id: str) -> str:
    """Stop the run's Ray job; if its driver is gone already, mark its unfinished points as cancelled.

    Returns a line that says what was done. Raises UserError: the driver lives, but cannot be stopped as a Ray job.
    """
    run = queries.run(store, run_id)
    assert run is not None, "the caller looked the run up"
    if RunState(run["state"]).ended:
        return f"{run_id} has ended already: {run['state']}"
    by = f"{queries.CANCELLED_BY}{settings.person or user() or 'an unknown user'} with nsa cancel"
    job = run["submission_id"]
    gone = "its job has ended" if job else "it was not run as a Ray job"
    try:
        if job:
            with _answering(f"job: {job!r}"):
                stopping = _client(settings).stop_job(job)
            if stopping:  # its driver cancels the remaining points, and knows a signal only
                store.apply_many([EventRecord(run_id=run_id, message=by)])
                return f"stopping {run_id} (job {job}); its remaining points end as cancelled"
    except SubmissionError as err:
        gone = f"its job could not be asked to stop ({err})"
    path, note = Path(run["artifacts"] or "") / NAME, ""
    own = _is_journal_of(run_id, path)
    if not own and os.path.isfile(path):
        note = f" in the database alone: {in_a_line(path)} is not its journal, and stays as it is"
    with ExitStack() as stack:
        # Who gets the lease, and the lock of the journal where that is here, knows that no driver is alive.
        try:
            store.take_lease(run_id)
            stack.callback(store.end_lease, run_id)
            journal = stack.enter_context(Journal(path)) if own else None
        except (LeaseHeld, JournalHeld):
            raise UserError(
                f"RUN: {run_id!r}: its driver is alive on {run['host'] or 'its host'}; interrupt it there with "
                "Ctrl-C, or stop its Ray job"
            ) from None
        if journal:
            store.apply_many(read(path))  # the database may have missed some
        run = queries.run(store, run_id) or run
        records: list[Record] = []
        if not RunState(run["state"]).ended:  # as its journal may say
            ending: dict[str, Any] = {"run_id": run_id, "reason": by}
            for row in queries.attempts(store, run_id).to_dict("records"):
                if not PointState(row["state"]).ended:
                    point = {"point_id": row["point_id"], "attempt": row["number"], "state": PointState.CANCELLED}
                    records.append(OutcomeRecord(**ending, **point))
            records.append(RunEndRecord(**ending, state=RunState.CANCELLED, resumed=run["resumed"]))
        if journal:
            journal.append(records)
        store.apply_many(records)
    return f"{gone}; marked {max(0, len(records) - 1)} unfinished points of {run_id} as cancelled{note}"


def label_run(store: Store, run_id: str, tags: Sequence[str], remove: Sequence[str], note: str | None) -> str:
    """Add tags to a run, remove others, set its notes; also in its journal, where that is here and not in use.

    Returns the labels in a line. Raises UserError for what is no tag.
    """
    run = queries.run(store, run_id)
    assert run is not None, "the caller looked the run up"
    left = {*run["tags"].split(), *tags} - {*remove}
    record = labels(run_id, sorted(left), run["notes"] if note is None else note or None)
    if (before := run["labelled_at"]) and before >= record.at:  # by the clock of another host, which is ahead
        record = record.model_copy(update={"at": before + timedelta(microseconds=1)})
    path = Path(run["artifacts"] or "") / NAME
    if _is_journal_of(run_id, path):
        with suppress(JournalError), Journal(path) as journal:  # its driver has it, or it is another user's
            journal.append([record])
    store.apply_many([record])
    return f"{run_id}: tags {' '.join(record.tags) or '(none)'}" + (f"; note: {record.notes}" if record.notes else "")


def _is_journal_of(run_id: str, path: Path) -> bool:
    """Whether a file is the run's journal: the path comes with an imported journal, so it may be any."""
    try:
        first = next(read(path), None) if os.path.isfile(path) else None
    except JournalError:
        return False
    return first is not None and first.run_id == run_id


def run_steps(settings: Settings, steps: Sequence[Step], *, dry_run: bool = False) -> None:
    """Submit each step that a node can run, and follow it to its end; say which are not run, and why.

    A failed step does not stop the next. Raises SubmissionError: no cluster answers.
    """
    nodes = cluster_nodes(settings) if any(step.command for step in steps) else []
    for step in steps:
        settled = f"{', '.join(step.settles)} on {step.hardware}"
        cards = {step.accelerator, card_of(step.accelerator)[0]} if step.accelerator else None
        if step.command is None:
            say(f"no command settles {settled}: {step.lacking}")
        elif not any(
            node.get("GPU", 0) >= step.gpus and (cards is None or not cards.isdisjoint(card_types(node)))
            for node in nodes
        ):
            here = {
                f"{node['GPU']:g}× {' or '.join(sorted(card_types(node))) or 'GPU'}"
                for node in nodes
                if node.get("GPU")
            }
            say(
                f"not run: {step.command}: needs a node with {step.gpus}× {step.accelerator or 'GPU'}; "
                f"this cluster has {', '.join(sorted(here)) or 'no GPU'}"
            )
        elif dry_run:
            say(f"would run: {step.command}: {console.cost(step)}; settles {settled}")
        else:
            say(f"running: {step.command}: {console.cost(step)}; settles {settled}")
            spec = READY_SPECS / (step.spec or "")
            try:
                driver.check([str(spec), *set_options(step.overrides)])
                job = submit(settings, spec, step.overrides)
                end = f"failed (job {job})" if follow(settings, job) else "done"
            except (UserError, SpecError) as err:
                end = f"failed ({'; '.join(str(err).splitlines())})"
            say(f"{end}: {step.command}")


def cluster_nodes(settings: Settings) -> list[dict[str, float]]:
    """Ray's resources of each living node, from the cluster's dashboard. Raises SubmissionError."""
    _check_ray(settings)
    from ray.util.state import list_nodes

    alive: Any = [("state", "=", "ALIVE")]
    with _answering(f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: cannot list the nodes", "look at `nsa status`"):
        listed = list_nodes(settings.ray_dashboard, alive, limit=_MOST_NODES, detail=True)
        return [vars(each)["resources_total"] for each in listed]


def _check_ray(settings: Settings) -> None:
    """Raise SubmissionError if no cluster answers."""
    if not local_services(settings)[0].healthy:
        raise SubmissionError(
            f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: no Ray cluster answers there; start one with `nsa up`, "
            "or run without one: python -m jobs SPEC --local"
        )
    host = urlsplit(settings.ray_dashboard).hostname or ""
    if host in LOOPBACKS and not proxy_bypass(host):  # Ray's client would ask http_proxy for this host's own cluster
        told = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = f"{told},{host}" if told else host


def _client(settings: Settings) -> JobSubmissionClient:
    _check_ray(settings)
    ray_access.send_token()
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


@contextmanager
def _answering(what: str, fix: str = "`ray job list` lists the jobs") -> Iterator[None]:
    """Raise SubmissionError if Ray's client, called in the block, is refused, times out or returns garbage."""
    try:
        yield
    except Exception as err:
        raise SubmissionError(f"{what}: {in_a_line(err, _REASON)}; {fix}") from None
