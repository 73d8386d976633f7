"""Glue: chooses the size of a model and the length of its training before the model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_parallel.callbacks.counting import StepTokens, count_candidate, count_parameters, last_step
from lightning_parallel.scaling.checks import check_whole
from lightning_parallel.scaling.outlook import caveat
from lightning_parallel.scaling.plan import SizingGoal, SizingPlan, Suggestion, suggestion
from lightning_parallel.scaling.shapes import AspectRule, Shape
from lightning_parallel.scaling.speeds import Speed, first_speed

__all__ = ["ChinchillaSizer"]

SHAPE_NAMES = {"layers": "layers", "width": "width", "heads": "heads"}
CLOSE_ENOUGH = 1.5
"""By how much a step of padded or shifted sequences may differ from what the user counts."""


def is_rehearsal(trainer: Trainer) -> bool:
    """Whether the Trainer runs a batch or a few to find mistakes (``fast_dev_run``) and sets its own ``max_steps``."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


class ChinchillaSizer(Callback):
    """Chooses layers, width and heads for a budget, a loss or the data there is, and sets ``max_steps``.

    The module builds its layers in ``configure_model`` from its hyperparameters, which are set before that. Candidates
    are built on the meta device to count their parameters exactly. A module that is built already keeps its size, and
    only its tokens are chosen, if ``resize=False``. The choice is the same on every rank and on resume: it depends on
    nothing but the arguments and, where the goal names the file of a `ThroughputMonitor`, the first speed in it, which
    rank 0 reads (later runs may add theirs). It goes into the module's hyperparameters and into checkpoints.
    Suggestions for the global batch and the learning rate are printed and kept in ``suggestion``, not applied. A
    ``max_epochs`` still ends the run, and so do the 1000 epochs of a Trainer without one: a warning says so at the
    start if that is before the last step. Another one says so if the first step has other tokens than expected.
    Evaluation of a module that is not built yet sizes it as well, so that it takes the weights of a checkpoint.

    Args:
        goal: what is fixed.
        tokens_per_step: tokens of one optimizer step: sequence length x batch size x accumulation x data replicas.
        resize: False keeps the model as it is.
        rule: the aspect-ratio rule, or a function from a number of parameters to hyperparameters.
        names: hyperparameters that hold ``layers``, ``width`` and ``heads``.
        tokens_fn: tokens of a batch, by which the first step is compared with ``tokens_per_step``; see
            `lightning_parallel.callbacks.count_tokens`.

    Raises:
        ValueError: see the messages; nothing is changed then.
    """

    def __init__(
        self,
        goal: SizingGoal,
        tokens_per_step: int,
        resize: bool = True,
        rule: AspectRule | Callable[[float], Mapping[str, Any]] | None = None,
        names: Mapping[str, str] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
    ) -> None:
        if not isinstance(goal, SizingGoal):
            raise ValueError(f"goal={goal!r} must be a SizingGoal, such as SizingGoal(flops=1e18)")
        if rule is not None and not isinstance(rule, AspectRule) and not callable(rule):
            raise ValueError(f"rule={rule!r} must be an AspectRule or a function of a number of parameters")
        self.names = {**SHAPE_NAMES, **(names or {})}
        if set(self.names) != set(SHAPE_NAMES):
            raise ValueError(f"names={dict(names or {})!r} may rename {', '.join(SHAPE_NAMES)} only")
        self.goal = goal
        self.tokens_per_step = check_whole("tokens_per_step", tokens_per_step, 1, "65536")
        self.resize = resize
        self.rule = rule or AspectRule()
        self.plan: SizingPlan | None = None
        self.chosen: dict[str, Any] = {}
        self.speed: Speed | None = None
        self._first_step = StepTokens(tokens_fn)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Chooses, before the model is built."""
        built = any(True for _ in pl_module.parameters())
        if stage != "fit":
            if self.resize and not built:
                self._resized(pl_module, built, self._with_speed(trainer))
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "with manual optimization every optimizer.step() counts as a step, so max_steps cannot be chosen from "
                "tokens; use automatic optimization, or take the plan from SizingGoal.plan() and set max_steps yourself"
            )
        goal = self._with_speed(trainer)
        params = self._resized(pl_module, built, goal) if self.resize else self._fixed(pl_module, built)
        self.plan = goal.plan(params, self.tokens_per_step)
        self._limit_steps(trainer, self.plan.steps)
        self._announce()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns of epochs that end before the steps do."""
        assert self.plan is not None, "planned at set-up"
        self._first_step.start(trainer)
        end = last_step(trainer)
        if end is not None and end < self.plan.steps and not is_rehearsal(trainer):
            rank_zero_warn(
                f"max_epochs={trainer.max_epochs} ends the run after {end:.0f} of the {self.plan.steps} steps chosen; "
                "set max_epochs=-1 to take them all (a Trainer without it takes 1000)"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the first step's tokens."""
        self._first_step.begin(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Warns if the first step is of another size than it was said to be."""
        tokens = self._first_step.end(trainer)
        expected = self.tokens_per_step
        if tokens and not expected / CLOSE_ENOUGH < tokens < expected * CLOSE_ENOUGH:
            assert self.plan is not None, "planned at set-up"
            rank_zero_warn(
                f"the first step had {tokens:.0f} tokens, not tokens_per_step={expected}: like this {self.plan.steps} "
                f"steps see {self.plan.steps * tokens:.4g} tokens instead of {self.plan.tokens:.4g}; tokens_per_step "
                "is sequence length x batch size x accumulation x data replicas"
            )

    def _with_speed(self, trainer: Trainer) -> SizingGoal:
        """The goal with the number for a measured speed, which rank 0 finds out for all."""
        place = self.goal.flops_per_second
        if not isinstance(place, str | Path):
            return self.goal
        found: Speed | str = ""
        if trainer.is_global_zero:
            try:
                found = first_speed(place)
            except ValueError as error:
                found = str(error)
        found = trainer.strategy.broadcast(found)
        if isinstance(found, str):
            raise ValueError(found)
        self.speed = found
        return replace(self.goal, flops_per_second=found.flops_per_second)

    def _resized(self, module: LightningModule, built: bool, goal: SizingGoal) -> int:
        if built and self.chosen and all(module.hparams.get(name) == size for name, size in self.chosen.items()):
            return count_parameters(module)  # sized by an earlier fit
        if built:
            raise ValueError(
                f"{type(module).__name__} builds its layers in __init__, so its size cannot be chosen any more; build "
                "them in configure_model() from self.hparams, or keep the size with resize=False"
            )
        if isinstance(self.rule, AspectRule):
            missing = [name for name in self.names.values() if name not in module.hparams]
            if missing:
                raise ValueError(
                    f"{type(module).__name__} has no hyperparameters {', '.join(missing)}; call save_hyperparameters() "
                    f"with them in __init__, or pass names, for example names={{'width': 'd_model'}}"
                )
            shape, params = self.rule.closest(goal.params(), lambda shape: count_candidate(module, self._named(shape)))
            self.chosen = self._named(shape)
        else:
            self.chosen = dict(self.rule(goal.params()))
            params = count_candidate(module, self.chosen)
        module.save_hyperparameters(self.chosen)
        return params

    def _fixed(self, module: LightningModule, built: bool) -> int:
        self.chosen = {}
        return count_parameters(module) if built else count_candidate(module, {})

    def _named(self, shape: Shape) -> dict[str, Any]:
        return {self.names[name]: value for name, value in asdict(shape).items()}

    @staticmethod
    def _limit_steps(trainer: Trainer, steps: int) -> None:
        if is_rehearsal(trainer):
            return
        if trainer.max_steps not in (-1, steps):
            raise ValueError(
                f"the Trainer has max_steps={trainer.max_steps}, but {steps} steps were chosen; leave max_steps out, "
                f"or set it to {steps}"
            )
        trainer.fit_loop.epoch_loop.max_steps = steps

    @property
    def suggestion(self) -> Suggestion | None:
        """Global batch and learning rate that are usual for the chosen budget; None before there is one."""
        return None if self.plan is None else suggestion(self.plan.flops)

    def _announce(self) -> None:
        advice = self.suggestion
        assert self.plan is not None, "announced once the plan exists"
        assert advice is not None, "a plan comes with a suggestion"
        sizes = ", ".join(f"{name}={value}" for name, value in self.chosen.items()) or "its size as it is"
        measured = ""
        if self.speed is not None:
            measured = (
                f" of {self.speed.flops_per_second:.4g} FLOP/s each, measured with {self.speed.params:.4g} parameters"
            )
        rank_zero_info(
            f"ChinchillaSizer: {self.plan.why}{measured}; {sizes}; predicted loss {self.plan.loss:.4f}. For Adam, "
            f"{advice.batch_tokens:.3g} tokens per step and a learning rate of {advice.learning_rate:.3g} are usual; "
            f"steps have {self.tokens_per_step} tokens{caveat(self.plan.flops, self.goal.law)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The plan and the sizes."""
        if self.plan is None:
            return {}
        speed = None if self.speed is None else asdict(self.speed)
        return {"plan": asdict(self.plan), "chosen": dict(self.chosen), "speed": speed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to go on with a run that was sized otherwise."""
        if not state_dict or self.plan is None:
            return
        before = (state_dict["chosen"], state_dict["plan"]["steps"])
        now = (self.chosen, self.plan.steps)
        if before != now:
            raise ValueError(
                f"the checkpoint was sized as {before[0]} for {before[1]} steps, this run as {now[0]} for {now[1]}; "
                "use the goal and tokens_per_step of the first run"
            )
