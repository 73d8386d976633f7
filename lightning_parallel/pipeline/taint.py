"""Mechanism: the planning pass. Runs one uncut step and follows which parameters and blocks every tensor depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightning_parallel.pipeline.placeholder import _DATA_READS, _FACTORIES
from lightning_parallel.pipeline.trace import BlockUse, StepTrace

__all__ = ["trace_step"]

Source = frozenset[str]
NOTHING: Source = frozenset()


class _Taint(TorchDispatchMode):
    """Follows sources ("parameter:NAME", "block:INDEX") by storage, so that views and in-place writes are covered."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, Source] = {}
        self.keep_alive: list[torch.UntypedStorage] = []  # storage addresses must not be reused
        self.touched: Source = NOTHING
        self.inside: int | None = None
        self.where = "before the first block"
        self.reads: list[tuple[str, str, str]] = []

    def get(self, tensor: torch.Tensor) -> Source:
        return self.sources.get(tensor.untyped_storage()._cdata, NOTHING)

    def set(self, tensor: torch.Tensor, sources: Source) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sources:
            self.keep_alive.append(storage)
        self.sources[storage._cdata] = sources

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        sources = NOTHING
        if name not in _FACTORIES:
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, torch.Tensor):
                    sources |= self.get(leaf)
        if name in _DATA_READS and sources:
            self.reads.append((self.where, name, ", ".join(sorted(sources)[:2])))
        out = func(*args, **kwargs)
        self.touched |= sources
        if self.inside is not None:
            sources |= {f"block:{self.inside}"}
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor):
                self.set(leaf, self.get(leaf) | sources)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor handed from block to block: the first among positional arguments, then among keywords."""
    return next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)


def _split(sources: Source) -> tuple[set[str], set[int]]:
    parameters = {s.removeprefix("parameter:") for s in sources if s.startswith("parameter:")}
    blocks = {int(s.removeprefix("block:")) for s in sources if s.startswith("block:")}
    return parameters, blocks


class _Observer:
    """Hooks on the blocks that turn taint into a `StepTrace`."""

    def __init__(self, taint: _Taint, names: tuple[str, ...]) -> None:
        self.taint = taint
        self.names = names
        self.trace = StepTrace([BlockUse() for _ in names])
        self.saved: list[tuple[torch.Tensor, Source]] = []

    def before_block(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        taint, use = self.taint, self.trace.blocks[index]
        if not self.trace.calls:
            self.trace.before |= _split(taint.touched)[0]
        self.trace.calls.append(index)
        main = _first_tensor(args, kwargs)
        self.saved = []
        for tensor in _tensors((args, dict(kwargs))):
            parameters, blocks = _split(taint.get(tensor))
            if tensor is main:
                use.main_from |= blocks
            # What feeds the first block's main input runs on the first stage anyway; everything else is recomputed
            # from the true inputs on the stage of this block.
            if tensor is not main or index > 0:
                use.inputs |= parameters
            use.values |= {(b, "chain" if b == index - 1 else "skip connection") for b in blocks}
            self.saved.append((tensor, taint.get(tensor)))
        for tensor, _ in self.saved:
            taint.set(tensor, NOTHING)
        taint.touched, taint.inside, taint.where = NOTHING, index, f"inside {self.names[index]}"

    def after_block(self, index: int, out: Any) -> None:
        taint, use = self.taint, self.trace.blocks[index]
        parameters, blocks = _split(taint.touched)
        use.inside |= parameters
        use.values |= {(b, "side channel") for b in blocks if b != index}
        for tensor, sources in self.saved:
            taint.set(tensor, sources)
        outputs = _tensors(out)
        if not outputs:
            self.trace.problems.append(f"{self.names[index]} returns no tensor")
        for tensor in outputs:
            taint.set(tensor, frozenset({f"block:{index}"}))
        taint.touched, taint.inside, taint.where = NOTHING, None, f"after {self.names[index]}"

    def finish(self) -> StepTrace:
        self.trace.after, self.trace.after_values = _split(self.taint.touched)
        self.trace.reads = self.taint.reads
        return self.trace


def trace_step(
    root: nn.Module, names: tuple[str, ...], parameters: Mapping[str, torch.Tensor], run: Callable[[], Any]
) -> StepTrace:
    """Runs one uncut step and reports what every block used.

    Args:
        root: the whole model.
        names: module paths of the blocks, in order.
        parameters: name in the plain model -> parameter of `root`, each parameter once.
        run: runs one step of `root`; called once, without gradients.
    """
    taint = _Taint()
    for name, parameter in parameters.items():
        taint.set(parameter, frozenset({f"parameter:{name}"}))
    observer = _Observer(taint, names)
    with _hooks(root, names, observer), torch.no_grad(), taint:
        run()
    return observer.finish()


@contextmanager
def _hooks(root: nn.Module, names: tuple[str, ...], observer: _Observer) -> Iterator[None]:
    handles = []
    for index, name in enumerate(names):
        block = root.get_submodule(name)

        def before(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            observer.before_block(index, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any, index: int = index) -> None:
            observer.after_block(index, out)

        handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
