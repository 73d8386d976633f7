"""Placeholders: shapes are right, data cannot be read in any way, writes are followed or refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_parallel.pipeline.outline import Outline, TensorMeta
from lightning_parallel.pipeline.placeholder import (
    PipelineCutError,
    Placeholder,
    WriteLedger,
    placeholder_like,
    placeholder_parameter,
    placeholders_in,
)

CPU = torch.device("cpu")
MASK = torch.tensor([[True, False, True], [False, False, True]])
Function = Callable[[Tensor], Any]


def stand_in(*shape: int, dtype: torch.dtype = torch.float32, ledger: WriteLedger | None = None) -> Placeholder:
    return placeholder_like(torch.zeros(shape, dtype=dtype), ["output of layer 3"], ledger)


# ------------------------------------------------------------------------------------------------ operators
OPERATORS: dict[str, Function] = {
    "arithmetic": lambda x: (x + 1) * torch.ones(3) / 2 - x,
    "promotion": lambda x: x.long() + torch.ones((), dtype=torch.float64),
    "comparison": lambda x: x > 0,
    "matmul": lambda x: x @ torch.ones(3, 5),
    "view": lambda x: x.T.reshape(-1)[1:].view(1, -1),
    "slice": lambda x: x[:, 1:],
    "integer index": lambda x: x[torch.tensor([1, 0, 1])],
    "mask": lambda x: x[MASK],
    "mask of rows": lambda x: x[torch.tensor([True, False])],
    "mask and index": lambda x: x[torch.tensor([0, 1]), torch.tensor([True, False, True])],
    "masked select": lambda x: x.masked_select(torch.tensor([[True], [False]])),
    "filled by mask": lambda x: x.masked_fill(MASK, 0.0),
    "indexed by it": lambda x: torch.ones(9, 2)[x.long()],
    "cat and stack": lambda x: torch.stack([torch.cat([x, torch.ones(1, 3)])] * 2),
    "several results": lambda x: list(x.chunk(3, 1)) + [x.max(1).values, x.sort().indices],
    "norm": lambda x: F.layer_norm(x, (3,), torch.ones(3)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "cast": lambda x: x.to(torch.bfloat16).float().double(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 2])),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 0]]), x),
    "where": lambda x: torch.where(MASK, x, 0.0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, torch.ones(4, 3)),
    "one hot": lambda x: F.one_hot(x.long(), 4),
    "one hot by name": lambda x: F.one_hot(x.long(), num_classes=4),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_shape_and_dtype_are_those_of_the_value(name: str) -> None:
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            found = OPERATORS[name](stand_in(2, 3))
            expected = OPERATORS[name](torch.rand(2, 3))
        for one, other in zip(*([v] if isinstance(v, Tensor) else v for v in (found, expected)), strict=True):
            assert isinstance(one, Placeholder)
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            assert "output of layer 3" in repr(one)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_selecting_with_any_mask(flags: list[bool]) -> None:
    mask = torch.tensor(flags).view(2, 3)
    for x in (stand_in(2, 3), stand_in(2, 3, 4)):
        assert x[mask].shape == (sum(flags), *x.shape[2:])
    assert stand_in(4, 2, 3)[:, mask].shape == (4, sum(flags))
    assert stand_in(2, 3).masked_select(mask).shape == (sum(flags),)


@pytest.mark.parametrize(
    "make",
    [
        torch.zeros_like,
        torch.empty_like,
        lambda x: torch.full_like(x, 2),
        torch.rand_like,
        lambda x: x.new_zeros(2, 3),
        lambda x: x.new_ones((2, 3)),
        lambda x: x.new_full((2, 3), 1),
        lambda x: x.new_tensor([[1.0] * 3] * 2),
    ],
)
def test_factories_give_real_tensors(make: Function) -> None:
    found = make(stand_in(2, 3))
    assert type(found) is Tensor
    assert (found.shape, found.dtype) == ((2, 3), torch.float32)


def test_origins_of_all_that_took_part_are_named() -> None:
    first, second = (placeholder_like(torch.zeros(2), [name]) for name in ("parameter a", "parameter b"))
    assert "of=parameter a, parameter b" in repr(first + second)
    first.add_(second)
    assert "of=parameter a, parameter b" in repr(first)
    many = placeholder_like(torch.zeros(2), [f"parameter {i}" for i in range(9)])
    assert "parameter 3 and 5 more" in repr(many)


# ------------------------------------------------------------------------------------------------ reading
READS: dict[str, Function] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x[0, 0]),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool((x > 0).all()),
    "index": lambda x: [1, 2, 3][x[0, 0].long()],
    "nonzero": lambda x: x.nonzero(),
    "argwhere": torch.argwhere,
    "where": torch.where,
    "unique": torch.unique,
    "unique consecutive": torch.unique_consecutive,
    "allclose": lambda x: torch.allclose(x, torch.zeros(2, 3)),
    "mask": lambda x: torch.ones(2, 3)[x > 0],
    "mask of itself": lambda x: x[x > 0],
    "masked select": lambda x: torch.ones(2, 3).masked_select(x > 0),
    "repeats": lambda x: torch.ones(2).repeat_interleave(x[:, 0].long()),
    "bincount": lambda x: x[0].long().bincount(),
    "fill value": lambda x: torch.full((2,), x[0, 0]),  # type: ignore[call-overload]
    "range": lambda x: torch.arange(x[0, 0]),  # type: ignore[call-overload]
    "one hot without classes": lambda x: F.one_hot(x.long()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_data_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(PipelineCutError, match="reads the data of a value that lives on another stage: .*layer 3"):
        READS[name](stand_in(2, 3))


@pytest.mark.parametrize(
    "leak",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.data_ptr(),
        lambda x: torch.from_dlpack(x),
        lambda x: torch.tensor([x[0, 0], 1.0]),
        lambda x: x.untyped_storage().data_ptr(),
        lambda x: memoryview(x),
    ],
)
def test_no_other_way_leads_to_data(leak: Function) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        leak(stand_in(2, 3))


def test_equal_is_identity() -> None:
    """What looks for a parameter in a list compares it with others."""
    x = stand_in(2)
    assert torch.equal(x, x)
    assert not torch.equal(x, stand_in(2))
    assert not torch.equal(torch.zeros(2), x)


# ------------------------------------------------------------------------------------------------ writing
def add_out(x: Tensor, local: Tensor) -> None:
    torch.add(x.detach(), 1, out=local)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda x, local: local.copy_(x),
    "part": lambda x, local: local[:, 1:].copy_(x[:, 1:]),
    "item": lambda x, local: local.__setitem__((0, 1), x[0, 0]),
    "mask": lambda x, local: local.__setitem__(MASK, x[MASK]),
    "arithmetic": lambda x, local: local.add_(x),
    "out": add_out,
    "list": lambda x, local: torch._foreach_add_([local], [x]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_into_a_local_tensor_is_an_error(name: str) -> None:
    local = torch.zeros(2, 3)
    with pytest.raises(PipelineCutError, match="into (a )?local tensor"):
        WRITES[name](stand_in(2, 3), local)
    assert not local.any()


@pytest.mark.parametrize("name", [n for n in WRITES if n != "list"])
def test_an_open_ledger_follows_the_tensor(name: str) -> None:
    ledger = WriteLedger()
    local, other = torch.zeros(2, 3), torch.zeros(2, 3)
    early_view = local[0]
    with ledger:
        WRITES[name](stand_in(2, 3, ledger=ledger), local)
        for value in (local + 1, local[0], early_view * 2, torch.cat([local, other]), local.T.reshape(-1)):
            assert isinstance(value, Placeholder)
            assert "layer 3" in repr(value)
        assert isinstance(ledger.stand_in(local), Placeholder)
        assert ledger.stand_in(other) is other
        assert type(other + 1) is Tensor
        local.zero_()
        assert isinstance(local + 1, Placeholder), "what was noted stays noted until the step ends"
        with pytest.raises(PipelineCutError, match="reads the data"):
            float(local.sum())
        other.copy_(local)
        assert isinstance(other + 1, Placeholder)
    assert type(local + 1) is Tensor
    with pytest.raises(PipelineCutError, match="writes a value of another stage"):
        local.copy_(stand_in(2, 3, ledger=ledger))


def test_writing_into_a_placeholder_is_nothing() -> None:
    x = stand_in(2, 3)
    x[0] = 1
    x.mul_(2).add_(torch.ones(3))
    x[:, 1:] += 1
    x.view(-1).zero_()
    assert isinstance(x, Placeholder)
    assert x.shape == (2, 3)


@pytest.mark.parametrize(
    "turn",
    [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(1).squeeze_()],
)
def test_turning_in_place_is_followed(turn: Function) -> None:
    real, x, ledger = torch.zeros(2, 3), stand_in(2, 3), WriteLedger()
    expected = turn(real.clone())
    assert turn(x) is x
    with ledger:
        real[0] = stand_in(3, ledger=ledger)
        assert turn(real) is real
        assert isinstance(real + 1, Placeholder)
    for found in (x, real):
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert (x * 2).shape == expected.shape


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_of_other_stages(kind: Any) -> None:
    layer = kind(4, 6, num_layers=2, batch_first=True, bidirectional=True)
    with WriteLedger() as ledger:
        output, _ = layer(stand_in(2, 5, 4, ledger=ledger))
    assert isinstance(output, Placeholder)
    assert output.shape == (2, 5, 12)


def test_changing_the_size_in_place_is_an_error() -> None:
    with pytest.raises(PipelineCutError, match=r"changes the shape .* in place, from \(2, 3\) to .*layer 3"):
        stand_in(2, 3).resize_(3, 3)


def test_lists_of_parameters() -> None:
    """Optimizers and averages hand over all parameters at once: those with data are computed."""
    mine, x = torch.ones(2), stand_in(2)
    torch._foreach_mul_([mine, x], 3.0)
    assert mine.tolist() == [3, 3]
    found = torch._foreach_add([x, mine], [x, mine])
    assert isinstance(found[0], Placeholder)
    assert found[1].tolist() == [6, 6]
    torch._foreach_mul_([x, x], 2.0)


# ------------------------------------------------------------------------------------------------ parameters
def parameter_stand_in(requires_grad: bool = True) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, 3), requires_grad)
    return placeholder_parameter(parameter, "layer.weight", CPU)


def test_a_parameter_without_data_is_a_parameter() -> None:
    module = nn.Linear(3, 2)
    module.weight = parameter_stand_in()
    assert isinstance(module.weight, nn.Parameter)
    assert dict(module.named_parameters())["weight"] is module.weight
    assert module.weight.requires_grad
    assert not parameter_stand_in(False).requires_grad
    y = module(torch.ones(4, 3))
    assert isinstance(y, Placeholder)
    assert y.requires_grad
    module.weight.requires_grad_(False)
    module.zero_grad()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_skip_it(kind: type[torch.optim.Optimizer], foreach: bool) -> None:
    mine = nn.Parameter(torch.ones(2))
    reference = nn.Parameter(torch.ones(2))
    optimizer = kind([parameter_stand_in(), mine], lr=0.1, foreach=foreach)  # type: ignore[call-arg]
    plain = kind([reference], lr=0.1, foreach=foreach)  # type: ignore[call-arg]
    for _ in range(2):
        for p in (mine, reference):
            p.grad = torch.ones(2)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
    torch.testing.assert_close(mine, reference, rtol=0, atol=0)
    torch.nn.utils.clip_grad_norm_([parameter_stand_in(), mine], 1.0)


def test_copies_are_placeholders_too() -> None:
    module = nn.Linear(3, 2)
    module.weight = parameter_stand_in()
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, Placeholder)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight is not module.weight
    assert isinstance(module.to(torch.float64).weight, Placeholder)


def test_views_of_a_parameter_in_inference_mode() -> None:
    """As learned positions are used in validation."""
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            x = torch.zeros(4, 3) + parameter_stand_in()[:1]
            assert isinstance(x[1:].reshape(-1), Placeholder)
            x[0] = 1


# ------------------------------------------------------------------------------------------------ trees
def test_placeholders_in_any_structure() -> None:
    x, y = stand_in(1), stand_in(2)
    tree = {"a": [x, torch.ones(1), (None, {"b": y})], "c": "text", "d": (1, 2.5, True)}
    assert placeholders_in(tree) == [x, y]
    assert placeholders_in(x) == [x]
    assert placeholders_in([1, None, torch.ones(1)]) == []


def test_outlines() -> None:
    value = {"a": (torch.zeros(2, 3), None), "b": [torch.zeros(1, dtype=torch.int64, requires_grad=False), 3, "text"]}
    outline = Outline.of(value)
    assert outline.leaves[0] == TensorMeta((2, 3), torch.float32, False)
    assert outline == Outline.of({"a": (torch.ones(2, 3), None), "b": [torch.ones(1).long(), 3, "text"]})
    assert outline != Outline.of({"a": (torch.ones(2, 4), None), "b": [torch.ones(1).long(), 3, "text"]})
    assert outline != Outline.of({"a": [torch.ones(2, 3), None], "b": [torch.ones(1).long(), 3, "text"]})
    assert pickle.loads(pickle.dumps(outline)) == outline
    made = outline.stand_in(["output of layer 1"], CPU)
    assert [t.shape for t in placeholders_in(made)] == [(2, 3), (1,)]
    assert made["a"][1] is None
    assert made["b"][1:] == [3, "text"]
