"""Pure: bytes of model state per rank, by stage of ZeRO (Rajbhandari et al. 2020) and offload (Ren et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_parallel.zero.offload import KINDS

__all__ = ["OffloadedBytes", "StateBytes", "offloaded_bytes", "state_bytes"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on one rank: of the parameters, of their gradients, and of what the optimizer keeps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(stage: int, ranks: int, parameter_bytes: int = 4, moments: int = 2) -> StateBytes:
    """Bytes per parameter that one rank holds between two steps, padding left out.

    Gradients are kept in 4 bytes, whatever the parameters have. Parameters of 2 bytes also have a master copy of 4,
    which counts as the optimizer's.

    Args:
        stage: 0 (plain data parallel) to 3.
        ranks: data replicas.
        parameter_bytes: 4, or 2 for half precision.
        moments: numbers of 4 bytes that the optimizer keeps for each element; Adam has 2.

    Raises:
        ValueError: an unknown stage, or less than one rank.

    >>> state_bytes(1, ranks=4).total, state_bytes(2, ranks=4).total, state_bytes(3, ranks=4).total
    (10.0, 7.0, 4.0)
    """
    if stage not in (0, 1, 2, 3) or ranks < 1:
        raise ValueError(f"stage {stage} of ZeRO on {ranks} ranks does not exist; use a stage of 0 to 3 and 1 rank up")
    master = 4 if parameter_bytes < 4 and stage > 0 else 0
    gradient = 4 if stage > 0 else parameter_bytes
    moment = 4 if stage > 0 else parameter_bytes
    return StateBytes(
        parameters=parameter_bytes / (ranks if stage == 3 else 1),
        gradients=gradient / (ranks if stage >= 2 else 1),
        optimizer=(moment * moments + master) / (ranks if stage >= 1 else 1),
    )


@dataclass(frozen=True)
class OffloadedBytes:
    """Bytes per parameter on one rank whose optimizer steps in host memory.

    Attributes:
        device: on the device between two steps.
        host: in host memory between two steps.
        disk: in its file; each step reads and writes all of it.
        down: that a step copies from the device to the host.
        up: that it copies back.
    """

    device: float
    host: float
    disk: float
    down: float
    up: float


def offloaded_bytes(kind: str, stage: int, ranks: int, parameter_bytes: int = 4, moments: int = 2) -> OffloadedBytes:
    """Where the bytes of `state_bytes` lie with an offload, padding and the few buckets on their way left out.

    Args:
        kind: "cpu" or "nvme".
        stage: 1 to 3.
        ranks: data replicas.
        parameter_bytes: 4, or 2 for half precision.
        moments: numbers of 4 bytes that the optimizer keeps for each element.

    Raises:
        ValueError: an unknown kind or stage, or less than one rank.

    >>> offloaded_bytes("cpu", 2, ranks=4)
    OffloadedBytes(device=4.0, host=3.0, disk=0.0, down=2.0, up=1.0)
    """
    if kind not in KINDS or stage == 0:
        raise ValueError(f"offload={kind!r} of stage {stage} of ZeRO does not exist; use 'cpu' or 'nvme' and 1 to 3")
    states = state_bytes(stage, ranks, parameter_bytes, moments)
    gradients = 4 / ranks
    on_disk = states.optimizer if kind == "nvme" else 0.0
    return OffloadedBytes(
        device=states.parameters + (states.gradients if stage == 1 else 0),
        host=gradients + states.optimizer - on_disk,
        disk=on_disk,
        down=gradients + parameter_bytes / ranks,
        up=parameter_bytes / ranks,
    )
