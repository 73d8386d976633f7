"""The search: what fits, the fastest first, and the three questions of every textbook."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from lightning_parallel.planner.advice import advice
from lightning_parallel.planner.cost import step_time
from lightning_parallel.planner.hardware import GIB, Cluster, find_gpu
from lightning_parallel.planner.job import RECOMPUTES, TrainingJob
from lightning_parallel.planner.memory import memory_by_stage, worst_stage
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.report import result_data
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


def test_pruning_loses_nothing() -> None:
    best = search(JOB).plans[0]
    base, limit = best.split, JOB.cluster.gpu.memory_gib * USABLE_MEMORY * GIB
    every = [replace(base, micro_batch=b, recompute=r) for b in (1, 2, 4, 8) for r in RECOMPUTES]
    fitting = [split for split in every if worst_stage(memory_by_stage(JOB, split)).total <= limit]
    assert min(step_time(JOB, split).total for split in fitting) == best.time.total


def test_fixed_fields_are_kept_and_others_searched() -> None:
    fixed = {"tensor": 2, "pipeline": 2, "recompute": "full", "zero_stage": 1}
    (plan,) = search(JOB, fixed).plans
    assert (plan.split.tensor, plan.split.pipeline, plan.split.data) == (2, 2, 2)
    assert (plan.split.recompute, plan.split.zero_stage) == ("full", 1)


def test_a_fixed_split_that_does_not_fit_is_rejected_with_its_figures() -> None:
    result = search(JOB, {"tensor": 1, "pipeline": 1, "zero_stage": 0})
    assert result.plans == ()
    (entry,) = result_data(result)["rejected"]
    assert "GiB (optimizer 59.8 GiB, master weights" in entry["reason"]
    assert entry["step_seconds"]["total"] > 0


def test_sizes_that_do_not_fill_the_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor=3 does not fill the 8 GPUs"):
        search(JOB, {"tensor": 3})
    with pytest.raises(ValueError, match="colour cannot be fixed"):
        search(JOB, {"colour": 1})


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


def test_many_data_for_a_small_model_are_read_in_parallel() -> None:
    job = TrainingJob(typical_shape(200e6), Cluster(find_gpu("a100-80gb"), nodes=8), 1024)
    result = search(job)
    best = result.plans[0].split
    assert (best.tensor, best.pipeline, best.data) == (1, 1, 64)
    (sentence,) = advice(result)
    assert sentence.startswith("Data parallel over 64 GPUs: the whole model fits on one GPU")


def test_seventy_billion_need_tensor_parallelism_and_more_nodes_or_offload_to_train() -> None:
    job = TrainingJob(typical_shape(70e9), Cluster(find_gpu("a100-80gb")), 8)
    sentences = advice(search(job))
    assert "1120 GB, 130.4 GiB per GPU if split over all 8" in sentences[0]
    assert "GiB of host memory per node" in sentences[1]
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
