"""Pure: the split of a run whose loader is given: every replica reads the same number of sequences per step.

More replicas then take larger global batches, so that layouts are compared by the sequences that they train per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_parallel.layout import divisors
from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.beyond import Beyond, faster_elsewhere
from lightning_parallel.planner.hardware import GIB
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.report import result_data
from lightning_parallel.planner.search import USABLE_MEMORY, Plan, Rejected, SearchResult, rank_layouts
from lightning_parallel.planner.units import memory_text, plural

__all__ = ["NOTABLE", "Choice", "Choices", "choose", "last_resort"]

# What no strategy runs is told only where it is faster by this part: a run is about to start.
NOTABLE = 0.05

WhyNot = Callable[[TrainingJob, Candidate], str]
Cases = Sequence[tuple[TrainingJob, Mapping[str, Any]]]


class Choice(NamedTuple):
    """A split that fits, with the job that it makes of the loader's batches."""

    job: TrainingJob
    plan: Plan

    @property
    def seconds_per_sequence(self) -> float:
        """Seconds of a step over the sequences of all replicas."""
        return self.plan.time.total / self.job.global_batch


@dataclass(frozen=True)
class Choices:
    """``ranked`` fastest first; the others with the reason; what would be notably faster but no strategy runs.

    ``is_last_resort`` tells that states are offloaded because nothing fits without.
    """

    ranked: tuple[Choice, ...]
    rejected: tuple[tuple[TrainingJob, Rejected], ...]
    beyond: tuple[tuple[TrainingJob, Beyond], ...] = ()
    is_last_resort: bool = False

    @property
    def best(self) -> Choice:
        """The fastest.

        Raises:
            ValueError: nothing fits; the text names the nearest layout, what it lacks, and what would help.
        """
        if not self.ranked:
            raise ValueError(self._nearest())
        return self.ranked[0]

    def _nearest(self) -> str:
        known = [(job, entry) for job, entry in self.rejected if entry.plan is not None]
        if not known:
            reasons = "; ".join(dict.fromkeys(entry.reason for _, entry in self.rejected))
            return f"no layout runs this job: {reasons or 'no sizes fill the devices'}"
        job, entry = min(known, key=lambda pair: pair[1].plan.worst.total if pair[1].plan else 0.0)
        split = entry.split
        usable = USABLE_MEMORY * job.cluster.gpu.memory_gib * GIB
        offloaded = " and states in host memory" if split.offload == "cpu" else ""
        lacks_host = entry.plan is not None and entry.plan.worst.total <= usable
        memory = "more host memory, " if lacks_host else ""
        return (
            f"no layout of {plural(job.cluster.gpus, 'device')} with "
            f"{memory_text(job.cluster.gpu.memory_gib * GIB)} each holds {job.shape.parameters:,} parameters "
            f"and their training: the nearest, tensor {split.tensor} x pipeline {split.pipeline} "
            f"x data {split.data} with ZeRO {split.zero_stage}{offloaded}, {entry.reason}; use {memory}more devices, a "
            "smaller batch, or a model that recomputes its activations"
        )

    def data(self) -> dict[str, Any]:
        """The whole answer, with the keys of `result_data`."""
        if not self.ranked:
            raise ValueError(self._nearest())
        found = [result_data(SearchResult(choice.job, (choice.plan,), ())) for choice in self.ranked]
        rejected = [result_data(SearchResult(job, (), (entry,)))["rejected"][0] for job, entry in self.rejected]
        elsewhere = [
            result_data(SearchResult(job, (), (), beyond=(entry,)))["not_run_here"][0] for job, entry in self.beyond
        ]
        job, plan = self.best
        given = {} if self.is_last_resort else {"offload": plan.split.offload}
        others = tuple(entry for tried, entry in self.rejected if tried == job)
        best = SearchResult(job, (plan,), others, fixed=given)
        answer = {
            "plans": [answer["plans"][0] for answer in found],
            "rejected": rejected,
            "not_run_here": elsewhere,
            "advice": advice(best),
        }
        return {**found[0], **answer}


def choose(
    cases: Iterable[tuple[TrainingJob, Mapping[str, Any]]],
    why_not: WhyNot = lambda job, split: "",
) -> Choices:
    """Every layout of the devices with the loader's batch on each replica.

    Args:
        cases: what is trained, its ``global_batch`` being the sequences that one replica reads per step, with the
            fields of the candidates that are given. More than one where the bytes of the states depend on such a field.
        why_not: why a split cannot be run here; empty if it can.
    """
    known = [(replica, {"offload": "none", **fixed}) for replica, fixed in cases]
    found = _ranked(known, why_not)
    if not found.ranked:
        return found
    return replace(found, beyond=tuple(_beyond(known, found.best)))


def last_resort(choices: Choices, cases: Iterable[tuple[TrainingJob, Mapping[str, Any]]], why_not: WhyNot) -> Choices:
    """Where nothing fits, what does with states in host memory; the same choices otherwise, or if that does not help.

    Args:
        choices: what was found without.
        cases: as for `choose`, of stages that shard something.
        why_not: as for `choose`.
    """
    if choices.ranked:
        return choices
    found = choose([(job, {**fixed, "offload": "cpu"}) for job, fixed in cases], why_not)
    rejected = choices.rejected + found.rejected
    return replace(found, rejected=rejected, is_last_resort=bool(found.ranked))


def _ranked(cases: Cases, why_not: WhyNot) -> Choices:
    ranked: list[Choice] = []
    rejected: list[tuple[TrainingJob, Rejected]] = []
    for job, fixed in _jobs(cases):
        result = rank_layouts(job, fixed)
        rejected += [(job, entry) for entry in result.rejected]
        for plan in result.plans:
            reason = why_not(job, plan.split)
            if reason:
                rejected.append((job, Rejected(plan.split, reason)))
            else:
                ranked.append(Choice(job, plan))
    return Choices(tuple(sorted(ranked, key=lambda choice: choice.seconds_per_sequence)), tuple(rejected))


def _beyond(cases: Cases, best: Choice) -> Iterator[tuple[TrainingJob, Beyond]]:
    """What trains notably more sequences per second, the fastest first, where no part of its needs gains as much."""
    found = [
        (job, entry)
        for job, fixed in _jobs([(job, _without_schedule(fixed)) for job, fixed in cases])
        for entry in faster_elsewhere(job, fixed, best.seconds_per_sequence * job.global_batch)
        if entry.faster is not None and entry.faster >= NOTABLE
    ]
    seen: set[frozenset[str]] = set()
    for job, entry in sorted(found, key=lambda pair: pair[1].plan.time.total / pair[0].global_batch):
        needs = frozenset(entry.needs)
        if not any(part <= needs for part in seen):
            seen.add(needs)
            yield job, entry


def _without_schedule(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What a strategy's own schedule could be replaced with is looked for here."""
    return {name: value for name, value in fixed.items() if name != "schedule"}


def _jobs(cases: Cases) -> Iterator[tuple[TrainingJob, dict[str, Any]]]:
    """A job for each number of replicas, with the fields that are given."""
    for replica, fixed in cases:
        for data in _replicas(replica.cluster.gpus, fixed):
            yield replace(replica, global_batch=replica.global_batch * data), {**fixed, "data": data}


def _replicas(devices: int, fixed: Mapping[str, Any]) -> list[int]:
    """Numbers of replicas that sizes of the model's ranks leave."""
    taken = fixed.get("tensor", 1) * fixed.get("pipeline", 1)
    return [data for data in divisors(devices) if devices // data % taken == 0 and fixed.get("data", data) == data]
