"""torch's attention and transformer layers, split by head, against themselves in one process: fp64, 1e-10."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.tensor_parallel.plan import resolve_plan
from tests.distributed.formulas import wave
from tests.distributed.tensor_models import Holder, compare_with_plain, fill, split_model
from tests.harness import Ranks

WIDTH, HEADS = 16, 4
worlds = pytest.mark.parametrize("world_size", [2, 4])


def attention_inputs(options: dict[str, Any], case: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key, value and masks of one case; ``same`` says how many of the three are one tensor."""
    batch, length = 2, 5
    source = length if case.get("same", 3) == 3 else 7
    key_size, value_size = options.get("kdim") or WIDTH, options.get("vdim") or WIDTH

    def sequence(size: int, width: int, phase: float) -> Tensor:
        x = wave(batch, size, width, phase=phase)
        x = x[0] if case.get("unbatched") else (x if options.get("batch_first") else x.transpose(0, 1))
        return x.contiguous().requires_grad_()

    query = sequence(length, WIDTH, 0.1)
    if case.get("same", 3) == 3:
        inputs = [query, query, query]
    else:
        key = sequence(source, key_size, 0.2)
        inputs = [query, key, key if case["same"] == 2 else sequence(source, value_size, 0.3)]
    causal = torch.ones(length, source, dtype=torch.bool).triu(1)
    masks: dict[str, Any] = {
        "bool": causal,
        "float": wave(length, source, phase=0.5),
        "heads": wave(batch * HEADS, length, source, phase=0.7),
        "heads_bool": (wave(batch * HEADS, length, source, phase=0.7) > 0.9),
    }
    kwargs: dict[str, Any] = {"need_weights": case.get("need_weights", True)}
    if "mask" in case:
        kwargs["attn_mask"] = masks[case["mask"]]
    if case.get("causal"):
        kwargs["is_causal"] = True
    if "padding" in case:
        hidden = torch.zeros(batch, source, dtype=torch.bool)
        hidden[0, -2:] = True
        hidden = hidden[0] if case.get("unbatched") else hidden
        as_float = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -1.5)
        kwargs["key_padding_mask"] = hidden if case["padding"] == "bool" else as_float
    if "average" in case:
        kwargs["average_attn_weights"] = case["average"]
    return inputs, kwargs


def check_attention(rank: int, world_size: int, options: dict[str, Any], case: dict[str, Any]) -> None:
    plain = fill(Holder(nn.MultiheadAttention(WIDTH, HEADS, **options)))
    split = fill(Holder(nn.MultiheadAttention(WIDTH, HEADS, **options)))
    plan, tags, undo = split_model(split, {"model": "attention"})
    plain.train(case.get("train", True))
    split.train(case.get("train", True))
    gradients: list[list[Tensor | None]] = []

    def loss(model: nn.Module) -> Tensor:
        inputs, kwargs = attention_inputs(options, case)
        output, weights = model(*inputs, **kwargs)
        total = (output * wave(*output.shape, phase=0.4)).sum()
        if kwargs["need_weights"]:
            total = total + (weights * wave(*weights.shape, phase=0.9)).sum()
        else:
            assert weights is None
        gradients.append(list(torch.autograd.grad(total, inputs, retain_graph=True)))
        return total

    compare_with_plain(plain, split, tags, loss, plan=plan)
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    undo.restore()
    assert type(split.get_submodule("model")) is nn.MultiheadAttention


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"batch_first": True}, {"need_weights": False}),
    ({"batch_first": True}, {"need_weights": False, "train": False}),
    ({"bias": False}, {"need_weights": False, "mask": "bool"}),
    ({"batch_first": True}, {"need_weights": False, "mask": "bool", "causal": True}),
    ({"batch_first": True}, {"need_weights": True, "mask": "bool", "causal": True}),
    ({"batch_first": True}, {"need_weights": False, "mask": "bool", "causal": True, "padding": "bool"}),
    ({}, {"mask": "float", "padding": "float"}),
    ({"batch_first": True}, {"need_weights": False, "mask": "heads"}),
    ({}, {"mask": "heads_bool", "average": False}),
    ({"batch_first": True}, {"average": False, "padding": "bool"}),
    ({"batch_first": True}, {"same": 2, "need_weights": False}),
    ({}, {"same": 1, "padding": "bool"}),
    ({"kdim": 12, "vdim": 20, "batch_first": True}, {"same": 1, "need_weights": False, "mask": "float"}),
    ({"kdim": 12, "vdim": 20, "bias": False}, {"same": 1, "average": False}),
    ({"kdim": 12, "vdim": 12}, {"same": 2}),
    ({"batch_first": True}, {"unbatched": True}),
    ({}, {"unbatched": True, "need_weights": False, "padding": "bool"}),
]


@worlds
@pytest.mark.parametrize(("options", "case"), CASES)
def test_attention_equals_plain(ranks: Ranks, world_size: int, options: dict[str, Any], case: dict[str, Any]) -> None:
    ranks(world_size, check_attention, options, case)


def check_dropout(rank: int, world_size: int) -> tuple[float, list[float]]:
    """With weights of one and no projection in the way, how many attention weights survive, per head."""
    torch.manual_seed(1234)
    split = fill(Holder(nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True)))
    split_model(split, {"model": "attention"})
    x = wave(2, 8, WIDTH)
    _, weights = split(x, x, x, average_attn_weights=False)
    after = float(torch.rand(()))
    kept = (weights != 0).double()
    return after, [float(kept[:, head].mul(wave(2, 8, 8)).sum()) for head in range(HEADS)]


def test_dropout_differs_between_ranks_and_leaves_common_numbers(ranks: Ranks) -> None:
    (after, heads), (after_other, heads_other) = ranks(2, check_dropout)
    assert after == after_other
    assert heads == heads_other
    assert len(set(heads)) == HEADS


def check_layer(rank: int, world_size: int, kind: str, options: dict[str, Any], train: bool) -> None:
    plain, split = (fill(layer(kind, options)).train(train) for _ in range(2))
    plan, tags, undo = split_model(split, "auto")
    assert not plan.replicated
    compare_with_plain(plain, split, tags, lambda model: layer_loss(model, kind, options), plan=plan)
    with torch.no_grad():  # in eval mode this is where torch would take its fused kernel
        expected, found = layer_loss(plain, kind, options), layer_loss(split, kind, options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    undo.restore()
    assert [type(m) for m in split.modules()] == [type(m) for m in plain.modules()]
    assert [vars(m).get("activation_relu_or_gelu") for m in split.modules()] == [
        vars(m).get("activation_relu_or_gelu") for m in plain.modules()
    ]


def layer(kind: str, options: dict[str, Any]) -> nn.Module:
    shape = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.0} | options
    if kind == "encoder":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), 2, norm=nn.LayerNorm(WIDTH))
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), 2)


def layer_loss(model: nn.Module, kind: str, options: dict[str, Any]) -> Tensor:
    def sequence(length: int, phase: float) -> Tensor:
        x = wave(2, length, WIDTH, phase=phase)
        return x if options.get("batch_first") else x.transpose(0, 1)

    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1, -1] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    if kind == "encoder":
        output = model(sequence(5, 0.1), src_key_padding_mask=hidden)
        keep = (~hidden if options.get("batch_first") else ~hidden.t()).unsqueeze(-1)
        return (output * wave(*output.shape, phase=0.6) * keep).sum()
    output = model(sequence(5, 0.1), sequence(7, 0.2), tgt_mask=causal, tgt_is_causal=True)
    return (output * wave(*output.shape, phase=0.6)).sum()


@worlds
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {"norm_first": True}, {"batch_first": True, "norm_first": True, "activation": "gelu"}],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer_layers_equal_plain(
    ranks: Ranks, world_size: int, kind: str, options: dict[str, Any], train: bool
) -> None:
    ranks(world_size, check_layer, kind, options, train)


@pytest.mark.parametrize("option", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_keys_that_belong_to_no_head_are_refused(option: dict[str, bool]) -> None:
    model = Holder(nn.MultiheadAttention(WIDTH, HEADS, **option))
    with pytest.raises(ValueError, match="add_bias_kv and add_zero_attn .* use False"):
        resolve_plan(model, {"model": "attention"}, 2)


def check_wrong_mask(rank: int, world_size: int) -> str:
    split = fill(Holder(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))
    split_model(split, {"model": "attention"})
    x = wave(2, 5, WIDTH)
    with pytest.raises(ValueError, match="expected 8 masks for 2 samples and 4 heads, got 3") as caught:
        split(x, x, x, attn_mask=wave(3, 5, 5))
    dist.barrier()
    return str(caught.value)


def test_a_mask_of_the_wrong_number_of_heads_is_named(ranks: Ranks) -> None:
    assert len(set(ranks(2, check_wrong_mask))) == 1
