"""Jobs with a plain training loop: one process, our layers, Megatron-Core's layers, torch's 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.tensor_parallel.parallelize import parallelize_module, shard_parameters
from lightning_parallel.tensor_parallel.plan import resolve_plan
from tests.benchmarks.job import Run
from tests.benchmarks.model import GPT, batches, loss_of, optimizer_of


def start_group() -> None:
    """The group of all ranks of a job."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))


def train(run: Run, step: Callable[[Tensor, Tensor], Tensor], part: int = 0, parts: int = 1) -> list[Tensor]:
    """Takes every step of a run, of `parts` replicas with the samples of one."""
    losses = []
    for ids, target in list(batches(run.sizes, run.steps, part, parts)):
        run.clock.tick()
        losses.append(step(ids, target).detach())
    run.clock.finish()
    return losses


def _whole_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor] = loss_of
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step on the whole batch."""

    def step(ids: Tensor, target: Tensor) -> Tensor:
        model.zero_grad()
        value = loss(model(ids), target)
        value.backward()
        optimizer.step()
        return value

    return step


def _train_whole(run: Run, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = loss_of) -> list[Tensor]:
    return train(run, _whole_step(model, optimizer_of(model), loss))


def one_process(run: Run) -> list[Tensor]:
    """The whole batch on one process."""
    return _train_whole(run, GPT(run.sizes))


def one_process_accumulating(run: Run) -> list[Tensor]:
    """All micro-batches of a pipeline, one after another on one process: the work without the pipeline."""
    model = GPT(run.sizes)
    optimizer = optimizer_of(model)

    def step(ids: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, goal in zip(ids.chunk(run.micro_batches), target.chunk(run.micro_batches), strict=True):
            value = loss_of(model(part), goal) / run.micro_batches
            value.backward()
            total += value.detach()
        optimizer.step()
        return total

    return train(run, step)


def without_communication(run: Run) -> list[Tensor]:
    """Each rank trains on its samples, and steps on half of the parameters, as if it were alone: what nobody can beat.

    Parameters drift apart, which costs no time.
    """
    model = GPT(run.sizes)
    optimizer = torch.optim.Adam(list(model.parameters())[run.rank :: run.ranks], lr=optimizer_of(model).defaults["lr"])
    return train(run, _whole_step(model, optimizer), run.rank, run.ranks)


def least_transfers(run: Run, halves: int = 2) -> list[Tensor]:
    """`without_communication`, while two ranks exchange as many bytes as sharding has to: what gloo leaves to gain.

    What is sent is beside the point and ready from the start, so that nothing waits for it and it may hide anywhere.

    Args:
        run: of two ranks.
        halves: how often each rank sends a half of the model: once for gradients, once for each time it is gathered.
    """
    start_group()
    model = GPT(run.sizes)
    optimizer = torch.optim.Adam(list(model.parameters())[run.rank :: run.ranks], lr=optimizer_of(model).defaults["lr"])
    half = sum(p.numel() for p in model.parameters()) // 2
    sent, received = torch.zeros(half), torch.zeros(half)
    step = _whole_step(model, optimizer)

    def exchanging(ids: Tensor, target: Tensor) -> Tensor:
        works = [
            start(operation, part, 1 - run.rank)
            for _ in range(halves)
            for parts in zip(sent.chunk(4), received.chunk(4), strict=True)
            for operation, part in zip((dist.isend, dist.irecv), parts, strict=True)
        ]
        value = step(ids, target)
        for work in works:
            work.wait()
        return value

    return train(run, exchanging, run.rank, run.ranks)


def least_transfers_of_parameters(run: Run) -> list[Tensor]:
    """The same if parameters are gathered for the forward and again for the backward pass."""
    return least_transfers(run, halves=3)


def our_layers(run: Run) -> list[Tensor]:
    """Tensor parallel with this package's layers, without its strategy and without Lightning."""
    start_group()
    model = GPT(run.sizes)
    plan = resolve_plan(model, "auto", run.ranks)
    parallelize_module(model, plan, dist.group.WORLD)
    shard_parameters(model, plan.tags(model), run.rank)
    return _train_whole(run, model)


def torch_1f1b(run: Run) -> list[Tensor]:
    """Pipeline parallel with `torch.distributed.pipelining`; the stages are made by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    start_group()
    model = GPT(run.sizes, run.rank, run.ranks)
    optimizer = optimizer_of(model)
    stage = PipelineStage(model, run.rank, run.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=run.micro_batches, loss_fn=loss_of)
    is_last = run.rank == run.ranks - 1

    def step(ids: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments = (ids,) if run.rank == 0 else ()
        if is_last:
            schedule.step(*arguments, target=target, losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        return torch.stack([v.detach() for v in losses]).mean() if losses else torch.tensor(torch.nan)

    return train(run, step)


def start(operation: Callable[..., dist.Work | None], tensor: Tensor | None, peer: int) -> dist.Work:
    work = operation(tensor, peer)
    assert work is not None, "both ranks are in the group"
    return work


class _FirstOutput(nn.Module):
    """Megatron's linears return a pair."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[0]


def megatron_layers(run: Run) -> list[Tensor]:
    """Tensor parallel with Megatron-Core's layers and vocabulary-parallel loss."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    start_group()
    # Megatron asks for the current CUDA device even where everything is on the CPU.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.ranks)
    model = GPT(run.sizes)
    _use_megatron(model, run)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits.contiguous(), target).mean()

    return _train_whole(run, model, loss)


def _use_megatron(model: GPT, run: Run) -> None:
    """Replaces linears and the token embedding by Megatron's, with this rank's share of the weights."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    config = ModelParallelConfig(
        tensor_model_parallel_size=run.ranks,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=True,
    )
    options: dict[str, Any] = {"config": config, "init_method": lambda weight: weight}

    def column(linear: nn.Linear) -> nn.Module:
        split = ColumnParallelLinear(
            linear.in_features, linear.out_features, bias=False, gather_output=False, **options
        )
        split.weight.data = linear.weight.data.chunk(run.ranks, 0)[run.rank].clone()
        return _FirstOutput(split)

    def row(linear: nn.Linear) -> nn.Module:
        split = RowParallelLinear(
            linear.in_features, linear.out_features, bias=False, input_is_parallel=True, skip_bias_add=False, **options
        )
        split.weight.data = linear.weight.data.chunk(run.ranks, 1)[run.rank].clone()
        return _FirstOutput(split)

    for name, child in list(model.named_modules()):
        if isinstance(child, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            make = row if leaf in ("o_proj", "down_proj") else column
            setattr(model.get_submodule(parent), leaf, make(child))
    tokens = model.get_submodule("embedding.tokens")
    embedding = VocabParallelEmbedding(run.sizes.vocabulary, run.sizes.width, **options)
    embedding.weight.data = tokens.weight.data.chunk(run.ranks, 0)[run.rank].clone()  # type: ignore[operator]
    model.embedding.tokens = embedding
