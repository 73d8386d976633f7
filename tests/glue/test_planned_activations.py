"""Activations and counts against what autograd really keeps for the model of the examples."""

from __future__ import annotations

import importlib.util
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_parallel.commands.modules import shape_of_module
from lightning_parallel.pipeline.actions import Kind
from lightning_parallel.pipeline.schedules import compute_plan
from lightning_parallel.planner.activations import block_bytes
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.memory import memory_by_stage
from lightning_parallel.planner.model_shape import ModelShape
from lightning_parallel.weight_gradients import WeightGradients, split_linears

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
BATCH, SEQ, WIDTH, HEADS = 2, 128, 128, 2
SHAPE = ModelShape.gpt(4, WIDTH, HEADS, vocab=256, seq=SEQ)
CLUSTER = Cluster(find_gpu("a100-80gb"))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_of_the_planner", EXAMPLE)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{EXAMPLE} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kept_bytes(run: Callable[[], torch.Tensor], parameters: nn.Module) -> int:
    """Bytes of the distinct storages that a forward keeps, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters.parameters()}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            # Keeps the address from being used again.
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(found.values())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_block_of_the_example_keeps_what_is_planned(
    example: ModuleType, precision: str, dtype: torch.dtype, recompute: str
) -> None:
    block = example.Block(WIDTH, HEADS, dropout=0.0).to(dtype)
    x = torch.randn(BATCH, SEQ, WIDTH, dtype=dtype, requires_grad=True)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return block(x) if recompute == "none" else checkpoint(block, x, use_reentrant=False)

    measured = kept_bytes(run, block)
    job = TrainingJob(SHAPE, CLUSTER, BATCH, precision=precision, dropout=False)
    planned = block_bytes(job, Candidate(micro_batch=BATCH, recompute=recompute))  # type: ignore[arg-type]
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_keeps_32_bits_between_the_blocks_and_copies_of_weights(example: ModuleType, recompute: str) -> None:
    block = example.Block(WIDTH, HEADS, dropout=0.0)
    x = torch.randn(BATCH, SEQ, WIDTH, requires_grad=True)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cpu", torch.bfloat16):
            return block(x) if recompute == "none" else checkpoint(block, x, use_reentrant=False)

    measured = kept_bytes(run, block)
    job = TrainingJob(SHAPE, CLUSTER, BATCH, states="autocast", dropout=False)
    planned = block_bytes(job, Candidate(micro_batch=BATCH, recompute=recompute))  # type: ignore[arg-type]
    assert planned == pytest.approx(measured, rel=0.05)


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators made inside and that are still alive; `states` do not count."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.states = [tensor.untyped_storage() for tensor in states]
        self.ignored = set(map(id, self.states))

    @property
    def total(self) -> int:
        return sum(self.alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor)
        return made

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.alive and id(storage) not in self.ignored:
            self.alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, id(storage))


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention with stored scores, as models without fused attention write it."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.masked_fill(FUTURE, -math.inf).softmax(-1) @ v


FUTURE = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)


def every_other_product() -> Any:
    """Saves attention and every other product; what torchtitan calls selective."""
    count = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal count
        if op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            count += not context.is_recompute
            return CheckpointPolicy.MUST_SAVE if count % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        attention = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def run_stage(blocks: nn.ModuleList, x: torch.Tensor, recompute: str, attention: str) -> torch.Tensor:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    for block in blocks:
        if recompute == "full":
            x = checkpoint(block, x, **options)
        elif recompute == "selective" and attention == "flash":
            x = checkpoint(block, x, context_fn=every_other_product, **options)
        else:
            x = block(x)
    return x


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("gpipe", 0), ("zero-bubble", 0), ("zero-bubble", 1)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_a_stage_allocates_what_is_planned(
    example: ModuleType, attention: str, recompute: str, schedule: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two stages walks its schedule; memory is looked at after each of its passes."""
    micro_batches = 4
    if attention == "eager":
        core = eager
        if recompute == "selective":

            def core(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
                return checkpoint(eager, *tensors, use_reentrant=False, preserve_rng_state=False)

        monkeypatch.setattr(example.F, "scaled_dot_product_attention", core)
    blocks = nn.ModuleList(example.Block(WIDTH, HEADS, dropout=0.0) for _ in range(2))
    states = [*blocks.parameters()]
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)
        states.append(parameter.grad)
    store = WeightGradients()
    if schedule == "zero-bubble":
        split_linears(blocks, store)
    sent: dict[int, torch.Tensor] = {}
    peak = 0
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), store.opened(), Allocations(states) as memory:
        for action in compute_plan(schedule, 2, micro_batches)[stage]:
            if action.kind is Kind.FORWARD:
                received = torch.randn(BATCH, SEQ, WIDTH).requires_grad_()
                sent[action.micro_batch] = run_stage(blocks, received, recompute, attention)
                del received
            elif action.kind is Kind.BACKWARD:
                output = sent.pop(action.micro_batch)
                with store.backward(action.micro_batch):
                    output.backward(torch.ones_like(output))
                del output
            else:
                store.compute(action.micro_batch)
            peak = max(peak, memory.total)
        assert memory.total < 0.05 * peak, "all of it is gone in the end"
    shape = ModelShape.gpt(4, WIDTH, HEADS, vocab=1, seq=SEQ)
    job = TrainingJob(shape, CLUSTER, BATCH * micro_batches, precision="fp32", attention=attention, dropout=False)
    split = Candidate(pipeline=2, micro_batch=BATCH, recompute=recompute, schedule=schedule)  # type: ignore[arg-type]
    planned = memory_by_stage(job, split)[stage].activations
    assert planned == pytest.approx(peak, rel=0.05)


def test_the_example_is_counted_exactly(example: ModuleType) -> None:
    with torch.device("meta"):
        model = example.Transformer(layers=4, heads=HEADS, width=WIDTH, context=SEQ, dropout=0.0, tie_head=False)
    shape = shape_of_module(model)
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.seq) == (4, WIDTH, HEADS, 4 * WIDTH, SEQ)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
