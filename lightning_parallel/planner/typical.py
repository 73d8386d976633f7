"""Pure: the shape that models of a given size usually have."""

from __future__ import annotations

from dataclasses import replace

from lightning_parallel.planner.model_shape import ModelShape

__all__ = ["typical_shape"]

# Layers and hidden width by parameters: the TinyStories models (Eldan and Li 2023), then Llama-like ones (TinyLlama,
# Llama 3.2, Llama 2 and 3).
_LADDER = (
    (1e6, 8, 64),
    (3e6, 8, 128),
    (8e6, 8, 256),
    (28e6, 8, 512),
    (0.1e9, 12, 768),
    (0.35e9, 24, 1024),
    (1.1e9, 22, 2048),
    (3.2e9, 28, 3072),
    (6.7e9, 32, 4096),
    (13e9, 40, 5120),
    (33e9, 60, 6656),
    (69e9, 80, 8192),
    (180e9, 96, 12288),
    (405e9, 126, 16384),
    (1000e9, 128, 25600),
)
VOCABULARY = 32000


def typical_shape(parameters: float, *, seq: int = 0) -> ModelShape:
    """A Llama-like shape of exactly ``parameters`` parameters: the nearest model's depth and width, the MLP adjusted.

    >>> typical_shape(7e9).parameters, typical_shape(7e9).layers, typical_shape(7e9).hidden
    (7000000000, 32, 4096)

    Raises:
        ValueError: fewer than a million parameters, or more than any computer holds.
    """
    if not 1e6 <= parameters <= 1e18:
        raise ValueError(f"--params counts parameters, 1e6 to 1e18, such as 7e9, got {parameters:g}")
    _, layers, hidden = min(_LADDER, key=lambda row: abs(row[0] / parameters - parameters / row[0]))
    vocab = min(VOCABULARY, int(parameters / hidden / 8))
    norms, attention = 2 * hidden, 4 * hidden**2
    rest = (parameters - (2 * vocab + 1) * hidden) / layers - attention - norms
    multiple = 256 if hidden >= 768 else 64
    ffn = max(multiple, int(rest / (3 * hidden) / multiple) * multiple)
    shape = ModelShape.llama(layers, hidden, hidden // 64 if hidden < 2048 else hidden // 128, ffn, vocab=vocab)
    return replace(shape, seq=seq or shape.seq).with_parameters(round(parameters))
