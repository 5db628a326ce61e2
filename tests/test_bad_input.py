"""Property: any spec, table, journal or setting is taken, or its command ends with 2 and a line; no traceback.

A few hundred cases by default; 10,000 with `make test-thorough`.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nsa_command import Done, called, nsa

from jobs.schema.states import PointState, RunState
from jobs.specs.kinds import kinds
from orchestrator import reference_data
from orchestrator.cli import doctor
from orchestrator.database_url import hide_password
from orchestrator.run import driver
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries
from orchestrator.store.journal import read
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, RunEndRecord, RunRecord, StartRecord, now

pytestmark = pytest.mark.filterwarnings(
    "ignore",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
    "error::pytest.PytestUnraisableExceptionWarning",
)
_MANY = {} if settings().max_examples > 100 else {"max_examples": 60}
quick = settings(deadline=None, suppress_health_check=list(HealthCheck), **_MANY)

HOSTILE = st.sampled_from(
    [
        *("", "nan", "inf", "-1", "1e30", "1e400", "0x10", "2001-99-99", "9" * 5000, "x" * 6000, "a\0b", "\x1b[31m"),
        *("=1+1", "@x", "'=", "`[a](http://b)`", "\u202e", "\udcff", "../..", "http://[::1", "None", "true", "1:99"),
        *(None, True, 0, -1, 2**31, 2**63, 2**70, 16**3000, 0.5, 1e308, 5e-324, float("nan"), float("inf")),
    ]
)
VALUES = st.recursive(
    HOSTILE | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# Fields of every kind, each of which may be changed as well.
COMMON: dict[str, Any] = {
    "seed": 3,
    "memory_gib": 4,
    "resources": {"num_cpus": 1, "workers": 2},
    "deadlines": {"point_s": 600},
}
CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"
_PRINTED = 20  # mistakes of a spec, which are all found at once
_MORE = re.compile(r"error: and [1-9][0-9,]* more mistakes; mend these first")


def base(kind: str) -> dict[str, Any]:
    """The small ready spec of a kind, with the fields that all have."""
    names = (f"{kind}_smoke.yaml", f"{kind}.yaml", "demo.yaml")
    data = yaml.safe_load(next(path for name in names if (path := CONFIGS / name).exists()).read_text())
    return data | {name: value for name, value in COMMON.items() if name not in data}


BASES = {kind: base(kind) for kind in sorted(kinds())}
DATA = Path(next(iter(reference_data.__path__)))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad") / "nsa.db"


@pytest.fixture(scope="module")
def store(database: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{database}") as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input")


def succeeded(done: Done, most: int = 1) -> bool:
    """Whether a command succeeded. It may also refuse what it was given, in at most so many mistakes, each a line."""
    lines = done.err.splitlines()
    assert done.err == "".join(f"{line}\n" for line in lines), done
    assert done.code in (driver.OK, driver.BAD_INPUT), done
    assert (done.code == driver.BAD_INPUT) == bool(lines), done
    assert "as a bug" not in done.err, done
    if len(lines) > _PRINTED and _MORE.fullmatch(lines[-1]):
        del lines[-1]
    assert len(lines) <= most, done
    assert all(line.startswith("error: ") and ": " in line[7:] and len(line) < 1_200 for line in lines), done
    return not lines


def stored(database: Path, path: Path) -> bool:
    """Whether `nsa import` stored the file in the SQLite database; else it said why not, in a line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_DATABASE_URL", f"sqlite:///{database}")
        return succeeded(nsa("import", str(path)))


def changed(data: Any, draw: Callable[..., Any]) -> Any:
    """A copy of the data in which one to three places are gone or have another value."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        node, keys = data, []
        while isinstance(node, dict | list) and node:
            key = draw(st.sampled_from(sorted(node, key=str) if isinstance(node, dict) else range(len(node))))
            keys.append((node, key))
            node = node[key]
            if draw(st.booleans()):
                break
        owner, key = keys[-1]
        match draw(st.sampled_from(["value", "value", "gone", "more"])):
            case "gone":
                del owner[key]
            case "more" if isinstance(owner, dict):
                owner[draw(st.text(min_size=1, max_size=8))] = draw(VALUES)
            case _:
                owner[key] = draw(VALUES)
        if not data:
            break
    return data


@quick
@given(data=st.data(), kind=st.sampled_from([*BASES]))
def test_any_spec(folder: Path, data: st.DataObject, kind: str):
    text = data.draw(
        st.one_of(
            st.just(None).map(lambda _: yaml.safe_dump(changed(BASES[kind], data.draw), sort_keys=False)),
            st.text(max_size=60),
            st.integers(2, 12).map(bomb),
            st.integers(1, 3_000).map(lambda depth: "kind: scaling\nx: " + "[" * depth + "]" * depth),
        )
    )
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    succeeded(called(lambda: driver.main([str(path), "--dry-run"])), most=_PRINTED)


def bomb(levels: int) -> str:
    """YAML whose aliases stand for 9 ** levels values."""
    lines = ["kind: scaling", "a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


TABLES = [path.read_text().splitlines()[:4] for path in sorted(DATA.glob("*.csv"))]
TABLES.append(
    [
        "run_id,run_name,kind,source,point_id,number,label,state,reason,implementation,workload,pass,seq_len,batch,"
        "query_heads,kv_heads,head_dim,layers,dtype,device,env,python,gpu,estimate_bytes,created_at,ended_at,metric,"
        "unit,value,p10,p90,ci_low,ci_high,method,axis_chunks",
        "r,n,scaling,,r/0,0,l,ok,,chunked,attention,forward,512,1,4,2,64,,float32,cpu,,,,100,2026-11-20 12:00:00+00:00,"
        "2026-11-20 12:00:00+00:00,time,ms,1.5,1,2,1,2,by hand,3",
    ]
)


@quick
@given(data=st.data(), table=st.sampled_from(TABLES))
def test_any_table(store: Store, database: Path, folder: Path, data: st.DataObject, table: list[str]):
    cells = [line.split(",") for line in table]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(cells))
        place = data.draw(st.integers(0, len(row) - 1))
        row[place] = str(data.draw(HOSTILE | st.text(max_size=10)))[:4000]
    for name in data.draw(st.lists(st.sampled_from(cells[0]), max_size=20)):
        if name in cells[0]:
            place = cells[0].index(name)
            cells = [row[:place] + row[place + 1 :] for row in cells]
    path = folder / "table.csv"
    path.write_text("\n".join(map(",".join, cells)) + "\n", encoding="utf-8", errors="replace")
    if stored(database, path):
        queries.runs(store)


def journal(run_id: str) -> list[dict[str, Any]]:
    """The records of a run of one point, as JSON."""
    point = {"run_id": run_id, "point_id": f"{run_id}/0"}
    metrics = (MetricData(name="time", unit="ms", value=1.5, samples=(1.0, 2.0), p10=1.0, p90=2.0),)
    records = [
        RunRecord(run_id=run_id, name="t", kind="scaling", spec={"a": [1]}, spec_hash="5"),
        PointRecord(**point, index=0, key="k", label="l", config={"a": {}}, axes={"seq_len": 64}, estimate_bytes=9),
        StartRecord(**point, attempt=1, node="n"),
        OutcomeRecord(
            **point, attempt=1, state=PointState.OK, started_at=now(), metrics=metrics, environment={"gpu": "H200"}
        ),
        RunEndRecord(run_id=run_id, state=RunState.DONE),
    ]
    return [json.loads(record.model_dump_json()) for record in records]


NUMBERS = itertools.count()


@quick
@given(data=st.data())
def test_any_journal(store: Store, database: Path, folder: Path, data: st.DataObject):
    records = changed(journal(f"run-{next(NUMBERS)}"), data.draw)
    path = folder / "journal.jsonl"
    path.write_text("".join(_json(record) + "\n" for record in records), encoding="utf-8", errors="replace")
    if stored(database, path):
        run_id = next(read(path)).run_id
        assert queries.run(store, run_id)
        queries.measurements(store, run_ids=[run_id])


def _json(record: object) -> str:
    try:
        return json.dumps(record)
    except ValueError:  # an integer that Python does not write
        return "[" + "9" * 5000 + "]"


NAMES = ("DATABASE_URL", "RAY_DASHBOARD", "RAY_HOST", "ARTIFACT_STORE", "DASHBOARD_PORT", "HOME", "ARTIFACTS", "GATES")
ADDRESSES = st.builds(
    lambda scheme, user, host, port, path: f"{scheme}://{user}{host}{port}{path}",
    st.sampled_from(["http", "https", "sqlite", "postgresql", "file", "s3", "ftp", ""]),
    st.sampled_from(["", "me@", "me:secret@", "me:se/secret@", "me:se secret@", "me:se@secret@", "me:se#secret@"]),
    st.sampled_from(["h", "127.0.0.1", "[::1]", "[::1", "", "..", "h" * 300, "a b", "\u0663", "[zz]"]),
    st.sampled_from(["", ":1", ":0", ":99999", ":abc", ":", ":-1"]),
    st.sampled_from(["", "/", "/db", "/db?x=1", "/a\x1b[31m", "//", "/" + "x" * 3000, "/db?password=se secret"]),
)


def unreachable(*_: object, **__: object) -> None:
    raise psycopg.OperationalError("no server here")


@quick
@example(name="GATES", value="9" * 5000)  # too long for a file's name
@example(name="HOME", value="9" * 5000)
@example(name="ARTIFACTS", value="9" * 5000)
@given(name=st.sampled_from(NAMES), value=ADDRESSES | st.text(max_size=30) | HOSTILE.map(str))
def test_any_setting(folder: Path, name: str, value: str):
    value = value.replace("\0", "").encode("utf-8", "replace").decode()  # what a process can be given
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(f"NSA_{name}", value)
        patch.setattr(psycopg, "connect", unreachable)
        done = called(lambda: driver.main([str(CONFIGS / "demo.yaml"), "--dry-run"]))
        listed = nsa("runs")
        told = [done.err, listed.err]
        if succeeded(done):
            rows = doctor.setting_rows(load_settings())
            told.extend(value for variable, value, _, _ in rows if variable == "NSA_DATABASE_URL")
        succeeded(listed)
    if name == "DATABASE_URL":
        assert not any("secret" in text for text in told), told
    assert "secret" not in hide_password(value) or "://" not in value or "@" not in value
