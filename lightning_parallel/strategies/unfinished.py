"""Glue: gradients inside of an accumulation window are those of one replica: to be looked at, and not to be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

__all__ = ["UnfinishedGradients"]


class UnfinishedGradients:
    """Notices changes of gradients before they are summed over replicas, in which each replica's would count.

    Args:
        parameters: of this rank, by name.
        keeps: whether what a parameter has accumulated goes on without its `.grad`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], keeps: Callable[[nn.Parameter], bool]) -> None:
        self.parameters = parameters
        self.keeps = keeps
        self._seen: list[tuple[str, nn.Parameter, Tensor, int]] = []

    def note(self) -> None:
        """Hooks see the gradients now, and more will be added to them."""
        found = ((name, p, p.grad) for name, p in self.parameters.items())
        self._seen = [(name, p, grad, grad._version) for name, p, grad in found if grad is not None]

    def check(self) -> None:
        """Before more is added.

        Raises:
            RuntimeError: somebody has changed or replaced a gradient. Forgetting all of it is no change.
        """
        seen, self._seen = self._seen, []
        for name, p, grad, version in seen:
            if (p.grad is not grad or grad._version != version) and (p.grad is not None or self.keeps(p)):
                raise RuntimeError(
                    f"the gradient of {name} was changed while it is still accumulating, so that the change would "
                    "count once for each replica; change it in on_before_optimizer_step, which runs once it is complete"
                )
