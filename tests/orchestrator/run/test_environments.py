"""Runs under several environments and interpreters, and the paths of a spec, by the driver on this machine."""

from __future__ import annotations

from pathlib import Path

from other_interpreters import make_interpreter, own_packages

from orchestrator.run import driver
from orchestrator.store import Store, journal, queries
from orchestrator.store.records import OutcomeRecord, PointRecord

ROOT = Path(__file__).resolve().parents[3]
KINDS = Path(__file__).parents[1] / "kinds"
TRAIN = "kind: train\nname: t\ndevice: cpu\nseq_len: 32\nsteps: 5\noptimizer: {{warmup_steps: 2}}\ndata: {{path: {}}}\n"


def test_a_second_interpreter_and_environment_measure_the_same_point(home, spec, tmp_path, snippet_kind) -> None:
    other = make_interpreter(tmp_path / "other", *own_packages(), KINDS)
    code = "value = 1.0 + len(os.environ.get('MALLOC_ARENA_MAX', ''))"
    more = f"python: [null, {other}]\nenv: [{{}}, {{MALLOC_ARENA_MAX: '12'}}]\n"
    path = spec(code, more=more)
    assert driver.main([str(path), "--local"]) == 0
    [file] = (home / "artifacts").glob(f"*/{journal.NAME}")
    kept = list(journal.read(file))
    planned = [record for record in kept if isinstance(record, PointRecord)]
    assert len({record.key for record in planned}) == 4
    assert [record.label for record in planned][1] == "snippet 0 [MALLOC_ARENA_MAX=12]"
    ends = [record for record in kept if isinstance(record, OutcomeRecord)]
    assert [end.environment["settings"] for end in ends] == [{"MALLOC_ARENA_MAX": text} for text in ("unset", "12")] * 2
    assert [end.metrics[0].value for end in ends] == [1.0, 3.0] * 2
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        points = queries.points(store, file.parent.name)
        assert [None if env != env else env for env in points["env"]] == [None, "MALLOC_ARENA_MAX=12"] * 2
        assert list(points["python"].fillna("")) == ["", "", other, other]


def test_paths_and_interpreters_are_looked_for_where_the_points_run(home, tmp_path, capsys) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(TRAIN.format("/no/data") + "python: [/no/python]\n")
    for args in (["--local"], ["--local", "--dry-run"]):
        assert driver.main([str(path), *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert [line.partition(" on node ")[0] for line in err.splitlines()] == [
            "error: data.path: '/no/data': does not exist",
            "error: python: '/no/python': does not exist",
        ]
    driver.check([str(path)])  # as nsa submit does: the nodes may have it
    assert driver.main([str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for named in ("data.path: '/no/data'", "python: '/no/python'"):
        assert f"{named} is not on this machine; a run looks for it on the nodes" in out
    assert not (home / "artifacts").exists()
