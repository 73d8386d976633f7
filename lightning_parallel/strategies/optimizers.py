"""Glue: optimizers that look at more than one element at a time, which cannot work on the part of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_parallel.data_parallel import GradientReducer
from lightning_parallel.parameters import ParameterTag
from lightning_parallel.strategies.optimizer_trial import Scope, scope_of_step
from lightning_parallel.zero.optimizer import is_within_step
from lightning_parallel.zero.placement import NEEDS_WHOLE_MODEL
from lightning_parallel.zero.sharder import ZeroSharder

__all__ = [
    "KnownOptimizers",
    "check_steps",
    "refuse_foreign_parameters",
    "refuse_optimizers",
    "refuse_step",
    "refuse_unshardable",
]

# By name, because most live in packages that need not be installed. They need whole tensors: factored or preconditioned
# moments, norms per layer.
_WHOLE_TENSORS = frozenset(
    {"Adafactor", "CAME", "Lamb", "LAMB", "Lars", "LARS", "Muon", "NovoGrad", "Shampoo", "SOAP", "DistributedShampoo"}
)


def refuse_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], tags: Mapping[str, ParameterTag], names: Mapping[int, str], ranks: int
) -> None:
    """Refuses optimizers whose steps would differ from those of a plain run.

    Args:
        optimizers: built on the whole model.
        tags: tag of every parameter.
        names: id of a parameter -> name in the plain model.
        ranks: ranks that share one replica.

    Raises:
        ValueError: an optimizer needs the whole model or whole tensors, which no rank has.
    """
    for optimizer in optimizers:
        kinds = {kind.__name__ for kind in type(getattr(optimizer, "_optimizer", optimizer)).__mro__}
        kind = type(optimizer).__name__
        if ranks > 1 and kinds & NEEDS_WHOLE_MODEL:
            raise ValueError(
                f"{kind} needs all parameters at once, but {ranks} ranks share the model; use tensor_parallel_size=1 "
                "and pipeline_parallel_size=1, or an optimizer such as AdamW"
            )
        scope = _scope(optimizer) if ranks > 1 else Scope.ELEMENT
        if scope is Scope.MODEL:
            raise ValueError(
                f"a step of {kind} depends on all parameters at once, but {ranks} ranks share the model; use "
                "tensor_parallel_size=1 and pipeline_parallel_size=1, or an optimizer such as AdamW"
            )
        if kinds & _WHOLE_TENSORS or scope is Scope.TENSOR:
            _refuse_split(optimizer, tags, names)


def _refuse_split(optimizer: Any, tags: Mapping[str, ParameterTag], names: Mapping[int, str]) -> None:
    split = next((name for name in _parameter_names(optimizer, names) if tags[name].shard is not None), None)
    if split is not None:
        raise ValueError(
            f"{type(optimizer).__name__} needs whole tensors, but {split} of shape {tags[split].shape} is split over "
            "the tensor ranks; use tensor_parallel_size=1, or an optimizer that works on each element such as AdamW"
        )


class KnownOptimizers:
    """The optimizers of a run on a model that several ranks share, as `refuse_optimizers` found them to be right.

    Args:
        optimizers: when training starts.
        tags: tag of every parameter.
        names: id of a parameter -> name in the plain model.
        ranks: ranks that share one replica.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        tags: Mapping[str, ParameterTag],
        names: Mapping[int, str],
        ranks: int,
    ) -> None:
        self.tags, self.names, self.ranks = tags, names, ranks
        self._seen = [(optimizer, len(optimizer.param_groups), _takes_tensors(optimizer)) for optimizer in optimizers]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step.

        Raises:
            RuntimeError: the optimizer was made later.
            ValueError: it has got parameters of which it would need more than this rank's part.
        """
        kind = type(optimizer).__name__
        found = next((entry for entry in self._seen if entry[0] is optimizer), None)
        if found is None:
            raise RuntimeError(
                f"this {kind} was made after training had started, but {self.ranks} ranks have divided those of "
                "configure_optimizers; change their param_groups"
            )
        _, groups, takes_tensors = found
        if takes_tensors and len(optimizer.param_groups) > groups:
            _refuse_split(optimizer, self.tags, self.names)


def _takes_tensors(optimizer: Any) -> bool:
    kinds = {kind.__name__ for kind in type(getattr(optimizer, "_optimizer", optimizer)).__mro__}
    return bool(kinds & _WHOLE_TENSORS) or _scope(optimizer) is Scope.TENSOR


def refuse_unshardable(optimizers: Iterable[torch.optim.Optimizer], replicas: int) -> None:
    """Refuses optimizers that would not notice that each replica steps on a share of the parameters.

    Args:
        optimizers: built on the whole model.
        replicas: how many ranks share the optimizers' work.

    Raises:
        ValueError: a step depends on all parameters, or does not take them from the optimizer's groups.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if NEEDS_WHOLE_MODEL & {cls.__name__ for cls in type(optimizer).__mro__}:
            continue  # refused by name where it is to be sharded
        if not _takes_hooks(optimizer):
            raise ValueError(
                f"{kind} does not call torch.optim.Optimizer.__init__, so that {replicas} replicas cannot give its "
                "step their shares; let it do that, return the optimizer that it wraps, or use zero_stage=0"
            )
        attribute = _own_list(optimizer)
        if attribute is not None:
            raise ValueError(
                f"{kind}.{attribute} is a list of parameters beside the optimizer's groups, past which {replicas} "
                "replicas could not give it their shares; let its step read param_groups, or use zero_stage=0"
            )
        if replicas > 1 and _scope(optimizer) is Scope.MODEL:
            raise ValueError(
                f"a step of {kind} depends on all parameters at once, but each of {replicas} replicas steps on a share "
                "of them; use an optimizer such as AdamW, or zero_stage=0"
            )


def _takes_hooks(optimizer: Any) -> bool:
    """Whether an optimizer was built by torch's class: wrappers of others may only look like it."""
    return hasattr(getattr(optimizer, "_optimizer", optimizer), "_optimizer_step_pre_hooks")


def _own_list(optimizer: Any) -> str | None:
    """The attribute in which an optimizer keeps parameters of its groups, if there is one."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    own = {id(p) for group in inner.param_groups for p in group["params"]}
    for name, value in vars(inner).items():
        is_container = name not in ("param_groups", "state") and isinstance(value, (list, tuple, set, dict))
        if is_container and any(id(entry) in own for entry in value):
            return name
    return None


def refuse_foreign_parameters(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str], replicas: int
) -> None:
    """Raises ValueError if optimizers train what is not in the module, which every replica would train apart.

    Args:
        optimizers: built on the whole model.
        names: id of every parameter of the module -> its name.
        replicas: how many there are.
    """
    for optimizer in optimizers if replicas > 1 else ():
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in trained if id(p) not in names]
        if foreign:
            raise ValueError(
                f"{type(optimizer).__name__} trains {len(foreign)} parameters that are not the module's, the first of "
                f"shape {tuple(foreign[0].shape)}: each of {replicas} replicas would train its own; assign them to "
                "attributes of the LightningModule as nn.Parameter"
            )


def _scope(optimizer: Any) -> Scope | None:
    """Torch's own optimizers are known; others are tried."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    return Scope.ELEMENT if type(inner).__module__.startswith("torch.optim.") else scope_of_step(inner)


def _parameter_names(optimizer: Any, names: Mapping[int, str]) -> list[str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names[id(parameter)] for parameter in parameters if id(parameter) in names]


def refuse_step(reducer: GradientReducer | ZeroSharder, optimizer: Any, module: LightningModule, replicas: int) -> None:
    """Refuses a step that would be another one on every replica.

    Args:
        reducer: sums gradients over replicas.
        optimizer: that is about to step, or to run its closure.
        module: the user's module.
        replicas: how many there are.

    Raises:
        RuntimeError: gradients were not summed, or the optimizer is not the one that was set up, or trains parameters
            that came later.
    """
    kind = type(getattr(optimizer, "_optimizer", optimizer)).__name__
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    late = next((p for p in trained if not reducer.knows(p)), None)
    if late is not None:
        raise RuntimeError(
            f"{kind} trains a parameter of shape {tuple(late.shape)} that was not in {type(module).__name__} when "
            f"training started, so that each of {replicas} replicas would train its own; make it in __init__ or "
            "configure_model, with requires_grad=False until it is needed"
        )
    if isinstance(reducer, ZeroSharder) and all(known.optimizer is not optimizer for known in reducer.optimizers):
        raise RuntimeError(
            f"this {kind} was made after training had started, but ZeRO has sharded those of configure_optimizers; "
            "change their param_groups, or use zero_stage=0"
        )
    if not module.automatic_optimization and reducer.lacks_sums(trained):
        raise RuntimeError(
            f"{kind} would step on gradients that were not summed over {replicas} replicas; call "
            "self.manual_backward(loss) instead of loss.backward(), and step outside of no_sync() and "
            "toggle_model(sync_grad=False)"
        )


def check_steps(
    optimizers: Iterable[torch.optim.Optimizer], check: Callable[[torch.optim.Optimizer], None]
) -> list[Any]:
    """Has every step of optimizers checked, also one that user code calls past Lightning's wrapper.

    One that torch's class did not build has no hooks around its steps, and is checked inside of the wrapper alone.

    Args:
        optimizers: whose groups hold the user's parameters when `check` looks at them: before anything else that runs
            around a step, and after the closure if there is one.
        check: raises if the step must not be taken.

    Returns:
        Handles, whose `remove` ends that.
    """

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if is_within_step(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            check(optimizer)
            return None

        def then_check() -> Any:
            result = closure()
            check(optimizer)
            return result

        return (
            ((args[0], then_check, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_check})
        )

    handles: list[Any] = []
    for optimizer in filter(_takes_hooks, optimizers):
        handles.append(optimizer.register_step_pre_hook(before))
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handles[-1].id, last=False)
    return handles
