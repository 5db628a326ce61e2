"""A run's findings in a sentence."""

import gzip
from pathlib import Path

import pytest

import orchestrator
from orchestrator.report.runs import answer
from orchestrator.store import Store
from orchestrator.store.importer import import_file

JOURNALS = Path(orchestrator.__file__).parent / "reference_data" / "journals"
ONE = "20261124-224808-train-2gpu-9f3e"
TWO = "20261124-224434-train-2gpu-663c"  # on two ranks


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("20261128-105241-bench-3dc2", "is 3.55 times as fast as dense at S=32,768 (forward+backward, 12/2 d64)"),
        ("20261129-001732-train-m7c-9c95", "; held-out loss 2.485 nat/byte of NSA (Triton), 2.442 nat/byte of dense"),
        (TWO, f"2 ranks 1.02 times as fast as one at the same batch ({ONE})"),
        ("20261124-224234-train-2gpu-caf0", f"2 ranks 1.74 times as fast as one at as many sequences a rank ({ONE})"),
        (ONE, "Time 15.49 ms, NSA (Triton) at S=2,048"),
    ],
)
def test_a_run_is_answered_in_a_sentence(store: Store, run: str, said: str):
    for name in {run, ONE}:
        import_file(store, JOURNALS / f"{name}.jsonl.gz")
    assert said in answer(store, run)


@pytest.mark.parametrize("packed", [ONE, TWO])
def test_ranks_are_not_compared_with_one_of_another_mode(store: Store, tmp_path: Path, packed: str):
    for name in (ONE, TWO):
        text = gzip.decompress((JOURNALS / f"{name}.jsonl.gz").read_bytes()).decode()
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text.replace('"heldout":0.1', '"pack":true,"heldout":0.1') if name == packed else text)
        import_file(store, path)
    assert "as fast as one" not in answer(store, TWO)
