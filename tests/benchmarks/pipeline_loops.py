"""Jobs of two pipeline stages written out: what a schedule can take here at best."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parallel.weight_gradients import WeightGradients, split_linears
from tests.benchmarks.bare_jobs import start, start_group, train
from tests.benchmarks.job import Run
from tests.benchmarks.model import GPT, loss_of, optimizer_of


def plain_1f1b(run: Run) -> list[Tensor]:
    """Two stages in a loop of nothing but sends, receives, forward and backward: what 1F1B can take here at best."""
    start_group()
    model = GPT(run.sizes, run.rank, run.ranks)
    optimizer = optimizer_of(model)
    count = run.micro_batches
    sizes = run.sizes
    shape = (sizes.batch // count, sizes.length, sizes.width)

    def first_stage(ids: Tensor) -> Tensor:
        parts = list(ids.chunk(count))
        outputs: list[Tensor] = []
        pending: list[dist.Work] = []

        def forward(part: Tensor) -> None:
            outputs.append(model(part))
            pending.append(start(dist.isend, outputs[-1].detach(), 1))

        forward(parts[0])
        for i in range(count):
            gradient = torch.empty(shape)
            receive = start(dist.irecv, gradient, 1)
            if i + 1 < count:
                forward(parts[i + 1])
            receive.wait()
            outputs[i].backward(gradient)
            outputs[i] = torch.empty(0)
        for work in pending:
            work.wait()
        return torch.tensor(torch.nan)

    def last_stage(target: Tensor) -> Tensor:
        total = torch.zeros(())
        buffers = [torch.empty(shape, requires_grad=True) for _ in range(count)]
        receives = [start(dist.irecv, buffer.detach(), 0) for buffer in buffers]
        pending = []
        for buffer, receive, goal in zip(buffers, receives, target.chunk(count), strict=True):
            receive.wait()
            value = loss_of(model(buffer), goal) / count
            value.backward()
            total += value.detach()
            pending.append(start(dist.isend, buffer.grad, 0))
        for work in pending:
            work.wait()
        return total

    def step(ids: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = first_stage(ids) if run.rank == 0 else last_stage(target)
        optimizer.step()
        return total

    return train(run, step)


def never_waiting(run: Run) -> list[Tensor]:
    """Two stages that compute and send as 1F1B does, on made-up values: only the first value is waited for.

    What is sent arrives whenever it may, so that nothing can be shorter that sends as much and computes alike.
    """
    return _never_waiting(run, None)


def never_waiting_split(run: Run) -> list[Tensor]:
    """The same with the gradients of linear layers' weights apart, as zero bubble has them: in place, into the sum."""
    return _never_waiting(run, WeightGradients())


def _never_waiting(run: Run, store: WeightGradients | None) -> list[Tensor]:
    start_group()
    model = GPT(run.sizes, run.rank, run.ranks)
    optimizer = optimizer_of(model)
    count, sizes = run.micro_batches, run.sizes
    shape = (sizes.batch // count, sizes.length, sizes.width)
    made_up = torch.randn(shape)
    received = torch.empty(count, *shape)
    is_last = run.rank == run.ranks - 1
    if store is not None:
        split_linears(model, store)

    def forward(part: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output of the stage."""
        if is_last:
            x = made_up.clone().requires_grad_()
            return x, loss_of(model(x), goal) / count
        return part, model(part)

    def backward(number: int, x: Tensor, y: Tensor) -> None:
        with nullcontext() if store is None else store.backward(number):
            y.backward(None if is_last else made_up)
        if store is not None:
            store.compute(number)

    def step(ids: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        works = [start(dist.irecv, buffer, 1 - run.rank) for buffer in received]
        if is_last:
            works.pop(0).wait()
        ahead: list[tuple[int, Tensor, Tensor]] = []
        with nullcontext() if store is None else store.opened():
            for number, (part, goal) in enumerate(zip(ids.chunk(count), target.chunk(count), strict=True)):
                ahead.append((number, *forward(part, goal)))
                if not is_last:
                    works.append(start(dist.isend, ahead[-1][2].detach(), 1 - run.rank))
                if is_last or number:
                    backward(*ahead[0])
                    _, x, _ = ahead.pop(0)
                    if is_last:
                        works.append(start(dist.isend, x.grad, 1 - run.rank))
            for one in ahead:
                backward(*one)
        for work in works:
            work.wait()
        optimizer.step()
        return torch.tensor(torch.nan)

    return train(run, step)
