"""Pure: the splits that would be faster than what is planned, and what each of them needs for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from lightning_parallel.planner.cost import least_seconds, pass_seconds, step_time
from lightning_parallel.planner.fitting import WORTHWHILE, Plan, fits, plan_of, surely_too_large
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import fullest_stage
from lightning_parallel.planner.runnable import not_planned
from lightning_parallel.planner.stages import stage_parameters
from lightning_parallel.planner.variants import (
    group_sizes,
    micro_batches,
    only_pipelines,
    orders,
    recomputes,
    sequence_parallelism,
    zero_stages,
)

__all__ = ["Beyond", "faster_elsewhere"]


@dataclass(frozen=True)
class Beyond:
    """A split that no strategy here runs, or none unless it is asked for.

    Attributes:
        plan: its figures.
        needs: what no strategy does, or has to be told to do, in words.
        faster: part by which it trains more tokens per second than the best plan that runs; None when none fits.
    """

    plan: Plan
    needs: tuple[str, ...]
    faster: float | None


def faster_elsewhere(job: TrainingJob, fixed: Mapping[str, Any], limit: float) -> tuple[Beyond, ...]:
    """The fastest split that fits for everything that no strategy runs, and each combination that gains by its parts.

    A combination of needs has to be faster by 1% than all of its parts, and than what runs. What is skipped cannot be
    among them: bounds from below tell, see `least_seconds` and `least_bytes`, and of ZeRO stages 1 and 2, which take
    the same time, the one that holds less.

    Args:
        job: what is trained, and where.
        fixed: fields of the candidates that are given, ``offload`` among them.
        limit: seconds of a step of the fastest plan that runs; infinite when none does.
    """

    def needs_of(split: Candidate) -> tuple[str, ...]:
        return tuple(not_planned(job, split, fixed).values())

    search = _Search(job, fixed, limit)
    search.run()
    found = [
        Beyond(plan_of(job, split), needs_of(split), limit / seconds - 1 if limit < inf else None)
        for kinds, (seconds, split) in search.best.items()
        if seconds < search.bound(kinds, itself=False)
    ]
    return tuple(sorted(found, key=lambda entry: entry.plan.time.total))


class _Search:
    """The fastest split by what it needs."""

    def __init__(self, job: TrainingJob, fixed: Mapping[str, Any], limit: float) -> None:
        self.job = job
        self.fixed = fixed
        self.limit = limit * (1 - WORTHWHILE)
        self.best: dict[frozenset[str], tuple[float, Candidate]] = {}
        self._passes: dict[tuple[int, int, int, bool], float] = {}

    def run(self) -> None:
        """Those with the lowest bounds first: little else has to be looked at."""
        for least, base in sorted(self._bounded(), key=lambda entry: entry[0]):
            kinds = frozenset(not_planned(self.job, base, self.fixed))
            if least < self.bound(kinds):
                self._take_fastest(base, kinds)

    def bound(self, kinds: frozenset[str], *, itself: bool = True) -> float:
        """Seconds that a split with these needs has to undercut."""
        parts = [seconds * (1 - WORTHWHILE) for other, (seconds, _) in self.best.items() if other < kinds]
        own = [self.best[kinds][0]] if itself and kinds in self.best else []
        return min([self.limit, *parts, *own])

    def _bounded(self) -> Iterator[tuple[float, Candidate]]:
        """Splits that need something, whose bound is below the limit, but for the recomputation."""
        for sizes in group_sizes(self.job, self.fixed, every=True):
            if sizes.pipeline == 1 and only_pipelines(self.fixed):
                continue
            try:
                stage_parameters(self.job.shape, sizes)
                for arranged, whole in self._arranged(sizes):
                    yield from self._ordered(arranged, whole)
            except ValueError:
                continue  # heads, blocks or batches do not split that way

    def _arranged(self, sizes: Candidate) -> Iterator[tuple[Candidate, float]]:
        for micro_batch in micro_batches(self.job, sizes, self.fixed):
            sized = replace(sizes, micro_batch=micro_batch)
            for shared in sequence_parallelism(self.job, sized, self.fixed):
                arranged = replace(sized, sequence_parallel=shared)
                whole = self._pass_seconds(arranged)
                if whole * arranged.micro_batches(self.job) / arranged.pipeline < self.limit:
                    yield arranged, whole

    def _pass_seconds(self, split: Candidate) -> float:
        key = (split.tensor, split.context, split.micro_batch, split.sequence_parallel)
        if key not in self._passes:
            self._passes[key] = pass_seconds(self.job, split)
        return self._passes[key]

    def _ordered(self, arranged: Candidate, whole: float) -> Iterator[tuple[float, Candidate]]:
        stages = self._stages_with_room(arranged)
        for ordered in orders(self.job, arranged, self.fixed, every=True):
            for stage in stages:
                base = replace(ordered, zero_stage=stage)
                if not_planned(self.job, base, self.fixed):
                    least = least_seconds(self.job, base, whole)
                    if least < self.limit:
                        yield least, base

    def _stages_with_room(self, arranged: Candidate) -> list[int]:
        """ZeRO stages but for those that surely do not fit, whatever the schedule, or hold more in the same time."""
        # Stage 2 keeps whole gradients while micro-batches add up, like stage 1, and the shards that it sums.
        larger = 2 if arranged.micro_batches(self.job) > 1 and arranged.offload == "none" else 1
        found = zero_stages(arranged, self.fixed, every=True)
        if "zero_stage" not in self.fixed:
            found = tuple(stage for stage in found if stage != larger)
        return [stage for stage in found if not surely_too_large(self.job, replace(arranged, zero_stage=stage))]

    def _take_fastest(self, base: Candidate, kinds: frozenset[str]) -> None:
        for recompute in recomputes(self.fixed):
            split = replace(base, recompute=recompute)
            seconds = step_time(self.job, split).total
            faster = seconds < self.bound(kinds)
            taken = faster and fits(self.job, split, fullest_stage(self.job, split))
            if taken:
                self.best[kinds] = (seconds, split)
            if (taken or not faster) and split.zero_stage < 3:
                return  # recomputing more is slower still, but under stage 3 it hides gathers
