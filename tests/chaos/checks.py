"""Checks after a chaos run. Each returns a line for each fault that it finds."""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from chaos.sweep import Sweep, value
from sqlalchemy import text

from jobs.schema.states import PointState, RunState
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, PointRecord, StartRecord

_GOOD_ENDS = (0, 1, 2, 130, -9, -15)  # as documented, and ended before it could look at signals


def accounts(sweep: Sweep, url: str, folder: Path) -> Iterator[str]:
    """Every point is ok exactly once in the journal, in the database, and in a database made of the journal."""
    run_id, kept = str(sweep.run_id), list(journal.read(sweep.path))
    wanted = {f"{run_id}/{number}": value(number) for number in range(sweep.points)}
    planned = {record.point_id for record in kept if isinstance(record, PointRecord)}
    if planned != set(wanted):
        yield f"{run_id}: the journal plans {len(planned)} points, not {len(wanted)}"
    good = defaultdict[str, dict[int, float]](dict)
    for record in kept:
        if isinstance(record, StartRecord) and good[record.point_id] and record.attempt not in good[record.point_id]:
            yield f"{record.point_id}: was measured again after it was ok"
        if isinstance(record, OutcomeRecord) and record.state is PointState.OK:
            good[record.point_id][record.attempt] = record.metrics[0].value
    for point_id, expected in wanted.items():
        if list(good[point_id].values()) != [expected]:
            yield f"{point_id}: the journal has the ok attempts {good[point_id]}, not one of {expected}"
    attempts = [next(iter(good[point_id]), None) for point_id in wanted]
    with Store.open(url, readonly=True) as store:
        yield from _rows(store, "database", run_id, attempts, list(wanted.values()))
    with Store.open(f"sqlite:///{folder / sweep.name}.db") as store:
        importer.import_file(store, sweep.path)
        yield from _rows(store, "database made of the journal", run_id, attempts, list(wanted.values()))


def _rows(
    store: Store, where: str, run_id: str, attempts: Sequence[int | None], values: Sequence[float]
) -> Iterator[str]:
    run, points = queries.run(store, run_id), queries.points(store, run_id)
    if run is None or run["state"] != RunState.DONE:
        yield f"{run_id}: the {where} has the run {run and run['state']}, not done"
    if list(points["state"]) != [PointState.OK] * len(values):
        yield f"{run_id}: the {where} has points {points['state'].value_counts().to_dict()}, not {len(values)} ok"
    if list(points["attempt"]) != list(attempts):
        yield f"{run_id}: the {where} has other attempts than the journal"
    found = queries.measurements(store, run_ids=[run_id]).value.tolist()
    if sorted(found) != sorted(values):
        yield f"{run_id}: the {where} has {len(found)} values, not each of the {len(values)} once"


def drivers(sweep: Sweep) -> Iterator[str]:
    """Drivers end with their exit codes, and without a traceback."""
    for number, code in enumerate(sweep.codes):
        if code not in _GOOD_ENDS:
            yield f"{sweep.log(number)}: the driver ended with {code}"
    for number in range(len(sweep.codes) + 1):
        if sweep.log(number).exists() and "Traceback" in sweep.log(number).read_text():
            yield f"{sweep.log(number)}: has a traceback"


def handles(workers: Sequence[psutil.Process], url: str) -> Iterator[str]:
    """No process that outlives a point holds one of its files; no session of Postgres is left, nor a lease."""
    for process in workers:
        for name in _open_files(process.pid):
            if "nsa-point-" in name:
                yield f"{process}: still has {name} open"
    with Store.open(url, readonly=True) as store, store.session() as session:
        others = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
        if count := session.scalar(text(f"SELECT count(*) FROM pg_stat_activity WHERE {others}")):
            yield f"Postgres: {count} sessions are left"
        for owner in session.scalars(text("SELECT lease_owner FROM run WHERE lease_owner IS NOT NULL")):
            yield f"Postgres: {owner} still has a lease"


def processes(mark: str) -> Iterator[str]:
    """No process is left that inherited `mark` in its environment, whoever its parent is now."""
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            yield f"a process is left: {process.pid} {' '.join(process.cmdline())[:200]}"


def marked(mark: str) -> list[psutil.Process]:
    """Other processes that have `mark` in the environment that they were started with."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.pid != os.getpid() and mark.encode() in environment:
                found.append(process)
    return found


def leftovers(temporary: Path) -> Iterator[str]:
    """No temporary file of ours is left. PyTorch keeps a cache, and a killed dashboard of Ray leaves pymp-*."""
    for path in temporary.iterdir():
        if not path.name.startswith(("torchinductor_", "pymp-")):
            yield f"a temporary file is left: {path}"


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(descriptor.path)
