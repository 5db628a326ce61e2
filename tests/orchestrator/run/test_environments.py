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
    assert driver.main(["--resume", file.parent.name, "--local"]) == 0
    assert len([r for r in journal.read(file) if isinstance(r, OutcomeRecord)]) == 4  # nothing was measured again


def test_a_setting_without_effect_is_refused_before_anything_is_measured(home, spec, capsys, snippet_kind) -> None:
    path = spec("pass", more="env: [{}, {NCCL_DEBUG: INFO}]\n")
    assert driver.main([str(path), "--local"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: env.NCCL_DEBUG: 'INFO': has no effect on ")
    assert line.endswith(": it concerns GPUs, and the points run on the CPU; remove it")
    assert not (home / "artifacts").exists()


def test_a_path_is_looked_for_where_the_points_run(home, tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(TRAIN.format("/no/data"))
    assert driver.main([str(path), "--local"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: data.path: '/no/data': does not exist on node ")
    driver.check([str(path)])  # as nsa submit does: the nodes may have it
    assert driver.main([str(path), "--dry-run"]) == 0
    assert "data.path: '/no/data' is not on this machine; a run looks for it on the nodes" in capsys.readouterr().out
    assert not (home / "artifacts").exists()


def test_an_interpreter_is_looked_for_where_the_points_run(home, spec, tmp_path, capsys, snippet_kind) -> None:
    """Also by a dry run, as far as that can be told without a process."""
    (tmp_path / "text").touch()
    gone, text = str(tmp_path / "gone"), str(tmp_path / "text")
    path = spec("pass", more=f"python: [{gone}, {text}]\n")
    told = []
    for args in (["--local"], ["--local", "--dry-run"]):
        assert driver.main([str(path), *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        told.append(err)
    assert told[0] == told[1]
    first, second = told[0].splitlines()
    assert first.startswith(f"error: python: {gone!r}: does not exist on node ")
    assert first.endswith("; make the environment there, or give an interpreter that every node has")
    assert second.startswith(f"error: python: {text!r}: is not a program that may be run on node ")
    assert driver.main([str(path), "--dry-run"]) == 0
    assert f"python: {gone!r} is not on this machine; a run looks for it on the nodes" in capsys.readouterr().out


def test_a_relative_path_must_be_there_to_be_uploaded(home, tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(TRAIN.format("data"))
    monkeypatch.chdir(tmp_path)
    for args in (["--dry-run"], ["--local"]):
        assert driver.main([str(path), *args]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: data.path: 'data': there is no such file in {tmp_path}; give an existing one")
    (tmp_path / "data").mkdir()
    driver.check([str(path)])
    assert not home.exists()
