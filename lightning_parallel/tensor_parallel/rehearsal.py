"""Mechanism: rehearse one module on every tensor rank in turn, in one process, and compare with the whole module.

The whole module runs once and the output of its row layers is recorded. Then each rank's slice of it runs, and where a
row layer would sum over the ranks the recorded sum is returned. If the ranks' products add up to the recorded output
at every row layer, and every rank ends with the whole module's output, then by induction over the calls the ranks
together compute what the whole module computes.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_parallel.tensor_parallel.local_shapes import LocalShape, LocalViews, local_arguments
from lightning_parallel.tensor_parallel.rules import HeadPatch, is_conv1d
from lightning_parallel.tensor_parallel.sharding import ShardSpec

__all__ = ["Bench", "Bypassed", "Call", "Mismatch", "Rehearsal", "Trial", "clone_module", "tensors_in"]

_TOLERANCE = 1e-4


class Mismatch(Exception):
    """A rank's slice fails or computes something else; the text says where."""


class Bypassed(Mismatch):
    """The module uses weights of the layers that are to be split without calling the layers."""


@dataclass(frozen=True)
class Call:
    """Arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Names, relative to the rehearsed module, of what is split and how."""

    ranks: int
    columns: tuple[str, ...]
    row: str
    shards: Mapping[str, ShardSpec]


@dataclass(frozen=True)
class Trial:
    """One way to make the module's forward run on local shapes; module names are relative."""

    patches: tuple[HeadPatch, ...] = ()
    stand_in: tuple[str, ...] = ()
    local_views: bool = False


class Rehearsal:
    """The whole module's run, against which trials are compared.

    Raises:
        Bypassed: the module uses a weight that is to be split outside of its layer.
        Mismatch: the whole module itself cannot be called like this.
    """

    def __init__(self, module: nn.Module, bench: Bench, call: Call, names: Sequence[str]) -> None:
        self.module = module.eval()
        self.bench = bench
        self.call = call
        self.names = tuple(names)
        self.column_inputs: list[Tensor] = []
        self.row_outputs: list[Tensor] = []
        self._row_inputs: list[Any] = []
        self._readers: dict[int, list[str]] = {}
        self.draws_random_numbers = True
        handles = [
            module.get_submodule(name).register_forward_pre_hook(partial(self._record_input, name))
            for name in bench.columns
        ]
        handles += [module.get_submodule(name).register_forward_hook(_detached) for name in bench.columns]
        row = module.get_submodule(bench.row)
        handles.append(row.register_forward_pre_hook(lambda _, args: self._row_inputs.append(args)))
        handles.append(row.register_forward_hook(self._record_output))
        try:
            self.output = _run(module, call)
        finally:
            for handle in handles:
                handle.remove()
        self._refuse_bypasses()
        if not self.row_outputs or not self.column_inputs:
            raise Mismatch("its forward does not call the layers of the plan")

    def _record_input(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.column_inputs.append(args[0])
        self._readers.setdefault(id(args[0]), []).append(name)

    def _record_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if isinstance(output, FakeTensor):
            raise Mismatch("its arguments are objects whose tensors cannot be replaced")
        self.row_outputs.append(output.detach())
        return output.detach()

    def _refuse_bypasses(self) -> None:
        """Layers returned values without a graph: weights on which anything still depends were used past them."""
        names = Counter(id(p) for _, p in self.module.named_parameters(remove_duplicate=False))
        untied = {n: p for n, p in self.module.named_parameters() if n in self.bench.shards and names[id(p)] == 1}
        past = sorted(_reached([*self.column_inputs, *tensors_in((self._row_inputs, self.output))], untied))
        if past:
            layer = past[0].rpartition(".")[0]
            raise Bypassed(f"its forward uses {past[0]} past {layer}, which would not sum over the ranks then")

    def stand_in_names(self) -> tuple[str, ...]:
        """Parameters of the forward whose tensor goes into the columns as it is."""
        given = dict(zip(self.names, self.call.args, strict=False)) | self.call.kwargs
        return tuple(name for name, value in given.items() if any(value is x for x in self.column_inputs))

    def shared_columns(self) -> tuple[tuple[str, ...], ...]:
        """Columns that read the same tensor."""
        return tuple(tuple(names) for names in self._readers.values() if len(set(names)) == len(names) > 1)

    def check(self, trial: Trial) -> None:
        """Run every rank of ``trial`` and compare.

        Raises:
            Mismatch: an operation fails, a shape differs, or the ranks do not add up to the whole.
        """
        sums: list[Tensor] = []
        for rank in range(self.bench.ranks):
            run = _RankRun(self, trial, rank)
            output = run.run()
            _compare(output, self.output, f"the output of tensor rank {rank}")
            if len(run.partials) != len(self.row_outputs):
                raise Mismatch(f"its row layer runs {len(run.partials)} times instead of {len(self.row_outputs)}")
            parts = [part.detach() for part in run.partials]
            sums = parts if not sums else [a + b for a, b in zip(sums, parts, strict=True)]
        bias = self._row_bias()
        for total, whole in zip(sums, self.row_outputs, strict=True):
            _compare(total if bias is None else total + bias, whole, f"the sum over tensor ranks at {self.bench.row!r}")
        with torch.random.fork_rng(devices=[]):
            training = _RankRun(self, trial, 0, train=True)
            training.run()
        self.draws_random_numbers = training.draws_random_numbers

    def partial_parameters(self, trial: Trial) -> tuple[str, ...]:
        """Whole parameters of which each rank only sees the part of the gradient that comes from its slice.

        Raises:
            Mismatch: a parameter is used both on local and on whole activations, so that neither rule is right.
        """
        run = _RankRun(self, trial, 0, detach=True)
        output = run.run()
        whole = {
            name: parameter
            for name, parameter in run.module.named_parameters()
            if name not in self.bench.shards and not name.startswith(f"{self.bench.row}.")
        }
        behind = _reached(list(run.partials), whole)
        ahead = _reached([*run.column_inputs, *tensors_in(output)], whole)
        both = sorted(behind & ahead)
        if both:
            raise Mismatch(f"its parameter {both[0]!r} is used on whole and on split activations")
        return tuple(name for name in whole if name in behind)

    def _row_bias(self) -> Tensor | None:
        bias = getattr(self.module.get_submodule(self.bench.row), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None


class _RankRun:
    """One run of one rank's slice, with the recorded sums in place of communication."""

    def __init__(
        self, rehearsal: Rehearsal, trial: Trial, rank: int, *, detach: bool = False, train: bool = False
    ) -> None:
        self.rehearsal = rehearsal
        self.trial = trial
        self.detach = detach
        self.partials: list[Tensor] = []
        self.column_inputs: list[Tensor] = []
        self.draws_random_numbers = False
        self._generator_state: Tensor | None = None
        bench = rehearsal.bench
        self.module = clone_module(rehearsal.module, self._slicer(bench, rank)).train(train)
        for patch in trial.patches:
            setattr(self.module.get_submodule(patch.module), patch.attribute, patch.local)
        for name in bench.columns:
            column = self.module.get_submodule(name)
            size = "nf" if is_conv1d(column) else "out_features"
            vars(column)[size] = bench.shards[f"{name}.weight"].local_size(rank)
            column.register_forward_pre_hook(self._enter_column)
            column.register_forward_hook(self._leave_column)
        row = self.module.get_submodule(bench.row)
        vars(row)["nx" if is_conv1d(row) else "in_features"] = bench.shards[f"{bench.row}.weight"].local_size(rank)
        row.register_forward_pre_hook(self._enter_row)
        row.register_forward_hook(self._leave_row)

    @staticmethod
    def _slicer(bench: Bench, rank: int) -> Callable[[str, Tensor], Tensor]:
        def slice_of(name: str, tensor: Tensor) -> Tensor:
            spec = bench.shards.get(name)
            if spec is None:
                return tensor
            pieces = [tensor.narrow(spec.dim, s.start, s.stop - s.start) for s in spec.parts[rank]]
            return torch.cat(pieces, spec.dim)

        return slice_of

    def _enter_column(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        value = args[0].full if isinstance(args[0], LocalShape) else args[0]
        self.column_inputs.append(value)
        return (value.detach() if self.detach else value, *args[1:])

    def _leave_column(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._generator_state is None:
            self._generator_state = torch.get_rng_state()

    def _enter_row(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        before, self._generator_state = self._generator_state, None
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self.draws_random_numbers = True

    def _leave_row(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        place = len(self.partials)
        bias = getattr(module, "bias", None)
        self.partials.append(output - bias if isinstance(bias, Tensor) else output)
        # More calls come from activation checkpointing, which recomputes in the same order; others are counted later.
        whole = self.rehearsal.row_outputs[place % len(self.rehearsal.row_outputs)]
        if whole.shape != output.shape:
            raise Mismatch(f"its row layer returns shape {tuple(output.shape)} instead of {tuple(whole.shape)}")
        return whole

    def run(self) -> Any:
        call, ranks = self.rehearsal.call, self.rehearsal.bench.ranks
        stand_in = frozenset(self.trial.stand_in)
        args, kwargs = local_arguments(self.rehearsal.names, stand_in, ranks, call.args, call.kwargs)
        with LocalViews(ranks) if self.trial.local_views else nullcontext():
            return _run(self.module, Call(args, kwargs))


def clone_module(module: nn.Module, tensor: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of the module tree with other tensors: ``tensor(name, old)`` for every parameter and buffer.

    Hooks are left behind and plain containers copied, so that running the copy does not change the original. Other
    attributes are shared.
    """
    return _clone(module, "", tensor, {})


def _clone(module: nn.Module, prefix: str, tensor: Callable[[str, Tensor], Tensor], seen: dict[int, Any]) -> nn.Module:
    if id(module) in seen:
        clone: nn.Module = seen[id(module)]
        return clone
    own = vars(module).get("forward")
    if own is not None and getattr(own, "__self__", None) is not module:
        raise Mismatch(f"the forward of its {type(module).__name__} is replaced on the instance")
    clone = type(module).__new__(type(module))
    seen[id(module)] = clone
    state: dict[str, Any] = {
        key: type(value)() if "_hooks" in key else _copied(value, module, clone) for key, value in vars(module).items()
    }
    state["_compiled_call_impl"] = None
    state["_modules"] = {
        name: None if child is None else _clone(child, f"{prefix}{name}.", tensor, seen)
        for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: None if old is None else _converted(f"{prefix}{name}", old, tensor, seen)
            for name, old in state[kind].items()
        }
    vars(clone).update(state)
    return clone


def _copied(value: Any, module: nn.Module, clone: nn.Module) -> Any:
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, clone)
    if type(value) in (dict, list, set):
        return value.copy()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _converted(name: str, old: Tensor, tensor: Callable[[str, Tensor], Tensor], seen: dict[int, Any]) -> Tensor:
    if id(old) not in seen:
        new = tensor(name, old)
        if isinstance(old, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new.detach(), requires_grad=new.is_floating_point())
        seen[id(old)] = new
    kept: Tensor = seen[id(old)]
    return kept


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))


def _detached(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.detach()


def _run(module: nn.Module, call: Call) -> Any:
    """Call the module; the user's code may raise anything, which becomes a Mismatch that names the line."""
    try:
        with torch.enable_grad():
            return module(*call.args, **call.kwargs)
    except Mismatch:
        raise
    except Exception as error:  # the boundary to code that is not ours
        raise Mismatch(_failed_line(error)) from error


def _failed_line(error: Exception) -> str:
    """The user's line that failed: the last frame outside torch and this package."""
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and "lightning_parallel/tensor_parallel" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} `{frame.line}` fails with {reason}"
    return reason


def _compare(found: Any, wanted: Any, what: str) -> None:
    pairs = list(tensors_in(found)), list(tensors_in(wanted))
    if len(pairs[0]) != len(pairs[1]):
        raise Mismatch(f"{what} has {len(pairs[0])} tensors instead of {len(pairs[1])}")
    for a, b in zip(*pairs, strict=True):
        if a.shape != b.shape:
            raise Mismatch(f"{what} has shape {tuple(a.shape)} instead of {tuple(b.shape)}")
        if not b.is_floating_point():
            continue
        scale = float(b.detach().abs().nan_to_num().max()) if b.numel() else 0.0
        if not torch.allclose(a, b, rtol=0.0, atol=_TOLERANCE * max(scale, 1e-3), equal_nan=True):
            off = float((a - b).detach().abs().nan_to_num().max())
            raise Mismatch(f"{what} is off by {off:.2g} (largest value {scale:.2g})")


def _reached(outputs: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Names of the parameters on which some output depends."""
    total = [output.sum() for output in outputs if output.requires_grad]
    used = [(name, p) for name, p in parameters.items() if p.requires_grad]
    if not total or not used:
        return set()
    try:
        gradients = torch.autograd.grad(total, [p for _, p in used], allow_unused=True)
    except Exception as error:  # checkpointed code of the user's runs again here
        raise Mismatch(_failed_line(error)) from error
    return {name for (name, _), gradient in zip(used, gradients, strict=True) if gradient is not None}
