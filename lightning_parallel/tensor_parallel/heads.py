"""Mechanism: head counts that attention modules write down, and what of them changes when heads are split.

A forward that views its projections as ``(batch, sequence, heads, head_dim)`` with numbers stored on the module must
see the local numbers. Only integer attributes of modules change, never a config object, which may be shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from torch import nn

from lightning_parallel.tensor_parallel.rules import HeadPatch
from lightning_parallel.tensor_parallel.styles import Heads

__all__ = ["attribute_patch", "patch_sets", "ratio_patches", "read_heads"]

_QUERY = (
    "n_head",
    "n_heads",
    "num_heads",
    "num_attention_heads",
    "heads",
    "nhead",
    "nheads",
    "n_q_heads",
    "num_q_heads",
    "num_query_heads",
    "n_local_heads",
    "h",
    "nh",
)
_KEY_VALUE = (
    "n_kv_head",
    "n_kv_heads",
    "num_kv_heads",
    "num_key_value_heads",
    "kv_heads",
    "n_local_kv_heads",
    "n_query_groups",
    "num_query_groups",
)
_RATIO = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "q_per_kv", "kv_groups")
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "d_kv", "d_k")
_MOST_WIDTHS = 3


def read_heads(module: nn.Module, query_size: int, *, reads_config: bool) -> Heads | None:
    """Head counts from integer attributes of ``module`` or, read only and if asked to, of its ``config``.

    ``query_size`` is the output size of the query projection, when no head size is written down. Returns None when the
    module names no head count.
    """
    for source in (module, getattr(module, "config", None) if reads_config else None):
        query = _first(source, _QUERY)
        if source is None or query is None:
            continue
        key_value = _first(module, _KEY_VALUE) or _first(source, _KEY_VALUE)
        ratio = _first(module, _RATIO)
        if key_value is None:
            key_value = query // ratio if ratio and query % ratio == 0 else query
        head_dim = _first(module, _HEAD_DIM) or _first(source, _HEAD_DIM) or query_size // query
        return Heads(query, key_value, head_dim)
    return None


def patch_sets(modules: dict[str, nn.Module], heads: Heads | None, ranks: int) -> Iterator[tuple[HeadPatch, ...]]:
    """Sets of integer attributes that may have to change, fewest first: none, head counts, then widths as well.

    ``modules`` are the modules of one region by full name. Widths are integers equal to a total size of heads.
    """
    counts: list[HeadPatch] = []
    widths: list[HeadPatch] = []
    if heads is not None and heads.query % ranks == 0:
        local = Heads(heads.local_query(ranks), heads.local_key_value(ranks), heads.head_dim)
        for name, module in modules.items():
            for attribute, value in _integers(module):
                new = _local_count(attribute, value, heads, local)
                if new is not None and new != value:
                    counts.append(HeadPatch(name, attribute, value, new))
                elif new is None and (new := _local_width(attribute, value, heads, local)) is not None:
                    widths.append(HeadPatch(name, attribute, value, new))
    by_attribute = list(dict.fromkeys(patch.attribute for patch in widths))[:_MOST_WIDTHS]
    yield ()
    for size in range(len(by_attribute) + 1):
        for chosen in combinations(by_attribute, size):
            extra = tuple(patch for patch in widths if patch.attribute in chosen)
            if counts or extra:
                yield (*counts, *extra)
            if counts and extra:
                yield extra


def attribute_patch(module_name: str, module: nn.Module, attribute: str, ranks: int) -> HeadPatch:
    """The patch that a plan asks for with the style ``"local"``.

    Raises:
        ValueError: the attribute is no integer, or does not split over the ranks.
    """
    value = vars(module).get(attribute)
    if type(value) is not int or value % ranks:
        raise ValueError(
            f"{module_name}.{attribute} = {value!r} cannot be made local; it must be an integer attribute that is a "
            f"multiple of tensor_parallel_size={ranks}"
        )
    return HeadPatch(module_name, attribute, value, value // ranks)


def _first(source: object, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(source, name, None) if source is not None else None
        if type(value) is int and value > 0:
            return value
    return None


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    for attribute, value in vars(module).items():
        if type(value) is int and value > 0:
            yield attribute, value


def _local_count(attribute: str, value: int, heads: Heads, local: Heads) -> int | None:
    if attribute in _RATIO and value == heads.query // heads.key_value:
        return local.query // local.key_value
    if attribute in _KEY_VALUE and value == heads.key_value:
        return local.key_value
    if attribute in _QUERY and value == heads.query:
        return local.query
    return None


def _local_width(attribute: str, value: int, heads: Heads, local: Heads) -> int | None:
    """Totals of heads: [Q], [K], [Q;K;V], [K;V]. Head sizes and counts of something else keep their value."""
    if attribute in (*_HEAD_DIM, *_QUERY, *_KEY_VALUE, *_RATIO) or attribute.startswith("_"):
        return None
    totals = (
        (heads.query, local.query),
        (heads.key_value, local.key_value),
        (heads.query + 2 * heads.key_value, local.query + 2 * local.key_value),
        (2 * heads.key_value, 2 * local.key_value),
    )
    for full, part in totals:
        if value == full * heads.head_dim:
            return part * heads.head_dim
    return None


def ratio_patches(name: str, module: nn.Module, ranks: int) -> list[HeadPatch]:
    """Patches of "query heads per key/value head" for a module that views everything else with -1.

    It changes only when there are fewer key/value heads than ranks and each rank keeps one of them.
    """
    heads = read_heads(module, 0, reads_config=True)
    if heads is None or heads.key_value >= ranks or heads.query % ranks:
        return []
    local = heads.local_query(ranks) // heads.local_key_value(ranks)
    full = heads.query // heads.key_value
    return [HeadPatch(name, a, value, local) for a, value in _integers(module) if a in _RATIO and value == full]
