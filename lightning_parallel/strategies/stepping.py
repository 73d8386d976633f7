"""Glue: the steps that Lightning asks a strategy for, on one rank of a split module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_parallel.strategies import _compat
from lightning_parallel.strategies._compat_loops import batches_behind, evaluation_position, skips_backward
from lightning_parallel.strategies.samples import divides_evenly
from lightning_parallel.strategies.steps import StepRunner
from lightning_parallel.strategies.whole_checkpoints import WholeCheckpointStrategy

__all__ = ["SteppingStrategy"]


class SteppingStrategy(WholeCheckpointStrategy):
    """Base of the strategies whose steps a `StepRunner` takes; where gradients are between Lightning's hooks."""

    _set_aside: list[tuple[nn.Parameter, torch.Tensor | None]]  # gradients that the parameters do not hold now

    @abstractmethod
    def _ready(self, step_name: str, batch: Any) -> StepRunner:
        """The runner; splits the module at the first evaluation step if that had to wait for a batch."""

    def _running(self) -> StepRunner:
        if self._runner is None:
            raise RuntimeError("the module is split in setup(), before its first step")
        return self._runner

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's training step; with a pipeline or micro-batches also every backward pass."""
        with self._sight.hidden():
            return self._train(args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        runner = self._ready("training_step", args[0])
        trainer = self._trainer()
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._training_samples.start(batches_behind(trainer))
        batch, counts = self._training_samples.keep_real(args[0], trainer.train_dataloader)
        rest = args[1:]

        def call(part: Any) -> Any:
            # Replicas may have different numbers of micro-batches, and meet after the last one.
            with self._sight.watched("training_step", runner.is_direct), self.precision_plugin.train_step_context():
                return module.training_step(part, *rest, **kwargs)

        number = (trainer.fit_loop.total_batch_idx,)
        if runner.is_direct:
            return runner.train_direct(call, batch, counts, number)
        runner.start_batch()
        first = self._starts_window(trainer)
        if first:
            self._put_gradients_aside()
        output = runner.train_schedule(call, batch, counts, number)
        if skips_backward(trainer):
            self._sight.meet()
        if first:
            self._swap_gradients()
        return output

    @staticmethod
    def _starts_window(trainer: Trainer) -> bool:
        """Whether Lightning zeroes gradients between this training step and its backward pass."""
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0 and not skips_backward(trainer)

    def _put_gradients_aside(self) -> None:
        """The previous step's gradients are still there: `on_before_zero_grad` may look at them."""
        visible = _compat.sees_old_gradients(self._trainer())
        self._running().forget_gradients()
        self._set_aside = []
        for p in self._split_module().local_parameters.values():
            self._set_aside.append((p, p.grad.clone() if visible and p.grad is not None else None))
            p.grad = None

    def _swap_gradients(self) -> None:
        """New gradients wait outside of the parameters until Lightning has zeroed the old ones."""
        waiting = [(p, p.grad) for p, _ in self._set_aside]
        for p, old in self._set_aside:
            p.grad = old
        self._set_aside = waiting

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the backward pass between Lightning's hooks, or hands out the gradients that the schedule computed."""
        with self._sight.hidden():
            return self._backward(closure_loss, optimizer, *args, **kwargs)

    def _backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        module, runner = self._module(), self._running()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if runner.is_direct:
            runner.start_batch()
            if runner.reducer is not None:
                runner.reducer.prepare()
                if runner.reduces_now:
                    runner.reducer.arm()
            if runner.manual_share is not None:
                closure_loss = closure_loss * runner.manual_share.to(closure_loss.dtype)
            runner.check_graph(closure_loss)
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if runner.reduces_now:
                runner.finish_gradients()
        else:
            for p, new in self._set_aside:
                if new is not None:
                    p.grad = new if p.grad is None else new.add_(p.grad)
            self._set_aside = []
        runner.deliver_gradients()
        self._sight.note_backward(complete=runner.reduces_now)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning opens this around batches that only accumulate."""
        self._running().accumulating = True
        try:
            yield
        finally:
            self._running().accumulating = False

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's validation step, forward only through the pipeline."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's test step, forward only through the pipeline."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def _evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        runner = self._ready(name, args[0])
        batch_idx, loader_idx, loader = evaluation_position(self._trainer(), name, args)
        self._watch.evaluation_step(loader_idx, batch_idx)
        batch, counts = self._evaluation_samples.keep_real(args[0], loader, loader_idx)

        def call(part: Any) -> Any:
            with self._sight.watched(name, lockstep), context():
                return getattr(module, name)(part, *args[1:], **kwargs)

        lockstep = divides_evenly(loader, self.layout.data)
        with self._sight.hidden():
            return runner.evaluate(call, batch, counts, (name, batch_idx, loader_idx), lockstep)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's prediction step; every rank of a replica returns the result."""
        module = self._module()
        batch_idx, loader_idx, loader = evaluation_position(self._trainer(), "predict_step", args)
        self._watch.evaluation_step(loader_idx, batch_idx)
        runner = self._ready("predict_step", args[0])
        self._predictions.note(args[0], loader, loader_idx, self.layout.data)

        def call(part: Any) -> Any:
            with self._sight.watched("predict_step", False), self.precision_plugin.predict_step_context():
                return module.predict_step(part, *args[1:], **kwargs)

        with self._sight.hidden():
            return runner.predict(call, args[0], ("predict_step", *args[1:]))
