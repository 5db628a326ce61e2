"""`make bench-system`: how fast storing, commands and pages are with 1,000 runs of 200 points.

Each command and page is timed in turns with an empty database, as the machine may be busy: the shortest of three. Of
a page that is the time until its title is there, and until it is drawn, in a new tab. Prints Markdown.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

from made_up_runs import attempt, metrics, planned
from playwright.sync_api import Browser, expect, sync_playwright
from postgres_process import Postgres
from processes import CHROMIUM, free_ports

from jobs.schema.states import PointState, RunState
from orchestrator.store import Store, queries, upgrade
from orchestrator.store import records as rec

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    "compare {before} {after}", "compare {old} {new}", "gate", "plan", "history", "history triton forward 12/2 2048",
    "runs", "show last", "status", "doctor", "report last", "--help",
)  # fmt: skip
PAGES = ("Overview", "Results", "Now", "Scaling", "Compare", "History", "Runs", "Fleet")
_CELLS = tuple(
    product(("triton", "dense"), ("forward", "forward+backward"), ((12, 2), (32, 8), (64, 4), (16, 1), (8, 8)))
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-system")
    parser.add_argument("--home", type=Path, help="an earlier one's folder, whose database is used again")
    parser.add_argument("--only", choices=("postgres", "commands", "pages"), nargs="*")
    asked = parser.parse_args()
    home = asked.home or Path(tempfile.mkdtemp(prefix="nsa-load-"))
    full, empty = home / "full", home / "empty"
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {home}", flush=True)
    upgrade(f"sqlite:///{empty}/nsa.db")
    if not (full / "nsa.db").exists():
        store("SQLite", f"sqlite:///{full}/nsa.db")
    only = asked.only or ("postgres", "commands", "pages")
    with ExitStack() as stack:
        if "postgres" in only:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = Postgres(folder, free_ports(1)[0], os.environ)
            stack.callback(server.stop)
            store("Postgres", server.url, runs=50)
        if "commands" in only:
            time_commands(full, empty)
        if "pages" in only:
            playwright = stack.enter_context(sync_playwright())
            time_pages(playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]), full, empty)


def store(name: str, url: str, runs: int = 1000) -> None:
    """Store runs of 200 points at `url`, and print how many metrics a second that were."""
    upgrade(url)
    seconds, rows = 0.0, 0
    with Store.open(url) as opened:
        for number in range(runs):
            records = list(made_up(number))
            rows += sum(len(each.metrics) for each in records if isinstance(each, rec.OutcomeRecord))
            begun = time.monotonic()
            opened.apply_many(records)
            seconds += time.monotonic() - begun
    print(f"{name}: {rows:,} metrics in {seconds:.0f} s, {rows / seconds:,.0f} a second", flush=True)


def made_up(number: int) -> Iterator[rec.Record]:
    """A run of one of 25 specs, on one of 200 commits, of which every fiftieth point has failed."""
    at = datetime.now(UTC) - timedelta(hours=number + 1)
    name, kind = f"sweep-{number % 25}", "bench" if number % 3 else "scaling"
    run_id = f"{at:%Y%m%d-%H%M%S}-{name}-{number:04x}"
    told = {"git_commit": f"{1_000_000_007 * (1 + number // 5):040x}", "git_dirty": False, "host": f"bench{number % 4}"}
    spec = {"kind": kind, "name": name, "seed": number % 25}
    yield rec.RunRecord(run_id=run_id, at=at, name=name, kind=kind, spec=spec, spec_hash=f"{number % 25:016x}", **told)
    gpu = {"name": "NVIDIA H200", "driver": "580", "uuid": f"GPU-{number % 8}", "index": number % 8}
    environment = {"torch": "2.13", "host": told["host"], "gpu": gpu}
    for index in range(200):
        implementation, pass_, (heads, kv_heads) = _CELLS[index % len(_CELLS)]
        seq_len = 512 << index // len(_CELLS)
        axes = {"pass_": pass_, "query_heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16", "device": "cuda"}
        plan = planned(run_id, index, implementation, seq_len, at, axes, estimate_bytes=seq_len * 2**15)
        start = at + timedelta(seconds=index)
        if index % 50 == 49:
            about = {"reason": "needed 160 GiB of 139 GiB", "environment": environment}
            yield from attempt(plan, start, 1, PointState.OOM, **about)
            continue
        value = heads * (seq_len / 512) ** (1.1 if implementation == "triton" else 2) * (1 + (number * 7 % 13) / 500)
        memory = {"peak_extra_memory": 3 * value, "oracle_error": 1e-6, "oracle_error_bound": 1e-5}
        measured = metrics(time=value, throughput=seq_len / value, **memory)
        measured[0] |= {"samples": tuple(value * (1 + k / 1000) for k in range(20)), "p10": value, "p90": 1.02 * value}
        about = {"route": dict.fromkeys(("cmp", "slc", "win"), implementation), "environment": environment}
        yield from attempt(plan, start, 1, PointState.OK, started_at=start, metrics=measured, **about)
    yield rec.RunEndRecord(run_id=run_id, at=at + timedelta(minutes=9), state=RunState.DONE)


def time_commands(full: Path, empty: Path) -> None:
    with Store.open(f"sqlite:///{full}/nsa.db", readonly=True) as opened:
        found = queries.runs(opened)
    alike = found.loc[found["name"] == found["name"][0], "run_id"].tolist()
    names = {"after": alike[0], "before": alike[1], "new": found["git_commit"][0], "old": found["git_commit"].iloc[-1]}
    print("\n| command | s | s, empty |\n|---|---|---|")
    nsa = [sys.executable, "-c", "from orchestrator.cli.entry import main; main()"]
    for command in COMMANDS:
        words = command.format(**names).split()

        def run(home: Path, words: list[str] = words) -> tuple[float]:
            begun = time.monotonic()
            done = subprocess.run([*nsa, *words], cwd=ROOT, env=environment(home), capture_output=True, text=True)
            assert "Traceback" not in done.stderr, done.stderr
            return (time.monotonic() - begun,)

        (seconds,), (least,) = in_turns(run, full, empty)
        print(f"| `nsa {command}` | {seconds:.2f} | {least:.2f} |", flush=True)


def in_turns(timed: Callable[[Path], tuple[float, ...]], *homes: Path) -> list[tuple[float, ...]]:
    """The shortest of three times for each home."""
    times = [[timed(home) for home in homes] for _ in range(3)]
    return [tuple(map(min, zip(*of_home, strict=True))) for of_home in zip(*times, strict=True)]


def environment(home: Path) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    return outer | {"NSA_HOME": str(home), "NSA_DATABASE_URL": f"sqlite:///{home}/nsa.db", "PYTHONPATH": str(ROOT)}


@contextmanager
def dashboard(home: Path) -> Iterator[str]:
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "streamlit", "run", "dashboard/app.py", f"--server.port={port}"]
    command += ["--server.address=127.0.0.1", "--server.headless=true"]
    with (home / "dashboard.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment(home), stdout=log, stderr=log)
    try:
        for _ in range(600):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2)
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def time_pages(browser: Browser, full: Path, empty: Path) -> None:
    expect.set_options(timeout=120_000)
    with dashboard(full) as one, dashboard(empty) as other:
        urls = {full: one, empty: other}
        print("\n| page | title, s | drawn, s | title, empty | drawn, empty |\n|---|---|---|---|---|")
        for title in PAGES:

            def visit(home: Path, title: str = title) -> tuple[float, ...]:
                time.sleep(3)  # what other visits read is no longer cached
                with browser.new_page() as page:
                    begun = time.monotonic()
                    page.goto(f"{urls[home]}/{'' if title == 'Overview' else title.lower()}")
                    expect(page.get_by_role("heading", name=title, level=1)).to_be_visible()
                    shown = time.monotonic() - begun
                    state = "data-test-script-state"
                    expect(page.get_by_test_id("stApp")).to_have_attribute(state, "notRunning")
                    return shown, time.monotonic() - begun

            for home in urls:
                visit(home)  # imports, and the browser's cache of scripts
            figures = " | ".join(f"{one:.2f} | {other:.2f}" for one, other in in_turns(visit, full, empty))
            print(f"| {title} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
