"""Model states are exact; activations follow the published forms and the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_parallel.pipeline.actions import Kind
from lightning_parallel.pipeline.schedules import build_schedule
from lightning_parallel.pipeline.simulate import peak_live_micro_batches
from lightning_parallel.planner.activations import block_bytes, factor_bytes
from lightning_parallel.planner.hardware import GIB, Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import host_bytes, host_states_by_stage, memory_by_stage, worst_stage
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.planner.stages import fullest_moments, live_blocks, live_micro_batches, stage_parameters
from lightning_parallel.zero.memory import offloaded_bytes

CLUSTER = Cluster(find_gpu("a100-80gb"), nodes=8)
LLAMA = ModelShape.llama(32, 4096, 32, 11008)
# 6.75 billion parameters, all of them in blocks that tensor ranks and stages split evenly.
BARE = ModelShape.llama(32, 4096, 32, 11704, vocab=1, seq=128)


def job_of(shape: ModelShape, **options: object) -> TrainingJob:
    return TrainingJob(shape, CLUSTER, 64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("zero_stage", "bytes_per_parameter"),
    [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_zero_shards_what_its_paper_says(zero_stage: int, bytes_per_parameter: float) -> None:
    (stage,) = memory_by_stage(job_of(LLAMA), Candidate(data=8, zero_stage=zero_stage))
    assert stage.states == pytest.approx(bytes_per_parameter * LLAMA.parameters, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({"precision": "fp32"}, 16),
        ({"states": "fp32-gradients"}, 18),
        ({"states": "true"}, 8),
        ({"optimizer": "sgd"}, 8),
        ({"optimizer": "adam-8bit"}, 10),
    ],
)
def test_bytes_per_parameter_follow_precision_and_optimizer(options: dict, bytes_per_parameter: float) -> None:
    (stage,) = memory_by_stage(job_of(LLAMA, **options), Candidate())
    assert stage.states == pytest.approx(bytes_per_parameter * LLAMA.parameters, rel=1e-12)


def test_weights_and_gradients_of_a_three_dimensional_split() -> None:
    split = Candidate(tensor=4, pipeline=4, data=4, zero_stage=3)
    weights = worst_stage(memory_by_stage(job_of(BARE), split)).weights / GIB
    one = replace(split, zero_stage=1)
    gradients = worst_stage(memory_by_stage(job_of(BARE, states="fp32-gradients"), one)).gradients / GIB
    assert weights == pytest.approx(0.196, rel=0.02)
    assert gradients == pytest.approx(1.57, rel=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 2), (4, 9), (3, 40)])
def test_live_micro_batches_are_those_of_the_schedule(schedule: str, stages: int, micro_batches: int) -> None:
    found = live_micro_batches(schedule, stages, micro_batches)
    assert found == peak_live_micro_batches(build_schedule(schedule, stages, micro_batches))


def test_what_starves_keeps_all_micro_batches_on_every_rank() -> None:
    shape = replace(ModelShape.gpt(8, 1024, 8), vocab=8)
    split = Candidate(pipeline=4, schedule="zb-h2", balance="even")
    assert live_blocks(shape, split, 3) == (6.0, 6.0, 6.0, 6.0)
    assert live_blocks(shape, split, 9)[-1] == 2.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 2), (4, 3), (4, 4), (4, 9), (3, 40), (2, 1)])
def test_what_is_put_off_is_that_of_the_schedule(stages: int, micro_batches: int) -> None:
    for stage, planned in enumerate(fullest_moments(stages, micro_batches)):
        live = waiting = 0
        seen = set()
        for action in build_schedule("zero-bubble", stages, micro_batches).actions[stage]:
            live += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            waiting += {Kind.BACKWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
            seen.add((live, waiting))
        assert seen >= set(planned)
        for whole, factors in ((1, 0), (3, 1), (1, 1), (1, 3), (0, 1)):
            assert max(whole * a + factors * b for a, b in seen) == max(whole * a + factors * b for a, b in planned)


def test_factors_of_a_gpt_block_are_those_of_the_paper() -> None:
    """32 s b h bytes in 16 bit (Qi et al. 2024, table 1)."""
    job = TrainingJob(ModelShape.gpt(2, 1024, 8, vocab=8, seq=512), Cluster(find_gpu("a100-80gb")), 4, states="true")
    assert factor_bytes(job, Candidate(micro_batch=2)) == 32 * 512 * 2 * 1024


def test_interleaving_keeps_the_published_factor() -> None:
    shape = ModelShape.gpt(96, 12288, 96, vocab=51200)
    split = Candidate(pipeline=8, schedule="interleaved", virtual_stages=3)
    assert live_blocks(shape, split, 64)[0] == pytest.approx(96 * (1 + 7 / (8 * 3)))


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "bytes_per_element"),
    [
        (1, False, "none", 34 + 5 * 64 * 2048 / 6144),
        (8, False, "none", 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (8, True, "none", 34 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (8, True, "selective", 34 / 8),
        (8, False, "selective", 10 + 24 / 8),
        (1, False, "full", 2),
    ],
)
def test_activations_of_a_gpt_block(
    tensor: int, sequence_parallel: bool, recompute: str, bytes_per_element: float
) -> None:
    shape = ModelShape.gpt(48, 6144, 64, vocab=51200)
    split = Candidate(tensor=tensor, micro_batch=4, recompute=recompute, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    found = block_bytes(job_of(shape, attention="eager"), split)
    assert found == pytest.approx(2048 * 4 * 6144 * bytes_per_element)


def test_the_first_stage_of_1f1b_keeps_most_and_the_last_keeps_one() -> None:
    stages = memory_by_stage(job_of(LLAMA), Candidate(pipeline=4))
    kept = [stage.activations for stage in stages]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 3.5 * kept[3]
    assert stages[0].logits == 0 < stages[3].logits


def test_a_fused_loss_keeps_logits_and_their_gradient_in_16_bit() -> None:
    plain, fused = (memory_by_stage(job_of(LLAMA, loss=loss), Candidate())[0].logits for loss in ("plain", "fused"))
    assert fused == 4 * LLAMA.seq * LLAMA.vocab
    assert plain == 2.5 * fused
    with pytest.raises(ValueError, match="loss='liger' is unknown; use plain or fused"):
        job_of(LLAMA, loss="liger")


def test_a_tied_head_is_held_by_both_ends_of_a_pipeline() -> None:
    gpt = ModelShape.gpt(12, 768, 12, seq=1024)
    assert sum(stage_parameters(gpt, Candidate())) == gpt.parameters
    assert sum(stage_parameters(gpt, Candidate(pipeline=2))) == gpt.parameters + 50257 * 768


def test_offloaded_states_move_to_the_host() -> None:
    job = job_of(LLAMA)
    split = Candidate(data=8, zero_stage=2, offload="cpu")
    (stage,) = memory_by_stage(job, split)
    host = host_bytes(job, split, ranks_per_node=8)
    assert stage.optimizer == stage.master_weights == stage.gradients == 0
    assert host["offload"] == pytest.approx(14 * LLAMA.parameters)
    assert host["start"] == host["start_whole"] == pytest.approx(8 * 4 * LLAMA.parameters)


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_offloaded_states_lie_where_zero_puts_them(kind: str, zero_stage: int) -> None:
    job, ranks = job_of(LLAMA), 8
    split = Candidate(data=ranks, zero_stage=zero_stage, offload=kind)
    expected = offloaded_bytes(kind, zero_stage, ranks, 2, gradient_bytes=2, parameters=zero_stage == 3)
    (stage,) = memory_by_stage(job, split)
    host = host_bytes(job, split, ranks_per_node=4)
    found = (stage.states, *host_states_by_stage(job, split), host["offload"] / 4, host["nvme"] / 4)
    wanted = (expected.device, expected.host, expected.host, expected.disk)
    assert found == pytest.approx([LLAMA.parameters * size for size in wanted])


def test_stage_2_keeps_gradients_whole_while_micro_batches_add_up() -> None:
    """As docs/zero.md says of an accumulation window; what lies between steps is a shard all the same."""
    job = job_of(LLAMA, states="fp32-gradients")
    several, one = (Candidate(data=8, zero_stage=2, micro_batch=size) for size in (4, 8))
    gradients = 4 * LLAMA.parameters
    for split, gathered in ((several, gradients * 7 / 8), (one, 0)):
        (stage,) = memory_by_stage(job, split)
        assert (stage.gradients, stage.gathered) == pytest.approx((gradients / 8, gathered))
    (stage,) = memory_by_stage(job, replace(several, offload="cpu"))
    assert (stage.gradients, stage.gathered) == pytest.approx((0, gradients))


def test_zero_3_gathers_whole_blocks() -> None:
    (stage,) = memory_by_stage(job_of(LLAMA), Candidate(data=8, zero_stage=3))
    assert stage.gathered >= 2 * 2 * LLAMA.block_parameters


def test_a_batch_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="64 sequences over 8 data ranks .* micro-batches of 3; use 1, 2, 4 or 8"):
        memory_by_stage(job_of(LLAMA), Candidate(data=8, micro_batch=3))
