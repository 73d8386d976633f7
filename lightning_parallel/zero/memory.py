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


def state_bytes(
    stage: int, ranks: int, parameter_bytes: int = 4, moments: int = 2, gradient_bytes: int = 4
) -> StateBytes:
    """Bytes per parameter that one rank holds between two steps, padding left out.

    Parameters of 2 bytes also have a master copy of 4, which counts as the optimizer's.

    Args:
        stage: 0 (plain data parallel) to 3.
        ranks: data replicas.
        parameter_bytes: 4, or 2 for half precision.
        moments: numbers of 4 bytes that the optimizer keeps for each element; Adam has 2.
        gradient_bytes: 4, or those of a parameter with `gradient_dtype="parameter"`.

    Raises:
        ValueError: an unknown stage, or less than one rank.

    >>> state_bytes(1, ranks=4).total, state_bytes(2, ranks=4).total, state_bytes(3, ranks=4).total
    (10.0, 7.0, 4.0)
    """
    if stage not in (0, 1, 2, 3) or ranks < 1:
        raise ValueError(f"stage {stage} of ZeRO on {ranks} ranks does not exist; use a stage of 0 to 3 and 1 rank up")
    master = 4 if parameter_bytes < 4 and stage > 0 else 0
    gradient = gradient_bytes if stage > 0 else parameter_bytes
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
        disk: in its file; each step reads and writes all of it, and parameters once more for each gather.
        down: that a step copies from the device to the host.
        up: that it copies back.
    """

    device: float
    host: float
    disk: float
    down: float
    up: float


def offloaded_bytes(
    kind: str,
    stage: int,
    ranks: int,
    parameter_bytes: int = 4,
    moments: int = 2,
    gradient_bytes: int = 4,
    parameters: bool = False,
) -> OffloadedBytes:
    """Where the bytes of `state_bytes` lie with an offload, padding and the few buckets on their way left out.

    Parameters that are offloaded travel for each gather, of which a step has two; only what changed comes back.

    Args:
        kind: "cpu" or "nvme".
        stage: 1 to 3.
        ranks: data replicas.
        parameter_bytes: 4, or 2 for half precision.
        moments: numbers of 4 bytes that the optimizer keeps for each element.
        gradient_bytes: see `state_bytes`.
        parameters: shares of stage 3's parameters are offloaded, too.

    Raises:
        ValueError: an unknown kind or stage, less than one rank, or parameters of another stage.

    >>> offloaded_bytes("cpu", 2, ranks=4)
    OffloadedBytes(device=4.0, host=3.0, disk=0.0, down=2.0, up=1.0)
    """
    if kind not in KINDS or stage == 0:
        raise ValueError(f"offload={kind!r} of stage {stage} of ZeRO does not exist; use 'cpu' or 'nvme' and 1 to 3")
    if parameters and stage != 3:
        raise ValueError(f"stage {stage} of ZeRO has whole parameters on every device; offload those of stage 3")
    states = state_bytes(stage, ranks, parameter_bytes, moments, gradient_bytes)
    gradients, share = gradient_bytes / ranks, parameter_bytes / ranks
    away = states.optimizer + (states.parameters if parameters else 0)
    on_disk = away if kind == "nvme" else 0.0
    return OffloadedBytes(
        device=(0 if parameters else states.parameters) + (states.gradients if stage == 1 else 0),
        host=gradients + away - on_disk,
        disk=on_disk,
        down=gradients + (0 if parameters else share),
        up=share * (2 if parameters else 1),
    )
