"""Mechanism: split layers for those who build them by hand: linears and an embedding over a tensor group."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel import comm
from lightning_parallel.comm import ProcessGroup
from lightning_parallel.tensor_parallel.forwards import STATE, ColumnForward, LayerState, RowForward, VocabForward
from lightning_parallel.tensor_parallel.sharding import split_uneven
from lightning_parallel.tensor_parallel.shards import shard_tensor

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "check_embedding", "local_row"]


def check_embedding(module: nn.Embedding) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(
                f"nn.Embedding with {option}={getattr(module, option)} cannot be vocabulary-parallel; "
                f"use {option}={None if option == 'max_norm' else False} or leave the layer whole"
            )


def local_row(index: int | None, state: LayerState) -> int | None:
    """Where the rank that owns a row of the full table keeps it; None on the others."""
    part = state.spec.parts[state.rank]
    if index is None or not part or not part[0].start <= index < part[-1].stop:
        return None
    return index - part[0].start


class ColumnParallelLinear(ColumnForward, nn.Linear):
    """A linear whose output features are split over a group.

    Start weights are this rank's slice of those that ``nn.Linear`` would draw, so they do not depend on the group size.

    Args:
        in_features: input features.
        out_features: output features of all ranks together; rank slices are those of ``torch.chunk``.
        group: tensor group.
        bias: whether to add a bias.
        gather_output: return all output features on every rank.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None,
        bias: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._fill(nn.Linear(in_features, out_features, bias, device, dtype), group, gather_output)

    @classmethod
    def from_linear(
        cls, module: nn.Linear, group: ProcessGroup | None, *, gather_output: bool = False
    ) -> ColumnParallelLinear:
        """The parallel layer with this rank's slice of a plain linear's parameters."""
        layer = _blank(cls)
        layer._fill(module, group, gather_output)
        return layer

    def _fill(self, full: nn.Linear, group: ProcessGroup | None, gather_output: bool) -> None:
        spec = split_uneven(0, full.out_features, comm.group_size(group))
        state = LayerState(group, spec, gather_output)
        self.__dict__[STATE] = state
        self.in_features, self.out_features = full.in_features, spec.local_size(state.rank)
        self.weight = _slice(full.weight, state)
        self.register_parameter("bias", None if full.bias is None else _slice(full.bias, state))
        self.train(full.training)


class RowParallelLinear(RowForward, nn.Linear):
    """A linear whose input features are split over a group; every rank returns the sum, with the bias added once.

    Args:
        in_features: input features of all ranks together; rank slices are those of ``torch.chunk``.
        out_features: output features.
        group: tensor group.
        bias: whether to add a bias, which every rank holds whole.
        split_input: the input is whole on every rank; take this rank's share of it.
        scatter_dim: return only this rank's torch.chunk slice along that dimension (sequence parallel).
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: ProcessGroup | None,
        bias: bool = True,
        split_input: bool = False,
        scatter_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._fill(nn.Linear(in_features, out_features, bias, device, dtype), group, split_input, scatter_dim)

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        group: ProcessGroup | None,
        *,
        split_input: bool = False,
        scatter_dim: int | None = None,
    ) -> RowParallelLinear:
        """The parallel layer with this rank's slice of a plain linear's weight, and its whole bias."""
        layer = _blank(cls)
        layer._fill(module, group, split_input, scatter_dim)
        return layer

    def _fill(self, full: nn.Linear, group: ProcessGroup | None, split_input: bool, scatter_dim: int | None) -> None:
        spec = split_uneven(1, full.in_features, comm.group_size(group))
        state = LayerState(group, spec, split_input=split_input, scatter_dim=scatter_dim)
        self.__dict__[STATE] = state
        self.in_features, self.out_features = spec.local_size(state.rank), full.out_features
        self.weight = _slice(full.weight, state)
        bias = full.bias
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad)
        )
        self.train(full.training)


class VocabParallelEmbedding(VocabForward, nn.Embedding):
    """An embedding whose rows are split over a group.

    Args:
        num_embeddings: rows of all ranks together; rank slices are those of ``torch.chunk``.
        embedding_dim: size of one row.
        group: tensor group.
        padding_idx: row of the full table that gets no gradient.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: ProcessGroup | None,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._fill(nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype), group)

    @classmethod
    def from_embedding(cls, module: nn.Embedding, group: ProcessGroup | None) -> VocabParallelEmbedding:
        """The parallel layer with this rank's rows of a plain embedding.

        Raises:
            ValueError: the embedding uses max_norm, scale_grad_by_freq or sparse.
        """
        layer = _blank(cls)
        layer._fill(module, group)
        return layer

    def _fill(self, full: nn.Embedding, group: ProcessGroup | None) -> None:
        check_embedding(full)
        state = LayerState(group, split_uneven(0, full.num_embeddings, comm.group_size(group)))
        self.__dict__[STATE] = state
        self.num_embeddings, self.embedding_dim = state.spec.local_size(state.rank), full.embedding_dim
        self.padding_idx = local_row(full.padding_idx, state)
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self.weight = _slice(full.weight, state)
        self.train(full.training)


_Layer = TypeVar("_Layer", bound=nn.Module)


def _blank(cls: type[_Layer]) -> _Layer:
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    return layer


def _slice(parameter: Tensor, state: LayerState) -> nn.Parameter:
    return nn.Parameter(shard_tensor(parameter, state.spec, state.rank), parameter.requires_grad)
