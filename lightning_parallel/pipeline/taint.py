"""Mechanism: the planning pass. Runs one uncut step and follows which parameters and blocks every tensor depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from lightning_parallel.pipeline.boundary import strangers_in
from lightning_parallel.pipeline.inner_gradients import InnerGradients, in_transform
from lightning_parallel.pipeline.operators import FACTORIES, OneHotByShape, data_read_by, operator_name, written_by
from lightning_parallel.pipeline.outline import Outline
from lightning_parallel.pipeline.trace import WRITE, BlockUse, StepTrace

__all__ = ["trace_step"]

Source = frozenset[str]
NOTHING: Source = frozenset()


class _Taint(TorchDispatchMode):
    """Follows sources by storage, so that views and in-place writes are covered.

    Sources are "parameter:NAME", "block:INDEX" (computed inside a block or from its value) and "write:INDEX" (the block
    wrote into a tensor that was handed to it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, Source] = {}
        self.keep_alive: list[Any] = []  # storage addresses must not be reused
        self.touched: Source = NOTHING
        self.inside: int | None = None
        self.where = "before the first block"
        self.reads: list[tuple[str, str, str]] = []
        self.parameters: dict[int, torch.Tensor] = {}  # storage -> parameter
        self.overwritten: dict[int, torch.Tensor] = {}  # storage of a parameter -> its value before the step
        self.buffers: dict[int, str] = {}  # storage -> name
        self.writes: list[tuple[str, str, str]] = []  # (where, of what, buffer or "") of writes outside of the blocks

    def get(self, tensor: torch.Tensor) -> Source:
        return self.sources.get(_storage(tensor), NOTHING)

    def set(self, tensor: torch.Tensor, sources: Source) -> None:
        if _storage(tensor) not in self.sources:
            self.keep_alive.append(tensor.untyped_storage() if tensor.layout is torch.strided else tensor)
        self.sources[_storage(tensor)] = sources

    def add_parameter(self, name: str, parameter: torch.Tensor) -> None:
        self.set(parameter, self.get(parameter) | {f"parameter:{name}"})
        self.parameters[_storage(parameter)] = parameter

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = frozenset().union(*(self.get(t) for t in data_read_by(func, args, kwargs)))
        if read:
            self.reads.append((self.where, operator_name(func), _some(read)))
        inputs = _operands((args, kwargs))
        sources = NOTHING if operator_name(func) in FACTORIES else NOTHING.union(*map(self.get, inputs))
        written = written_by(func, args, kwargs)
        for tensor in written:
            self._save(tensor)
        out = func(*args, **kwargs)
        self.touched |= sources
        if self.inside is not None:
            sources |= {f"block:{self.inside}"}
        storages = {_storage(t) for t in inputs}
        for tensor in written:
            if self.inside is None and not sources <= self.get(tensor):
                self.writes.append((self.where, _some(sources), self.buffers.get(_storage(tensor), "")))
            self.set(tensor, self.get(tensor) | sources)
        for tensor in _operands(out):
            if _storage(tensor) not in storages:  # a view of an input is what the input is
                self.set(tensor, self.get(tensor) | sources)
        return out

    def _save(self, tensor: torch.Tensor) -> None:
        """Planning must leave the parameters as they are, also if the step writes into them."""
        storage = _storage(tensor)
        if storage in self.parameters and storage not in self.overwritten:
            self.overwritten[storage] = self.parameters[storage].detach().clone()

    def restore(self) -> None:
        for storage, value in self.overwritten.items():
            self.parameters[storage].detach().copy_(value)
        self.overwritten.clear()


def _storage(tensor: torch.Tensor) -> int:
    """What two tensors that share memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _some(sources: Source) -> str:
    return ", ".join(sorted(sources)[:2])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _operands(value: Any) -> list[torch.Tensor]:
    """Tensors among the arguments or results of an operator, which come in tuples, lists and dicts only."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in _operands(item)]


def _split(sources: Source) -> tuple[set[str], set[int], set[int]]:
    """Names of parameters, blocks whose values are used, and blocks whose writes into an argument are used."""
    parameters = {s.removeprefix("parameter:") for s in sources if s.startswith("parameter:")}
    blocks = {int(s.removeprefix("block:")) for s in sources if s.startswith("block:")}
    writes = {int(s.removeprefix("write:")) for s in sources if s.startswith("write:")}
    return parameters, blocks, writes


class _Observer:
    """Hooks on the blocks that turn taint into a `StepTrace`."""

    def __init__(self, taint: _Taint, names: tuple[str, ...]) -> None:
        self.taint = taint
        self.names = names
        self.trace = StepTrace([BlockUse() for _ in names])
        self.saved: list[tuple[torch.Tensor, Source]] = []
        self.outlines: list[Outline] = []
        self.is_strange = False

    def before_block(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        taint, use = self.taint, self.trace.blocks[index]
        if in_transform((args, kwargs)):
            raise ValueError(
                f"the step runs {self.names[index]} inside of torch.func (grad, vjp, jvp, vmap), whose graph spans "
                "the blocks, of which stages have parts: transform what runs inside of one block, or use "
                "pipeline_parallel_size=1"
            )
        if not self.trace.calls:
            self.trace.before |= _split(taint.touched)[0]
        self.trace.calls.append(index)
        self.saved = [(tensor, taint.get(tensor)) for tensor in _tensors((args, dict(kwargs)))]
        for _, sources in self.saved:
            parameters, blocks, writes = _split(sources)
            use.fed_by |= blocks
            # Computed outside of the blocks, thus again on the stage of this block, from the true inputs.
            use.inputs |= parameters
            use.values |= {(b, "chain" if b == index - 1 else "skip connection") for b in blocks}
            use.values |= {(b, WRITE) for b in writes}
        for tensor, _ in self.saved:
            taint.set(tensor, NOTHING)
        taint.touched, taint.inside, taint.where = NOTHING, index, f"inside {self.names[index]}"

    def after_block(self, index: int, out: Any) -> Any:
        """Returns the block's value, with copies in place of tensors that it was handed or holds."""
        taint, use, own = self.taint, self.trace.blocks[index], f"block:{index}"
        parameters, blocks, writes = _split(taint.touched)
        use.inside |= parameters
        use.values |= {(b, "side channel") for b in blocks if b != index}
        use.values |= {(b, WRITE) for b in writes if b != index}
        arguments = {_storage(tensor) for tensor, _ in self.saved}
        computed = {_storage(t) for t in _tensors(out) if own in taint.get(t)} - arguments
        for tensor, sources in self.saved:
            taint.set(tensor, sources | {f"write:{index}"} if own in taint.get(tensor) else sources)
        taint.inside, taint.where = None, f"after {self.names[index]}"
        # Who uses the block's value is told from who uses the argument that it is or was written into.
        out = tree_map_only(torch.Tensor, lambda t: t if _storage(t) in computed else t.clone(), out)
        outputs, strangers = _tensors(out), strangers_in(out)
        if strangers and not self.is_strange and index < len(self.names) - 1:
            self.is_strange = True  # the others return the same
            self.trace.problems.append(
                f"{self.names[index]} returns {', '.join(strangers)}, which cannot be sent to another stage; return "
                "tensors, or tuples, lists and dicts of them"
            )
        elif not outputs and not strangers:
            self.trace.problems.append(f"{self.names[index]} returns no tensor")
        if not strangers:
            self.outlines.append(Outline.of(out))
        for tensor in outputs:
            taint.set(tensor, frozenset({own}))
        taint.touched = NOTHING
        return out

    def note_derivative(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None) -> None:
        """The step differentiates, which takes the graph of all blocks between both; inside of a block it is there."""
        to = [block for tensor in outputs for block in _split(self.taint.get(tensor))[1]]
        if self.taint.inside is None and to:
            start = min((max(_split(self.taint.get(t))[1], default=-1) for t in inputs or ()), default=-1)
            self.trace.derivatives.append((start, max(to), self.taint.where))

    def finish(self) -> StepTrace:
        self.trace.after, self.trace.after_values, self.trace.after_writes = _split(self.taint.touched)
        self.trace.reads, self.trace.writes = self.taint.reads, self.taint.writes
        self.trace.changing = any(o != self.outlines[0] for o in self.outlines)
        return self.trace


def trace_step(
    root: nn.Module, names: tuple[str, ...], parameters: Mapping[str, torch.Tensor], run: Callable[[], Any]
) -> StepTrace:
    """Runs one uncut step and reports what every block used.

    Args:
        root: the whole model.
        names: module paths of the blocks, in order.
        parameters: name in the plain model -> parameter of `root`, each parameter once.
        run: runs one step of `root`; called once, without gradients. Parameters that it writes into are put back.
    """
    taint = _Taint()
    for name, parameter in parameters.items():
        taint.add_parameter(name, parameter)
    taint.buffers = {_storage(buffer): name for name, buffer in root.named_buffers()}
    observer = _Observer(taint, names)
    with torch.no_grad():
        try:
            with _hooks(root, names, observer), taint, OneHotByShape(), InnerGradients(observer.note_derivative):
                run()
        finally:
            taint.restore()
    return observer.finish()


@contextmanager
def _hooks(root: nn.Module, names: tuple[str, ...], observer: _Observer) -> Iterator[None]:
    handles = []
    for index, name in enumerate(names):
        block = root.get_submodule(name)

        def before(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            observer.before_block(index, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any, index: int = index) -> Any:
            return observer.after_block(index, out)

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
