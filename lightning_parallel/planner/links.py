"""Pure: how long collectives take: rings inside a node, all network cards across nodes.

Times follow ``bytes / bandwidth + latency`` with the ring factors: an all-reduce of S bytes over n ranks moves
2 (n - 1) / n S through every rank, an all-gather or reduce-scatter half of that. Across nodes the ranks of a node share
the work, so that every network card carries a part (as NCCL's rings and trees do).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from lightning_parallel.planner.hardware import Cluster

__all__ = ["Group", "all_gather_seconds", "all_reduce_seconds", "send_seconds"]

# Share of a link's rate that large collectives reach: 235 of 300 GB/s on 8 A100, 363 of 450 on 8 H200 (ring), 746 of
# 900 between two GB200.
LINK_SHARE = 0.78
# Share of the network cards' rate: an all-reduce of 16 GiB over 4 nodes of 8 B200 with 50 GB/s each takes 87.6 ms, its
# bytes alone 64.4 ms.
NETWORK_SHARE = 0.73
# Seconds before the first byte: an all-reduce of 32 KiB takes 44 microseconds over 8 A100, one of 4 MiB 430
# over 4 nodes.
LINK_START = 16e-6
LINK_HOP = 1e-6
NETWORK_START = 100e-6
NETWORK_HOP = 50e-6
# Bytes that are lost while a collective gets up to its rate: 424 microseconds instead of 250 for 32 MiB over 8 A100.
RAMP_BYTES = 16e6
# A send between stages beside running kernels: bubble rates that Qi et al. 2024 computed from profiled times imply 24
# to 30 GB/s for 12 to 50 MB between A100, hops between nodes included; their links copy 274 when nothing else runs.
SEND_SHARE = 0.12
SEND_START = 20e-6
# An all-reduce that the switches of a node add up: 367 instead of 480 GB/s over 8 H200.
SWITCH_GAIN = 0.76


@dataclass(frozen=True)
class Group:
    """``size`` communicating ranks, of which ``per_node`` share the fast links of one node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Fast-link domains that the group spans."""
        return -(-self.size // self.per_node)

    @classmethod
    def of(cls, size: int, stride: int, domain: int) -> Group:
        """A group of ``size`` ranks ``stride`` apart, where neighbours of ``domain`` ranks share fast links."""
        return cls(size, max(1, min(size, domain // stride)))


def all_gather_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds to gather ``size`` bytes in total on every rank; a reduce-scatter takes the same."""
    if group.size == 1 or size <= 0:
        return 0.0
    part = (group.per_node - 1) / group.per_node
    ramp = RAMP_BYTES * size / (size + RAMP_BYTES)
    inside = LINK_START + LINK_HOP * group.per_node + part * (size + ramp) / (cluster.gpu.link_gbps * 1e9 * LINK_SHARE)
    if group.per_node == 1:
        inside = 0.0
    if group.nodes == 1:
        return inside
    # Every rank of a node brings its part of the bytes over its own card, while the links hand the parts around.
    across = (group.nodes - 1) / group.nodes * (size + ramp) / group.per_node
    wire = across / (cluster.network_gbps * 1e9 * NETWORK_SHARE)
    return NETWORK_START + NETWORK_HOP * log2(group.nodes) + max(inside, wire)


def all_reduce_seconds(cluster: Cluster, group: Group, size: float) -> float:
    """Seconds to sum ``size`` bytes over the ranks of a group: a reduce-scatter and an all-gather."""
    seconds = 2 * all_gather_seconds(cluster, group, size)
    return seconds * SWITCH_GAIN if cluster.gpu.reduces_in_switch and group.nodes == 1 else seconds


def send_seconds(cluster: Cluster, size: float, *, across: float) -> float:
    """Mean seconds to hand ``size`` bytes to the next stage, when a part ``across`` of all hops crosses the network."""
    inside = size / (cluster.gpu.link_gbps * 1e9 * SEND_SHARE)
    wire = size / (cluster.network_gbps * 1e9 * NETWORK_SHARE)
    return SEND_START + (1 - across) * inside + across * max(inside, wire)
