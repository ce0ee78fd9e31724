"""Hosts of their own on one machine: network namespaces joined by a switch, where the machine permits them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LISTENING = "0A"


@dataclass(frozen=True)
class Host:
    """A namespace with an address that the others reach; nothing else does, and it reaches nothing else."""

    name: str
    address: str

    @property
    def enter(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def listens(self) -> list[tuple[str, int]]:
        """Where something listens that others could reach: addresses that are not the loopback's, with ports."""
        found = []
        for family in ("tcp", "tcp6"):
            told = ip(*self.enter[1:], "cat", f"/proc/net/{family}")
            for local, state in ((line.split()[1], line.split()[3]) for line in told.splitlines()[1:]):
                address, port = local.split(":")
                if state == LISTENING and address not in ("0100007F", "0" * 24 + "01000000"):
                    found.append((address, int(port, 16)))
        return found


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    switch = f"fewlabel-{os.getpid()}"
    found = [Host(f"{switch}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
    with ExitStack() as stack:
        for name in (switch, *(host.name for host in found)):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(found):
            port = f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield found


def permitted() -> bool:
    try:
        with hosts(1):
            return True
    except (OSError, subprocess.SubprocessError):
        return False
