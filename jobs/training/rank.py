"""One rank: its share of a point, also of a single process, and its own process, which reports to its starter."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from jobs.diagnosis.rank_state import BOOT, LOADER, NOW, Notes, RankState
from jobs.hardware import nvml
from jobs.hardware.energy import Energy
from jobs.hardware.environment import environment
from jobs.hardware.telemetry import Telemetry
from jobs.hardware.topology import Topology, topology
from jobs.measure.check import Agreement
from jobs.measure.memory import Peak, measure_peak
from jobs.process import post_mortem
from jobs.process.child import end_with_parent
from jobs.process.messages import LONGEST_TEXT, Outbox, RankFailure, RankProcess
from jobs.process.reporter import ProcessReporter
from jobs.schema.point import Beat, Metric, Rank, Surroundings
from jobs.schema.quantities import GPU_UTILIZATION
from jobs.training.case import TextCase
from jobs.training.checkpoints.folder import CheckpointReport
from jobs.training.data.corpus import load_bytes
from jobs.training.data.token_corpus import load_tokens
from jobs.training.errors import noting_sigterm
from jobs.training.loop import Trainer
from jobs.training.soak import SoakHistory, SoakWatch
from jobs.training.state import Run

T = TypeVar("T")

SILENCE_S = 5.0  # without progress, after which a rank writes what its flight recorder holds
TIMEOUT = timedelta(days=1)  # of a collective: only the supervisor can tell a stalled rank from a slow one
SAMPLE_INTERVAL_S = 0.5  # between two samples of a rank's series: the point's process thins them

_inner: Any = _distributed_c10d  # PyTorch 2.13 has no public way to write the flight recorder's JSON
_newer = hasattr(_inner, "_dump_fr_trace_json")  # it records gloo, too
PROCESS_GROUP = {  # variables that PyTorch reads when a process group is formed; a user's own win
    "TORCH_FR_BUFFER_SIZE" if _newer else "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # collectives of the flight recorder
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # sums of gradients do not wait for the kernels of the backward pass beside them
}

_dump: Callable[[], bytes] = _inner._dump_fr_trace_json if _newer else _inner._dump_nccl_trace_json


@dataclass(frozen=True)
class RankReport:
    """Results of one rank."""

    run: Run
    peak: Peak  # of one whole step
    agreement: Agreement  # of the attention with the oracle on this rank's device
    utilization: Metric | None  # of its GPU, sampled in steady steps; None without NVML, on one rank and of a soak
    environment: dict[str, Any]  # as in Measurement
    gpu: str  # PyTorch's name of it; "" on a CPU
    state: RankState  # at the end
    energy: Energy | None = None  # of its GPU over this attempt's steady steps, for the tokens of all ranks
    checkpoints: CheckpointReport | None = None
    topology: Topology | None = None  # of its host, if the case asks for it


def train_rank(case: TextCase, device: torch.device, rank: int, beat: Beat, stop: threading.Event) -> RankReport:
    """Train as one of the case's ranks. Raises as Trainer.run, and DataError or WrongResult (of the attention)."""
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    notes = Notes(beat, device, rank, case.layout.ranks)
    notes.note(BOOT)
    beat("corpus")
    size = case.batch, case.seq_len, case.seed
    if case.data.tokenized:
        corpus = load_tokens(case.data, case.model.vocab_size, *size, beat)
    else:
        corpus = load_bytes(case.data, *size)
    notes.note(LOADER)
    gpu = None if device.index is None else next(iter(nvml.visible_gpus()[device.index :]), None)  # NVML's id
    soak = case.soak
    watch = soak and SoakWatch(soak, SoakHistory(), device, rank, beat, nvml.utilization_meter(gpu))
    trainer = Trainer(case, corpus, device, rank, watch, notes)
    beat("check")
    agreement = case.check()
    beat("heldout loss before")
    # The supervisor samples the GPU of a single rank, and a soak's watch looks itself.
    telemetry = Telemetry([gpu] if gpu is not None and soak is None and case.layout.ranks > 1 else [])
    checkpoints = None
    if case.checkpoints is not None:
        from jobs.training.checkpoints.saving import Checkpoints  # long to import: a second of the processor

        checkpoints = Checkpoints(case, case.checkpoints, corpus.about, rank, device, beat)
    try:
        run = trainer.run(beat, stop, telemetry, checkpoints)
    finally:
        sampled = telemetry.stop()
        if checkpoints is not None:
            checkpoints.close()
    notes.note(NOW)
    state, host = notes.state(trainer.state.step, trainer.route), topology() if case.topology else None
    beat("memory")
    peak = measure_peak(trainer.step, device, trainer.resident, cuda_graphs=case.cuda_graphs)
    training = {
        "corpus": {**corpus.about, **corpus.batches.about},
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "checkpointing": trainer.model.checkpointing_effective,
        "compile": case.compile,  # in one graph, else the first step would have raised
        "cuda_graphs": case.cuda_graphs,
        "launcher": "none",  # run_ranks knows what started several ranks
        "ranks": asdict(case.layout),
    }
    if checkpoints is not None:
        told = ("folder", "kept", "failures", "damaged")
        training["checkpoints"] = {name: getattr(checkpoints.report, name) for name in told}
        training |= {"resumed_from": run.begun[1:], "steps_of_other_code": run.foreign}
    if case.cuda_graphs:
        torch.compiler.reset()  # frees their memory, which the process's next point would find taken
    return RankReport(
        run=run,
        peak=peak,
        agreement=agreement,
        utilization=next((metric for metric in sampled.metrics if metric.name == GPU_UTILIZATION.name), None),
        environment=environment(device) | {"training": training},
        gpu=trainer.gpu,
        state=state,
        energy=trainer.energy.energy,
        checkpoints=checkpoints and checkpoints.report,
        topology=host,
    )


def train(case: TextCase, surroundings: Surroundings, rank: Rank) -> RankReport:
    """Train as one of the case's ranks; reports to the process that started them."""
    threading.current_thread().name = f"rank {rank.number}"  # seen in dumps of stacks
    with _telling_failure(rank.post, rank.number):
        rank.post(RankProcess(rank.number, os.getpid(), "joined"))
        report = ProcessReporter(
            rank.post, surroundings, rank=rank.number, interval=lambda _: SAMPLE_INTERVAL_S, longest=LONGEST_TEXT
        )
        try:
            with _recording_silence(report, rank.folder / f"flight-recorder-rank{rank.number}.json"):
                result = train_rank(case, torch.device(rank.device), rank.number, report, rank.stop)
                dist.barrier()  # nobody leaves while another still exchanges
                dist.destroy_process_group()
        finally:
            report.close()
        return result


def elastic_main(main: Callable[[Rank], T], pipe: Path, folder: Path, device: str, memory_fraction: float | None) -> T:
    """Run `main` as the rank that the elastic launcher's environment variables name, with a pipe to the process that
    started it. SIGTERM asks it to end; before all ranks have formed a group it ends at once."""
    end_with_parent()
    number, post = int(os.environ["RANK"]), Outbox(os.open(pipe, os.O_WRONLY)).send
    post_mortem.offer_stacks()
    post(RankProcess(number, os.getpid(), "starting"))
    with _telling_failure(post, number):
        for name, value in PROCESS_GROUP.items():
            os.environ.setdefault(name, value)
        joined = torch.device(device)
        if device == "cpu":
            dist.init_process_group("gloo", timeout=TIMEOUT)
        else:
            joined = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(joined)
            torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))
            if memory_fraction is not None:
                torch.cuda.set_per_process_memory_fraction(memory_fraction, joined)
            dist.init_process_group("nccl", timeout=TIMEOUT, device_id=joined)
    with noting_sigterm() as stop:
        return main(Rank(number, str(joined), post, stop, folder))


@contextlib.contextmanager
def _telling_failure(post: Callable[[Any], None], rank: int) -> Iterator[None]:
    """Tell the process that started the ranks of an exception, which goes on."""
    try:
        yield
    except BaseException as err:
        post(RankFailure.of(rank, err))
        with contextlib.suppress(OSError):  # stderr is a file, whose disk may be full
            traceback.print_exc()
        raise


@contextlib.contextmanager
def _recording_silence(report: ProcessReporter, path: Path) -> Iterator[None]:
    """Write the flight recorder to `path` whenever there was no progress for SILENCE_S, once for each silence.

    Not after the block: what waits for the process to end is no silence, and the path's folder may be removed by then.
    """
    ended = threading.Event()

    def watch() -> None:
        written = 0.0
        while not ended.wait(0.5):
            last = report.last_beat
            if last > written and time.monotonic() - last > SILENCE_S:
                written = time.monotonic()
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(".partial")
                partial.write_bytes(_dump())
                partial.replace(path)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
