"""A test network: "hosts" as network namespaces, joined by veth and bridges, shaped with tbf. Needs root and iproute2.

Ranks in one namespace talk over its loopback, which no shaper touches; between namespaces everything passes a shaped
interface. Racks are bridges joined by a shaped pair of their own. A network has names of its own and is always taken
down: on leaving the `with` block, on an exception, on SIGTERM and at exit. No latency is added: netem is rarely there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType

INTERFACE = "eth0"
"""The same in every host."""

BURST = "burst 128kb latency 100ms"


class NetError(Exception):
    """This machine cannot make such a network; the message says why."""


def run(command: str) -> str:
    """Run a command line; raises `NetError` with what it said."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise NetError(f"`{command}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Layout:
    """Hosts, spread evenly over racks."""

    hosts: int
    racks: int = 1


class Network:
    """A running network. `store_host` is an address that every host reaches and that no host owns."""

    def __init__(self, layout: Layout, subnet: str = "10.77.0") -> None:
        self.layout, self.subnet = layout, subnet
        self.name = f"ctr{os.getpid()}"
        self.store_host = f"{subnet}.254"
        self._made: list[str] = []

    def host(self, index: int) -> str:
        """Name of a host's namespace."""
        return f"{self.name}-h{index}"

    def switch(self, rack: int) -> str:
        """Name of a rack's namespace; the store lives in the first."""
        return f"{self.name}-s{rack}"

    def rack_of(self, host: int) -> int:
        """Rack of a host."""
        return host * self.layout.racks // self.layout.hosts

    def inside(self, namespace: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", namespace]

    def __enter__(self) -> Network:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise NetError(f"{' and '.join(missing)} not found: install iproute2")
        atexit.register(self.down)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            self._up()
            self.limit(1000)  # says at once whether tbf exists
            self.limit(None)
        except NetError:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        atexit.unregister(self.down)

    def _namespace(self, name: str) -> None:
        run(f"ip netns add {name}")
        self._made.append(name)
        run(f"ip -n {name} link set lo up")

    def _up(self) -> None:
        for rack in range(self.layout.racks):
            switch = self.switch(rack)
            self._namespace(switch)
            run(f"ip -n {switch} link add br0 type bridge")
            run(f"ip -n {switch} link set br0 up")
            if rack:
                run(f"ip link add name up0 netns {switch} type veth peer name down{rack} netns {self.switch(0)}")
                run(f"ip -n {switch} link set up0 master br0 up")
                run(f"ip -n {self.switch(0)} link set down{rack} master br0 up")
        run(f"ip -n {self.switch(0)} addr add {self.store_host}/24 dev br0")
        for index in range(self.layout.hosts):
            host, switch = self.host(index), self.switch(self.rack_of(index))
            self._namespace(host)
            run(f"ip link add name p{index} netns {switch} type veth peer name {INTERFACE} netns {host}")
            run(f"ip -n {switch} link set p{index} master br0 up")
            run(f"ip -n {host} addr add {self.subnet}.{index + 1}/24 dev {INTERFACE}")
            run(f"ip -n {host} link set {INTERFACE} up")

    def uplink(self) -> str:
        """Give this process a way into the network, for a client of what its hosts serve; returns the own address."""
        address, ours = f"{self.subnet}.253", f"u{os.getpid()}"  # the interface goes with the switch
        run(f"ip link add name {ours} type veth peer name uplink netns {self.switch(0)}")
        run(f"ip -n {self.switch(0)} link set uplink master br0 up")
        run(f"ip addr add {address}/24 dev {ours}")
        run(f"ip link set {ours} up")
        return address

    def limit(self, mbit: float | None, host: int | None = None) -> None:
        """Shape what one host (or each) sends; None takes the shaper away."""
        for index in range(self.layout.hosts) if host is None else [host]:
            self._shape(self.host(index), INTERFACE, mbit)

    def limit_racks(self, mbit: float | None) -> None:
        """Shape what goes from rack to rack, in both directions."""
        for rack in range(1, self.layout.racks):
            self._shape(self.switch(rack), "up0", mbit)
            self._shape(self.switch(0), f"down{rack}", mbit)

    def _shape(self, namespace: str, device: str, mbit: float | None) -> None:
        if mbit is None:
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
        else:
            run(f"tc -n {namespace} qdisc replace dev {device} root tbf rate {mbit:g}mbit {BURST}")

    def cable(self, host: int, *, plugged: bool) -> None:
        """Pull a host's cable, or plug it in again."""
        run(f"ip -n {self.switch(self.rack_of(host))} link set p{host} {'up' if plugged else 'down'}")

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host's interface has sent."""
        return sent_by(run(" ".join([*self.inside(self.host(host)), "cat", "/proc/net/dev"])), INTERFACE)

    def rack_bytes(self, rack: int) -> int:
        """Bytes that have left a rack (not the first) for others."""
        return sent_by(run(" ".join([*self.inside(self.switch(rack)), "cat", "/proc/net/dev"])), "up0")

    def down(self) -> None:
        """Take everything away; harmless if nothing is there."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True)


def sent_by(table: str, interface: str) -> int:
    """The counter of sent bytes in the text of /proc/net/dev."""
    for line in table.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise NetError(f"no interface {interface}")
