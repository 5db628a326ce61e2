"""The faults of a chaos run and their times, from its seed alone."""

import random
from dataclasses import dataclass
from enum import StrEnum

_BEGIN_S = 25.0  # the drivers have started and looked at the cluster
_END = 0.9  # of the time, after which nothing new happens
_ROUND_MIN = 3.0


class Kind(StrEnum):
    """Kinds of faults."""

    DRIVER = "kill a driver"
    CANCEL = "cancel a run"
    RESUME = "resume a run that is being measured"
    WORKER = "kill a Ray worker that supervises a point"
    POINT = "kill the process of a point"
    RAYLET = "kill the raylet of a node"
    HEAD = "kill the head"
    FREEZE = "freeze Postgres"
    STOP = "stop Postgres"
    DISK = "fill the disk under a journal"


_LASTS_S = {Kind.RAYLET: (2.0, 10.0), Kind.FREEZE: (3.0, 20.0), Kind.STOP: (3.0, 15.0), Kind.DISK: (3.0, 15.0)}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: time since the start.
        lasts_s: time until what is broken is mended.
        pick: chooses one of several things that it may befall, in [0, 1).
    """

    at_s: float
    kind: Kind
    lasts_s: float
    pick: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s  {self.kind}{lasts} ({self.pick:.3f})"


def schedule(seed: int, minutes: float) -> list[Fault]:
    """Faults in the order of their times: every kind once in each round of about three minutes, in random order."""
    dice = random.Random(seed)
    rounds = max(1, int(minutes / _ROUND_MIN))
    kinds = [kind for _ in range(rounds) for kind in dice.sample(list(Kind), len(Kind))]
    each = (_END * 60 * minutes - _BEGIN_S) / len(kinds)
    faults = []
    for number, kind in enumerate(kinds):
        at_s = _BEGIN_S + each * (number + dice.random())
        faults.append(Fault(at_s, kind, dice.uniform(*_LASTS_S.get(kind, (0, 0))), dice.random()))
    return faults
