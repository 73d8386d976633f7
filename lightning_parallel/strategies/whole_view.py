"""Glue: shows the plain model's whole parameters, gradients and buffers to user code that runs between steps.

Inside of a step a rank computes with its part. A hook that reads `p.grad.norm()` or clamps `p.data` means the whole, so
while user hooks run, the module's registries and the optimizers' groups hold stand-ins that are gathered when they are
read and written through when they are changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.gradient_sync import GradientCompleter
from lightning_parallel.mesh import Mesh
from lightning_parallel.strategies.parted import PartedState
from lightning_parallel.strategies.partition import Partition
from lightning_parallel.whole.reads import ServedReads
from lightning_parallel.whole.tensor import WholeParameter, WholeTensor

__all__ = ["WeightsValue", "WholeView"]


class WeightsValue:
    """Values of one parameter, in `local` on this rank."""

    def __init__(self, view: WholeView, name: str, local: Tensor) -> None:
        self.view, self.name, self.local = view, name, local
        self.number = view.reads.register(self.gather)

    def gather(self) -> Tensor:
        shards = self.view.partition.shards
        held = self.local.detach() if shards.holds(self.name) else None
        return _own(shards.gather(self.name, held, self.local.dtype), held)

    def read(self) -> Tensor:
        return self.view.reads.fetch(self.number)

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        self.view.reads.note_write(self.name)
        shards = self.view.partition.shards
        if shards.holds(self.name):
            self.local.detach().copy_(shards.slice(self.name, whole))

    @property
    def requires_grad(self) -> bool:
        return self.local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad_(value)

    def copy(self) -> WeightsValue:
        return WeightsValue(self.view, self.name, self.local.detach().clone())


class _Gradient:
    """Gradient of one parameter; `local` holds this rank's part of it."""

    def __init__(self, view: WholeView, name: str, local: Tensor) -> None:
        self.view, self.name, self.local = view, name, local
        self.number = view.reads.register(self.gather)

    def gather(self) -> Tensor:
        shards, gradient = self.view.partition.shards, self.local.grad
        held = None
        if shards.holds(self.name):
            held = torch.zeros_like(self.local) if gradient is None else gradient
            held = self.view.completer.completed(self.name, held) if self.view.accumulating else held
        dtype = self.local.dtype if gradient is None else gradient.dtype
        return _own(shards.gather(self.name, held, dtype), held)

    def get(self) -> Tensor | None:
        if self.local.grad is None and not self.view.reads.is_open:
            return None  # `zero_grad` looks at copies that a hook made
        if not self.view.has_gradient(self.name):
            return None
        return WholeTensor(self, self.view.outline(self.name, self.local.dtype), self.local.device)

    def set(self, gradient: Tensor | None) -> None:
        if gradient is None and not self.view.reads.is_open:
            self.local.grad = None
            return
        if isinstance(gradient, WholeTensor) and gradient._value is self and not gradient._steps:
            return
        whole = gradient._whole() if isinstance(gradient, WholeTensor) else gradient
        self.view.note_gradient(self.name, whole is not None)
        self._take(whole)

    def read(self) -> Tensor:
        return self.view.reads.fetch(self.number)

    def write(self, whole: Tensor) -> None:
        self.view.note_gradient(self.name, True)
        self._take(whole)

    def _take(self, whole: Tensor | None) -> None:
        if self.view.accumulating and whole is not None:
            raise RuntimeError(
                f"the gradient of {self.name} cannot be changed while it is still accumulating; change it in "
                "on_before_optimizer_step, which runs once it is complete"
            )
        self.view.reads.note_write(f"the gradient of {self.name}")
        shards = self.view.partition.shards
        if not shards.holds(self.name):
            return
        if whole is None:
            self.local.grad = None
        elif self.local.grad is None:
            self.local.grad = shards.slice(self.name, whole).clone()
        else:
            self.local.grad.copy_(shards.slice(self.name, whole))

    def copy(self, value: Any = None) -> Any:
        return _Gradient(self.view, self.name, value.local)


class _Buffer:
    """A buffer, as the stage has it that computes with it."""

    def __init__(self, view: WholeView, name: str, local: Tensor) -> None:
        self.view, self.name, self.local = view, name, local
        self.number = view.reads.register(self.gather)

    def gather(self) -> Tensor:
        return self.view.partition.shards.gather_buffer(self.name, self.local)

    def read(self) -> Tensor:
        return self.view.reads.fetch(self.number)

    @torch.no_grad()
    def write(self, whole: Tensor) -> None:
        self.view.reads.note_write(self.name)
        self.local.copy_(whole)

    def copy(self) -> _Buffer:
        return _Buffer(self.view, self.name, self.local.detach().clone())


class WholeView:
    """The whole model of one replica, as user code between steps sees it.

    Args:
        partition: the split module.
        completer: completes gradients that are looked at before the end of an accumulation.
        optimizers: whose groups are shown, too.
    """

    runs_modules = False  # whether modules that are shown whole can compute

    def __init__(
        self, partition: Partition, completer: GradientCompleter, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.partition = partition
        self.completer = completer
        self.optimizers = optimizers
        self.accumulating = False
        self.reads = ServedReads(self._readers(partition.mesh))
        self._present = self.reads.register(self._gather_presence)
        self._presence: dict[str, bool] | None = None
        self._shown_states: dict[int, PartedState] = {}
        self._stand_ins: dict[int, Tensor] = {}  # id of what the step uses -> what hooks see
        self._locals: dict[int, Tensor] = {}  # id of what hooks see -> what the step uses
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        self._children: list[tuple[dict[str, Any], str, nn.Module | None]] = []
        self._size = 0
        self._refusing: list[Any] = []  # handles of hooks that keep modules from running while they are shown whole
        self._make_stand_ins()

    # -------------------------------------------------------------- what is shown
    def outline(self, name: str, dtype: torch.dtype) -> Tensor:
        """Shape and dtype of a whole parameter, on the meta device."""
        return torch.empty(self.partition.tags[name].shape, dtype=dtype, device="meta")

    def _make_stand_ins(self) -> None:
        pipeline = self.partition.mesh.pipeline is not None
        for name, p in self.partition.module.named_parameters():
            if self._is_shown(name):
                self._stand_ins[id(p)] = self._make_stand_in(name, p)
        for name, buffer in self.partition.module.named_buffers() if pipeline else ():
            outline = torch.empty_like(buffer, device="meta")
            self._stand_ins[id(buffer)] = WholeTensor(_Buffer(self, name, buffer), outline, buffer.device)
        for module in self.partition.module.modules():
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for registry in registries:
                self._places += [(registry, n, t) for n, t in registry.items() if id(t) in self._stand_ins]
            self._children += [(module._modules, leaf, child) for leaf, child in module._modules.items()]
        self._size = sum(len(registry) for registry, _, _ in self._children)
        self._locals = {id(self._stand_ins[id(tensor)]): tensor for _, _, tensor in self._places}

    def _refuse_forwards(self, refuse: bool) -> None:
        """Split layers and stages take part in steps of all ranks; whole weights would be counted once per rank."""
        for handle in self._refusing:
            handle.remove()
        shown = {id(registry) for registry, _, _ in self._places}
        modules = self.partition.module.modules() if refuse else ()
        self._refusing = [
            module.register_forward_pre_hook(_refuse_forward)
            for module in modules
            if id(module._parameters) in shown or id(module._buffers) in shown
        ]

    @staticmethod
    def _readers(mesh: Mesh) -> Any:
        """The ranks that have parts of a value."""
        return mesh.model_control

    def _is_shown(self, name: str) -> bool:
        """Whether not every rank has a parameter whole."""
        tag = self.partition.tags[name]
        return self.partition.mesh.pipeline is not None or tag.shard is not None or tag.partial_gradient

    def _make_stand_in(self, name: str, p: nn.Parameter) -> Tensor:
        value, gradient = WeightsValue(self, name, p), _Gradient(self, name, p)
        return WholeParameter.of(value, gradient, self.outline(name, p.dtype), p.device)

    def has_gradient(self, name: str) -> bool:
        """Whether any rank has a gradient of a parameter. All are asked for at once, and once per hook."""
        if self._presence is None:
            flags = self.reads.fetch(self._present).tolist()
            self._presence = dict(zip(self.partition.tags, map(bool, flags), strict=True))
        return self._presence[name]

    def note_gradient(self, name: str, present: bool) -> None:
        """A hook set a gradient, or removed it."""
        if self._presence is not None:
            self._presence[name] = present

    def _gather_presence(self) -> Tensor:
        local = self.partition.local_parameters
        present = [int(n in local and local[n].grad is not None) for n in self.partition.tags]
        flags = torch.tensor(present, device="cpu")
        comm.all_reduce_(flags, self.partition.mesh.model_control, "max")
        return flags

    # -------------------------------------------------------------- showing and hiding
    @contextmanager
    def shown(self, hook: str = "") -> Iterator[None]:
        """User code inside sees whole values; every rank of the replica enters and leaves. May be nested.

        Args:
            hook: name of the hook that runs inside.
        """
        if self.reads.is_open:
            yield
            return
        self._swap(True)
        self.reads.open()
        try:
            yield
            self._refuse_other_parameters(hook)
            self.reads.leave()
        finally:
            self.reads.close()
            self._swap(False)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, parameters are what steps compute with, also if a hook is running. Collective if one is."""
        if not self.reads.is_open:
            yield
            return
        self.reads.meet()
        self._swap(False)
        self.reads.is_open = False
        try:
            yield
        finally:
            self._swap(True)
            self.reads.open()

    def meet(self) -> None:
        """To be called before any collective that a hook may ask for."""
        self.reads.meet()

    def _refuse_other_parameters(self, hook: str) -> None:
        """The hook is over: what was shown must still be where it was, or it could not be taken back."""
        for registry, leaf, tensor in self._places:
            shown = self._stand_ins[id(tensor)]
            if isinstance(shown, nn.Parameter) and registry.get(leaf) is not shown:
                name = self.partition.names[id(tensor)]
                raise _replaced(hook, name)
        self.refuse_other_modules(hook)

    def refuse_other_modules(self, what: str) -> None:
        """Raises RuntimeError if modules whose parameters ranks hold in parts have been replaced or removed.

        Args:
            what: who may have done it.
        """
        if self._is_as_it_was():
            return
        left = {id(registry) for m in self.partition.module.modules() for registry in (m._parameters, m._buffers)}
        gone = next((tensor for registry, _, tensor in self._places if id(registry) not in left), None)
        if gone is not None:
            raise _replaced(what, self.partition.names.get(id(gone), "a buffer"))
        if self.partition.mesh.pipeline is not None:
            names = {**self.partition.names, **dict.fromkeys(self._locals, "")}
            new = next((name for name, p in self.partition.module.named_parameters() if id(p) not in names), None)
            if new is not None:
                raise RuntimeError(
                    f"{what or 'a hook'} added the parameter {new}, which no stage of the pipeline would compute with; "
                    "make it in __init__ or configure_model, with requires_grad=False until it is needed"
                )

    def _is_as_it_was(self) -> bool:
        """Whether every module has the same children."""
        count = 0
        for registry, leaf, child in self._children:
            if registry.get(leaf) is not child:
                return False
            count += len(registry)
        return count == self._size

    def _swap(self, show: bool) -> None:
        self._presence = None
        self._refuse_forwards(show)
        for registry, leaf, tensor in self._places:
            stand_in = self._stand_ins[id(tensor)]
            source, target = (tensor, stand_in) if show else (stand_in, tensor)
            if registry.get(leaf) is source:
                registry[leaf] = target
        for optimizer in self.optimizers:
            self._swap_state(optimizer, show)
            for group in optimizer.param_groups:
                group["params"] = [(self._stand_ins if show else self._locals).get(id(p), p) for p in group["params"]]

    def _swap_state(self, optimizer: Any, show: bool) -> None:
        if show:
            optimizer.state = self._shown_states[id(optimizer)] = PartedState(optimizer.state)
            return
        given, shown = optimizer.state, self._shown_states.pop(id(optimizer))
        optimizer.state = shown.parts
        if given is shown:
            return
        if len(given):
            raise RuntimeError(
                f"a hook replaced the state of {type(optimizer).__name__}, which is divided over the ranks; drop it "
                "with optimizer.state.clear(), or load a whole one from a checkpoint: trainer.fit(..., ckpt_path=...)"
            )
        shown.clear()


def _replaced(what: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"{what or 'a hook'} replaced or removed the parameter {name}, of which several ranks hold parts; change its "
        "values instead, or replace it before the trainer starts"
    )


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"a hook runs {type(module).__name__}, whose weights lie on several ranks: hooks between steps may read and "
        "change weights and gradients, but the model computes in steps, which all ranks take together; call it in "
        "training_step, validation_step or predict_step, or on a plain module that loaded a checkpoint"
    )


def _own(whole: Tensor, held: Tensor | None) -> Tensor:
    """The whole value without memory in common with the part it was made of."""
    return whole.clone() if held is not None and whole.data_ptr() == held.data_ptr() else whole.contiguous()
