"""Activations and counts against what autograd really keeps for the model of the examples."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_parallel.commands.modules import shape_of_module
from lightning_parallel.planner.activations import block_bytes
from lightning_parallel.planner.hardware import Cluster, find_gpu
from lightning_parallel.planner.job import Candidate, TrainingJob
from lightning_parallel.planner.model_shape import ModelShape

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"
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


def test_the_example_is_counted_exactly(example: ModuleType) -> None:
    with torch.device("meta"):
        model = example.Transformer(layers=4, heads=HEADS, width=WIDTH, context=SEQ, dropout=0.0, tie_head=False)
    shape = shape_of_module(model)
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.seq) == (4, WIDTH, HEADS, 4 * WIDTH, SEQ)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
