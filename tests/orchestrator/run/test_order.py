"""Bad input ends with one line a mistake before a file is made; a dry run makes none either."""

import re
from itertools import chain

import pytest

from jobs.specs.load import load_spec
from orchestrator.errors import UserError
from orchestrator.run import driver, plan
from orchestrator.run.order import read_order
from orchestrator.store.records import RunRecord

TRAIN = "kind: train\nname: t\ndevice: cpu\nseq_len: 32\nsteps: 5\noptimizer: {{warmup_steps: 2}}\ndata: {{path: {}}}\n"


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "real"])
@pytest.mark.parametrize(
    ("given", "env", "fields"),
    [
        ({"workers": 0}, {}, ["resources.workers: 0"]),
        ({"isolation": "cold", "more": "lenghts: [1]\n"}, {}, ["isolation: 'cold'", "lenghts"]),
        ("kind: nonsense\n", {}, ["kind: 'nonsense'"]),
        (None, {}, ["spec: "]),
        ({}, {"NSA_DATABASE_URL": "mysql://x/y"}, ["NSA_DATABASE_URL"]),
        ("kind: nonsense\n", {"NSA_DATABASE_URL": "sqlite://"}, ["NSA_DATABASE_URL", "kind"]),
        (TRAIN.format("missing"), {"NSA_DATABASE_URL": "sqlite://"}, ["NSA_DATABASE_URL", "data.path: 'missing'"]),
        ({}, {"NSA_DASHBOARD_PORT": "x"}, ["NSA_DASHBOARD_PORT"]),
        ({}, {"NSA_GATES": "missing.yaml"}, ["gates: 'missing.yaml'"]),
    ],
)
def test_every_mistake_is_a_line_and_no_file_is_made(
    home, spec, tmp_path, capsys, monkeypatch, quick_probe, given: dict | str | None, env, fields, dry
) -> None:
    """`given`: arguments of the fixture `spec`, the text of a spec, or None for a missing file."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "spec.yaml"
    if isinstance(given, str):
        path.write_text(given)
    elif given is not None:
        spec("pass", **given)
    assert driver.main([str(path), "--local", *(["--dry-run"] if dry else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(fields)
    for line, field in zip(lines, fields, strict=True):
        assert re.match(rf"error: {re.escape(field)}", line), line
    assert not home.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "arguments: SPEC is missing"),
        (["--bogus"], "arguments: "),
        (["--resume", "nope"], "--resume: 'nope': no journal of this run in "),
        (["--resume", "../../etc"], "--resume: '../../etc': no journal of this run in "),
        (["x.yaml", "--retry-failed"], "arguments: --retry-failed"),
        (
            ["--resume", "nope", "--tag", "a"],
            "arguments: --tag and --note label a new run; label an earlier one with nsa",
        ),
        (["--resume", "nope", "--note", ""], "arguments: --tag and --note"),
        (["x.yaml", "--resume", "nope"], "spec: 'x.yaml' cannot be read"),
    ],
)
def test_wrong_arguments_are_named(home, capsys, args, message) -> None:
    assert driver.main([*args, "--local"]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith(f"error: {message}")
    assert not home.exists()


def test_a_run_begun_before_a_field_was_added_is_resumed_with_its_spec(home, spec, monkeypatch, snippet_kind) -> None:
    path = spec("pass")
    stored = load_spec(path).model_dump(mode="json", exclude={"seed"})
    begun = RunRecord(run_id="r", name="test", kind="snippet", spec=stored, spec_hash="older")
    monkeypatch.setattr(plan, "begun", lambda *_: begun)
    assert read_order([str(path), "--resume", "r"]).resumed
    with pytest.raises(UserError, match="--resume: 'r': its spec differs"):
        read_order([str(path), "--resume", "r", "--set", "seed=1"])


def test_asking_for_more_than_this_machine_has_is_an_error(home, spec, capsys, snippet_kind) -> None:
    args = [str(spec("pass")), "--local"]
    for setting in ("resources.num_cpus=4096", "resources.num_gpus=64", "resources.accelerator_type=H100"):
        args += ["--set", setting]
    assert driver.main(args) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in errors] == [
        "resources.num_cpus",
        "resources.num_gpus",
        "resources.accelerator_type",
    ]
    assert not home.exists()


def test_a_missing_cluster_is_an_error_with_a_fix(home, spec, capsys, monkeypatch, snippet_kind) -> None:
    monkeypatch.setenv("NSA_RAY_ADDRESS", "127.0.0.1:1")
    assert driver.main([str(spec("pass"))]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: NSA_RAY_ADDRESS: '127.0.0.1:1': no Ray cluster answers")
    assert "nsa up" in line
    assert "--local" in line
    assert not home.exists()


def test_a_dry_run_lists_the_points_and_makes_no_file(home, capsys) -> None:
    assert driver.main(["jobs/configs/drill.yaml", "--dry-run", "--set", "behaviours=[ok, skip]"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +0  ok$", out, re.MULTILINE)
    assert re.search(r"^ +1  skip  skipped: skipped on purpose$", out, re.MULTILINE)
    assert not home.exists()


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


@pytest.mark.parametrize(
    ("spec", "override", "told"),
    [
        ("train_speed", "resources.accelerator_type=H200", "\n1 min, 0.015 GPU-h, $0.06 on 1× H200 (published results"),
        ("train_speed", "steps=100000", "\ntime and price: no estimate, because no published run has these points"),
        ("scaling_m7c", "passes=[forward]", "\n64 of 128 points, so at most 6 min, 0.092 GPU-h, $0.35 on 1× H200"),
    ],
)
def test_a_dry_run_tells_the_time_of_a_ready_spec_or_of_a_part_of_its_points(
    home, capsys, spec: str, override: str, told: str
) -> None:
    assert driver.main([f"jobs/configs/{spec}.yaml", "--dry-run", "--set", override]) == 0
    assert told in capsys.readouterr().out


def test_a_dry_run_on_a_cpu_of_a_spec_that_is_ready_for_a_gpu_has_no_estimate(home, capsys) -> None:
    changes = [("--set", change) for change in ("device=cpu", "implementations=[chunked]", "lengths=[128]")]
    assert driver.main(["jobs/configs/scaling_m7c.yaml", "--dry-run", *chain(*changes)]) == 0
    assert "time and price: no estimate" in capsys.readouterr().out
