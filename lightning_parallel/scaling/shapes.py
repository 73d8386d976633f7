"""Pure: width, depth and heads for a number of parameters, by the aspect-ratio rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_parallel.scaling.checks import check_range, check_whole

__all__ = ["AspectRule", "Shape"]

CLOSE_ENOUGH = 2.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer."""

    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class AspectRule:
    """Width grows with depth: width = aspect x layers, rounded to whole heads of one size.

    Loss hardly depends on the aspect ratio over a wide range (Kaplan et al. 2020, figure 5).

    Attributes:
        aspect: width per layer.
        head_size: width per head.
        max_layers: deepest shape.

    >>> AspectRule().shape(12)
    Shape(layers=12, width=768, heads=12)
    """

    aspect: float = 64.0
    head_size: int = 64
    max_layers: int = 256

    def __post_init__(self) -> None:
        check_range("aspect", self.aspect, (1e-3, 1e6), "64")
        check_whole("head_size", self.head_size, 1, "64")
        check_whole("max_layers", self.max_layers, 1, "256")

    def shape(self, layers: int) -> Shape:
        """The shape of a depth."""
        heads = max(1, round(self.aspect * layers / self.head_size))
        return Shape(layers, heads * self.head_size, heads)

    def closest(self, params: float, count: Callable[[Shape], int]) -> tuple[Shape, int]:
        """The shape whose number of parameters is nearest to ``params`` as a ratio, and that number.

        Args:
            params: the number wanted.
            count: parameters of a shape; must grow with the depth.

        Raises:
            ValueError: no shape is within a factor of two.

        >>> AspectRule().closest(1e8, lambda shape: 12 * shape.layers * shape.width**2)
        (Shape(layers=13, width=832, heads=13), 107986944)
        """
        low, high = 1, self.max_layers
        while low < high:
            middle = (low + high) // 2
            if count(self.shape(middle)) < params:
                low = middle + 1
            else:
                high = middle
        around = [self.shape(layers) for layers in {max(1, low - 1), low}]
        found = [(shape, count(shape)) for shape in around]
        best = min(found, key=lambda pair: abs(math.log(pair[1] / params)))
        if not 1 / CLOSE_ENOUGH <= best[1] / params <= CLOSE_ENOUGH:
            raise ValueError(
                f"no shape of width {self.aspect:g} x layers has about {params:.4g} parameters, the nearest "
                f"({best[0]}) has {best[1]:.4g}; use another aspect or head_size, or a budget for such a model"
            )
        return best
