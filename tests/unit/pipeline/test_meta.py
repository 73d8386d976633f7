"""Outlines of operator results, remembered by the outlines of the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_parallel.pipeline.meta import result_on_meta

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


def outlines(result: Any) -> list[tuple[Any, ...]]:
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)
    return [(tuple(t.shape), t.stride(), t.dtype) for t in tensors]


@pytest.mark.parametrize(("operator", "args", "kwargs"), CALLS)
def test_result_has_the_outline_of_the_real_one(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    expected = outlines(operator(*args, **kwargs))
    for _ in range(2):  # computed, then remembered
        result = result_on_meta(operator, args, kwargs)
        assert outlines(result) == expected
        assert all(t.is_meta for t in ([result] if isinstance(result, torch.Tensor) else result))


def test_another_outline_is_another_result() -> None:
    assert result_on_meta(aten.relu.default, (MATRIX,), {}).shape == (3, 4)
    assert result_on_meta(aten.relu.default, (MATRIX.T,), {}).stride() == (1, 4)
    assert result_on_meta(aten.relu.default, (MATRIX.double(),), {}).dtype is torch.float64


def test_results_share_nothing() -> None:
    first = result_on_meta(aten.relu.default, (MATRIX,), {})
    first.unsqueeze_(0)
    assert result_on_meta(aten.relu.default, (MATRIX,), {}).shape == (3, 4)


def test_argument_that_is_no_key() -> None:
    class Unhashable(int):
        __hash__ = None  # type: ignore[assignment]

    for _ in range(2):
        assert result_on_meta(aten.sum.dim_IntList, (MATRIX, [Unhashable(1)]), {}).shape == (3,)
