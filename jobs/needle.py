"""Retrieval: does a small model that was trained for it find a needle at every depth, with NSA as with dense attention?

A point is one implementation and length: a model trained from nothing by the loop of `train` on synthetic retrieval
(NeedleTask), then asked for needles at each depth. All points of a length get the same batches.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.diagnosis.rank_state import BOOT, LOADER, Notes
from jobs.hardware.environment import environment
from jobs.hardware.stats import summarize
from jobs.hardware.telemetry import Telemetry
from jobs.measure.memory import measure_peak
from jobs.measure.passes import ImplementationsSpec
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import AGREEMENT, ENERGY, MEMORY, TELEMETRY, THROUGHPUT, TIME, Better, Quantity, Role
from jobs.schema.training_plan import MODE_AXES, mode_of
from jobs.specs.fields import Count, Layers, Several
from jobs.training.case import Layout, OptimizerSpec, TrainingCase, check_warm_up
from jobs.training.data.corpus import Batches, Corpus
from jobs.training.errors import noting_sigterm
from jobs.training.live import HELDOUT_LOSS, LOSS, MFU, RANK_COMPUTE_TIME, SERIES
from jobs.training.loop import Trainer
from jobs.training.metrics import energy_per_token
from jobs.training.state import first_steady
from nsa_core.loss import IGNORED

RECALL = Quantity("recall", "%", "Recall, mean over the depths", "recall", Better.HIGHER, Role.HEADLINE)
RECALL_WORST = Quantity("recall_worst", "%", "Recall at the worst depth", "worst depth", Better.HIGHER, Role.HEADLINE)
RECALL_AT = Quantity("recall_depth_*", "%", "Recall at depth", better=Better.HIGHER)
CHANCE = Quantity("chance", "%", "Recall of a guess")
CONVERGED = Quantity("converged", "1", "Converged (1) or still learning (0)", "converged", Better.HIGHER, Role.HEADLINE)
LOSS_CHANGE = Quantity("loss_change", "nat/answer", "Change of the loss between the last tenths of the steps")
LEARNED_STEP = Quantity("learned_step", "1", "Step at which the task was learned", "learned at", Better.LOWER)
ANSWER_LOSS = replace(LOSS, unit="nat/answer")
HELDOUT_ANSWER_LOSS = replace(HELDOUT_LOSS, unit="nat/answer")
AXES = MODE_AXES
QUANTITIES = (
    *(RECALL, RECALL_WORST, CONVERGED, ANSWER_LOSS, HELDOUT_ANSWER_LOSS, RECALL_AT, CHANCE, LOSS_CHANGE, LEARNED_STEP),
    *(TIME, THROUGHPUT, ENERGY, *MEMORY, *AGREEMENT, *TELEMETRY, *SERIES, MFU, RANK_COMPUTE_TIME),
)

_LEARNED = 0.1  # of the loss of a guess, below which the mean loss over a twentieth of the steps has to fall
_HELDOUT_BATCHES = 2

_STRAW = 32  # different tokens of the haystack
_MULTIPLE = 64  # of a vocabulary: other widths are slower on GPUs

Depth = Annotated[int, Field(ge=0, le=100)]


@dataclass(frozen=True)
class NeedleTask:
    """Synthetic retrieval: haystacks of random tokens with needles in them, pairs of a key and a value, and questions.

    A haystack ends with the keys of its needles in any order, each of which asks for its value. No other token has a
    target: thousands that can be told without looking back would drown the answers' gradient. Sequences to learn from
    have haystacks of all lengths up to their own, since short ones are learned first, and more straw behind them.
    """

    needles: int  # pairs in a sequence
    alphabet: int  # different keys, and different values; a guess is right once in so many times
    seed: int = 0  # of the held-out sequences and those with a needle at a depth

    @property
    def vocabulary(self) -> int:
        """Tokens that a model needs: straw, keys, values; up to a multiple of 64."""
        return -(-(_STRAW + 2 * self.alphabet) // _MULTIPLE) * _MULTIPLE

    def corpus(self, batch: int, seq_len: int, seed: int) -> Corpus:
        """Sequences to learn from, which `seed` decides, and held-out ones."""
        batches = Batches(partial(self.draw, batch, seq_len), _generator("training", seed))
        generator = _generator("held out", self.seed)
        heldout = [self.draw(batch, seq_len, generator) for _ in range(_HELDOUT_BATCHES)]
        about = {"needles": self.needles, "alphabet": self.alphabet, "vocabulary": self.vocabulary}
        return Corpus(batches, heldout, about)

    def asked(self, count: int, seq_len: int, depth: int) -> tuple[Tensor, Tensor]:
        """Sequences [count, seq_len] whose first question asks for the needle at a depth [%], of which 0 is the first
        tokens of the haystack, 100 the last before the questions; values asked for [count]."""
        generator = _generator(f"asked at {depth}", self.seed)
        last = (seq_len - self.needles) // 2 - 1
        tokens, targets = self.draw(count, seq_len, generator, first=round(depth * last / 100))
        return tokens, targets[:, seq_len - self.needles]

    def draw(
        self, batch: int, seq_len: int, generator: torch.Generator, first: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """(tokens, targets), int64 [batch, seq_len] each. `first` is the place of the needle that is asked for first,
        in a haystack as long as the sequence; None: anywhere, in haystacks of all lengths."""

        def distinct(among: int, first: Tensor | None = None) -> Tensor:
            """Numbers below `among` in any order, [batch, among]; those below `first` [batch, 1] before the others."""
            order = torch.rand(batch, among, generator=generator)
            return (order if first is None else order + (torch.arange(among) >= first)).argsort(1)

        lengths = torch.full((batch, 1), seq_len)  # of haystacks with their questions; their logarithms are uniform
        if first is None:
            shortest = 4 * self.needles
            spread = torch.rand(batch, 1, generator=generator) * math.log((seq_len + 1) / shortest)
            lengths = (shortest * spread.exp()).long().clamp(shortest, seq_len)
        tokens = torch.randint(_STRAW, (batch, seq_len), generator=generator)
        places = distinct((seq_len - self.needles) // 2, (lengths - self.needles) // 2)
        if first is not None:  # the first needle gets its place, and whichever had it the first needle's
            places = torch.where(places == first, places[:, :1], places)
            places[:, 0] = first
        places = 2 * places[:, : self.needles]
        keys = _STRAW + distinct(self.alphabet)[:, : self.needles]
        values = torch.randint(self.alphabet, keys.shape, generator=generator) + _STRAW + self.alphabet
        tokens.scatter_(1, places, keys)
        tokens.scatter_(1, places + 1, values)
        order = distinct(self.needles) if first is None else torch.arange(self.needles).expand(batch, -1)
        asked = lengths - self.needles + torch.arange(self.needles)
        targets = torch.full_like(tokens, IGNORED)
        tokens.scatter_(1, asked, keys.gather(1, order))
        targets.scatter_(1, asked, values.gather(1, order))
        return tokens, targets


def _generator(use: str, seed: int) -> torch.Generator:
    """A generator for one use. Of a seed PyTorch's CPU generator takes 32 bits, so that they have to differ there."""
    digest = hashlib.sha256(f"{use} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))


class Case(TrainingCase):
    """A training on a task, and the questions after it: fields as in Spec."""

    task: NeedleTask
    depths: list[int]
    questions: int
    converged_nat: float


class Spec(ImplementationsSpec):
    """Lengths x implementations: a model trained on retrieval for each."""

    kind: Literal["needle"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    DEFAULT = "tiny"
    RANDOM_TOKENS = False  # a haystack has a vocabulary of its own
    layers: Layers | None = Field(default=None, description="None: the model's")
    lengths: Annotated[Several[Annotated[int, Field(ge=8, le=2**22)]], Field(description="tokens of a sequence")]
    depths: Several[Depth] = Field(
        default=[0, 25, 50, 75, 100], description="places of the needle that is asked for [%]"
    )
    needles: Count = Field(default=1, description="pairs of key and value in a sequence; all are asked for")
    alphabet: int = Field(default=8, ge=2, le=2**12, description="keys, and values; a guess is right once in so many")
    questions: Count = Field(default=64, description="sequences asked at each depth")
    tokens: Count = Field(description="of a step; the batch is tokens / length")
    steps: int = Field(ge=20, le=2**24, description="equal for all implementations")
    converged_nat: float = Field(
        default=0.05,
        gt=0,
        description="change of the loss between the last two tenths of the steps that is no learning",
    )
    compile: bool = Field(default=False, description="torch.compile the training step's passes, or fail")
    optimizer: OptimizerSpec = OptimizerSpec()

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        """Refuse needles that have no place, and steps that are no whole number of sequences."""
        if self.needles > self.alphabet:
            raise ValueError(
                f"needles: {self.needles}: each needs a key of its own; use at most alphabet = {self.alphabet}"
            )
        for length in self.lengths:
            if length < 4 * self.needles:
                raise ValueError(
                    f"lengths: {length}: has no room for {self.needles} needles and their questions; use at least "
                    f"{4 * self.needles}"
                )
            if self.tokens % length:
                nearest = max(1, round(self.tokens / length)) * length
                raise ValueError(f"tokens: {self.tokens}: is no multiple of the length {length}; use {nearest}")
        check_warm_up(self.optimizer, self.steps)
        if self.model is not None and self.model.vocab_size is not None:
            given = f"model.vocab_size: {self.model.vocab_size}"
            raise ValueError(f"{given}: has no effect: a haystack has a vocabulary of its own; leave it out")
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """A point for each length and implementation, shortest lengths first."""
        self.refuse_unusable(machine)
        task = NeedleTask(self.needles, self.alphabet, self.seed)
        layers, points = self.layers or self.base.layers, []
        for seq_len, implementation in product(sorted(self.lengths), self.implementations):
            batch = self.tokens // seq_len
            model = replace(self.base.under(implementation), vocab_size=task.vocabulary, layers=layers)
            own = {name: getattr(self, name) for name in ("steps", "compile", "depths", "questions", "converged_nat")}
            own |= {"optimizer": self.optimizer, "layout": Layout(batch), "task": task, "dtype": self.precision}
            case = Case.of(self, machine, (implementation, "train", seq_len, batch), model=model, **own)
            label, more = f"{implementation} {self.model_name} S={seq_len}", mode_of(case.model_dump())
            points.append(case.point(self, machine, label, "shorten lengths, or lower tokens", more=more))
        return points


def measure(case: Case, beat: Beat) -> Measurement:
    """Train a model on retrieval, and ask it at each depth. Raises as Trainer.run, and WrongResult."""
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    device, alphabet, steps = case.torch_device, case.task.alphabet, case.steps
    notes = Notes(beat, device, 0, 1)
    notes.note(BOOT)
    corpus = case.task.corpus(case.batch, case.seq_len, case.seed)
    notes.note(LOADER)
    trainer = Trainer(case, corpus, device, notes=notes)
    beat("check")
    agreement = case.check()
    with noting_sigterm() as stop:
        run = trainer.run(beat, stop, Telemetry([]))
    recall = {depth: _recall(trainer, case, depth, beat) for depth in case.depths}
    beat("memory")
    peak = measure_peak(trainer.step, device, trainer.resident)
    change, learned = loss_course(run.losses, math.log(alphabet))
    if learned is None:
        reporter(beat).warn(f"steps: {steps}: the task was not learned; give more steps, or another seed")
    elif abs(change) > case.converged_nat:
        text = f"the loss still changes by {change:.2g} nat/answer in the last tenth of the steps"
        reporter(beat).warn(f"steps: {steps}: {text}, more than converged_nat; give more steps")
    steady, last = [run.seconds[step] for step in run.steady_steps()], max(1, len(run.losses) // 10)
    timed = f"from the end of one step to that of the next, the first {first_steady(len(run.seconds))} left out"
    asked = f"{case.questions} sequences a depth; the asked needle at the depth, the likeliest token counts"
    bound = f"learned, and between the last two tenths of the steps the loss changes by {case.converged_nat:g} at most"
    metrics = [
        Metric.of(RECALL, fmean(recall.values()), tuple(recall.values()), f"{asked}; samples: depths"),
        Metric.of(RECALL_WORST, min(recall.values()), method=asked),
        *(Metric.of(RECALL_AT.named(str(depth)), share, method=asked) for depth, share in recall.items()),
        Metric.of(CHANCE, 100 / alphabet, method="one of the alphabet's values"),
        Metric.of(CONVERGED, float(learned is not None and abs(change) <= case.converged_nat), method=bound),
        Metric.of(LOSS_CHANGE, change, method="mean of the last tenth less that of the tenth before"),
        Metric.of(ANSWER_LOSS, fmean(run.losses[-last:]), tuple(run.losses), f"mean of the last {last} steps"),
        Metric.of(HELDOUT_ANSWER_LOSS, run.after, method="sequences of other seeds"),
        summarize(TIME, [1000 * s for s in steady], timed),
        summarize(THROUGHPUT, [case.tokens / s for s in steady], timed),
        *energy_per_token([trainer.energy.energy]),
        *peak.metrics(),
        *agreement.metrics(),
    ]
    if learned is not None:
        method = f"mean loss over a twentieth of the steps below {_LEARNED:g} of a guess's"
        metrics.append(Metric.of(LEARNED_STEP, learned, method=method))
    about = {"corpus": corpus.about, "parameters": sum(p.numel() for p in trainer.model.parameters())}
    rows = [f"{case.implementation},{case.seq_len},{d},{case.questions},{share:.6g}" for d, share in recall.items()]
    table = "\n".join(["implementation,length,depth_percent,questions,recall_percent", *rows, ""])
    files = {**peak.files, "recall.csv": table}
    return Measurement(tuple(metrics), trainer.route, environment(device) | {"training": about}, files)


@torch.no_grad()
def _recall(trainer: Trainer, case: Case, depth: int, beat: Beat) -> float:
    """Share of needles at a depth whose value is the model's likeliest token [%]."""
    trainer.model.eval()
    tokens, values = case.task.asked(case.questions, case.seq_len, depth)
    asked, right = case.seq_len - case.task.needles, 0
    for start in range(0, len(tokens), case.batch):
        beat(f"recall at {depth} %", start, len(tokens))
        part = slice(start, start + case.batch)
        with trainer.precision():
            logits = trainer.model(tokens[part].to(trainer.device))[:, asked]
        right += int((logits.argmax(-1).cpu() == values[part]).sum())
    trainer.model.train()
    return 100 * right / len(tokens)


def loss_course(losses: Sequence[float], guess: float) -> tuple[float, int | None]:
    """Change of the mean loss from the last but one tenth of the steps to the last [nat/answer], and the step at which
    its mean over a twentieth fell below a tenth of a guess's, who knows but the alphabet; None: it never did."""
    tenth, window = len(losses) // 10, len(losses) // 20
    change = fmean(losses[-tenth:]) - fmean(losses[-2 * tenth : -tenth])
    ends = range(window, len(losses) + 1)
    return change, next((end for end in ends if fmean(losses[end - window : end]) < _LEARNED * guess), None)
