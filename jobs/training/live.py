"""The live series of a training: what is reported of each step while it runs."""

import time
from collections import deque
from statistics import fmean

import torch

from jobs.measure.memory import resident_bytes
from jobs.schema.peaks import BF16_PEAKS
from jobs.schema.point import Beat, reporter
from jobs.schema.quantities import THROUGHPUT, Better, Plot, Quantity, Role
from jobs.training.case import TrainingCase
from nsa_core.model import ModelConfig

LOSS = Quantity("loss", "nat/byte", "Training loss", "loss", Better.LOWER, Role.HEADLINE, Plot.CURVE)
HELDOUT_LOSS = Quantity("heldout_loss", "nat/byte", "Held-out loss", better=Better.LOWER, role=Role.HEADLINE)
GRADIENT_NORM = Quantity("gradient_norm", "1", "Gradient norm before clipping", "gradient norm")
LEARNING_RATE = Quantity("learning_rate", "1", "Learning rate")
TRAINING_MEMORY = Quantity("training_memory", "MiB", "Memory of the training process", "memory")
MFU = Quantity("mfu", "%", "Model FLOPs utilisation", "MFU", Better.HIGHER, Role.HEADLINE)
RANK_COMPUTE_TIME = Quantity("rank_compute_time", "ms", "Own compute time of a step by rank", better=Better.LOWER)
CHECKPOINT_FAILURES = Quantity("checkpoint_failures", "1", "Checkpoints not saved", better=Better.LOWER)
SERIES = (GRADIENT_NORM, LEARNING_RATE, TRAINING_MEMORY)

_WINDOW_S = 1.0


def model_flops(case: TrainingCase, gpu: str) -> tuple[float, float] | None:
    """Model FLOPs of a token, and the published peak of all ranks' GPUs together [FLOP/s]; None where none is known."""
    if gpu not in BF16_PEAKS or case.dtype != "bfloat16":
        return None
    return training_flops_per_token(case.model, case.seq_len), BF16_PEAKS[gpu] * case.layout.ranks


class LiveTraining:
    """Reports a sample a step: memory and own compute time of each rank; the first one's has the training's series,
    too: loss, gradient norm, learning rate, throughput (`tokens` of a step, of all ranks) and MFU, if a peak is known.
    """

    def __init__(
        self, beat: Beat, tokens: int, device: torch.device, rank: int = 0, flops: tuple[float, float] | None = None
    ) -> None:
        self._report = reporter(beat)
        self._tokens, self._device, self._rank, self._flops = tokens, device, rank, flops
        self._begun = time.perf_counter()
        self._steps: deque[tuple[float, int]] = deque()  # end and number of the steps of the last second
        self._compute_ms: deque[tuple[float, float]] = deque()  # end and own compute time of these steps
        self._memory = (-_WINDOW_S, 0.0)  # when it was last looked at, and MiB

    def step(
        self, step: int, loss: float, gradient_norm: float, learning_rate: float, compute_ms: float | None = None
    ) -> None:
        """Report that step `step`, from 1, has ended; waits for nothing."""
        clock = time.perf_counter()
        if clock - self._memory[0] >= _WINDOW_S:
            self._memory = clock, memory_mib(self._device)
        values = {TRAINING_MEMORY.name: self._memory[1]}
        if compute_ms is not None:  # a mean: a step by itself says little of how even the ranks are
            self._compute_ms.append((clock, compute_ms))
            while clock - self._compute_ms[0][0] > _WINDOW_S:
                self._compute_ms.popleft()
            values[RANK_COMPUTE_TIME.name] = fmean(ms for _, ms in self._compute_ms)
        if self._rank == 0:
            values |= {LOSS.name: loss, GRADIENT_NORM.name: gradient_norm, LEARNING_RATE.name: learning_rate}
            if not self._steps:
                self._steps.append((self._begun, step - 1))  # a resumed training begins at any step
            self._steps.append((clock, step))
            while len(self._steps) > 2 and clock - self._steps[1][0] >= _WINDOW_S:
                self._steps.popleft()
            since, before = self._steps[0]
            values[THROUGHPUT.name] = throughput = (step - before) * self._tokens / max(clock - since, 1e-9)
            if self._flops is not None:
                per_token, peak = self._flops
                values[MFU.name] = 100 * throughput * per_token / peak
        self._report.sample(step, values, self._rank)


def memory_mib(device: torch.device) -> float:
    """Most memory allocated so far on a GPU, present resident memory of this process on a CPU [MiB]; no waiting."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resident_bytes() / 2**20


def training_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs per token of a training step, without recomputation.

    Six for every weight of a matrix product (two forward, four backward; none for embedding look-ups), and twelve per
    layer, query head, head dimension and key that the query attends to, on average over the sequence (arXiv 2204.02311,
    appendix B, with the keys that causal or sparse attention really visits). A learned compression is not counted.
    """
    heads = config.heads * config.head_dim
    pairs, gates = (3, 3 * config.heads) if config.attention == "nsa" else (1, 0)  # NSA: keys and values per branch
    projections = config.dim * (2 * heads + 2 * pairs * config.kv_heads * config.head_dim + gates)
    weights = config.layers * (projections + 3 * config.dim * config.ffn_dim) + config.vocab_size * config.dim
    return 6 * weights + 12 * config.layers * heads * visited_keys(config, seq_len)


def visited_keys(config: ModelConfig, seq_len: int) -> float:
    """Average number of keys that a query attends to: t+1 at position t for dense, the sum of the branches' for NSA.

    The query's own block is assumed to be selected, and counts up to the query.
    """
    if config.attention == "dense":
        return (seq_len + 1) / 2
    nsa = config.nsa
    reach = nsa.slc_count * nsa.slc_block
    total = sum(
        nsa.cmp_tokens(t) + min(t, reach - -t % nsa.slc_block) + min(t, nsa.window) for t in range(1, seq_len + 1)
    )
    return total / seq_len
