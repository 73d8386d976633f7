"""Mechanism: converts linears and embeddings of a user's model into split ones, in place, and back.

The module stays the object it was: its class becomes a subclass of the one it had, while parameters, hooks and
references to it remain. Whoever converts also puts the local shards into the parameters' data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel.forwards import (
    SHARED,
    STATE,
    ColumnForward,
    LayerState,
    OwnColumnForward,
    OwnRowForward,
    OwnVocabForward,
    RowForward,
    VocabForward,
)
from lightning_parallel.tensor_parallel.modules import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_embedding,
    local_row,
)
from lightning_parallel.tensor_parallel.random import RegionState
from lightning_parallel.tensor_parallel.sharding import ShardSpec
from lightning_parallel.tensor_parallel.shards import contiguous_sizes
from lightning_parallel.tensor_parallel.shared_input import SharedInput

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "attach_group",
    "convert_to_column_parallel",
    "convert_to_row_parallel",
    "convert_to_vocab_parallel",
    "restore_module",
]


def convert_to_column_parallel(
    module: nn.Module,
    spec: ShardSpec,
    group: ProcessGroup | None,
    *,
    gather_output: bool = False,
    shared_input: SharedInput | None = None,
    copy_input: bool = True,
    region: RegionState | None = None,
) -> None:
    """Make a linear (``nn.Linear``, transformers' Conv1D or a subclass) compute its share of the output features.

    Args:
        module: its parameters' data is sliced by the caller, before or after.
        spec: split of the output features, along dimension 0 of an ``nn.Linear`` weight.
        group: tensor group.
        gather_output: return the full output on every rank.
        shared_input: other column-parallel linears that read the same tensor; their input gradient is reduced once.
        copy_input: reduce the input's gradient over the group; False where the caller does so.
        region: gives the consumers of the split output random numbers of their own, in training; pass the model's
            where the model has dropout.

    Raises:
        ValueError: the module is of another kind, already converted, or cannot be split this way.
    """
    transposed = _is_conv1d(module)
    attribute = "nf" if transposed else "out_features"
    _check_linear(module, "column-parallel", spec, group, 1 if transposed else 0, attribute)
    state = LayerState(group, spec, gather_output, copy_input, transposed=transposed, region=region)
    plain = _inherits_forward(module)
    _convert(module, ColumnForward if plain else OwnColumnForward, state, {attribute: spec.local_size(state.rank)})
    if shared_input is not None and plain and not transposed and copy_input:
        module.__dict__[SHARED] = shared_input
        shared_input.add(module)  # type: ignore[arg-type]


def convert_to_row_parallel(
    module: nn.Module,
    spec: ShardSpec,
    group: ProcessGroup | None,
    *,
    split_input: bool = False,
    scatter_dim: int | None = None,
    region: RegionState | None = None,
) -> None:
    """Make a linear compute its share of the input features' products and sum them over the group; bias added once.

    Args:
        module: its weight's data is sliced by the caller, before or after; the bias stays whole.
        spec: split of the input features, along dimension 1 of an ``nn.Linear`` weight.
        group: tensor group.
        split_input: the input is whole on every rank; take this rank's share of it.
        scatter_dim: return only this rank's torch.chunk slice along that dimension (sequence parallel).
        region: as in :func:`convert_to_column_parallel`.

    Raises:
        ValueError: the module is of another kind, already converted, or cannot be split this way.
    """
    transposed = _is_conv1d(module)
    attribute = "nx" if transposed else "in_features"
    _check_linear(module, "row-parallel", spec, group, 0 if transposed else 1, attribute)
    if spec.replicated:
        raise ValueError(
            "the inputs of a row-parallel layer cannot be held by several ranks: they would be summed twice"
        )
    plain = _inherits_forward(module)
    if not plain and getattr(module, "bias", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has a forward of its own and a bias, which would be added once per tensor rank; "
            "use bias=False or leave the layer whole"
        )
    state = LayerState(
        group, spec, split_input=split_input, scatter_dim=scatter_dim, transposed=transposed, region=region
    )
    _convert(module, RowForward if plain else OwnRowForward, state, {attribute: spec.local_size(state.rank)})


def convert_to_vocab_parallel(module: nn.Module, spec: ShardSpec, group: ProcessGroup | None) -> None:
    """Make an ``nn.Embedding`` (or a subclass) hold its share of the rows and sum the lookups over the group.

    Args:
        module: its weight's data is sliced by the caller, before or after.
        spec: split of the rows, one contiguous run per rank in rank order.
        group: tensor group.

    Raises:
        ValueError: the module is of another kind, already converted, or uses an option that a split table cannot keep.
    """
    if not isinstance(module, nn.Embedding):
        raise ValueError(f"{type(module).__name__} cannot be vocabulary-parallel; expected nn.Embedding or a subclass")
    _check_module(module, spec, group, 0, "num_embeddings")
    check_embedding(module)
    if contiguous_sizes(replace(spec, padding=())) is None:
        raise ValueError("a vocabulary-parallel embedding needs one contiguous run of rows per rank, in rank order")
    state = LayerState(group, spec)
    local = {"num_embeddings": spec.local_size(state.rank), "padding_idx": local_row(module.padding_idx, state)}
    _convert(module, VocabForward if _inherits_forward(module) else OwnVocabForward, state, local)


def restore_module(module: nn.Module) -> None:
    """Undo a conversion: original class and attributes. The caller puts the full data back.

    Raises:
        ValueError: the module was not converted.
    """
    state = module.__dict__.get(STATE)
    if state is None or state.original_class is None:
        raise ValueError(f"{type(module).__name__} is not a converted module")
    module.__class__ = state.original_class
    del module.__dict__[STATE]
    shared = module.__dict__.pop(SHARED, None)
    if shared is not None:
        shared.remove(module)
    for name, value in state.original.items():
        setattr(module, name, value)


def attach_group(module: nn.Module, group: ProcessGroup | None) -> None:
    """Give every parallel layer in an unpickled ``module`` its tensor group.

    Raises:
        ValueError: a layer was split over another number of ranks.
    """
    for layer in module.modules():
        state = layer.__dict__.get(STATE)
        if state is not None:
            _check_ranks(type(layer).__name__, state.spec, group)
            layer.__dict__[STATE] = replace(state, group=group)


def _convert(module: nn.Module, mixin: Any, state: LayerState, local: dict[str, Any]) -> None:
    original = {name: getattr(module, name) for name in local}
    module.__dict__[STATE] = replace(state, original_class=type(module), original=original)
    for name, value in local.items():
        setattr(module, name, value)
    base: Any = type(module)
    module.__class__ = derive_class(base, mixin)


@cache
def derive_class(base: Any, mixin: Any) -> type[nn.Module]:
    """The subclass of ``base`` with the forward of ``mixin``; always the same one."""
    for public in (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        if public.__bases__ == (mixin, base):
            return public
    namespace = {"__doc__": mixin.__doc__, "__module__": base.__module__, "__reduce_ex__": _reduce}
    return type(mixin.prefix + base.__name__, (mixin, base), namespace)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle by the classes it was derived from: the derived one cannot be imported by name."""
    mixin, base = type(module).__bases__
    get_state = getattr(module, "__getstate__", None)  # every object has one from Python 3.11 on
    return _rebuild, (base, mixin), module.__dict__ if get_state is None else get_state()


def _rebuild(base: Any, mixin: Any) -> nn.Module:
    cls = derive_class(base, mixin)
    return cls.__new__(cls)


def _is_conv1d(module: nn.Module) -> bool:
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) and hasattr(module, "nf")


def _inherits_forward(module: nn.Module) -> bool:
    """Whether the class computes what its plain ancestor does."""
    forward = type(module).forward
    return forward in (nn.Linear.forward, nn.Embedding.forward) or forward.__qualname__ == "Conv1D.forward"


def _check_linear(
    module: nn.Module, kind: str, spec: ShardSpec, group: ProcessGroup | None, dim: int, attribute: str
) -> None:
    if not isinstance(module, nn.Linear) and not _is_conv1d(module):
        raise ValueError(f"{type(module).__name__} cannot be {kind}; expected nn.Linear, Conv1D or a subclass")
    _check_module(module, spec, group, dim, attribute)


def _check_module(module: nn.Module, spec: ShardSpec, group: ProcessGroup | None, dim: int, attribute: str) -> None:
    """What every conversion needs: an untouched module whose weight the split fits."""
    name, size = type(module).__name__, getattr(module, attribute)
    if STATE in module.__dict__:
        raise ValueError(f"{name} is already split over {module.__dict__[STATE].spec.ranks} tensor ranks")
    if "forward" in module.__dict__:
        raise ValueError(f"the forward of this {name} was replaced on the object, so a conversion would have no effect")
    weight = module._parameters.get("weight")
    if weight is None:
        raise ValueError(f"the weight of this {name} is computed from other parameters; remove its parametrization")
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"this {name} has no shape yet; run the model once before splitting it")
    others = sorted(set(dict(module.named_parameters())) - {"weight", "bias"})
    if others and not _inherits_forward(module):
        raise ValueError(f"{name} computes with parameters that have no split: {', '.join(others)}; leave it whole")
    _check_ranks(name, spec, group)
    if (spec.dim, spec.size) != (dim, size):
        raise ValueError(
            f"{name} with {attribute}={size} is split along dimension {dim} of size {size}, "
            f"but the split is of dimension {spec.dim} and size {spec.size}"
        )


def _check_ranks(name: str, spec: ShardSpec, group: ProcessGroup | None) -> None:
    if spec.ranks != comm.group_size(group):
        raise ValueError(
            f"{name}: a split over {spec.ranks} ranks needs a group of as many, not {comm.group_size(group)}"
        )
