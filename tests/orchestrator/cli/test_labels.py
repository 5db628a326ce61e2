"""Labels of runs, and one point again: as a run of its own, as a script."""

import subprocess
from datetime import timedelta

import pytest
from nsa_command import Nsa

from orchestrator.cli import lookup
from orchestrator.run import driver
from orchestrator.settings import load_settings
from orchestrator.store import Store, journal, queries
from orchestrator.store.records import LabelRecord, now

SPEC = "kind: snippet\nname: test\ndevice: cpu\ncodes: [value = 1.5, raise ValueError, value = 2.5]\n"


@pytest.mark.usefixtures("snippet_kind")
def test_a_run_is_labelled_and_found_and_a_point_of_it_measured_again(nsa: Nsa, home, monkeypatch) -> None:
    (home / "spec.yaml").write_text(SPEC)
    monkeypatch.setenv("NSA_PERSON", "Zoë")
    assert driver.main([str(home / "spec.yaml"), "--local", "--tag", "first", "--note", "by hand"]) == 1
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    run_id = path.parent.name
    *_, labelled = nsa("label", "last", "--tag", "best", "--remove", "first").out.splitlines()
    assert labelled == f"{run_id}: tags best; note: by hand"
    assert [record.type for record in journal.read(path)].count("label") == 2
    for given in ("--tag best", "--person ZOË", "--search hand", "--since 2026-01-01"):
        listed = nsa("runs", *given.split()).out
        assert run_id in listed, given
        assert "done, 1 of 3 failed" in listed
    assert nsa("runs", "--tag", "first").out == "Runs: none\n"
    assert nsa("label", "last", "--tag", "two words").err.startswith("error: --tag: 'two words': is no tag")
    assert nsa("label", "last", "--tag", "a\udcff").err.startswith("error: --tag: 'a\\udcff': is no tag")
    assert nsa("label", "last", "--note", "a\udcff").out.endswith("; note: a\\udcff\n")
    with Store.open(load_settings().database) as store:  # a host whose clock is an hour ahead
        store.apply_many([LabelRecord(run_id=run_id, at=now() + timedelta(hours=1), tags=("ahead",))])
    nsa("label", "last", "--tag", "late")
    assert nsa("runs", "--tag", "late").out == nsa("runs", "--tag", "ahead").out != "Runs: none\n"

    refused = nsa("submit", str(home / "spec.yaml"), "--resume", "last", "--tag", "best")
    assert refused.err.startswith("error: --tag, --note: label a new run; label an earlier one with `nsa label RUN`")

    script = nsa("repro", f"{run_id}/2").out
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert "git worktree add" in script
    assert nsa("rerun", f"{run_id}/1", "--local").code == 1
    [*_, newest, oldest] = nsa("runs").out.splitlines()
    with Store.open(load_settings().database) as store:
        rerun = next(iter(queries.run_ids(store)))
        for name in ("last", rerun):
            nsa("label", run_id, "--tag", name)
            assert lookup.find_side(store, name).name == rerun, "rather than the run with this tag"
    assert (newest.split()[3], oldest.split()[3]) == ("failed", "done,")
    assert "only=['" in newest
    assert nsa("rerun", "last/9", "--local").err.startswith("error: --point: 9: run ")
    assert nsa("repro", "last").err == "error: POINT: 'last': names no point; write RUN/NUMBER, e.g. last/0\n"
