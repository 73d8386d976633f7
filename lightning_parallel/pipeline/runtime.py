"""Mechanism: walks the actions of a schedule on one stage. What runs is exactly what is printed and simulated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from lightning_parallel import comm
from lightning_parallel.mesh import Mesh
from lightning_parallel.pipeline.actions import Action, Kind, Schedule, execution_steps
from lightning_parallel.pipeline.boundary import Boundary, BoundaryLink
from lightning_parallel.pipeline.cut import StageCut, StageResult
from lightning_parallel.pipeline.hook_passes import refuse_unserved
from lightning_parallel.weight_gradients import WeightGradients

__all__ = ["PipelineRuntime", "StepCallbacks"]


class StepCallbacks(Protocol):
    """What the runtime asks of its user while it walks a schedule."""

    def forward(self, micro_batch: int) -> Any:
        """Runs the user's step on a micro-batch."""

    def backward(self, output: Any, micro_batch: int) -> torch.Tensor:
        """Starts the backward pass from the step's output, on the last stage; returns the value it started from."""

    def before_last_backward(self) -> None:
        """The coming backward, or the second half of one, is the last of this schedule: gradients are complete then."""

    def reduce(self) -> None:
        """Reduces gradients over replicas and owners."""


@dataclass
class _InFlight:
    """State of one run of a schedule."""

    received: dict[int, Boundary] = field(default_factory=dict)
    sent: dict[int, Boundary] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    results: dict[int, StageResult] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    arrivals: dict[tuple[Kind, int], list[Any]] = field(default_factory=dict)
    sending: list[tuple[Any, list[torch.Tensor]]] = field(default_factory=list)


class PipelineRuntime:
    """Runs schedules on the stage of this process.

    Args:
        mesh: groups and place of this rank.
        cut: the cut model of this stage; None if the pipeline has one stage.
    """

    def __init__(self, mesh: Mesh, cut: StageCut | None) -> None:
        stage, stages = mesh.stage, mesh.layout.pipeline
        previous = mesh.rank_of_stage(stage - 1) if stage > 0 else None
        following = mesh.rank_of_stage(stage + 1) if stage < stages - 1 else None
        self.cut = cut
        self.stage = stage
        self.is_last = stage == stages - 1
        self.link = BoundaryLink(previous, following, mesh.boundary, mesh.control, mesh.device)

    def run(self, schedule: Schedule, callbacks: StepCallbacks) -> list[Any]:
        """Executes the actions of this stage.

        Returns:
            The step's outputs, one per micro-batch, on the last stage; an empty list elsewhere.
        """
        state = _InFlight()
        actions = schedule.actions[self.stage]
        self.link.await_headers(sum(a.kind is Kind.RECV_FORWARD for a in actions))
        completing = next((a for a in reversed(actions) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)), None)
        store = None if self.cut is None or not schedule.splits_backward else self.cut.weight_gradients
        with nullcontext() if store is None else store.opened():
            for step in _steps(actions):
                if step[0].kind.is_communication:
                    self._communicate(step, state)
                    continue
                action = step[0]
                with torch.profiler.record_function(str(action)):
                    if action == completing:
                        callbacks.before_last_backward()
                    self._compute(action, callbacks, state, store)
        for work, _ in state.sending:
            work.wait()
        self.link.finish()
        return [state.outputs[i] for i in sorted(state.outputs)]

    # -------------------------------------------------------------- compute
    def _compute(
        self, action: Action, callbacks: StepCallbacks, state: _InFlight, store: WeightGradients | None
    ) -> None:
        if action.kind is Kind.REDUCE:
            callbacks.reduce()
            return
        number = _number(action)
        if action.kind is Kind.FORWARD:
            self._forward(number, callbacks, state)
        elif action.kind is Kind.BACKWARD:
            with nullcontext() if store is None else store.backward(number):
                self._backward(number, callbacks, state)
        elif store is not None:
            store.compute(number)

    def _forward(self, number: int, callbacks: StepCallbacks, state: _InFlight) -> None:
        def step() -> Any:
            return callbacks.forward(number)

        if self.cut is None:
            result = StageResult(output=step())
        else:
            boundary = self._arrived(Kind.RECV_FORWARD, number, state)
            received = () if boundary is None else (boundary.value(), boundary.outlines)
            result = self.cut.run(step, *received)
        if self.is_last:
            state.outputs[number] = result.output
        else:
            block = f"the last block of stage {self.stage}"
            state.sent[number] = self.link.pack(result.boundary, block, result.outlines)

    def _arrived(self, kind: Kind, number: int, state: _InFlight) -> Boundary | None:
        if self.link.previous is None:
            return None
        for work in state.arrivals.pop((kind, number)):
            work.wait()
        boundary = state.received[number]
        if torch.is_grad_enabled():
            boundary.enter_graph()
        else:
            del state.received[number]
        return boundary

    def _backward(self, number: int, callbacks: StepCallbacks, state: _InFlight) -> None:
        if self.is_last:
            output = state.outputs[number]
            loss = callbacks.backward(output, number)
            if number in state.received:
                refuse_unserved(loss, state.received[number].anchors, self.stage, number)
            state.outputs[number] = _detached(output)
            return
        outputs = state.sent.pop(number).differentiable
        for work in state.arrivals.pop((Kind.RECV_BACKWARD, number), ()):
            work.wait()
        gradients = state.gradients.pop(number, [])
        if outputs:
            torch.autograd.backward(outputs, gradients)

    # -------------------------------------------------------------- communication
    def _communicate(self, step: tuple[Action, ...], state: _InFlight) -> None:
        """Posts every send and receive of consecutive communication actions as one batch."""
        for action in step:
            if action.kind is Kind.SEND_FORWARD:
                self.link.announce(state.sent[_number(action)])
        transfers: list[comm.SendRecv] = []
        spans: list[tuple[Action, int, int]] = []
        for action in step:
            start = len(transfers)
            transfers += self._transfers(action, state)
            spans.append((action, start, len(transfers)))
        works = self.link.exchange(transfers)
        per_transfer = len(works) == len(transfers)  # some backends return one handle for the whole batch
        for action, start, stop in spans:
            own = works[start:stop] if per_transfer else works
            if action.kind.is_receive:
                state.arrivals[action.kind, _number(action)] = own
            else:
                state.sending += [(work, [t.tensor for t in transfers[start:stop]]) for work in own]
        state.sending = [(w, t) for w, t in state.sending if not w.is_completed()]

    def _transfers(self, action: Action, state: _InFlight) -> list[comm.SendRecv]:
        number = _number(action)
        previous, following = self.link.neighbours()
        if action.kind is Kind.SEND_FORWARD:
            return [comm.SendRecv(t.detach(), following, send=True) for t in state.sent[number].tensors]
        if action.kind is Kind.RECV_FORWARD:
            state.received[number] = self.link.expect()
            return [comm.SendRecv(t, previous, send=False) for t in state.received[number].tensors]
        if action.kind is Kind.RECV_BACKWARD:
            outputs = state.sent[number].differentiable
            state.gradients[number] = [torch.empty_like(t, requires_grad=False) for t in outputs]
            return [comm.SendRecv(t, following, send=False) for t in state.gradients[number]]
        anchors = state.received.pop(number).anchors
        return [comm.SendRecv(_gradient(t), previous, send=True) for t in anchors]


@lru_cache(maxsize=64)
def _steps(actions: tuple[Action, ...]) -> tuple[tuple[Action, ...], ...]:
    return execution_steps(actions)


def _number(action: Action) -> int:
    assert action.micro_batch is not None, f"{action} has no micro-batch"
    return action.micro_batch


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Gradient of a received tensor; zeros if the stage did not use it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()


def _detached(output: Any) -> Any:
    """The output without its graph, whose memory must not outlive the backward pass."""
    if isinstance(output, torch.Tensor):  # nearly always; walking a tree takes longer
        return output.detach()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)
