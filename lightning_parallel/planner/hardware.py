"""Pure: accelerators and clusters as numbers, with where each number comes from.

Peaks are dense rates without sparsity. Link rates count one direction: vendors print both directions together, but a
collective is bound by one. ``gemm_share`` is the part of the 16-bit peak that the best matrix product reaches, from the
"maximum achievable matmul FLOPS" measurements of stas00/ml-engineering where there are some.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

__all__ = ["GIB", "GPUS", "PRECISIONS", "Cluster", "Gpu", "cpu_process", "find_gpu", "recognise"]

GIB = 2**30
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "nvfp4")


@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    Attributes:
        name: its name in the catalogue.
        memory_gib: memory that programs see, in GiB.
        hbm_gbps: memory bandwidth in GB/s (1e9 bytes).
        tflops: dense peak in TFLOP/s per precision; a precision that is absent has no matrix units.
        link_gbps: bandwidth to the other GPUs of its node, one direction, in GB/s.
        host_gbps: bandwidth to the host, one direction, in GB/s.
        gemm_share: part of the 16-bit peak that a large matrix product reaches.
        multiprocessors: units that a kernel's tiles are dealt to.
        link_domain: GPUs that share the fast links; 0 for those of one node.
        network_gbit: usual network bandwidth per GPU in Gbit/s.
        reduces_in_switch: its links' switches add up, so that an all-reduce moves each byte once.
        context_gib: memory of context, libraries and communicators before the first tensor, in GiB.
        source: where the numbers were read.
    """

    name: str
    memory_gib: float
    hbm_gbps: float
    tflops: Mapping[str, float]
    link_gbps: float
    host_gbps: float
    gemm_share: float
    multiprocessors: int
    link_domain: int = 0
    network_gbit: float = 200.0
    reduces_in_switch: bool = False
    context_gib: float = 1.5
    source: str = "given"

    def __post_init__(self) -> None:
        for name in ("memory_gib", "hbm_gbps", "link_gbps", "host_gbps", "network_gbit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"a GPU needs {name} above 0, got {getattr(self, name)}")
        if not 0 < self.gemm_share <= 1:
            raise ValueError(f"gemm_share is a part of the peak above 0 and up to 1, got {self.gemm_share}; use 0.8")

    def __hash__(self) -> int:
        # Equal GPUs have equal names and memory; the rates are a mapping, which has no hash.
        return hash((self.name, self.memory_gib))

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's, so that nothing can be moved there."""
        return self.name == _CPU

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s of matrix products in ``precision``.

        Raises:
            ValueError: the GPU has no such units; the text names the precisions that it has.
        """
        if precision not in self.tflops:
            raise ValueError(f"{self.name} has no {precision} matrix units; use {' or '.join(self.tflops)}")
        return self.tflops[precision] * 1e12


_CPU = "cpu"
_ML_ENGINEERING = "stas00/ml-engineering 744d01e, accelerator and network tables"
_VENDOR = "vendor's data sheet or whitepaper"


def _rates(
    bf16: float, *, fp32: float, fp16: float = 0.0, tf32: float = 0.0, fp8: float = 0.0, nvfp4: float = 0.0
) -> Mapping[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16 or bf16, "bf16": bf16, "fp8": fp8, "nvfp4": nvfp4}
    return MappingProxyType({name: rate for name, rate in rates.items() if rate})


_V100 = Gpu(
    "v100-32gb", 31.7, 900, _rates(0, fp16=125, fp32=15.7), 150, 12, 0.75, 80, network_gbit=50, source=_ML_ENGINEERING
)
_A100 = Gpu("a100-80gb", 79.2, 2039, _rates(312, tf32=156, fp32=19.5), 300, 25, 0.869, 108, source=_ML_ENGINEERING)
_H100 = Gpu(
    "h100-80gb", 79.1, 3350, _rates(989, tf32=494.5, fp32=67, fp8=1979), 450, 50, 0.803, 132, network_gbit=400,
    reduces_in_switch=True, source=_ML_ENGINEERING,
)  # fmt: skip
_B200 = Gpu(
    "b200", 178.4, 8000, _rates(2250, tf32=1125, fp32=80, fp8=4500, nvfp4=9000), 900, 50, 0.776, 148,
    network_gbit=400, reduces_in_switch=True, source=_ML_ENGINEERING,
)  # fmt: skip
_GB200 = Gpu(
    "gb200", 184.0, 8000, _rates(2500, tf32=1250, fp32=80, fp8=5000, nvfp4=10000), 900, 200, 0.729, 152,
    link_domain=72, network_gbit=400, reduces_in_switch=True, source=_ML_ENGINEERING,
)  # fmt: skip

_CATALOGUE = (
    replace(_V100, name="v100-16gb", memory_gib=15.8),
    _V100,
    replace(_A100, name="a100-40gb", memory_gib=39.4, hbm_gbps=1555, source=_VENDOR),
    _A100,
    _H100,
    # The 96 GB part with HBM2e runs at 500 W instead of 700 W: the products fall with the power.
    replace(_H100, name="h100-96gb", memory_gib=95.0, hbm_gbps=2400, gemm_share=0.573, source=_VENDOR),
    replace(_H100, name="h200", memory_gib=139.8, hbm_gbps=4800, source=_ML_ENGINEERING),
    _B200,
    replace(_B200, name="b300", memory_gib=268.0, gemm_share=0.786, network_gbit=800),
    _GB200,
    replace(_GB200, name="gb300", memory_gib=277.0, tflops=_rates(2500, tf32=1250, fp32=80, fp8=5000, nvfp4=15000)),
    Gpu("l4", 22.0, 300, _rates(121, tf32=60, fp32=30.3, fp8=242.5), 25, 25, 0.75, 58, network_gbit=50, source=_VENDOR),
    Gpu("l40s", 44.5, 864, _rates(362, tf32=183, fp32=91.6, fp8=733), 25, 25, 0.75, 142,
        network_gbit=50, source=_VENDOR),
    Gpu("rtx-3090", 23.6, 936, _rates(71, fp32=35.6, fp16=71), 25, 25, 0.85, 82, network_gbit=25, source=_VENDOR),
    Gpu("rtx-4090", 23.5, 1008, _rates(165.2, tf32=82.6, fp32=82.6, fp8=330.3), 25, 25, 0.85, 128,
        network_gbit=25, source=_VENDOR),
    Gpu("rtx-5090", 31.3, 1792, _rates(209.5, tf32=104.8, fp32=104.8, fp8=419), 50, 50, 0.85, 170,
        network_gbit=25, source=_VENDOR),
)  # fmt: skip

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _CATALOGUE})


def find_gpu(name: str) -> Gpu:
    """The catalogue's GPU of that name.

    Raises:
        ValueError: there is none; the text names all that there are.
    """
    if name not in GPUS:
        raise ValueError(f"GPU {name!r} is unknown; use {' or '.join(GPUS)}")
    return GPUS[name]


def recognise(device: str, memory_gib: float) -> Gpu:
    """The catalogue's GPU that a driver calls ``device``, with the memory that it reports.

    >>> recognise("NVIDIA A100-SXM4-80GB", 79.25).name, recognise("NVIDIA GeForce RTX 4090", 23.6).name
    ('a100-80gb', 'rtx-4090')

    Raises:
        ValueError: it is none of the catalogue.
    """
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    fitting = [gpu for gpu in GPUS.values() if gpu.name.removeprefix("rtx-").partition("-")[0] in words]
    if not fitting:
        raise ValueError(f"the device {device!r} is not in the catalogue; name the nearest of {' or '.join(GPUS)}")
    nearest = min(fitting, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return replace(nearest, memory_gib=memory_gib)


def cpu_process(memory_gib: float) -> Gpu:
    """One process on a CPU core that talks over gloo: rates of the right order, for runs that only try a layout out."""
    rates = _rates(0.03, fp32=0.05, fp16=0.005)
    return Gpu(_CPU, memory_gib, 10, rates, 1, 10, 0.8, 1, network_gbit=8, context_gib=0.0, source="order of magnitude")


@dataclass(frozen=True)
class Cluster:
    """``nodes`` equal nodes of ``gpus_per_node`` GPUs.

    ``network_gbit`` is the network bandwidth of one GPU in Gbit/s (that of a node divided by its GPUs); 0 takes what is
    usual for the GPU. ``host_gib`` and ``nvme_gib`` are memory and disk of one node, 0 when unknown.
    """

    gpu: Gpu
    gpus_per_node: int = 8
    nodes: int = 1
    network_gbit: float = 0.0
    host_gib: float = 0.0
    nvme_gib: float = 0.0

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1 or self.nodes < 1:
            raise ValueError(f"a cluster needs at least 1 node of 1 GPU, got {self.nodes} x {self.gpus_per_node}")
        if not all(0 <= amount < math.inf for amount in (self.network_gbit, self.host_gib, self.nvme_gib)):
            raise ValueError("network, host memory and NVMe are amounts of at least 0; 0 means the usual or unknown")

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def link_domain(self) -> int:
        """Neighbouring GPUs that reach each other over the fast links."""
        return min(self.gpus, max(self.gpus_per_node, self.gpu.link_domain))

    @property
    def network_gbps(self) -> float:
        """Network bandwidth of one GPU in GB/s, one direction."""
        return (self.network_gbit or self.gpu.network_gbit) / 8
