"""Whole tensors without processes: one owner holds everything, and each operation must do what it does to the owner."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.whole.tensor import WholeParameter, WholeTensor


class Owned:
    """A value that counts how often it is gathered."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.requires_grad = True
        self.reads = self.writes = 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.tensor.clone()

    def write(self, whole: Tensor) -> None:
        self.writes += 1
        self.tensor.copy_(whole)

    def copy(self) -> Owned:
        return Owned(self.tensor.clone())


class OwnedGradient:
    def __init__(self, tensor: Tensor | None) -> None:
        self.value = None if tensor is None else Owned(tensor)

    def get(self) -> Tensor | None:
        return None if self.value is None else WholeTensor(self.value, self.value.tensor.to("meta"), CPU)

    def set(self, gradient: Tensor | None) -> None:
        self.value = None if gradient is None else Owned(gradient.clone())

    def copy(self, value: Any) -> OwnedGradient:
        return OwnedGradient(None)


CPU = torch.device("cpu")


def formula() -> Tensor:
    return torch.sin(torch.arange(12.0)).view(3, 4)


def pair() -> tuple[WholeParameter, nn.Parameter, Owned]:
    """A stand-in and a plain parameter that start alike."""
    owner = Owned(formula())
    stand_in = WholeParameter.of(owner, OwnedGradient(formula() * 2), formula().to("meta"), CPU)
    plain = nn.Parameter(formula())
    plain.grad = formula() * 2
    return stand_in, plain, owner


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "item": lambda p: p.sum().item(),
    "float": lambda p: float(p.detach()[1, 2]),
    "views": lambda p: p.t()[1:].reshape(-1)[::2],
    "split": lambda p: [part.sum() for part in p.split(2, dim=1)],
    "unbind": lambda p: p.unbind(0)[2] + 1,
    "comparison": lambda p: (p > 0).sum(),
    "matmul": lambda p: p @ p.t(),
    "foreach": lambda p: torch._foreach_norm([p.detach(), p.grad]),
    "stack": lambda p: torch.stack([p, p.grad]),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "list": lambda p: p.tolist(),
    "array": lambda p: torch.tensor(p.data.__array__("float64").sum()),
    "dtype": lambda p: p.to(torch.float64),
    "shape": lambda p: (p.shape, p.numel(), p.stride(), p.dtype, p.requires_grad, p.is_leaf, p.dim(), p.element_size()),
    "is parameter": lambda p: isinstance(p, nn.Parameter),
    "total norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "deep copy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "pickled data": lambda p: pickle.loads(pickle.dumps(p.data[1])),
    "copied data": lambda p: copy.deepcopy({"p": p.data})["p"],
    "no gradient of a view": lambda p: p.data.grad,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_gives_what_a_plain_parameter_gives(read: Callable[[Any], Any]) -> None:
    stand_in, plain, owner = pair()
    found, expected = read(stand_in), read(plain)
    torch.testing.assert_close(found, expected) if not isinstance(expected, tuple | bool | None) else None
    assert type(found) is type(expected)
    if isinstance(expected, tuple | bool | None):
        assert found == expected
    assert owner.writes == 0


def test_saving_stores_data() -> None:
    stand_in, plain, _ = pair()
    file = io.BytesIO()
    torch.save({"p": stand_in, "data": stand_in.data}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["p"], plain)
    assert torch.equal(loaded["data"], plain)


def _set_item(p: Any) -> None:
    p.data[1, :2] = 7


def _mask(p: Any) -> None:
    p.data.view(-1)[p.data.view(-1) < 0] = 0


def _data(p: Any) -> None:
    p.data = p.data.abs() + 1


def _load(p: Any) -> None:
    holder = nn.Module()
    holder._parameters["p"] = p
    holder.load_state_dict({"p": torch.arange(12.0).view(3, 4)})


def _vector(p: Any) -> None:
    nn.utils.vector_to_parameters(torch.arange(12.0), [p])


def _random(p: Any) -> None:
    torch.manual_seed(0)
    p.data.normal_()


def _out(p: Any) -> None:
    torch.add(torch.ones(3, 4), 1, out=p.data)


WRITES: dict[str, Callable[[Any], Any]] = {
    "clamp": lambda p: p.clamp_(-0.5, 0.5),
    "data": lambda p: p.data.mul_(2),
    "view of a view": lambda p: p.data.t()[1:3].view(2, 3)[0].add_(1),
    "chunk": lambda p: p.chunk(2, dim=1)[1].zero_(),
    "item": _set_item,
    "mask": _mask,
    "own value": lambda p: p.lerp_(p.data * 2, 0.3),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
    "augmented": lambda p: p.__iadd__(1),
    "assigned data": _data,
    "loaded": _load,
    "from vector": _vector,
    "random": _random,
    "out": _out,
    "init": lambda p: nn.init.constant_(p, 0.25),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_goes_through(write: Callable[[Any], Any]) -> None:
    stand_in, plain, owner = pair()
    with torch.no_grad():
        write(stand_in)
        write(plain)
    assert torch.equal(owner.tensor, plain)
    assert not torch.equal(owner.tensor, formula())


def test_in_place_operators_return_the_stand_in() -> None:
    stand_in, _, owner = pair()
    with torch.no_grad():
        assert stand_in.mul_(2).add_(1) is stand_in
    assert torch.equal(owner.tensor, formula() * 2 + 1)


def test_a_leaf_that_requires_gradients_is_not_written_with_gradients_on() -> None:
    stand_in, plain, _ = pair()
    for p in (stand_in, plain):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            p.mul_(2)


def test_gradients_are_read_written_and_replaced() -> None:
    stand_in, plain, _ = pair()
    for p in (stand_in, plain):
        assert p.grad is not None
        p.grad.mul_(0.5)
        p.grad.view(-1)[:2].zero_()
        nn.utils.clip_grad_norm_([p], 0.7)
    torch.testing.assert_close(stand_in.grad.clone(), plain.grad)  # type: ignore[union-attr]
    stand_in.grad = None
    assert stand_in.grad is None
    with pytest.raises(RuntimeError, match="different size"):
        stand_in.grad = torch.zeros(2)


def test_freezing_reaches_the_owner() -> None:
    stand_in, _, owner = pair()
    holder = nn.Module()
    holder._parameters["p"] = stand_in
    holder.requires_grad_(False)
    assert (owner.requires_grad, stand_in.requires_grad) == (False, False)
    stand_in.requires_grad = True
    assert (owner.requires_grad, stand_in.requires_grad) == (True, True)


def test_one_gather_serves_one_operation() -> None:
    stand_in, _, owner = pair()
    torch.stack([stand_in, stand_in.data.abs(), stand_in.detach()])
    assert owner.reads == 2  # abs, stack


def test_a_copy_inside_of_a_module_is_a_value_of_its_own() -> None:
    stand_in, _, owner = pair()
    holder = nn.Module()
    holder._parameters["p"] = stand_in
    copied = copy.deepcopy(holder).p
    assert isinstance(copied, WholeParameter)
    with torch.no_grad():
        copied.lerp_(torch.ones(3, 4), 0.5)
    assert torch.equal(owner.tensor, formula())
    torch.testing.assert_close(copied.data.clone(), formula() * 0.5 + 0.5)
    assert copied.grad is None


def test_data_of_another_shape_is_refused() -> None:
    stand_in, _, _ = pair()
    with pytest.raises(ValueError, match=r"shape \(3, 4\) cannot be replaced by a tensor of shape \(4,\)"):
        stand_in.data = torch.zeros(4)


def test_hooks_on_gradients_are_refused() -> None:
    stand_in, _, _ = pair()
    for register in (stand_in.register_hook, stand_in.register_post_accumulate_grad_hook):
        with pytest.raises(RuntimeError, match="before ranks hold parts only, in __init__, configure_model or setup"):
            register(lambda *args: None)
