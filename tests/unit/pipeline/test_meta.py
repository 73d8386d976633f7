"""Outlines of operator results, remembered by the outlines of the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from lightning_parallel.pipeline.meta import TensorOutline, outline_of_result

aten = torch.ops.aten
MATRIX = torch.ones(3, 4)
CALLS = [
    pytest.param(aten.add.Tensor, (MATRIX, MATRIX.T.contiguous().T), {}, id="add"),
    pytest.param(aten.mul.Tensor, (torch.ones(3, dtype=torch.int64), True), {}, id="mul-bool"),
    pytest.param(aten.mul.Tensor, (torch.ones(3, dtype=torch.int64), 1), {}, id="mul-int"),
    pytest.param(aten.mul.Tensor, (torch.ones(3, dtype=torch.int64), 1.0), {}, id="mul-float"),
    pytest.param(aten.t.default, (MATRIX,), {}, id="view"),
    pytest.param(aten.sum.dim_IntList, (MATRIX, [1]), {"dtype": torch.float64}, id="list-and-dtype"),
    pytest.param(aten.split.Tensor, (MATRIX, 2), {}, id="several-results"),
    pytest.param(aten.embedding.default, (MATRIX, torch.zeros(2, 5, dtype=torch.int64)), {}, id="embedding"),
]


@pytest.mark.parametrize(("operator", "args", "kwargs"), CALLS)
def test_result_has_the_outline_of_the_real_one(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    expected = tree_map_only(torch.Tensor, TensorOutline.of, operator(*args, **kwargs))
    for _ in range(2):  # computed, then remembered
        assert outline_of_result(operator, args, kwargs) == expected


def test_another_outline_is_another_result() -> None:
    relu = aten.relu.default
    assert outline_of_result(relu, (MATRIX,), {}).shape == (3, 4)
    assert outline_of_result(relu, (MATRIX.T,), {}).stride == (1, 4)
    assert outline_of_result(relu, (MATRIX.double(),), {}).dtype is torch.float64


def test_another_keyword_or_nesting_is_another_result() -> None:
    add, cat = aten.add.Tensor, aten.cat.default
    counts = torch.ones(2, dtype=torch.int64)
    assert outline_of_result(aten.sum.dim_IntList, (MATRIX, [0]), {"keepdim": True}).shape == (1, 4)
    assert outline_of_result(aten.sum.dim_IntList, (MATRIX, [0]), {"keepdim": False}).shape == (4,)
    assert outline_of_result(add, (counts, counts), {"alpha": 1}).dtype is torch.int64
    assert outline_of_result(add, (counts.double(), counts), {"alpha": 1}).dtype is torch.float64
    assert outline_of_result(cat, ([MATRIX, MATRIX],), {}).shape == (6, 4)
    assert outline_of_result(cat, ([MATRIX, MATRIX, MATRIX], 1), {}).shape == (3, 12)


def test_an_outline_is_a_tensor_of_that_outline() -> None:
    meta = TensorOutline.of(MATRIX.T).to_meta()
    assert meta.is_meta
    assert TensorOutline.of(meta) == TensorOutline((4, 3), (1, 4), torch.float32)


def test_argument_that_is_no_key() -> None:
    class Unhashable(int):
        __hash__ = None  # type: ignore[assignment]

    for _ in range(2):
        assert outline_of_result(aten.sum.dim_IntList, (MATRIX, [Unhashable(1)]), {}).shape == (3,)
