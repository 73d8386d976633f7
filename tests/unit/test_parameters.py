"""ParameterTag: who counts which element, and the completeness of names."""

from __future__ import annotations

import pytest

from lightning_parallel.parameters import ParameterTag, check_complete, describe_difference, name_difference
from lightning_parallel.tensor_parallel.sharding import (
    ShardSpec,
    split_even,
    split_kv_heads,
    split_qkv,
    split_uneven,
    split_vocab,
)


@pytest.mark.parametrize(
    "shard",
    [
        None,
        split_even(0, 12, 4),
        split_uneven(0, 12, 5),
        split_kv_heads(0, heads=2, head_dim=6, ranks=4),
        split_qkv(0, heads=4, kv_heads=1, head_dim=2, ranks=4),
        split_vocab(12, 4, padded_to=20),
    ],
)
@pytest.mark.parametrize("stages", [(0,), (1, 3)])
def test_every_element_is_counted_once(shard: ShardSpec | None, stages: tuple[int, ...]) -> None:
    tag = ParameterTag("weight", (12, 3), shard, stages=stages)
    ranks = shard.ranks if shard else 4
    assert sum(tag.counted_numel(stage, rank) for stage in range(4) for rank in range(ranks)) == tag.numel == 36
    counted = []
    for rank in range(ranks):
        rows = _local_rows(tag, rank)
        ranges = tag.counted_ranges(stages[0], rank)
        counted += rows if ranges is None else [row for start, stop in ranges for row in rows[start:stop]]
        assert tag.counted_ranges(2, rank) == ()
    assert sorted(counted) == list(range(12))


def _local_rows(tag: ParameterTag, rank: int) -> list[int]:
    if tag.shard is None:
        return list(range(tag.shape[0]))
    rows = [row for s, _ in tag.shard.local_slices(rank) for row in range(s.start, s.stop)]
    return rows + [-1] * (tag.local_shape(rank)[0] - len(rows))


def test_counted_ranges_leave_out_padding_and_repeats_and_say_none_for_a_whole_tensor() -> None:
    assert ParameterTag("w", (4,), split_even(0, 4, 2)).counted_ranges(0, 1) is None
    replicated = ParameterTag("w", (4,), None)
    assert (replicated.counted_ranges(0, 0), replicated.counted_ranges(0, 1)) == (None, ())
    padded = ParameterTag("w", (5, 2), split_vocab(5, 2, padded_to=8))
    assert (padded.counted_ranges(0, 0), padded.counted_ranges(0, 1)) == (None, ((0, 1),))
    qkv = ParameterTag("w", (6, 2), split_qkv(0, heads=4, kv_heads=1, head_dim=1, ranks=2))
    assert (qkv.counted_ranges(0, 0), qkv.counted_ranges(0, 1)) == (None, ((0, 2),))


def test_shapes_and_sharing() -> None:
    tag = ParameterTag("head.weight", (10, 4), split_uneven(0, 10, 4), stages=(0, 2))
    assert [tag.local_shape(rank) for rank in range(4)] == [(3, 4), (3, 4), (3, 4), (1, 4)]
    assert tag.shared
    assert not ParameterTag("bias", (), None).shared
    assert ParameterTag("bias", (), None).counted_numel(0, 0) == 1
    assert ParameterTag("norm", (4,), None, partial_gradient=True).local_shape(3) == (4,)


@pytest.mark.parametrize("stages", [(), (1, 0), (0, 0), (-1,)])
def test_stages_must_be_ascending_and_distinct(stages: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parameter 'w' needs ascending, distinct stages"):
        ParameterTag("w", (4,), None, stages=stages)


def test_a_shard_must_fit_the_shape() -> None:
    with pytest.raises(ValueError, match=r"parameter 'w' of shape \(4, 2\) has no dimension 1 of size 4"):
        ParameterTag("w", (4, 2), split_even(1, 4, 2))
    with pytest.raises(ValueError, match="no dimension 2"):
        ParameterTag("w", (4, 4), split_even(2, 4, 2))
    with pytest.raises(ValueError, match="its gradient cannot be partial"):
        ParameterTag("w", (4,), split_even(0, 4, 2), partial_gradient=True)


def test_names() -> None:
    assert name_difference(["b", "a", "c"], ["c", "z", "y"]) == (("b", "a"), ("z", "y"))
    assert describe_difference((), ()) == ""
    assert describe_difference(("a", "b"), ("z",)) == "2 missing (a, b), 1 unexpected (z)"
    many = tuple(f"layer.{i}" for i in range(8))
    assert describe_difference((), many).endswith("layer.3, layer.4 and 3 more)")


def test_complete_names_pass_in_any_order() -> None:
    check_complete(["a", "b"], iter(["b", "a"]))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (["a"], "1 missing (b)"),
        (["a", "b", "c"], "1 unexpected (c)"),
        (["a", "b", "b"], "1 given twice (b)"),
        (["a", "c", "c"], "1 missing (b), 1 unexpected (c), 1 given twice (c)"),
    ],
)
def test_incomplete_names_are_refused(found: list[str], text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared below
        check_complete(["a", "b"], found, what="last.ckpt")
    assert str(error.value) == f"last.ckpt does not hold exactly the parameters of the model: {text}"
