"""What the planner says about a plan, or about nothing that fits: the true cause, and values that work."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.hardware import Cluster, cpu_process, find_gpu
from lightning_parallel.planner.job import TrainingJob
from lightning_parallel.planner.search import search
from lightning_parallel.planner.typical import typical_shape
from lightning_parallel.planner.units import memory_text

JobAndFixed = tuple[TrainingJob, dict[str, Any]]


def job_of(params: float, *, nodes: int = 1, batch: int = 8, seq: int = 2048, **fixed: Any) -> JobAndFixed:
    return TrainingJob(typical_shape(params, seq=seq), Cluster(find_gpu("h100-80gb"), nodes=nodes), batch), fixed


@pytest.mark.parametrize(
    ("asked", "says", "never"),
    [
        (
            job_of(1e9),
            "the whole model fits on one GPU (20.8 GiB of 79.1 GiB with micro-batches of 1, no recomputation)",
            "alone would need",
        ),
        (
            job_of(7e9),
            "ZeRO-1: one GPU alone would need 117.8 GiB of 79.1 GiB with micro-batches of 1, no recomputation",
            "whole model",
        ),
        (job_of(7e9, context=2), "Each sequence is split over 2 GPUs, as given", "the whole model fits"),
        (job_of(1e9, tensor=2), "One GPU could hold the model", "cannot hold"),
        (job_of(7e9, tensor=8), "One GPU cannot hold the model", "sharded"),
        (job_of(7e9, zero_stage=3, offload="cpu"), "Offloading as given takes 104 GiB", "Nothing fits"),
        (job_of(1e9, micro_batch=1, pipeline=2), "optimizer states are sharded over 4 GPUs", "cannot"),
    ],
)
def test_the_reason_is_that_of_the_plan(asked: JobAndFixed, says: str, never: str) -> None:
    job, fixed = asked
    (sentence,) = advice(search(job, fixed))
    assert says in sentence
    assert never not in sentence


@pytest.mark.parametrize(
    ("asked", "cause", "remedies"),
    [
        (
            job_of(7e9, nodes=100_000, batch=1024),
            "a global batch of 1024 does not split over 3125 data ranks",
            ["--global-batch 3125 fits"],
        ),
        (
            job_of(7e9, micro_batch=64),
            "a batch of 8 sequences over 1 data rank does not split into micro-batches of 64; use 1, 2, 4 or 8",
            ["Without --micro-batch 64 it fits: micro-batch 1", "--global-batch 64 fits"],
        ),
        (job_of(7e9, seq=10**8), "a micro-batch of 1 sequence of 100000000 tokens takes", ["--seq 262144 fits"]),
        (
            job_of(7e9, tensor=1, pipeline=1, zero_stage=0),
            "weights, gradients and optimizer take",
            ["Without --zero 0"],
        ),
        (job_of(1e9, recompute="none", micro_batch=8, tensor=1, seq=16384, batch=64), "a micro-batch of", ["Without"]),
    ],
)
def test_nothing_fits_for_a_cause_and_what_is_named_works(asked: JobAndFixed, cause: str, remedies: list[str]) -> None:
    job, fixed = asked
    first, *others = advice(search(job, fixed))
    assert cause in first
    assert all(any(other.startswith(remedy) for other in others) for remedy in remedies)
    assert not any("Adapters" in other for other in others), "they would not help"


def test_what_is_offloaded_beside_tensor_ranks_says_so() -> None:
    job = TrainingJob(typical_shape(70e9), Cluster(find_gpu("a100-80gb")), 64)
    best = search(job).plans[0].split
    assert best.tensor > 1
    offloaded = advice(search(job, {"tensor": best.tensor, "pipeline": best.pipeline}))
    assert not any("inside the node" in sentence for sentence in offloaded), "it is the plan itself"
    sizes = f"tensor {best.tensor} x pipeline {best.pipeline} x data {best.data}"
    assert any(f"ZeRO-2 with offload fits, beside {sizes}: it needs" in sentence for sentence in offloaded)


def test_a_model_larger_than_all_computers_is_answered_at_once() -> None:
    job, _ = job_of(1e15)
    start = time.process_time()
    sentences = advice(search(job))
    assert time.process_time() - start < 5
    assert re.search(r"the states alone need 24530 nodes", sentences[1])


def test_cpus_and_single_things_are_named_as_they_are() -> None:
    job = TrainingJob(typical_shape(2e6, seq=64), Cluster(cpu_process(0.5), gpus_per_node=2), 2, precision="fp32")
    (sentence,) = advice(search(job, {"tensor": 1, "pipeline": 1}))
    assert "Data parallel over 2 CPUs: the whole model fits on one CPU" in sentence
    assert "MiB of 0.5 GiB" in sentence
    tight_job = replace(job, cluster=Cluster(cpu_process(0.03), gpus_per_node=2))
    found = search(tight_job, {"tensor": 2})
    assert {plan.split.offload for plan in found.plans} == {"none"}, "there is no other memory to move to"
    (tight,) = advice(found)
    assert "16 bytes x 2,000,000 parameters = 32 MB, 15.3 MiB per CPU" in tight
    tiny = TrainingJob(typical_shape(2e6, seq=64), Cluster(cpu_process(0.01), gpus_per_node=1), 1, precision="fp32")
    assert "MiB" in search(tiny, {"offload": "none"}).rejected[0].reason
    assert "0.0" not in search(tiny, {"offload": "none"}).rejected[0].reason
    with pytest.raises(ValueError, match=r"tensor=3 does not fill the 2 CPUs; use 1 or 2"):
        search(job, {"tensor": 3})
    assert memory_text(0.05 * 2**30) == "51.2 MiB"


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_a_host_that_is_too_small_for_a_given_offload_is_the_cause(offload: str) -> None:
    cluster = Cluster(find_gpu("h100-80gb"), host_gib=10, nvme_gib=10)
    first, second = advice(search(TrainingJob(typical_shape(3e9), cluster, 8), {"offload": offload}))
    assert first.startswith("Nothing fits as given: offloading needs ")
    assert first.endswith(" per node, there are 10 GiB.")
    assert second.startswith(f"Without --offload {offload} it fits: offload none (")
