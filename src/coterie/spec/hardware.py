"""HardwareSpec: one device and its links, as published or measured; plain numbers with a unit in their name.

A device is a GPU, NPU, TPU, a CPU socket, or a what-if. Rates are peaks of dense products and of reading memory; what
share of them software reaches is the planner's calibration, unless `measured` says that they were read on this machine.
Not here: the table that ships with the package (`planner/devices.py`), how many devices (`planner/layout.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from coterie.spec.errors import SpecError

DeviceKind = Literal["gpu", "npu", "tpu", "cpu", "pim"]
Topology = Literal["switch", "mesh", "torus2d", "torus3d", "ocs"]
"""Links inside the scale-up domain: a switch with full bisection, a direct link to each peer, a torus, an optical
circuit switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """One device. Tera-operations and GB are decimal (1e12, 1e9); bandwidths in GB/s, links per direction.

    `*_tops`: dense products a second in 1e12 operations (a multiply-add counts two), 0 where the device has no such
    unit. scaleup_gbps: all links inside the domain together; domain: devices in it. network_gbps: this device's share
    of the network between domains. disk_gbps, ram_gb, ram_gbps, host_link_gbps: tiers behind the device's memory, 0
    without. measured: the rates were read on a machine and are what software reaches. Raises SpecError for a size that
    cannot be.
    """

    name: str
    kind: DeviceKind
    bf16_tops: float
    fp8_tops: float = 0.0
    fp4_tops: float = 0.0
    int8_tops: float = 0.0
    memory_gb: float
    memory_gbps: float
    scaleup_gbps: float = 0.0
    domain: int = 1
    topology: Topology = "switch"
    network_gbps: float = 0.0
    ram_gb: float = 0.0
    ram_gbps: float = 0.0
    host_link_gbps: float = 0.0
    disk_gbps: float = 0.0
    price_hour: float = 0.0
    watts: float = 0.0
    measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not isinstance(value, bool) and not 0 <= value < 1e9:
                raise SpecError(f"{field.name} of {self.name} must be a number from 0 to 1e9, not {value}")
        for name in ("bf16_tops", "memory_gb", "memory_gbps", "domain"):
            if getattr(self, name) <= 0:
                raise SpecError(f"{name} of {self.name} must be above 0, not {getattr(self, name)}")

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def memory_rate(self) -> float:
        """Bytes a second."""
        return self.memory_gbps * 1e9

    def rate(self, bits: int) -> float:
        """Operations a second of products whose operands have so many bits; the next wider unit where there is none."""
        if bits <= 4 and self.fp4_tops:
            return self.fp4_tops * 1e12
        if bits <= 8 and (self.fp8_tops or self.int8_tops):
            return (self.fp8_tops or self.int8_tops) * 1e12
        return self.bf16_tops * 1e12

    @property
    def ridge(self) -> float:
        """Ridge point in bf16, operations per byte (arXiv 2507.15465, Table I)."""
        return self.bf16_tops * 1e12 / self.memory_rate
