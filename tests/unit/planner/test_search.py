"""The search: what fits, the fastest first, and the three questions of every textbook."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.cost import step_time
from lightning_parallel.planner.fitting import WORTHWHILE
from lightning_parallel.planner.hardware import GIB, Cluster, find_gpu
from lightning_parallel.planner.job import RECOMPUTES, Candidate, TrainingJob
from lightning_parallel.planner.memory import fullest_stage, least_bytes, memory_by_stage, worst_stage
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.report import result_data
from lightning_parallel.planner.runnable import missing, not_planned
from lightning_parallel.planner.search import USABLE_MEMORY, search
from lightning_parallel.planner.typical import typical_shape

LLAMA_8B = ModelShape.llama(32, 4096, 32, 14336, kv_heads=8, vocab=128256, seq=8192)
JOB = TrainingJob(LLAMA_8B, Cluster(find_gpu("h100-80gb")), 64)


def test_plans_fit_and_come_fastest_first() -> None:
    result = search(JOB)
    seconds = [plan.time.total for plan in result.plans]
    assert seconds == sorted(seconds)
    limit = JOB.cluster.gpu.memory_gib * USABLE_MEMORY * GIB
    assert all(plan.worst.total <= limit for plan in result.plans)
    assert all(plan.split.world_size == 8 for plan in result.plans)
    assert all(entry.reason for entry in result.rejected)


def tight_job(heads: int, batch: int, nodes: int, memory_gib: float) -> TrainingJob:
    gpu = replace(find_gpu("a100-80gb"), memory_gib=memory_gib)
    shape = ModelShape.llama(6, 2048, heads, 5632, vocab=32000, seq=2048)
    return TrainingJob(shape, Cluster(gpu, 4 // nodes, nodes), batch)


def every_split(job: TrainingJob) -> Iterator[Candidate]:
    """All fields that the code knows, each combined with each; left out is only what no runtime runs."""
    sizes = [size for size in itertools.product((1, 2, 4), repeat=4) if math.prod(size) == job.cluster.gpus]
    chunks = [*itertools.product(("1f1b", "gpipe", "zero-bubble", "zb-h2", "zb-v"), (1,)), ("interleaved", 2)]
    chunks += [("interleaved", 3)]
    for (tensor, pipeline, data, context), (schedule, virtual), zero_stage in itertools.product(
        sizes, chunks, (0, 1, 2, 3)
    ):
        if tensor > min(job.shape.heads, job.cluster.link_domain) or (pipeline == 1 and schedule != "1f1b"):
            continue
        if pipeline * (2 if schedule == "zb-v" else virtual) > job.shape.layers or (zero_stage and data * context == 1):
            continue
        for micro_batch, shared, recompute in itertools.product((1, 2, 4, 8, 16), (False, True), RECOMPUTES):
            micro_batches = job.global_batch / data / micro_batch
            if schedule == "interleaved" and micro_batches % pipeline:
                continue
            if micro_batches < {"zero-bubble": pipeline, "zb-h2": 2 * pipeline - 1, "zb-v": 2 * pipeline - 1}.get(
                schedule, 1
            ):
                continue
            if micro_batches.is_integer() and (tensor > 1 or not shared):
                yield Candidate(
                    tensor,
                    pipeline,
                    data,
                    context,
                    micro_batch,
                    zero_stage,
                    "none",
                    schedule,
                    virtual,
                    recompute,
                    shared,
                )


@pytest.mark.parametrize(
    ("heads", "batch", "nodes", "memory", "gains"),
    [
        (1, 4, 1, 5.0, 5),
        (8, 8, 1, 5.0, 3),
        (8, 8, 4, 6.0, 4),
        (8, 2, 1, 4.5, 0),
        (8, 1, 1, 6.0, 1),
        (8, 16, 1, 79.2, 0),
    ],
)
def test_pruning_loses_nothing(heads: int, batch: int, nodes: int, memory: float, gains: int) -> None:
    job = tight_job(heads, batch, nodes, memory)
    limit = job.cluster.gpu.memory_gib * USABLE_MEMORY * GIB
    fastest: dict[tuple[int, ...], float] = {}
    elsewhere: dict[frozenset[str], float] = {}
    for split in every_split(job):
        if worst_stage(memory_by_stage(job, split)).total > limit:
            continue
        seconds, kinds = step_time(job, split).total, frozenset(not_planned(job, split, {}))
        if kinds:
            elsewhere[kinds] = min(seconds, elsewhere.get(kinds, math.inf))
        else:
            # GPipe has to gain 1%.
            weighed = seconds / (1 if split.schedule == "1f1b" else 1 - WORTHWHILE)
            layout = (split.tensor, split.pipeline, split.data, split.zero_stage)
            fastest[layout] = min(weighed, fastest.get(layout, math.inf))
    result = search(job, {"offload": "none"})
    found = {(s.tensor, s.pipeline, s.data, s.zero_stage): plan for plan in result.plans for s in (plan.split,)}
    assert found.keys() == fastest.keys()
    for layout, plan in found.items():
        weighed = plan.time.total / (1 if plan.split.schedule == "1f1b" else 1 - WORTHWHILE)
        assert weighed == pytest.approx(fastest[layout], rel=1e-12), layout
    best = min((plan.time.total for plan in result.plans), default=math.inf)
    expected = {}
    for kinds, seconds in elsewhere.items():
        parts = [other for subset, other in elsewhere.items() if subset < kinds]
        if seconds < (1 - WORTHWHILE) * min([best, *parts]):
            expected[kinds] = seconds
    beyond = {frozenset(not_planned(job, entry.plan.split, {})): entry for entry in result.beyond}
    assert beyond.keys() == expected.keys()
    assert len(beyond) == gains
    for kinds, entry in beyond.items():
        assert entry.plan.time.total == pytest.approx(expected[kinds], rel=1e-12), kinds
        assert entry.plan.worst.total <= limit


@pytest.mark.parametrize("shape", [LLAMA_8B, ModelShape.gpt(7, 1024, 8, seq=512)])
def test_no_stage_is_emptier_than_the_bound_that_prunes(shape: ModelShape) -> None:
    job = replace(tight_job(8, 8, 1, 79.2), shape=replace(shape, layers=7))
    for split in itertools.islice(every_split(job), 0, None, 3):
        assert least_bytes(job, split) <= fullest_stage(job, split).total, split
    assert least_bytes(job, Candidate(tensor=2, pipeline=2)) > 0.6 * fullest_stage(job, Candidate(2, 2)).total


def test_a_larger_micro_batch_fits_where_stage_2_need_not_add_gradients_up() -> None:
    job = replace(tight_job(8, 8, 1, 79.2), shape=ModelShape.llama(6, 2048, 8, 5632, vocab=1000, seq=128))
    fixed = {"tensor": 1, "pipeline": 1, "zero_stage": 2, "recompute": "none", "offload": "none"}
    one, two = (fullest_stage(job, Candidate(data=4, micro_batch=b, zero_stage=2)).total / GIB for b in (1, 2))
    assert two < one
    tight = replace(job.cluster.gpu, memory_gib=(one + two) / 2 / USABLE_MEMORY)
    (plan,) = search(replace(job, cluster=replace(job.cluster, gpu=tight)), fixed).plans
    assert plan.split.micro_batch == 2


def test_plans_run_and_what_does_not_is_named_with_its_gain() -> None:
    job = tight_job(8, 8, 4, 79.2)
    result = search(job)
    best = result.plans[0]
    assert all(not missing(job, plan.split) for plan in result.plans)
    data = result_data(result)
    assert [plan["strategy"]["class_path"] for plan in data["plans"] if plan["strategy"]["class_path"] is None] == []
    entries = {entry["needs"][0]: entry for entry in data["not_run_here"]}
    entry = entries["the schedule interleaved with 3 virtual stages"]
    assert entry["layout"]["schedule"] == "interleaved"
    assert entry["faster_percent"] == pytest.approx(100 * (best.time.total / entry["step_seconds"]["total"] - 1))
    assert entry["faster_percent"] > 1
    assert len(entry["memory_by_stage_gib"]) == entry["layout"]["pipeline"]


def test_states_that_no_strategy_shards_are_no_plan_unless_they_are_asked_for() -> None:
    job = TrainingJob(typical_shape(7e9), Cluster(find_gpu("h100-80gb")), 8, states="true")
    result = search(job)
    assert all(not missing(job, plan.split) for plan in result.plans)
    assert {plan.split.zero_stage for plan in result.plans} >= {0, 2, 3}
    reasons = [entry.reason for entry in result.rejected if entry.split.zero_stage == 1]
    assert any("runs ZeRO-1 without 32-bit copies of weights; use --states mixed" in reason for reason in reasons)
    asked = search(job, {"zero_stage": 1, "tensor": 2, "pipeline": 1})
    assert [plan.split.zero_stage for plan in asked.plans] == [1]


@pytest.mark.parametrize(
    "fixed", [{"schedule": "interleaved"}, {"virtual_stages": 2}, {"schedule": "zb-h2"}, {"context": 2}]
)
def test_what_is_asked_for_is_planned_though_nothing_runs_it(fixed: dict[str, object]) -> None:
    result = search(JOB, fixed)
    assert result.plans
    for plan in result.plans:
        assert all(getattr(plan.split, name) == value for name, value in fixed.items())
        assert missing(JOB, plan.split)
        assert "context" in fixed or plan.split.pipeline > 1


def test_zero_bubble_is_planned_where_it_is_asked_for() -> None:
    plans = search(JOB, {"schedule": "zero-bubble"}).plans
    assert {plan.split.schedule for plan in plans} == {"zero-bubble"}
    assert not any(missing(JOB, plan.split) for plan in plans)
    job = tight_job(8, 8, 4, 79.2)
    result = search(job)
    assert "zero-bubble" not in {plan.split.schedule for plan in result.plans}
    needs = {entry.plan.split.schedule: entry.needs for entry in result.beyond}
    assert needs["zero-bubble"] == ("schedule='zero-bubble', which is planned where it is given",)


def test_gpipe_is_taken_only_where_it_gains() -> None:
    """It waits for few sends, and keeps all micro-batches."""
    slow = replace(JOB, cluster=replace(JOB.cluster, gpus_per_node=1, nodes=8, network_gbit=10))
    fixed = {"pipeline": 8, "tensor": 1, "recompute": "full"}
    assert search(slow, fixed).plans[0].split.schedule == "gpipe"
    assert search(JOB, fixed).plans[0].split.schedule == "1f1b"


def test_sequence_parallelism_needs_a_length_that_splits() -> None:
    job = replace(JOB, shape=replace(LLAMA_8B, seq=1001))
    fixed = {"tensor": 2, "pipeline": 1}
    assert {plan.split.sequence_parallel for plan in search(job, fixed).plans} == {False}
    (reason,) = {entry.reason for entry in search(job, {**fixed, "sequence_parallel": True}).rejected}
    assert "sequence parallelism cannot split 1001 tokens over 2 tensor ranks" in reason


def test_fixed_fields_are_kept_and_others_searched() -> None:
    fixed = {"tensor": 2, "pipeline": 2, "recompute": "full", "zero_stage": 1}
    (plan,) = search(JOB, fixed).plans
    assert (plan.split.tensor, plan.split.pipeline, plan.split.data) == (2, 2, 2)
    assert (plan.split.recompute, plan.split.zero_stage) == ("full", 1)


def test_a_fixed_split_that_does_not_fit_is_rejected_with_its_figures() -> None:
    result = search(JOB, {"tensor": 1, "pipeline": 1, "zero_stage": 0})
    assert result.plans == ()
    (entry,) = result_data(result)["rejected"]
    assert "GiB with micro-batches of 1, full recomputation (optimizer 59.8 GiB, master weights" in entry["reason"]
    assert entry["step_seconds"]["total"] > 0


def test_sizes_that_do_not_fill_the_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor=3 does not fill the 8 GPUs"):
        search(JOB, {"tensor": 3})
    with pytest.raises(ValueError, match="colour cannot be fixed"):
        search(JOB, {"colour": 1})


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"tensor": "2"}, "tensor='2' is not a size; use an integer of at least 1"),
        ({"micro_batch": True}, "micro_batch=True is not a size"),
        ({"pipeline": 0}, "pipeline needs a size of at least 1, got 0"),
        ({"zero_stage": None}, "zero_stage=None is unknown; use 0 or 1 or 2 or 3"),
        ({"sequence_parallel": "no"}, "sequence_parallel='no' is not a choice; use True or False"),
        ({"schedule": "gpipe", "virtual_stages": 2}, "schedule gpipe has one model chunk per rank"),
    ],
)
def test_values_that_no_split_has_are_refused(fixed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        search(JOB, fixed)


def test_layouts_that_the_strategies_refuse_are_not_proposed() -> None:
    odd = Cluster(find_gpu("h100-80gb"), gpus_per_node=6, nodes=2)
    assert not missing(replace(JOB, cluster=odd), Candidate(tensor=3, data=4))
    assert "nodes" in missing(replace(JOB, cluster=odd), Candidate(tensor=4, data=3)), "a group would leave its node"
    small = replace(JOB, shape=ModelShape.gpt(5, 64, 4, vocab=100_000))
    assert "balance" in missing(small, Candidate(pipeline=2, data=4, balance="even"))
    deep = replace(JOB, shape=ModelShape.gpt(32, 4096, 32, vocab=8))
    assert not missing(deep, Candidate(pipeline=2, data=4, balance="even")), "equal weights are cut alike"


def test_indivisible_heads_are_rejected_by_the_code_that_splits_them() -> None:
    job = replace(JOB, shape=ModelShape.llama(4, 768, 12, 2048), cluster=replace(JOB.cluster, nodes=1))
    reasons = [entry.reason for entry in search(job, {"tensor": 8}).rejected]
    assert any("attention head count 12 cannot be split" in reason for reason in reasons)


def test_sixteen_thousand_gpus_are_searched_in_seconds() -> None:
    shape = ModelShape.llama(126, 16384, 128, 53248, kv_heads=8, vocab=128256, seq=8192)
    job = TrainingJob(shape, Cluster(find_gpu("h100-80gb"), nodes=2048), 2048)
    start = time.process_time()
    result = search(job)
    assert time.process_time() - start < 5
    assert result.plans[0].split.tensor == 8


def test_what_nothing_holds_is_searched_in_seconds() -> None:
    job = TrainingJob(typical_shape(1e12), Cluster(find_gpu("h100-80gb"), nodes=4), 1024)
    start = time.process_time()
    result = search(job)
    assert time.process_time() - start < 5
    assert not result.plans
    largest = "(optimizer 7450.6 GiB, master weights 3725.3 GiB)"
    assert result.rejected[0].reason.startswith(
        f"needs 14937.8 GiB with micro-batches of 1, full recomputation {largest}"
    )


def test_many_data_for_a_small_model_are_read_in_parallel() -> None:
    job = TrainingJob(typical_shape(200e6), Cluster(find_gpu("a100-80gb"), nodes=8), 1024)
    result = search(job)
    best = result.plans[0].split
    assert (best.tensor, best.pipeline, best.data) == (1, 1, 64)
    (sentence,) = advice(result)
    assert sentence.startswith("Data parallel over 64 GPUs: the whole model fits on one GPU")
    assert "so they only have to share gradients once a step" in sentence
    page = Path(__file__).resolve().parents[3] / "docs" / "planner.md"
    assert "the whole model fits on one and GPUs share gradients once a step" in " ".join(page.read_text().split())


def test_nodes_of_six_gpus_are_planned() -> None:
    """Some sizes split the GPUs and not the heads; these are rejected, and no gain."""
    job = TrainingJob(typical_shape(7e9), Cluster(find_gpu("h100-80gb"), gpus_per_node=6, nodes=3), 36)
    result = search(job)
    assert all(plan.split.tensor in (1, 2) for plan in result.plans)
    assert all(entry.plan.split.tensor in (1, 2) for entry in result.beyond)
    assert any("head count 32 cannot be split" in entry.reason for entry in result.rejected)


@pytest.mark.parametrize(
    ("params", "gpu", "gpus", "batch", "helps"),
    [(7e9, "a100-40gb", 4, 512, True), (13e9, "h100-80gb", 4, 512, True), (13e9, "h100-80gb", 8, 8, False)],
)
def test_offload_is_proposed_where_it_is_faster(params: float, gpu: str, gpus: int, batch: int, helps: bool) -> None:
    job = TrainingJob(typical_shape(params), Cluster(find_gpu(gpu), gpus), batch)
    without, moved = (search(job, {"offload": offload}).plans for offload in ("none", "cpu"))
    limit = without[0].time.total * (1 - WORTHWHILE)
    faster = tuple(plan for plan in moved if plan.time.total < limit)
    assert bool(faster) == helps
    result = search(job)
    assert result.plans == (*faster, *without)
    (reason,) = advice(result)
    assert "Nothing fits" not in reason
    gain = f"{without[0].time.total / result.plans[0].time.total - 1:.0%} faster than the best without it: tensor"
    assert (gain in reason) == helps


def test_offload_without_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="offload cpu moves what is sharded, but ZeRO stage 0 shards nothing"):
        search(JOB, {"offload": "cpu", "zero_stage": 0})


def test_seventy_billion_need_tensor_parallelism_and_more_nodes_or_offload_to_train() -> None:
    job = TrainingJob(typical_shape(70e9), Cluster(find_gpu("a100-80gb")), 8)
    sentences = advice(search(job))
    assert "1120 GB, 130.4 GiB per GPU if split over all 8" in sentences[0]
    assert "GiB of host memory per node" in sentences[1]
    assert sentences[1].startswith("ZeRO-2 with offload fits, beside tensor 8 x pipeline 1 x data 1: it needs 930 GiB")
    assert "needs at least 2 nodes" in sentences[2]
    adapters = search(replace(job, trainable=0.005))
    assert adapters.plans[0].split.offload == "none"


def test_thirteen_billion_on_one_small_card_offload() -> None:
    job = TrainingJob(typical_shape(13e9), Cluster(find_gpu("rtx-4090"), gpus_per_node=1), 4)
    result = search(job)
    best = result.plans[0]
    assert (best.split.zero_stage, best.split.offload) == (3, "cpu")
    assert best.host["offload"] == pytest.approx(16 * 13e9)
    sentences = advice(result)
    assert "194 GiB of host memory" in sentences[1]
    assert "frozen weights take 26 GB" in sentences[-1]


def test_gradients_of_states_on_disk_wait_in_host_memory() -> None:
    job = TrainingJob(typical_shape(7e9), Cluster(find_gpu("h100-80gb"), host_gib=12), 8)
    result = search(job, {"offload": "nvme", "zero_stage": 2, "tensor": 1, "pipeline": 1})
    assert not result.plans
    assert "needs 13 GiB of host memory per node, there are 12 GiB" in result.rejected[0].reason
    (sentence,) = advice(search(replace(job, cluster=Cluster(job.cluster.gpu)), dict(result.fixed)))
    assert "takes 78 GiB of NVMe and 13 GiB of host memory per node" in sentence


def test_too_little_host_memory_is_a_reason() -> None:
    job = TrainingJob(typical_shape(13e9), Cluster(find_gpu("rtx-4090"), gpus_per_node=1, host_gib=64), 4)
    result = search(job, {"offload": "cpu", "zero_stage": 3})
    assert "needs 194 GiB of host memory per node, there are 64 GiB" in result.rejected[0].reason


def test_the_answer_has_the_promised_keys() -> None:
    data = result_data(search(JOB), price=2.0, tokens=1e9)
    assert data["model"]["parameters"] == 8_030_261_248
    plan = data["plans"][0]
    layout = "tensor pipeline data zero_stage offload micro_batch micro_batches schedule virtual_stages recompute"
    assert set(layout.split()) <= set(plan["layout"])
    assert {"total", "weights", "gradients", "optimizer", "activations"} <= set(plan["memory_gib"])
    assert len(plan["memory_by_stage_gib"]) == plan["layout"]["pipeline"]
    seconds = "total compute tensor bubble data pipeline optimizer offload"
    assert set(seconds.split()) == set(plan["step_seconds"])
    assert {"tokens_per_second_per_gpu", "model_tflops_per_gpu", "mfu", "hfu"} <= set(plan)
    assert {"class_path", "init_args"} <= set(plan["strategy"])
    assert 0 < plan["mfu"] <= plan["hfu"] < 1
    assert plan["run"]["cost"] == pytest.approx(2 * plan["run"]["gpu_hours"])
