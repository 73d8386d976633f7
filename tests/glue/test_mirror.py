"""Attributes that one copy of a module changes in a step, repeated on another copy."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.pipeline.placeholder import PipelineCutError, placeholder_like
from lightning_parallel.strategies.mirror import AttributeMirror
from tests.glue.oracle import assert_same


class Collector(LightningModule):
    """Every kind of attribute that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))
        self.outputs: list[Any] = []
        self.long = list(range(200))
        self.by_loader: Any = defaultdict(list)
        self.nested: Any = {"a": [1, 2], "b": {"c": [0.5]}, "sum": torch.zeros(())}
        self.vocabulary = {str(i): i for i in range(200)}
        self.words = {"one", "two"}
        self.recent: Any = deque([1, 2, 3], maxlen=3)
        self.ordered: Any = OrderedDict(x=1)
        self.counter = Counter(a=1)
        self.steps, self.name, self.best = 0, "start", float("nan")
        self.mean = torch.zeros(3)
        self.alias = self.outputs
        self.nothing = None

    def state(self) -> dict[str, Any]:
        names = ["outputs", "long", "by_loader", "nested", "vocabulary", "ordered", "counter", "steps", "name", "best"]
        own = {name: getattr(self, name) for name in [*names, "mean", "total", "nothing"]}
        more = {"words": sorted(self.words), "recent": list(self.recent), "late": getattr(self, "late", None)}
        return copy.deepcopy({**own, **more})


def append(m: Any) -> None:
    m.outputs.append({"pred": torch.arange(3.0), "id": len(m.outputs), "text": "x"})
    m.by_loader[len(m.outputs) % 2].append(len(m.outputs))
    m.steps += 1
    m.mean += 1
    m.total += 2
    m.nested["a"].append(3)
    m.nested["b"]["c"][0] += 1.0
    m.nested["sum"] += 1
    m.long.append(m.steps)
    m.recent.append(m.steps)
    m.words.add(str(m.steps))
    m.counter["b"] += 1
    m.ordered["y"] = m.steps


def replace(m: Any) -> None:
    m.name, m.best, m.nothing, m.late = "later", 1.5, [1], {"new": torch.ones(1)}
    m.long[len(m.long) // 2] = -1
    m.vocabulary["150"] = -1
    m.vocabulary["more"] = 1
    m.outputs = [torch.ones(2)]
    m.mean = m.mean + 1
    m.nested["b"] = {"c": [2.0], "d": 1}


def shrink(m: Any) -> None:
    m.long.clear()
    m.long.extend([5, 6])
    del m.nested["a"]
    m.words.discard("one")
    m.vocabulary.pop("3")
    m.recent.clear()
    m.outputs.clear()
    if hasattr(m, "late"):
        del m.late


@pytest.mark.parametrize("inference", [False, True])
def test_every_change_is_repeated_and_only_the_new_is_sent(inference: bool) -> None:
    last, first = Collector(), Collector()
    mirrors = [AttributeMirror(m, torch.device("cpu")) for m in (last, first)]
    steps: list[Callable[[Any], None]] = [append, append, replace, append, shrink, replace, lambda m: None]
    with torch.inference_mode(inference):
        for step in steps:
            held = [mirror.hold() for mirror in mirrors]
            step(last)
            # The other stage leaves its step early, after it changed some of the same things.
            first.steps += 1
            first.outputs.append("half done")
            first.nested["half"] = 1
            first.mean += 7
            changes = mirrors[0].changes(held[0])
            mirrors[1].repeat(held[1], changes)
            assert_same(first.state(), last.state(), step.__name__)
            assert type(first.by_loader) is defaultdict
            assert "vocabulary" not in changes or step is not append
            assert len(str(changes)) < 1500, "more was sent than what is new"
    unchanged = mirrors[0].changes(mirrors[0].hold())
    assert unchanged == {} or inference


def test_a_step_that_does_not_count_is_undone() -> None:
    module = Collector()
    mirror = AttributeMirror(module, torch.device("cpu"))
    before, outputs = module.state(), module.outputs
    for step in (append, replace, shrink):
        held = mirror.hold(exactly=True)
        step(module)
        mirror.restore(held)
        assert_same(module.state(), before, step.__name__)
        assert module.outputs is outputs


def test_values_of_other_stages_and_objects_that_cannot_travel_are_refused_by_name() -> None:
    module = Collector()
    mirror = AttributeMirror(module, torch.device("cpu"))
    held = mirror.hold()
    module.outputs.append(placeholder_like(torch.ones(2), ["output of net.blocks.0"]))
    with pytest.raises(PipelineCutError, match=r"changed Collector\.outputs.*net\.blocks\.0"):
        mirror.changes(held)
    module.outputs.clear()
    module.nested["function"] = lambda: None
    with pytest.raises(PipelineCutError, match=r"changed Collector\.nested .* cannot get its function"):
        mirror.changes(held)
