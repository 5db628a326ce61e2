"""Runs the steps of a plan on the cluster, as far as its nodes can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jobs.schema.plain_text import error_in_a_line
from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from orchestrator.cli import console, submission
from orchestrator.cli.services import ray_answers
from orchestrator.errors import UserError
from orchestrator.judge.rules import READY_SPECS, Gates, GatesError
from orchestrator.judge.steps import Step
from orchestrator.run import driver
from orchestrator.settings import Settings, check_current_folder
from orchestrator.terminal import say

_ACCELERATOR = "accelerator_type:"  # prefix of the resource by which Ray names a node's cards
_MOST_NODES = 10_000  # Ray's own limit


@dataclass(frozen=True)
class Node:
    """A living node of the cluster: its GPUs and Ray's types of them."""

    gpus: float
    accelerators: frozenset[str]

    def can_run(self, step: Step) -> bool:
        """Whether a step fits on it."""
        return self.gpus >= step.gpus and (step.accelerator is None or step.accelerator in self.accelerators)


def run(settings: Settings, steps: Sequence[Step], *, dry_run: bool = False) -> None:
    """Submit each step that a node can run, and follow it to its end; say which are not run, and why.

    A failed step does not stop the next.

    Raises:
        SubmissionError: no cluster answers.
    """
    nodes = cluster(settings) if any(step.command for step in steps) else []
    for step in steps:
        settled = f"{', '.join(step.settles)} on {step.hardware}"
        if step.command is None:
            _say(f"no command settles {settled}: {step.lacking}")
        elif not any(node.can_run(step) for node in nodes):
            cards = {f"{node.gpus:g}× {' or '.join(sorted(node.accelerators)) or 'GPU'}" for node in nodes if node.gpus}
            _say(
                f"not run: {step.command}: needs a node with {step.gpus}× {step.accelerator or 'GPU'}; "
                f"this cluster has {', '.join(sorted(cards)) or 'no GPU'}"
            )
        elif dry_run:
            _say(f"would run: {step.command}: {console.cost(step)}; settles {settled}")
        else:
            _say(f"running: {step.command}: {console.cost(step)}; settles {settled}")
            _say(f"{'done' if (problem := _submit(settings, step)) is None else problem}: {step.command}")


def check_commands(rules: Gates) -> None:
    """Raise GatesError if the spec of a rule's command refuses the values that the rule sets in it.

    SettingsError: the current folder was deleted.
    """
    check_current_folder()
    for target in rules.targets:
        for measure in (rule.measure for hardware in rules.of(target) for rule in target.rules_on(hardware)):
            if measure.spec is None:
                continue
            try:
                load_spec(READY_SPECS / measure.spec, measure.set)
            except SpecError as err:
                raise GatesError(f"set: {list(measure.set)}: {measure.spec} refuses it: {err}") from None


def cluster(settings: Settings) -> list[Node]:
    """The living nodes, as the cluster's dashboard lists them; this process does not join it.

    Raises:
        SubmissionError: no cluster answers.
    """
    if not ray_answers(settings):
        raise submission.no_cluster(settings)
    from ray.util.state import list_nodes

    try:
        listed = list_nodes(settings.ray_dashboard, [("state", "=", "ALIVE")], limit=_MOST_NODES, detail=True)
    except Exception as err:  # also of an answer of another server than Ray's
        raise submission.SubmissionError(
            f"NSA_RAY_DASHBOARD: {settings.ray_dashboard!r}: cannot list the nodes ({error_in_a_line(err)}); "
            "look at `nsa status`"
        ) from None
    nodes = []
    for each in listed:
        resources = vars(each)["resources_total"]
        types = {name.removeprefix(_ACCELERATOR) for name in resources if name.startswith(_ACCELERATOR)}
        nodes.append(Node(float(resources.get("GPU", 0)), frozenset(types)))
    return nodes


def _submit(settings: Settings, step: Step) -> str | None:
    """Run a step to its end. Returns the problem in a word or a line; None if it succeeded."""
    assert step.spec is not None, "a step with a command has a spec"
    spec = READY_SPECS / step.spec
    try:
        driver.check([str(spec), *(item for override in step.overrides for item in ("--set", override))])
        job = submission.submit(settings, spec, step.overrides).job
        _say(f"submitted {job}")
        for text in submission.follow(settings, job):
            say(text, end="")
        status = submission.job_status(settings, job)
    except (UserError, SpecError) as err:
        return f"failed ({'; '.join(str(err).splitlines())})"
    return None if status == "SUCCEEDED" else f"failed (job {job} {status.lower()})"


def _say(text: str) -> None:
    console.out.print(text, markup=False, soft_wrap=True)
