"""Pure: sizes and numbers of things as a reader expects them."""

from __future__ import annotations

from lightning_parallel.planner.hardware import GIB, Cluster

__all__ = ["device_word", "memory_text", "plural", "recompute_text", "whole_memory_text"]


def plural(count: int, word: str) -> str:
    """A number with its word.

    >>> plural(1, "node"), plural(2, "node")
    ('1 node', '2 nodes')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def memory_text(size: float) -> str:
    """Bytes with a unit in which small sizes do not vanish.

    >>> memory_text(60.4 * 2**30), memory_text(2**20), memory_text(1536), memory_text(0)
    ('60.4 GiB', '1.0 MiB', '1.5 KiB', '0 KiB')
    """
    if size >= 0.1 * GIB:
        return f"{size / GIB:.1f} GiB"
    if size >= 0.1 * 2**20:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB" if size else "0 KiB"


def whole_memory_text(size: float) -> str:
    """Bytes of what there is much of, such as host memory.

    >>> whole_memory_text(193.7 * 2**30), whole_memory_text(72.8 * 2**20)
    ('194 GiB', '72.8 MiB')
    """
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else memory_text(size)


def recompute_text(recompute: str) -> str:
    """What figures of memory count on being recomputed.

    >>> recompute_text("full"), recompute_text("none")
    ('full recomputation', 'no recomputation')
    """
    return f"{'no' if recompute == 'none' else recompute} recomputation"


def device_word(cluster: Cluster) -> str:
    """What one of its devices is called."""
    return "CPU" if cluster.gpu.name == "cpu" else "GPU"
