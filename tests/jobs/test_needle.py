"""The kind needle: its sequences, a model that learns to find needles, and specs that cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Keeping
from travelling import CPU, travelled, values_of

from jobs.needle import NeedleTask, Spec, loss_course, measure
from jobs.specs.load import load_spec
from nsa_core.loss import IGNORED

CONFIGS = Path(__file__).parents[2] / "jobs" / "configs"
TASK = NeedleTask(needles=3, alphabet=5)


def test_a_question_has_one_answer_and_it_stands_behind_its_key() -> None:
    tokens, targets = next(TASK.corpus(64, 32, seed=1).batches)
    assert tokens.shape == targets.shape == (64, 32)
    lengths = set()
    for sequence, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        asked = [place for place, answer in enumerate(answers) if answer != IGNORED]
        end = asked[0]
        lengths.add(end + 3)
        assert asked == [end, end + 1, end + 2]
        for place in asked:
            key, hay = sequence[place], sequence[:end]
            assert hay.count(key) == 1
            assert hay[hay.index(key) + 1] == answers[place]
    assert (min(lengths), max(lengths)) == (12, 32)  # haystacks of all lengths
    assert int(tokens.max()) < TASK.vocabulary == 64


@pytest.mark.parametrize(("depth", "place"), [(0, 0), (50, 12), (100, 24)])
def test_the_first_question_asks_for_the_needle_at_the_depth(depth: int, place: int) -> None:
    tokens, values = TASK.asked(200, 29, depth)  # 26 tokens of hay, 13 places
    assert torch.equal(tokens[:, place], tokens[:, 26])
    assert torch.equal(tokens[:, place + 1], values)
    keys = (tokens[:, :26] >= 32) & (tokens[:, :26] < 37)
    assert keys.sum(1).tolist() == [3] * 200  # no needle lies on another
    assert len(values.unique()) == 5


def test_training_and_questions_differ_and_a_position_is_taken_up_again() -> None:
    corpus = TASK.corpus(4, 32, 0)
    first, batches = next(corpus.batches)[0], corpus.batches
    assert not torch.equal(first, corpus.heldout[0][0])
    assert not any(torch.equal(first, TASK.asked(4, 32, depth)[0]) for depth in (0, 50, 100))
    assert not torch.equal(first, next(TASK.corpus(4, 32, 2**32).batches)[0])  # PyTorch takes 32 bits of a seed
    state = batches.state_dict()
    second = next(batches)[0]
    again = TASK.corpus(4, 32, 5).batches
    again.load_state_dict(state)
    assert torch.equal(next(again)[0], second)


@pytest.fixture(scope="module")
def spec() -> Any:
    return load_spec(CONFIGS / "needle_smoke.yaml")


def test_a_model_learns_to_find_needles_far_above_chance(spec: Spec) -> None:
    point, dense = spec.points(CPU)
    result = measure(travelled(point), lambda *_: None)
    values = values_of(result)
    assert values["chance"] == 12.5
    assert values["recall"] > 95
    assert values["recall_worst"] > 90
    assert values["heldout_loss"] < 0.3  # a guess's is 2.1
    shown = [float(line.rpartition(",")[2]) for line in str(result.files["recall.csv"]).splitlines()[1:]]
    assert shown == pytest.approx([values[f"recall_depth_{depth}"] for depth in (0, 25, 50, 75, 100)])
    assert "slc" in result.route
    assert [(each.axes.implementation, each.axes.seq_len) for each in (point, dense)] == [
        ("chunked", 32),
        ("dense", 32),
    ]


def test_an_untrained_model_guesses_and_says_that_it_still_learns(spec: Spec) -> None:
    report = Keeping()
    changes = {"steps": 20, "optimizer": {"warmup_steps": 5, "learning_rate": 1e-5}}
    short = Spec.model_validate(spec.model_dump() | changes)
    values = {m.name: m.value for m in measure(travelled(short.points(CPU)[1]), report).metrics}
    assert values["recall"] < 40
    assert values["converged"] == 0
    assert "learned_step" not in values
    assert report.warnings == ["steps: 20: the task was not learned; give more steps, or another seed"]


def test_the_course_of_a_loss() -> None:
    assert loss_course([2.0] * 50 + [0.1] * 50, guess=2.0) == (0, 55)  # five in a row below a tenth of the guess
    assert loss_course([2.0] * 90 + [1.0] * 10, guess=2.0) == (-1.0, None)
