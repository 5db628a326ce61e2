"""A job kind of another distribution, in one file: copies of a tensor, whole or in chunks.

It declares an axis (chunks) and two quantities (bandwidth, chunk size) that are unknown to this repository.
"""

import time
from collections.abc import Sequence
from itertools import product
from typing import Literal

import torch

from jobs.hardware.environment import environment
from jobs.hardware.stats import summarize
from jobs.schema import point
from jobs.schema.axes import Axes, Axis
from jobs.schema.point import Beat, Device, Machine, Measurement, Metric, Point
from jobs.schema.quantities import TIME, Better, Plot, Quantity, Role
from jobs.specs.spec import JobSpec

AXES = (Axis("chunks", "whole", "chunks"),)
BANDWIDTH = Quantity("bandwidth", "GiB/s", "Copy bandwidth", "bandwidth", Better.HIGHER, Role.HEADLINE, Plot.RATE)
CHUNK_SIZE = Quantity("chunk_size", "MiB", "Size of a chunk", plot=Plot.GROWTH)
QUANTITIES = (TIME, BANDWIDTH, CHUNK_SIZE)


class Case(point.Case):
    length: int
    chunks: int
    device: Device


class Spec(JobSpec):
    """A sweep of lengths x numbers of chunks."""

    kind: Literal["copying"]
    lengths: list[int]
    chunks: list[int]

    def points(self, machine: Machine) -> Sequence[Point]:
        return [
            Point(
                kind="copying",
                label=f"copy S={length} in {chunks}",
                case=Case(length=length, chunks=chunks, device=machine.device),
                axes=Axes(
                    implementation="copy",
                    workload="copy",
                    pass_="forward",
                    seq_len=length,
                    device=machine.device,
                    more={"chunks": chunks},
                ),
            )
            for length, chunks in product(self.lengths, self.chunks)
        ]


def measure(case: Case, beat: Beat) -> Measurement:
    parts = torch.ones(case.length, 256, device=case.device).chunk(case.chunks)
    seconds = []
    for repeat in range(5):
        beat("copy", repeat, 5)
        start = time.perf_counter()
        for part in parts:
            part.clone()
        seconds.append(time.perf_counter() - start)
    size = sum(part.numel() * part.element_size() for part in parts)
    metrics = (
        summarize(TIME, [1000 * s for s in seconds], "performance counter"),
        summarize(BANDWIDTH, [size / 2**30 / s for s in seconds], "bytes of the tensor over each sample of time"),
        Metric.of(CHUNK_SIZE, size / case.chunks / 2**20, method="computed"),
    )
    return Measurement(metrics, environment=environment(torch.device(case.device)))
