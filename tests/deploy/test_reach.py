"""A site reaches its server as Flower's node does: directly or by a proxy; and it compares the clocks."""

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from email.utils import format_datetime
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import httpx
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.control import ControlHttpClient

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members, reach, site_check


class Server(threading.Thread):
    """A federation's server, in so far as it refuses everything and tells a time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.socket, self.ahead, self.dated = socket.create_server(("127.0.0.1", 0)), 0.0, True
        address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        members.create(folder, members.Federation("loopback", address, version("fewlabel")), {})
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.start()

    def run(self) -> None:
        while True:
            with suppress(OSError), self.context.wrap_socket(self.socket.accept()[0], server_side=True) as caller:
                caller.recv(1000)
                now = keys.now() + datetime.timedelta(seconds=self.ahead)
                date = f"date: {format_datetime(now, usegmt=True)}\r\n" * self.dated
                caller.sendall(f"HTTP/1.1 404 \r\n{date}\r\n".encode())


class Proxy(threading.Thread):
    """A proxy for one connection at a time, which wants a password."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket, self.heads = socket.create_server(("127.0.0.1", 0)), list[bytes]()
        self.port = self.socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            with self.socket.accept()[0] as caller, suppress(OSError):
                self.heads.append(head := reach.read_head(caller))
                if b"Proxy-Authorization: Basic bWU6YSBi\r\n" not in head:  # me:a b
                    caller.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                    continue
                host, port = head.split()[1].decode().split(":")
                with socket.create_connection((host, int(port))) as server:
                    caller.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    back = threading.Thread(target=self.pass_on, args=(server, caller))
                    back.start()
                    self.pass_on(caller, server)
                    back.join()

    def pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Server(tmp_path / "fed")


@pytest.fixture
def trust(server: Server, tmp_path: Path) -> Path:
    return tmp_path / "fed" / "trust"


@pytest.mark.parametrize(("ahead", "sentence"), [(-30, "is 30 s ahead of"), (400, "is 400 s behind")])
def test_a_clock_that_the_server_would_refuse_is_told(ahead: float, sentence: str, server: Server, trust: Path) -> None:
    assert site_check.check_clock(trust) == "agrees with the server's"
    server.ahead = ahead
    with pytest.raises(BadInput, match=r"the clock here is (29|30|31|399|400|401) s") as found:
        site_check.check_clock(trust)
    assert sentence.split()[-1] in str(found.value)
    server.dated = False
    assert site_check.check_clock(trust).startswith("the server does not tell its time")


def test_a_proxy_of_the_environment_is_used_unless_it_is_not_for_this_server(
    server: Server, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy()
    assert site_check.check_proxy(trust) == "none, the server is reached directly"
    monkeypatch.setenv("https_proxy", f"http://me:a%20b@127.0.0.1:{proxy.port}")
    assert site_check.check_proxy(trust) == f"http://127.0.0.1:{proxy.port}, by the environment"
    assert "with a certificate of this federation" in site_check.check_connection(trust)
    assert len(proxy.heads) == 1
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(BadInput, match=r"does not connect to .*; it says: 407 Proxy Authentication Required"):
        site_check.check_connection(trust)
    monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(BadInput, match="is none that FewLabel can use; set https_proxy to http://HOST:PORT"):
        site_check.check_connection(trust)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "with a certificate of this federation" in site_check.check_connection(trust)
    assert len(proxy.heads) == 2


def test_flowers_node_looks_for_the_same_proxy(server: Server, trust: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy()
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    address = members.read_trust(trust).address
    client = ControlHttpClient.from_server_address(address, False, (trust / "ca.pem").read_bytes(), [])
    with pytest.raises(httpx.ProxyError):
        client.ListNodes(ListNodesRequest())
    assert proxy.heads[0].startswith(f"CONNECT {address} HTTP/1.1\r\n".encode())
