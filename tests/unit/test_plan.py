"""Plans on the full model, on the meta device and in one process: rules, tags, refusals."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.blocks import find_blocks
from lightning_parallel.tensor_parallel import fitting
from lightning_parallel.tensor_parallel.plan import HeadPatch, TensorPlan, resolve_plan
from lightning_parallel.tensor_parallel.sharding import (
    split_even,
    split_heads,
    split_kv_heads,
    split_packed,
    split_qkv,
    split_vocab,
)
from tests.distributed.tensor_models import GPT, Block, ChunkAttention, GroupedAttention, ViewAttention, build


@pytest.mark.parametrize("module", ["patterns", "tensor_parallel.regions"])
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_parallel.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def rules(plan: TensorPlan) -> dict[str, str]:
    return {rule.name: rule.style for rule in plan.rules}


def test_automatic_rules_of_a_gpt_on_the_meta_device() -> None:
    """The largest vocabulary with a head counts as the tokens, although there are more positions than tokens."""
    with torch.device("meta"):
        model = build_meta()
    plan = resolve_plan(model, "auto", 2)
    assert rules(plan) == {
        "tok": "vocab",
        "blocks.0.attn.c_attn": "colwise_qkv",
        "blocks.0.attn.c_proj": "rowwise",
        "blocks.0.mlp.0": "colwise",
        "blocks.0.mlp.2": "rowwise",
        "blocks.1.attn.c_attn": "colwise_qkv",
        "blocks.1.attn.c_proj": "rowwise",
        "blocks.1.mlp.0": "colwise",
        "blocks.1.mlp.2": "rowwise",
        "head": "colwise_gather",
    }
    assert plan.replicated == ("pos",)
    attention = plan.regions[0]
    assert (attention.name, attention.columns, attention.row) == (
        "blocks.0.attn",
        ("blocks.0.attn.c_attn",),
        "blocks.0.attn.c_proj",
    )
    assert set(attention.patches) == {
        HeadPatch("blocks.0.attn", "n_head", 8, 4),
        HeadPatch("blocks.0.attn", "n_embd", 32, 16),
    }
    assert attention.stand_in == ("x",)
    assert attention.evidence == "checked"
    tags = plan.tags(model)
    assert list(tags) == [name for name, _ in model.named_parameters()]
    assert tags["tok.weight"].shard == split_vocab(37, 2)
    assert tags["head.weight"].shard == split_vocab(37, 2)
    assert tags["blocks.1.attn.c_attn.weight"].shard == split_qkv(0, 8, 8, 4, 2)
    assert tags["blocks.1.attn.c_attn.bias"].shard == split_qkv(0, 8, 8, 4, 2)
    assert tags["blocks.1.attn.c_proj.weight"].shard == split_heads(1, 8, 4, 2)
    assert tags["blocks.0.mlp.2.weight"].shard == split_even(1, 128, 2)
    assert tags["blocks.0.mlp.2.bias"].shard is None
    assert not any(tag.partial_gradient for tag in tags.values())


def build_meta() -> nn.Module:
    return GPT(lambda: Block(ViewAttention(32, 8), 32), 32)


def test_nothing_changes_in_the_model() -> None:
    model = build("grouped2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    resolve_plan(model, "auto", 2)
    assert torch.equal(state, torch.get_rng_state()), "user code must see the random numbers of a plain run"
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_size_one_is_an_empty_plan() -> None:
    plan = resolve_plan(build("view"), "auto", 1)
    assert not plan
    assert not [*plan.rules, *plan.regions, *plan.replicated]
    assert all(tag.shard is None for tag in plan.tags(build("view")).values())


def test_a_weight_that_is_computed_stays_whole() -> None:
    model = build("view")
    nn.utils.parametrizations.weight_norm(model.get_submodule("blocks.0.mlp.2"))
    plan = resolve_plan(model, "auto", 2)
    assert "blocks.0.mlp.0" not in rules(plan)
    assert {"blocks.0.mlp.0", "blocks.0.mlp.2"} <= set(plan.replicated)
    assert rules(plan)["blocks.1.mlp.2"] == "rowwise"


def test_a_weight_that_is_computed_cannot_be_named() -> None:
    model = nn.ModuleDict({"fc1": nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), "fc2": nn.Linear(16, 8)})
    with pytest.raises(
        ValueError, match="the weight of fc1 is computed from other parameters .* leave fc1 out of the plan"
    ):
        resolve_plan(model, {"fc1": "colwise", "fc2": "rowwise"}, 2)


def test_key_value_heads_are_repeated_when_there_are_fewer_than_ranks() -> None:
    model = build("grouped2")
    plan = resolve_plan(model, "auto", 4)
    tags = plan.tags(model)
    spec = tags["blocks.0.attn.wk.weight"].shard
    assert spec == split_kv_heads(0, 2, 4, 4)
    assert spec.replicated
    assert {(p.attribute, p.full, p.local) for p in plan.regions[0].patches} == {
        ("n_heads", 8, 2),
        ("n_kv_heads", 2, 1),
        ("n_rep", 4, 2),
    }


def test_norms_between_columns_and_row_have_partial_gradients() -> None:
    model = build("chunk")
    tags = resolve_plan(model, "auto", 2).tags(model)
    assert {name for name, tag in tags.items() if tag.partial_gradient} == {
        f"blocks.{i}.attn.{norm}.{leaf}" for i in (0, 1) for norm in ("q_norm", "k_norm") for leaf in ("weight", "bias")
    }


def test_sequence_parallel_makes_whole_parameters_in_blocks_partial() -> None:
    model = build("view_tied")
    plan = resolve_plan(model, "auto", 2, sequence_parallel=True, blocks=find_blocks(model))
    tags = plan.tags(model)
    assert {name for name, tag in tags.items() if tag.partial_gradient} == {
        f"blocks.{i}.{norm}.{leaf}" for i in (0, 1) for norm in ("ln1", "ln2") for leaf in ("weight", "bias")
    }
    assert "head.weight" not in tags, "a tied parameter has one tag, under its first name"


def test_fused_projection_of_another_layout_is_recognised() -> None:
    """Rows grouped by head, [q k v] of head 0 first: plain slices are right, and a rehearsal tells."""

    class PerHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.proj = nn.Linear(16, 16)
            self.num_heads = 4

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], self.num_heads, -1).transpose(1, 2).chunk(3, -1)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    plan = resolve_plan(nn.ModuleDict({"attn": PerHead()}), "auto", 2)
    assert rules(plan) == {"attn.qkv": "colwise", "attn.proj": "rowwise"}


def test_gate_and_up_in_one_projection() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Linear(8, 24, bias=False)
            self.down_proj = nn.Linear(12, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(F.silu(gate) * up)

    model = nn.ModuleDict({"mlp": Gated()})
    plan = resolve_plan(model, "auto", 2)
    assert rules(plan) == {"mlp.gate_up_proj": "colwise_gate_up", "mlp.down_proj": "rowwise"}
    assert plan.tags(model)["mlp.gate_up_proj.weight"].shard == split_packed(0, 24, 2, 2)


def test_what_only_looks_like_a_pair_stays_whole_and_says_why() -> None:
    class Mixing(nn.Module):
        """A norm over all hidden units between the two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(8, 16)
            self.norm = nn.LayerNorm(16)
            self.fc2 = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.norm(self.fc1(x)))

    model = nn.ModuleDict({"good": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), "odd": Mixing()})
    plan = resolve_plan(model, "auto", 2)
    assert rules(plan) == {"good.0": "colwise", "good.2": "rowwise"}
    assert plan.replicated == ("odd.fc1", "odd.fc2")
    assert len(plan.notes) == 1
    assert "odd.fc1, odd.fc2" in plan.notes[0]
    assert "test_plan.py" in plan.notes[0]
    with pytest.raises(ValueError, match=r"Mixing 'odd' does not compute the same.*layer_norm|.*normalized_shape"):
        resolve_plan(model, {"odd.fc1": "colwise", "odd.fc2": "rowwise"}, 2)


def test_subclass_of_a_torch_layer_is_rehearsed() -> None:
    class Normed(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return self.linear2(F.layer_norm(self.linear1(x), (self.linear1.out_features,)))

    def layer(kind: type[nn.TransformerEncoderLayer]) -> nn.Module:
        return nn.ModuleDict({"layer": kind(16, 4, 24, 0.0, batch_first=True)})

    assert set(rules(resolve_plan(layer(nn.TransformerEncoderLayer), "auto", 2))) == {
        "layer.self_attn",
        "layer.self_attn.out_proj",
        "layer.linear1",
        "layer.linear2",
    }
    plan = resolve_plan(layer(Normed), "auto", 2)
    assert set(rules(plan)) == {"layer.self_attn", "layer.self_attn.out_proj"}
    assert plan.replicated == ("layer.linear1", "layer.linear2")
    assert "is off by" in plan.notes[0], "the rehearsed linear1 has the local out_features that the split one has"


def test_silently_different_attention_is_refused() -> None:
    """A scale from the width of the input would be wrong on local heads, without any shape telling."""

    class Scaled(ChunkAttention):
        def forward(self, x: Tensor) -> Tensor:
            y = self.qkv(x)
            q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in y.chunk(3, -1))
            weights = ((q @ k.transpose(-2, -1)) / y.shape[-1]).softmax(-1)
            return self.proj((weights @ v).transpose(1, 2).flatten(2))

    model = nn.ModuleDict({"attn": Scaled(16, 4)})
    with pytest.raises(ValueError, match=r"Scaled 'attn' does not compute the same .* is off by"):
        resolve_plan(model, {"attn.qkv": "colwise_qkv", "attn.proj": "rowwise"}, 2)
    with pytest.raises(ValueError, match=r"splits no layer of ModuleDict \(attn.qkv, attn.proj: .* is off by"):
        resolve_plan(model, "auto", 2)


def test_forward_that_names_the_failing_line() -> None:
    class Fixed(ViewAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.c_attn(x + 0).chunk(3, -1)
            q, k, v = (t.view(3, 5, 4, 4).transpose(1, 2) for t in (q, k, v))
            return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = nn.ModuleDict({"attn": Fixed(16, 4)})
    with pytest.raises(ValueError, match=r"test_plan.py:\d+ `.*t\.view\(3, 5, 4, 4\).*` fails with .*\.view\(B, T, -1"):
        resolve_plan(model, {"attn.c_attn": "colwise_qkv", "attn.c_proj": "rowwise"}, 2)


class NeedsMore(GroupedAttention):
    """Nobody calls it, so its second argument is unknown."""


def test_unknown_arguments_are_refused_unless_the_counts_are_named() -> None:
    model = nn.ModuleDict({"attn": NeedsMore(32, 8, 4)})
    plan = {"attn.wq": "colwise", "attn.wk": "colwise", "attn.wv": "colwise", "attn.wo": "rowwise"}
    with pytest.raises(ValueError, match=r"cannot be checked: NeedsMore could not be run.*example_input_array.*local"):
        resolve_plan(model, plan, 2)
    resolved = resolve_plan(model, plan | {"attn.n_heads": "local", "attn.n_kv_heads": "local"}, 2)
    assert {(p.attribute, p.local) for p in resolved.regions[0].patches} == {("n_heads", 4), ("n_kv_heads", 2)}
    assert resolved.regions[0].evidence == "given"


def test_arguments_come_from_the_example_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = GroupedAttention(32, 8, 4)
            self.example_input_array = (torch.zeros(2, 6, 32), torch.zeros(6, 4))

        def forward(self, x: Tensor, turns: Tensor) -> Tensor:
            return self.attn(x, turns)

    plan = resolve_plan(Model(), "auto", 4)
    assert plan.regions[0].evidence == "checked"


class Headless(ViewAttention):
    """Runs with any number of heads and returns the right shape, but heads of another size attend differently."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("thin", [False, True])
def test_shapes_are_not_enough(monkeypatch: pytest.MonkeyPatch, thin: bool) -> None:
    """The head count must become local, though nothing fails; thin weights, for large regions, tell it as well."""
    if thin:
        monkeypatch.setattr(fitting, "_DOUBLE_BELOW", 0)
        monkeypatch.setattr(fitting, "_THIN_ABOVE", 0)
    with torch.device("meta"):
        model = nn.ModuleDict({"attn": Headless(64, 8)})
    plan = resolve_plan(model, {"attn.c_attn": "colwise_qkv", "attn.c_proj": "rowwise"}, 2)
    assert plan.regions[0].patches == (HeadPatch("attn", "n_head", 8, 4),)
    assert plan.regions[0].evidence == "checked"
    with pytest.raises(ValueError, match="is off by"):
        resolve_plan(model, {"attn.c_attn": "colwise", "attn.c_proj": "rowwise"}, 2)


# ---- refusals of sizes, names and styles


def test_heads_that_do_not_split() -> None:
    model = GPT(lambda: Block(ViewAttention(24, 6), 24), 24)
    with pytest.raises(
        ValueError, match=r"blocks.0.attn.c_attn .*head count 6 .* tensor_parallel_size=4; use 1, 2, 3 or 6"
    ):
        resolve_plan(model, "auto", 4)


def test_key_value_heads_that_neither_split_nor_repeat() -> None:
    model = nn.ModuleDict({"attn": GroupedAttention(24, 6, 3)})
    plan = {"attn.wq": "colwise", "attn.wk": "colwise", "attn.wv": "colwise", "attn.wo": "rowwise"}
    with pytest.raises(ValueError, match="attn.wk .*3 key/value heads can be neither split nor repeated"):
        resolve_plan(model, plan, 2)


def test_hidden_size_that_does_not_split() -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(8, 10), "fc2": nn.Linear(10, 8)})
    with pytest.raises(ValueError, match=r"fc1 \(colwise\): output size 10 .*tensor_parallel_size=4; use 1, 2 or 5"):
        resolve_plan(model, {"fc1": "colwise", "fc2": "rowwise"}, 4)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({}, "plan is empty; give patterns"),
        ({"layers.*.fc1": "colwise"}, r"'layers.\*.fc1' matches no module; close names: "),
        ({"head": "diagonal"}, "style 'diagonal' of 'head' is not known; use one of colwise, rowwise"),
        ({"norm": "colwise"}, "style 'colwise' of 'norm' needs a Linear, but it is a LayerNorm"),
        ({"head": "vocab"}, "style 'vocab' of 'head' needs an Embedding, but it is a Linear"),
        ({"tok": "attention"}, "needs an nn.MultiheadAttention, but it is a Embedding"),
        ({"mlp.0": "colwise"}, "'blocks.0.mlp.0' is 'colwise' but no 'rowwise' layer.*use 'colwise_gather'"),
        ({"mlp.2": "rowwise"}, "'blocks.0.mlp.2' is 'rowwise' but no 'colwise' layer.*use 'rowwise_split'"),
        ({"tok": "vocab"}, "'tok.weight' and 'head.weight' are one tied weight"),
        ({"attn.heads": "local"}, r"'attn.heads' \(local\) matches no integer attribute"),
        ({"attn.n_head": "local"}, r"attn.n_head = 8 cannot be made local.*tensor_parallel_size=3"),
        ({"norm": "replicate"}, "splits no layer of GPT"),
    ],
)
def test_wrong_plans_are_refused(plan: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_plan(build("view_tied"), plan, 3 if "attn.n_head" in plan else 2)


@pytest.mark.parametrize(
    ("plan", "size", "text"),
    [
        ("llama", 2, 'plan must be "auto" or a mapping'),
        ("auto", 0, "tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(plan: Any, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_plan(build("view"), plan, size)


def test_inside_of_torch_attention_is_refused() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4)})
    with pytest.raises(ValueError, match="without calling it; give 'attn' the style 'attention'"):
        resolve_plan(model, {"attn.out_proj": "rowwise"}, 2)


def test_automatic_plan_without_anything_known() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 3, 3), "out": nn.Linear(3, 3)})
    with pytest.raises(ValueError, match=r"splits no layer of ModuleDict; give one such as .*plan=.*names from out"):
        resolve_plan(model, "auto", 2)


def test_table_rows() -> None:
    rows = resolve_plan(build("grouped1"), "auto", 2).describe(build("grouped1"))
    assert rows == (
        ("tok", "vocab", "weight 37 -> 19/18 along 0"),
        ("blocks.*.attn.wq (2)", "colwise", "weight 32 -> 16 along 0"),
        ("blocks.*.attn.wk (2)", "colwise", "weight 4 -> 4 along 0, heads repeated"),
        ("blocks.*.attn.wv (2)", "colwise", "weight 4 -> 4 along 0, heads repeated"),
        ("blocks.*.attn.wo (2)", "rowwise", "weight 32 -> 16 along 1"),
        ("blocks.*.mlp.w1 (2)", "colwise", "weight 48 -> 24 along 0"),
        ("blocks.*.mlp.w2 (2)", "rowwise", "weight 48 -> 24 along 1"),
        ("blocks.*.mlp.w3 (2)", "colwise", "weight 48 -> 24 along 0"),
        ("head", "colwise_gather", "weight 37 -> 19/18 along 0"),
        ("pos", "replicated", "64x32"),
    )
