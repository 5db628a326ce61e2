"""One rank's share of a point: check, training, memory; the same for a single process and for several ranks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from jobs.diagnosis.rank_state import BOOT, LOADER, NOW, Notes, RankState
from jobs.hardware import nvml
from jobs.hardware.energy import Energy
from jobs.hardware.environment import environment
from jobs.hardware.telemetry import Telemetry
from jobs.hardware.topology import Topology, topology
from jobs.measure import check
from jobs.measure.check import Agreement
from jobs.measure.memory import Peak, measure_peak
from jobs.schema.point import Beat, Metric, reporter
from jobs.schema.quantities import GPU_UTILIZATION
from jobs.specs.fields import torch_dtype
from jobs.training.checkpoints.exchange import Exchange, check_reach
from jobs.training.checkpoints.folder import CheckpointError
from jobs.training.checkpoints.report import CheckpointReport, CheckpointSpec
from jobs.training.data.base import Corpus
from jobs.training.data.byte_corpus import load_corpus
from jobs.training.data.spec import DataSpec
from jobs.training.data.token_corpus import load_tokens
from jobs.training.layout import Layout, implementation
from jobs.training.loop import Trainer
from jobs.training.soak.history import SoakHistory, SoakPlan, steps_of
from jobs.training.soak.watch import SoakWatch
from jobs.training.state import Run
from nsa_core.model import ModelConfig

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
        model: the model's shape.
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
    model: ModelConfig
    gpu: str
    state: RankState
    energy: Energy | None = None
    checkpoints: CheckpointReport | None = None
    topology: Topology | None = None


def train_rank(
    config: Mapping[str, Any], device: torch.device, rank: int, beat: Beat, stop: threading.Event
) -> RankReport:
    """Train with the point's configuration as one of its ranks.

    Raises:
        DataError: there is no such text, or too little.
        WrongResult: the attention disagrees with the oracle.
        Diverged, Stopped, Ineffective, MemoryLimit, CheckpointError: as Trainer.run.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    notes = Notes(beat, device, rank, Layout.from_config(config).ranks)
    notes.note(BOOT)
    beat("corpus")
    data = DataSpec.model_validate(config["data"])
    corpus = open_corpus(data, config, beat)
    notes.note(LOADER)
    plan, gpu = SoakPlan.from_config(config), _gpu(device)
    watch = None
    if plan is not None:
        watch = SoakWatch(plan, SoakHistory(), device, rank, beat, nvml.UtilizationMeter(gpu).now)
    trainer = Trainer(config, corpus, device, rank, watch, notes)
    beat("check")
    agreement = _agree(trainer.model.config, config, device)
    beat("heldout loss before")
    # The supervisor samples the GPU of a single rank, and a soak's watch looks itself.
    telemetry = Telemetry([gpu] if gpu is not None and plan is None and trainer.layout.ranks > 1 else [])
    checkpoints = new_checkpoints(config, corpus, device, rank, beat)
    try:
        run = trainer.run(data.heldout_batches, beat, stop, telemetry, checkpoints)
    finally:
        sampled = telemetry.stop()
        if checkpoints is not None:
            checkpoints.close()
    notes.note(NOW)
    state = notes.state(trainer.state.step, trainer.route)
    host = topology() if config.get("topology") else None
    beat("memory")
    graphs = config.get("cuda_graphs", False)
    peak = measure_peak(trainer.step, device, trainer.resident, cuda_graphs=graphs)
    report = RankReport(
        run=run,
        peak=peak,
        agreement=agreement,
        utilization=next((metric for metric in sampled.metrics if metric.name == GPU_UTILIZATION.name), None),
        route=trainer.route,
        environment=environment(device) | {"training": _about(trainer, config)},
        model=trainer.model.config,
        gpu=trainer.gpu,
        state=state,
        energy=trainer.energy.energy,
        checkpoints=None if checkpoints is None else checkpoints.report,
        topology=host,
    )
    if graphs:
        torch.compiler.reset()  # frees their memory, which the process's next point would find taken
    return report


def open_corpus(data: DataSpec, config: Mapping[str, Any], beat: Beat) -> Corpus:
    """The text of a point as its configuration has it: tokens of documents, or bytes. Raises DataError."""
    if not data.tokenized:
        return load_corpus(data.path, data.heldout, config["seq_len"])
    return load_tokens(data, config["model"]["vocab_size"], config["batch"], config["seq_len"], beat)


def new_checkpoints(
    config: Mapping[str, Any], corpus: Corpus, device: torch.device, rank: int, beat: Beat
) -> Checkpoints | None:
    """The checkpoints of a point as its configuration has them; None if it keeps none. Called by all ranks together.

    Raises:
        CheckpointError: there is no place for them, or not all ranks reach it.
    """
    if (section := config.get("checkpoints")) is None:
        return None
    there = reporter(beat).surroundings
    if there.checkpoints is None:
        raise CheckpointError("checkpoints: there is no artifact store to keep them in; set NSA_ARTIFACT_STORE")
    spec, exchange = CheckpointSpec.model_validate(section), Exchange(rank, Layout.from_config(config).ranks)
    from jobs.training.checkpoints.saving import Checkpoints  # PyTorch's are long to import: a second of the processor

    text = hashlib.sha256(json.dumps(corpus.about(), sort_keys=True).encode()).hexdigest()
    found = Checkpoints(spec, there.checkpoints, there.key, text, steps_of(config), exchange, device, beat)
    check_reach(there.checkpoints, exchange)
    return found


def _agree(model: ModelConfig, config: Mapping[str, Any], device: torch.device) -> Agreement:
    """Compare the model's attention with the oracle. Raises WrongResult."""
    heads, dtype = check.HeadShape.of(model), torch_dtype(config["precision"])
    return check.check_attention(
        implementation(model), model.nsa, heads, dtype, device, backward=True, seed=config["seed"]
    )


def _about(trainer: Trainer, config: Mapping[str, Any]) -> dict[str, Any]:
    """Section `training` of a point's environment: what was trained, and how."""
    return {
        "corpus": {**trainer.corpus.about(), **trainer.state.batches.about()},
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "checkpointing": trainer.model.checkpointing_effective,
        "compile": config["compile"],  # in one graph, else the first step would have raised
        "cuda_graphs": config.get("cuda_graphs", False),
        "launcher": "none",  # run_ranks knows what started several ranks
        **trainer.layout.to_config(),
    }


def _gpu(device: torch.device) -> str | None:
    """NVML's id of this rank's GPU; None on a CPU and without NVML."""
    return None if device.index is None else next(iter(nvml.visible_gpus()[device.index :]), None)
