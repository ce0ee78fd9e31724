"""A real federation on this machine: SuperLink, SuperNodes and site processes, with TLS and node keys."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from threading import Lock

import psutil

from fewlabel.deploy import flower, keys, members, peers, processes

SITE = """
import json, sys
from functools import partial
from pathlib import Path
from fewlabel.deploy import site, site_process
site_process.serve(partial(site.reply, json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(condition: Callable[[], object], seconds: float = 300) -> float:
    """Wait for something to be true. Return for how many seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come true"
        time.sleep(0.05)
    return time.monotonic() - began


class Processes(processes.Programs):
    """A SuperLink, and a node and a site process for each site, below a folder of their own.

    `code` is that of a site process. Its two arguments are the site's configuration and the socket.
    """

    def __init__(self, folder: Path, sites: list[dict], code: str = SITE) -> None:
        self.sites, self.code = sites, code
        self.port, *self.ports = free_ports(1 + len(sites))
        address = f"127.0.0.1:{self.port}"
        members.create(folder, members.Federation("loopback", address, version("fewlabel")), {})
        super().__init__(
            folder,
            processes.flower_environment(folder / "home")
            | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
            },
        )
        (folder / "home").mkdir()
        connection = f'address = "{address}"\nroot-certificates = "{folder / "ca.pem"}"\n'
        (folder / "home" / "config.toml").write_text(f"[superlink.here]\n{connection}")
        self.app = flower.write_app(folder)

    def __enter__(self) -> "Processes":
        try:
            self.link()
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(self.enrol, range(len(self.sites))))
            for number in range(len(self.sites)):
                self.site_process(number)
                self.node(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        processes.end(self.folder, self.started.values())

    def kill(self, name: str) -> None:
        """End a process and all its helpers, by a signal that none of them can catch."""
        parent = psutil.Process(self.started[name].pid)
        every = [*parent.children(recursive=True), parent]
        for process in every:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.started.pop(name).wait()
        psutil.wait_procs(every, 10)

    def link(self) -> None:
        """Start the SuperLink. If it was there before, it still knows what it knew."""
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        self.start("link", [
            str(processes.BIN / "flower-superlink"), *tls, "--enable-supernode-auth", "--port", str(self.port),
            "--database", "link.db", "--disable-runtime-dependency-installation",
        ])  # fmt: skip
        self.wait_for("link", "127.0.0.1", self.port, patience=300)

    def enrol(self, number: int) -> None:
        """Create and register a site's key."""
        key, public = keys.new_key(self.folder / f"key{number}", ssh=True), self.folder / f"key{number}.pub"
        public.write_text(keys.public_half(key))
        self.flwr("supernode", "register", str(public), "here")

    def site_process(self, number: int) -> None:
        config, path = json.dumps(self.sites[number]), str(self.folder / f"site{number}.socket")
        self.start(f"site{number}", [sys.executable, "-c", self.code, config, path])

    def node(self, number: int) -> None:
        self.start(f"node{number}", [
            sys.executable, "-m", "fewlabel.deploy.flower", "supernode", "--root-certificates", "ca.pem",
            "--auth-supernode-private-key", f"key{number}", "--superlink", f"127.0.0.1:{self.port}",
            "--node-config", f'socket="{self.folder / f"site{number}.socket"}"', "--port", str(self.ports[number]),
        ])  # fmt: skip

    def flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(processes.BIN / "flwr"), *arguments],
            cwd=self.folder, env=os.environ | self.environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, directory: Path) -> "subprocess.Popen[bytes]":
        """Start a command that ends when the run does."""
        options = ["--stream", "--run-config", f'directory="{directory}"']
        return self.start(
            f"run-{directory.name}", [str(processes.BIN / "flwr"), "run", str(self.app), "here", *options]
        )

    def run(self, directory: Path, timeout: float = 600) -> str:
        """Run what is laid out in a directory. Return what was printed."""
        self.submit(directory).wait(timeout)
        return self.log(f"run-{directory.name}").read_text()


class Members(Processes):
    """Processes whose sites are members that know each other's keys, which lie beside `peers.json`."""

    enrolling = Lock()

    def enrol(self, number: int) -> None:
        key, public = keys.new_key(self.folder / f"key{number}", ssh=True), self.folder / f"key{number}.pub"
        public.write_text(keys.public_half(key))
        node = json.loads(self.flwr("supernode", "register", str(public), "here", "--format", "json"))["node-id"]
        with self.enrolling:
            member = members.Member(number, f"site {number}", public.read_text(), str(number), "", int(node))
            members.write_members(self.folder, (*members.members(self.folder), member))
            peers.write(peers.of(self.folder), self.folder / peers.FILE)
