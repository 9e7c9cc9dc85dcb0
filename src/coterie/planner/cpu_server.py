"""A CPU server from what is on its data sheet: channels and their rate, sockets and NUMA, cores, clock, instructions.

`cpu:channels=12,mts=8800,cores=128,ghz=2.0,isa=amx,sockets=2` is a device wherever a device is asked for; the sockets
work as one. Rates are peaks; what software reaches is `cost.prior`'s, fitted, or measured by `plan calibrate`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal, get_args

from coterie.spec.errors import SpecError
from coterie.spec.hardware import HardwareSpec

PREFIX = "cpu:"
Isa = Literal["avx2", "avx512", "amx"]
Numa = Literal["local", "interleaved"]
CYCLE: dict[Isa, tuple[float, float]] = {"avx2": (32, 64), "avx512": (64, 256), "amx": (1024, 2048)}
"""Operations of a core and cycle on wide values and on 8-bit integers. avx2: two multiply-add units of 8 floats; 16
products of 16 bits each (int8 is widened). avx512: two of 16 floats; VNNI's 64 products each. amx: one tile product of
16 x 16 x 32 bf16 (64 int8) in 16 cycles (Intel's optimisation manual)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuServer:
    """A server. channels, cores, memory_gb: of one socket. mts: transfers of 8 bytes a channel, in 1e6 a second. numa:
    "local" where each socket reads the weights it holds (a rank, or half of each matrix, per socket), "interleaved"
    where pages lie in turn on all, so that of n sockets (n-1)/n of the reads cross `link_gbps`, the links into one
    socket in one direction."""

    channels: float
    mts: float
    cores: float
    ghz: float
    isa: Isa = "avx512"
    sockets: int = 1
    memory_gb: float = 512.0
    numa: Numa = "local"
    link_gbps: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("isa", "numa"):
                options = get_args(Isa if field.name == "isa" else Numa)
                if value not in options:
                    raise SpecError(f"{field.name} of a CPU server is one of {', '.join(options)}, not {value!r}")
            elif not 0 < value < 1e6:
                raise SpecError(f"{field.name} of a CPU server must be a number above 0 and below 1e6, not {value}")

    @classmethod
    def parse(cls, text: str) -> CpuServer:
        """Read `cpu:name=value,...`. Raises SpecError that names what is unknown, missing or no number."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, object] = {}
        for part in text.removeprefix(PREFIX).split(","):
            name, _, value = part.strip().partition("=")
            if name not in known:
                raise SpecError(f"{text}: there is no {name!r}; possible are {', '.join(known)}")
            values[name] = value if name in ("isa", "numa") else _number(text, name, value)
        missing = [name for name in ("channels", "mts", "cores", "ghz") if name not in values]
        if missing:
            raise SpecError(f"{text}: missing {', '.join(missing)}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def socket_gbps(self) -> float:
        """Memory of one socket, read by its own cores."""
        return self.channels * self.mts * 8 / 1e3

    @property
    def memory_gbps(self) -> float:
        """All sockets reading weights."""
        if self.sockets == 1 or self.numa == "local":
            return self.sockets * self.socket_gbps
        remote = (self.sockets - 1) / self.sockets
        return self.sockets * min(self.socket_gbps, self.link_gbps / remote)

    def hardware(self) -> HardwareSpec:
        """The server as one device."""
        wide, narrow = CYCLE[self.isa]
        cycles = self.sockets * self.cores * self.ghz * 1e9
        return HardwareSpec(
            name=f"CPU server, {self.sockets} x {self.cores:g} cores {self.isa}", kind="cpu",
            bf16_tops=cycles * wide / 1e12, int8_tops=cycles * narrow / 1e12, memory_gb=self.sockets * self.memory_gb,
            memory_gbps=self.memory_gbps, source=f"{self.channels:g} channels x {self.mts:g} MT/s, {self.numa} memory",
        )  # fmt: skip


def described(hw: HardwareSpec) -> tuple[int, Isa] | None:
    """(sockets, instructions) of a server that was described so; None for another device."""
    found = re.fullmatch(r"CPU server, (\d+) x [\d.e+]+ cores (\w+)", hw.name)
    return None if found is None else (int(found[1]), found[2])  # type: ignore[return-value]


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name == "sockets" and number == number and number == int(number):
        return int(number)
    if number != number or name == "sockets":
        raise SpecError(f"{text}: {name} {value!r} is not a {'whole ' if name == 'sockets' else ''}number")
    return number
