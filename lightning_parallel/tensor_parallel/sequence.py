"""Mechanism: sequence parallelism: between regions every tensor rank keeps a slice of the tokens.

The residual stream is scattered before the first block and gathered after the last one. A region gathers its input, and
its row layer returns this rank's tokens of the sum (Korthikanti et al. 2022, figure 5).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel import mappings
from lightning_parallel.tensor_parallel.random import RegionState
from lightning_parallel.tensor_parallel.rules import TensorPlan

__all__ = ["check_sequence_parallel", "own_gather", "split_sequences"]


def check_sequence_parallel(model: nn.Module, plan: TensorPlan) -> None:
    """Check that every region lies in a module of its own inside a block.

    Raises:
        ValueError: no blocks, layers of the plan outside of modules that can gather their own input, or styles that
            need all tokens.
    """
    if not plan.blocks:
        raise ValueError('sequence_parallel needs the repeated blocks; give blocks="auto" or names such as "layers.*"')
    for region in plan.regions:
        if not any(region.name.startswith(f"{block}.") for block in plan.blocks):
            if own_gather(model, region.name):
                continue
            layers = f"{', '.join(region.columns)} and {region.row}"
            if region.name not in plan.blocks:
                raise ValueError(
                    f"sequence_parallel splits layers inside of blocks only, but {layers} lie outside of the blocks "
                    f"{plan.blocks[0]} to {plan.blocks[-1]}; give those that hold them, or use sequence_parallel=False"
                )
            raise ValueError(
                f"sequence_parallel cannot gather tokens for {layers}: they lie in block {region.name!r} itself, whose "
                f"other layers work on slices of the sequence; put them in a module of their own inside the block, or "
                f"use sequence_parallel=False"
            )
    for rule in plan.rules:
        inside = any(rule.name.startswith(f"{block}.") for block in plan.blocks)
        if inside and rule.style in {"experts", "mla_kv", "all_reduce", "colwise_gather", "rowwise_split", "vocab"}:
            raise ValueError(
                f"sequence_parallel does not support style {rule.style!r} inside blocks ({rule.name}); "
                f"use sequence_parallel=False"
            )


def own_gather(model: nn.Module, name: str) -> bool:
    """Whether the module is one of torch's transformer layers, whose linear1 can gather alone."""
    return isinstance(model.get_submodule(name), (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))


def split_sequences(
    model: nn.Module,
    plan: TensorPlan,
    group: ProcessGroup,
    regions: RegionState,
    keep: Callable[[str], bool],
    undo: Callable[[Callable[[], None]], None],
) -> None:
    """Install what scatters and gathers the residual stream, for the blocks and regions that run here.

    Dropout between the first and the last kept block falls on slices of tokens, so it draws from this rank's own
    numbers.
    """
    hooks = _Hooks(group, plan.sequence_dim, regions)
    kept = [name for name in plan.blocks if _runs_here(model, name, keep)]
    for name in kept:
        block = model.get_submodule(name)
        enter = partial(hooks.enter_block, name == plan.blocks[0])
        undo(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
    if kept:
        last = model.get_submodule(kept[-1])
        leave = partial(hooks.leave_blocks, kept[-1] == plan.blocks[-1])
        undo(last.register_forward_hook(leave).remove)
    gathering: dict[str, None] = {}
    for region in plan.regions:
        if keep(region.row):
            gathering.update(dict.fromkeys(region.columns if own_gather(model, region.name) else (region.name,)))
    for name in gathering:
        gather = partial(hooks.enter_region, name)
        undo(model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True).remove)


def _runs_here(model: nn.Module, block: str, keep: Callable[[str], bool]) -> bool:
    """Whether this process runs a block: the modules that hold its parameters tell."""
    holders = [
        name
        for name, module in model.get_submodule(block).named_modules(prefix=block)
        if next(module.parameters(recurse=False), None) is not None
    ]
    return all(map(keep, holders or [block]))


class _Hooks:
    def __init__(self, group: ProcessGroup, dim: int, regions: RegionState) -> None:
        self.group = group
        self.dim = dim
        self.regions = regions
        self._dims, self._length = 0, 0  # dimensions of the stream, and tokens of this rank's slice of it

    def enter_block(
        self, first: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Scatter the stream before the first block; sum the gradients of everything else that enters a block."""
        stream = _first_tensor(args, kwargs)
        own = self._scatter(stream) if first else stream
        self._dims, self._length = own.dim(), own.shape[self.dim]

        def changed(value: Any) -> Any:
            if value is stream:
                return own
            wants = isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad
            return mappings.copy_to_group(value, self.group) if wants else value

        args, kwargs = tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}
        if module.training:
            self.regions.enter_sharded_region(comm.group_rank(self.group), stream.device)
        return args, kwargs

    def leave_blocks(self, last: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Back to whole sequences after the last block of all."""
        stream = output if isinstance(output, Tensor) else output[0]
        self.regions.leave_sharded_region(stream.device)
        if not last:
            return output
        whole = mappings.gather_from_group(stream, self.group, self.dim)
        return whole if isinstance(output, Tensor) else (whole, *output[1:])

    def enter_region(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the tokens that a region computes on; backward leaves each rank the sum for its own.

        Raises:
            ValueError: it is given something else than this rank's slice of the tokens.
        """
        stream = _first_tensor(args, kwargs)
        if stream.dim() != self._dims or stream.shape[self.dim] != self._length:
            raise ValueError(
                f"{name} was given a tensor of shape {tuple(stream.shape)} instead of the {self._length} tokens along "
                f"dimension {self.dim} of {self._dims} that each of {comm.group_size(self.group)} tensor ranks has "
                f"under sequence_parallel (does its block flatten or choose tokens, as routers of experts do?); use "
                f"sequence_parallel=False, or keep the layers of {name} whole with the style 'replicate'"
            )
        whole = mappings.gather_sequence(stream, self.group, self.dim)

        def changed(value: Any) -> Any:
            return whole if value is stream else value

        return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}

    def _scatter(self, stream: Tensor) -> Tensor:
        ranks, length = comm.group_size(self.group), stream.shape[self.dim]
        if length % ranks:
            below = length // ranks * ranks
            raise ValueError(
                f"sequence_parallel cannot split a sequence of {length} tokens over tensor_parallel_size={ranks}; "
                f"pad it to {below + ranks}{f' or cut it to {below}' if below else ''}"
            )
        return mappings.scatter_sequence(stream, self.group, self.dim)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError("sequence_parallel needs a floating tensor among the arguments of every block")
