"""Step times: measured collectives, and how each term answers to its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_parallel.pipeline.actions import Action, Kind, Schedule
from lightning_parallel.pipeline.schedules import Plan, add_communication, add_reduction, build_schedule
from lightning_parallel.pipeline.simulate import simulate
from lightning_parallel.planner.cost import hop_seconds, idle_share, step_time
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.kernels import START_SECONDS, block_kernels, gemm_seconds
from lightning_parallel.planner.links import Group, all_gather_seconds, all_reduce_seconds, send_seconds
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.typical import typical_shape

GPT = ModelShape.gpt(48, 8192, 64, vocab=51200)
CLUSTER = Cluster(find_gpu("a100-80gb"), nodes=8)
JOB = TrainingJob(GPT, CLUSTER, 256, precision="fp16", kernels="fused")
BASE = Candidate(tensor=8, pipeline=4, data=2, micro_batch=1)


@pytest.mark.parametrize(
    ("gpu", "nodes", "size", "measured"),
    [
        ("a100-80gb", 1, 4 * 2**20, 101.5e-6),
        ("a100-80gb", 1, 2**30, 8.204e-3),
        ("h200", 1, 2**33, 31.5e-3),
        ("b200", 4, 2**22, 430e-6),
        ("b200", 4, 2**30, 5.75e-3),
        ("b200", 4, 2**32, 22.05e-3),
    ],
)
def test_measured_all_reduces(gpu: str, nodes: int, size: int, measured: float) -> None:
    cluster = Cluster(find_gpu(gpu), nodes=nodes)
    found = all_reduce_seconds(cluster, Group.of(8 * nodes, 1, 8), size)
    assert found == pytest.approx(measured, rel=0.12)


def test_a_group_of_one_costs_nothing() -> None:
    assert all_gather_seconds(CLUSTER, Group.of(1, 8, 8), 1e9) == 0


def test_large_products_reach_the_sustained_share_and_thin_ones_the_memory() -> None:
    gpu = find_gpu("a100-80gb")
    large = 2 * 8192**3 / gemm_seconds(gpu, "bf16", 8192, 8192, 8192)
    assert 0.75 < large / gpu.peak("bf16") < 0.869
    thin = gemm_seconds(gpu, "bf16", 1, 8192, 8192)
    assert thin == pytest.approx(2 * 8192**2 / (0.82 * 2039e9), rel=0.01)


def test_the_terms_add_up() -> None:
    time = step_time(JOB, BASE)
    parts = (time.compute, time.tensor, time.bubble, time.data, time.pipeline, time.optimizer, time.offload)
    assert time.total == pytest.approx(sum(parts))
    assert min(parts[:-1]) > 0


def test_the_bubble_is_that_of_the_simulated_schedule() -> None:
    shape = ModelShape.llama(32, 4096, 32, 11008, vocab=1, seq=2048)
    job = TrainingJob(shape, CLUSTER, 16)
    time = step_time(job, Candidate(pipeline=4))
    share = time.bubble / (time.compute + time.bubble)
    assert share == pytest.approx(simulate(build_schedule("1f1b", 4, 16)).bubble, abs=0.015)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zb-h2", "zb-v"])
def test_better_schedules_have_smaller_bubbles(schedule: str) -> None:
    virtual = 3 if schedule == "interleaved" else 1
    other = replace(BASE, schedule=schedule, virtual_stages=virtual)
    assert step_time(JOB, other).bubble < 0.7 * step_time(JOB, BASE).bubble


def filled_plan(stages: int, micro_batches: int) -> Plan:
    """With halves of backwards apart: a rank takes a first half where it can, else a forward, else a second half."""
    plan: list[list[Action]] = [[] for _ in range(stages)]
    done: dict[Action, int] = {}
    for now in range(3 * (stages + micro_batches)):
        for stage, actions in enumerate(plan):
            needs = {
                Kind.BACKWARD: [(Kind.FORWARD, stage), (Kind.BACKWARD, stage + 1)],
                Kind.FORWARD: [(Kind.FORWARD, stage - 1)],
                Kind.WEIGHT: [(Kind.BACKWARD, stage)],
            }
            for kind, earlier in needs.items():
                i = sum(action.kind is kind for action in actions)
                if i < micro_batches and all(
                    done.get(Action(k, s, i), now) < now for k, s in earlier if 0 <= s < stages
                ):
                    actions.append(Action(kind, stage, i))
                    done[actions[-1]] = now
                    break
    return tuple(map(tuple, plan))


def chunked_plan(ranks: int, chunks: int, micro_batches: int) -> Plan:
    """What interleaving is with fewer micro-batches than ranks: all forwards chunk by chunk, and back."""
    return tuple(
        tuple(
            Action(kind, stage, i)
            for kind, stages in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1]))
            for stage in stages
            for i in range(micro_batches)
        )
        for own in (range(rank, ranks * chunks, ranks) for rank in range(ranks))
    )


def idle_passes(plan: Plan, micro_batches: int, chunks: int = 1) -> float:
    """Passes of a stage that the slowest rank waits between its first action and its last."""
    schedule = Schedule("filled", len(plan) * chunks, micro_batches, add_reduction(add_communication(plan)))
    split = any(action.kind is Kind.WEIGHT for actions in plan for action in actions)
    run = simulate(schedule, 1.0, 1.0 if split else 2.0, weight=1.0, transport="buffered")
    span = max(spans[-1].stop - spans[0].start for spans in run.spans)
    return span / 3 / chunks - micro_batches


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("schedule", ["zb-h2", "zero-bubble", "interleaved"])
def test_too_few_micro_batches_leave_the_bubble_of_the_simulated_schedule(schedule: str, stages: int) -> None:
    chunks = 3 if schedule == "interleaved" else 1
    split = Candidate(pipeline=stages, schedule=schedule, virtual_stages=chunks)
    usual = passes_of(idle_share(split, 1000), 1000)
    starved = 0
    for micro_batches in range(1, 2 * stages if schedule == "zb-h2" else stages + 1):
        plan = filled_plan(stages, micro_batches)
        if chunks > 1:
            plan = chunked_plan(stages, chunks, micro_batches)
        simulated = idle_passes(plan, micro_batches, chunks)
        found = passes_of(idle_share(split, micro_batches), micro_batches)
        assert found == pytest.approx(max(usual, simulated)), micro_batches
        starved += simulated > usual
    assert starved


def test_a_single_micro_batch_passes_the_v_twice() -> None:
    """Forward and back over 2 p halves of stages, and the last weight: 4 p + 1 of what a rank has 6 of."""
    split = Candidate(pipeline=8, schedule="zb-v")
    assert passes_of(idle_share(split, 1), 1) == pytest.approx((4 * 8 + 1 - 6) / 6)


def passes_of(share: float, micro_batches: int) -> float:
    return micro_batches * share / (1 - share)


@pytest.mark.parametrize(
    ("change", "term"),
    [
        ({"recompute": "full"}, "compute"),
        ({"recompute": "full"}, "tensor"),
        ({"data": 1, "tensor": 8, "pipeline": 8}, "bubble"),
        ({"offload": "cpu"}, "offload"),
        ({"offload": "cpu"}, "optimizer"),
    ],
)
def test_a_cause_raises_its_term(change: dict, term: str) -> None:
    assert getattr(step_time(JOB, replace(BASE, **change)), term) > getattr(step_time(JOB, BASE), term)


def test_zero_3_is_slow_when_little_is_computed_per_gathered_weight() -> None:
    job = replace(JOB, cluster=replace(CLUSTER, network_gbit=50), kernels="plain")
    small = step_time(job, Candidate(data=64, micro_batch=1, zero_stage=3))
    large = step_time(job, Candidate(data=64, micro_batch=4, zero_stage=3))
    assert small.data > 2 * large.data


def test_full_recomputation_costs_about_a_forward() -> None:
    ratio = step_time(JOB, replace(BASE, recompute="full")).compute / step_time(JOB, BASE).compute
    assert ratio == pytest.approx(4 / 3, abs=0.03)


def test_what_passes_between_stages_is_whole_unless_it_is_shared() -> None:
    """Every tensor rank here sends the whole residual stream; with sequence parallelism, and in Megatron, its part."""
    job = TrainingJob(GPT, CLUSTER, 64, states="autocast")
    split = Candidate(tensor=8, pipeline=4, data=2)
    size = 2048 * GPT.hidden * 4.0  # under autocast the stream is 32 bit wide
    whole = hop_seconds(job, split)
    assert whole == pytest.approx(send_seconds(CLUSTER, size, across=1.0))
    shared = send_seconds(CLUSTER, size / 8, across=1.0)
    assert hop_seconds(job, replace(split, sequence_parallel=True)) == pytest.approx(shared)
    assert hop_seconds(replace(job, scatters_sends=True), split) == pytest.approx(shared)


def test_interleaved_chunks_wait_for_each_of_their_sends_but_their_bubble_rate_does_not_count_them() -> None:
    job = TrainingJob(GPT, CLUSTER, 64)
    split = Candidate(tensor=8, pipeline=4, data=2, schedule="interleaved", virtual_stages=2)
    sends = step_time(job, split).pipeline / (2 * hop_seconds(job, split))
    assert sends == pytest.approx(3 + 32 * 2 * 3 / 4)
    assert idle_share(split, 32, 0.01) < idle_share(replace(split, schedule="1f1b", virtual_stages=1), 32, 0.01)


def test_small_micro_batches_of_plain_modules_cost_more_per_token() -> None:
    job = TrainingJob(GPT, CLUSTER, 64)
    for kernels, part in (("plain", 1.0), ("fused", 0.0)):
        block = block_kernels(replace(job, kernels=kernels), Candidate(tensor=8))
        assert block.forward.start == part * START_SECONDS["plain"]
        assert block.backward.start == 2 * block.forward.start


def test_weights_that_lie_on_the_host_come_over_its_wire_for_every_micro_batch() -> None:
    """What a block's passes do not hide is waited for: the less, the faster the wire."""
    shape, split = typical_shape(13e9), Candidate(zero_stage=3, offload="cpu", micro_batch=1)

    def waited(gbps: float) -> float:
        gpu = replace(find_gpu("rtx-4090"), host_gbps=gbps)
        return step_time(TrainingJob(shape, Cluster(gpu, gpus_per_node=1), 8), split).data

    there = 2.0 * shape.local_parameters("block", 1) * shape.layers / 1e9
    assert waited(1e9) < 1e-3 < waited(10) < waited(1)
    # Almost nothing is hidden at 1 GB/s: for the forward once, for the backward in and its gradients out.
    assert waited(1) == pytest.approx(8 * 3 * there, rel=0.1)
