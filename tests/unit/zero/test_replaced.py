"""Parameters whose data somebody has replaced come back with the new values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.zero.replaced import put_back


def test_replaced_data_is_put_back() -> None:
    flat = torch.zeros(6)
    places = [flat[:4].view(2, 2), flat[4:]]
    parameters = [nn.Parameter(place) for place in places]
    parameters[0].data = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()
    parameters[1].data.fill_(5.0)
    put_back(parameters, places)
    assert flat.tolist() == [1, 2, 3, 4, 5, 5]
    assert [p.data_ptr() for p in parameters] == [place.data_ptr() for place in places]
    put_back(parameters, [])
    for data in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        parameters[1].data = data
        with pytest.raises(RuntimeError, match=r"of shape \(2,\) and torch.float32 was replaced by data of shape \("):
            put_back(parameters, places)
