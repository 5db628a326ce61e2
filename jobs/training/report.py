"""One rank's share of a point: check, training, memory; the same for a single process and for several ranks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from jobs.diagnosis.rank_state import BOOT, LOADER, NOW, Notes, RankState
from jobs.hardware import nvml
from jobs.hardware.energy import Energy
from jobs.hardware.environment import environment
from jobs.hardware.telemetry import Telemetry
from jobs.hardware.topology import Topology, topology
from jobs.measure.check import Agreement, check_attention
from jobs.measure.memory import Peak, measure_peak
from jobs.schema.point import Beat, Metric, reporter
from jobs.schema.quantities import GPU_UTILIZATION
from jobs.training.case import TextCase
from jobs.training.checkpoints.exchange import Exchange, check_reach
from jobs.training.checkpoints.folder import CheckpointError
from jobs.training.checkpoints.report import CheckpointReport
from jobs.training.data.base import Corpus, load_corpus
from jobs.training.data.token_corpus import load_tokens
from jobs.training.loop import Trainer
from jobs.training.soak import SoakHistory, SoakWatch
from jobs.training.state import Run

if TYPE_CHECKING:
    from jobs.training.checkpoints.saving import Checkpoints


@dataclass(frozen=True)
class RankReport:
    """Results of one rank.

    Attributes:
        run: losses and times; the losses are means over all ranks.
        peak: memory of one whole step on this rank.
        agreement: error of the attention against the oracle on this rank's device.
        utilization: of this rank's GPU during the steady steps, sampled [%]; None without NVML, on a single rank and of
            a soak, whose history has it.
        route, environment: as in Measurement.
        gpu: PyTorch's name of the rank's GPU; "" on a CPU.
        state: of the rank at its end.
        energy: of this rank's GPU over the steady steps of this attempt, its work the tokens of all ranks; None if its
            driver tells none.
        checkpoints: their history; None without checkpoints.
        topology: of the rank's host, if the configuration asks for it.
    """

    run: Run
    peak: Peak
    agreement: Agreement
    utilization: Metric | None
    route: Mapping[str, str]
    environment: Mapping[str, Any]
    gpu: str
    state: RankState
    energy: Energy | None = None
    checkpoints: CheckpointReport | None = None
    topology: Topology | None = None


def train_rank(case: TextCase, device: torch.device, rank: int, beat: Beat, stop: threading.Event) -> RankReport:
    """Train as one of the case's ranks.

    Raises:
        DataError: there is no such text, or too little.
        WrongResult: the attention disagrees with the oracle.
        Diverged, Stopped, Ineffective, MemoryLimit, CheckpointError: as Trainer.run.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    notes = Notes(beat, device, rank, case.layout.ranks)
    notes.note(BOOT)
    beat("corpus")
    if case.data.tokenized:
        corpus = load_tokens(case.data, case.model.vocab_size, case.batch, case.seq_len, beat)
    else:
        corpus = load_corpus(case.data.path, case.data.heldout, case.seq_len)
    notes.note(LOADER)
    gpu = _gpu(device)
    watch = None
    if case.soak is not None:
        watch = SoakWatch(case.soak, SoakHistory(), device, rank, beat, nvml.utilization_meter(gpu))
    trainer = Trainer(case, corpus, device, rank, watch, notes)
    beat("check")
    settings = case.implementation, case.model.nsa, case.shape, case.torch_dtype, device
    agreement = check_attention(*settings, backward=True, seed=case.seed)
    beat("heldout loss before")
    # The supervisor samples the GPU of a single rank, and a soak's watch looks itself.
    telemetry = Telemetry([gpu] if gpu is not None and case.soak is None and case.layout.ranks > 1 else [])
    checkpoints = _new_checkpoints(case, corpus, device, rank, beat)
    try:
        run = trainer.run(case.data.heldout_batches, beat, stop, telemetry, checkpoints)
    finally:
        sampled = telemetry.stop()
        if checkpoints is not None:
            checkpoints.close()
    notes.note(NOW)
    state = notes.state(trainer.state.step, trainer.route)
    host = topology() if case.topology else None
    beat("memory")
    peak = measure_peak(trainer.step, device, trainer.resident, cuda_graphs=case.cuda_graphs)
    training = {
        "corpus": {**corpus.about(), **trainer.state.batches.about()},
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "checkpointing": trainer.model.checkpointing_effective,
        "compile": case.compile,  # in one graph, else the first step would have raised
        "cuda_graphs": case.cuda_graphs,
        "launcher": "none",  # run_ranks knows what started several ranks
        "ranks": asdict(case.layout),
    }
    report = RankReport(
        run=run,
        peak=peak,
        agreement=agreement,
        utilization=next((metric for metric in sampled.metrics if metric.name == GPU_UTILIZATION.name), None),
        route=trainer.route,
        environment=environment(device) | {"training": training},
        gpu=trainer.gpu,
        state=state,
        energy=trainer.energy.energy,
        checkpoints=None if checkpoints is None else checkpoints.report,
        topology=host,
    )
    if case.cuda_graphs:
        torch.compiler.reset()  # frees their memory, which the process's next point would find taken
    return report


def _new_checkpoints(case: TextCase, corpus: Corpus, device: torch.device, rank: int, beat: Beat) -> Checkpoints | None:
    """The checkpoints of a case; None if it keeps none. Called by all ranks together.

    Raises:
        CheckpointError: there is no place for them, or not all ranks reach it.
    """
    if case.checkpoints is None:
        return None
    there = reporter(beat).surroundings
    if there.checkpoints is None:
        raise CheckpointError("checkpoints: there is no artifact store to keep them in; set NSA_ARTIFACT_STORE")
    exchange = Exchange(rank, case.layout.ranks)
    from jobs.training.checkpoints.saving import Checkpoints  # PyTorch's are long to import: a second of the processor

    text = hashlib.sha256(json.dumps(corpus.about(), sort_keys=True).encode()).hexdigest()
    settings = there.checkpoints, there.key, text, case.last_step, exchange, device, beat
    checkpoints = Checkpoints(case.checkpoints, *settings)
    check_reach(there.checkpoints, exchange)
    return checkpoints


def _gpu(device: torch.device) -> str | None:
    """NVML's id of this rank's GPU; None on a CPU and without NVML."""
    return None if device.index is None else next(iter(nvml.visible_gpus()[device.index :]), None)
