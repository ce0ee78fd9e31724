"""What stands between a federation and the world passes the calls of nodes, and nothing that only looks like one."""

import hashlib
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.supercore.error import FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fewlabel.core.errors import BadInput
from fewlabel.deploy import gateway, keys, members
from tests.flower_processes import free_ports, until


def federation(folder: Path) -> None:
    """A federation on this machine, and the keys of its two members."""
    members.create(folder, members.Federation("loopback", "127.0.0.1:1", "0"), {})
    for client in range(2):
        member(folder, client, keys.new_key(folder / f"key{client}", ssh=True))


def member(folder: Path, client: int, key: EllipticCurvePrivateKey) -> None:
    one = members.Member(client, f"site {client}", keys.public_half(key), str(client), "")
    members.write_members(folder, (*members.members(folder), one))


def signed(key: EllipticCurvePrivateKey, ago: float = 0) -> dict[str, str]:
    """What a node with this key says of itself in each call: as Flower does, and by Flower's own functions."""
    moment = (keys.now() - timedelta(seconds=ago)).isoformat()
    return {
        "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
        "flwr-timestamp": moment,
        "flwr-signature": b64encode(sign_message(key, moment.encode())).decode(),
    }


class Server(ThreadingHTTPServer):
    """A SuperLink in so far as it takes everything: it remembers each request, and answers with the body."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.seen: list[tuple[str, dict[str, str], str]] = []
        self.connections: set[int] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self) -> None:
        self.server.connections.add(self.client_address[1])
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        digest = hashlib.sha256(body).hexdigest()
        self.server.seen.append((self.requestline, {k.lower(): v for k, v in self.headers.items()}, digest))
        self.send_response(412 if body == b"an unknown key" else 200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("set-cookie", "a=b")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_CONNECT = answer  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@dataclass
class Guarded:
    """A gateway in a process of its own, before a server in this one."""

    folder: Path
    server: Server
    process: subprocess.Popen
    port: int
    context: ssl.SSLContext = field(init=False)

    @property
    def log(self) -> Path:
        return self.folder / f"gateway{self.port}.log"

    def __post_init__(self) -> None:
        self.context = ssl.create_default_context(cafile=self.folder / "ca.pem")

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), 30)
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")

    def say(self, data: bytes) -> bytes:
        """All that comes back to these bytes until the gateway closes the connection, or is silent for a second."""
        with self.connect() as connection:
            connection.sendall(self.signed(data))
            return rest(connection)

    def signed(self, data: bytes, client: int = 0) -> bytes:
        """The same bytes, each of their calls with the key of a member."""
        headers = signed(keys.load_key(self.folder / f"key{client}"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return data.replace(b"host: a\r\n", b"host: a\r\n" + lines.encode())

    def client(self, client: int = 0) -> httpx.Client:
        """A member's calls."""
        return self.caller(signed(keys.load_key(self.folder / f"key{client}")))

    def caller(self, headers: dict[str, str]) -> httpx.Client:
        address = f"https://127.0.0.1:{self.port}"
        return httpx.Client(base_url=address, verify=self.context, timeout=60, headers=headers)


def rest(connection: ssl.SSLSocket) -> bytes:
    connection.settimeout(1)
    heard = b""
    try:
        while more := connection.recv(65536):
            heard += more
    except (TimeoutError, ConnectionError, ssl.SSLError):
        pass
    return heard


def started(folder: Path, to: int, change: str = "") -> tuple[subprocess.Popen, int]:
    (port,) = free_ports(1)
    command = ["-m", "fewlabel.deploy.gateway"]
    if change:
        command = ["-c", f"from fewlabel.deploy import gateway; gateway.{change}; gateway.main()"]
    files = ["--certificate", folder / "server.pem", "--key", folder / "server.key", "--ca", folder / "ca.pem"]
    files += ["--members", folder]
    with (log := folder / f"gateway{port}.log").open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command, "--listen", f"127.0.0.1:{port}", "--to", f"127.0.0.1:{to}", *map(str, files)],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    until(lambda: "nodes reach" in log.read_text())
    return process, port


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    federation(folder := tmp_path_factory.mktemp("gateway"))
    server = Server(folder)
    process, port = started(folder, server.server_address[1])
    yield Guarded(folder, server, process, port)
    process.terminate()
    assert process.wait(10) == 0
    server.shutdown()
    server.server_close()


@pytest.fixture
def another(guarded: Guarded) -> Iterator[Callable[..., Guarded]]:
    """Starts a gateway of its own before the same server, with some of its constants changed."""
    begun: list[Guarded] = []

    def start(change: str = "") -> Guarded:
        server = guarded.server
        begun.append(Guarded(guarded.folder, server, *started(guarded.folder, server.server_address[1], change)))
        return begun[-1]

    yield start
    for one in begun:
        one.process.kill()
        one.process.wait()


NODE = {
    "content-type": "application/x-protobuf",
    "accept": "application/x-protobuf",
    "flwr-package-name": "flwr",
    "flwr-package-version": "1.41.0",
    "flwr-component-name": "SuperNode",
}


@pytest.mark.parametrize("path", sorted(path.decode() for path in gateway.PATHS))
def test_a_nodes_call_passes_with_its_headers_and_its_body(guarded, path):
    guarded.server.seen.clear()
    others = {"cookie": "c=d", "x-forwarded-for": "10.0.0.1", "flwr-task-token": "stolen", "authorization": "Bearer x"}
    own = NODE | signed(keys.load_key(guarded.folder / "key0"))
    with guarded.caller(own | others) as client:
        answer = client.post(path, content=b"a call")
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (
        200, b"a call", "application/x-protobuf",
    )  # fmt: skip
    assert "set-cookie" not in answer.headers
    ((line, headers, digest),) = guarded.server.seen
    assert (line, digest) == (f"POST {path} HTTP/1.1", hashlib.sha256(b"a call").hexdigest())
    made = ("host", "content-length", "connection", "accept-encoding", "user-agent")  # by the gateway itself
    assert {name: value for name, value in headers.items() if name not in made} == own
    assert headers["content-length"] == "6"
    assert headers["host"] == f"127.0.0.1:{guarded.server.server_address[1]}"


BIG = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"


def strangers(folder: Path, stranger: EllipticCurvePrivateKey) -> dict[str, tuple[dict[str, str], str]]:
    """Who is no member, though most of them know the key of one, and what they are told."""
    key = keys.load_key(folder / "key0")
    own, other = signed(key), signed(stranger)
    return {
        "nobody": ({}, "its key is not enrolled"),
        "a stranger": (other, "its key is not enrolled"),
        "a key alone": ({"flwr-public-key": own["flwr-public-key"]}, "it is not signed by its key"),
        "by another": (other | {"flwr-public-key": own["flwr-public-key"]}, "it is not signed by its key"),
        "another time": (own | {"flwr-timestamp": signed(key, 1)["flwr-timestamp"]}, "it is not signed by its key"),
        "no time": (own | {"flwr-timestamp": "now"}, "it is not signed by its key"),
        "no text": (own | {"flwr-signature": "*"}, "it is not signed by its key"),
        "long ago": (signed(key, 310), "it was signed 31"),
        "to come": (signed(key, -69), "it was signed -6"),
    }


def test_who_is_no_member_is_refused_before_a_byte_of_a_body_is_passed_on(guarded, tmp_path):
    for headers, why in strangers(guarded.folder, keys.new_key(tmp_path / "stranger", ssh=True)).values():
        guarded.server.connections.clear()
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        with guarded.connect() as connection:
            connection.sendall((BIG % (1 << 30)).replace(b"host: a\r\n", b"host: a\r\n" + lines))
            heard = rest(connection)
        assert heard.startswith(b"HTTP/1.1 412")
        assert why in heard.decode()
        with guarded.caller(headers) as client:  # which nodes understand
            answer = client.post("/v1/fleet/activate-node", content=b"x" * 1000)
        found = FlowerError.from_json(answer.text)
        assert found is not None
        assert why in found.message
        assert not guarded.server.connections


def test_who_is_enrolled_meanwhile_passes_at_once(guarded, tmp_path):
    key = keys.new_key(tmp_path / "late", ssh=True)
    before = members.members(guarded.folder)
    with guarded.caller(signed(key)) as client:
        assert client.post(FLEET.decode(), content=b"x").status_code == 412
        member(guarded.folder, 2, key)
        assert client.post(FLEET.decode(), content=b"x").status_code == 200
        members.write_members(guarded.folder, before)
        assert client.post(FLEET.decode(), content=b"x").status_code == 412


def test_who_is_removed_within_one_tick_of_the_clock_is_refused(tmp_path):
    federation(folder := tmp_path / "federation")
    heads = [value.encode() for value in signed(keys.load_key(folder / "key0")).values()]
    roll, there = members.Roll(folder), (folder / members.MEMBERS).stat()
    assert roll.signer(*heads).client == 0
    members.write_members(folder, members.members(folder)[1:])
    os.utime(folder / members.MEMBERS, ns=(there.st_atime_ns, there.st_mtime_ns))
    with pytest.raises(BadInput, match="not enrolled"):
        roll.signer(*heads)


def test_a_member_has_no_more_under_way_than_one_message_may_have_and_all_have_a_limit(another, guarded):
    other = another("UNDER_WAY = 3 << 30")
    guarded.server.connections.clear()
    with other.connect() as first:
        first.sendall(other.signed(BIG % (3 << 29)))
        until(lambda: guarded.server.connections)
        assert b" 503 " in other.say(BIG % (1 << 30))  # beside the first, that is more than 2 GiB
        assert other.say(BIG % 2 + b"hi").endswith(b"hi")  # what is small always passes
        with other.connect() as second:
            second.sendall(other.signed(BIG % (1 << 31), 1))
            assert b" 503 " in rest(second)
        with other.connect() as second:
            second.sendall(other.signed(BIG % (1 << 30), 1))
            assert rest(second) == b""  # it may go on
    until(lambda: other.say(BIG % (1 << 30)) == b"")


def test_strangers_or_one_member_cannot_take_all_connections(another, guarded):
    other = another("EACH = gateway.STRANGERS = 3; gateway.FIRST = 600")
    call = b"POST " + FLEET + HEAD
    with ExitStack() as stack:

        def known(client: int) -> ssl.SSLSocket:
            connection = stack.enter_context(other.connect())
            connection.sendall(other.signed(call, client))
            return connection

        for client in (0, 0, 0, 1):
            member = known(client)
            until(lambda member=member: member.recv(65536).endswith(b"hi"))
        with known(0) as more:
            assert b" 503 " in rest(more)
        mute = [stack.enter_context(socket.create_connection(("127.0.0.1", other.port), 30)) for _ in range(4)]
        until(lambda: any(ended(one, b"") for one in mute))
        member.sendall(other.signed(call, 1))
        assert rest(member).endswith(b"hi")


def test_what_the_superlink_says_of_a_key_that_it_does_not_know_reaches_the_node(guarded):
    with guarded.client() as client:
        answer = client.post("/v1/fleet/activate-node", content=b"an unknown key")
    assert (answer.status_code, answer.content) == (412, b"an unknown key")


def test_calls_of_one_node_share_a_connection_on_both_sides(guarded):
    guarded.server.connections.clear()
    with guarded.connect() as connection:
        for _ in range(5):
            call = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi"
            connection.sendall(guarded.signed(call))
            while not connection.recv(65536).endswith(b"hi"):
                pass
    assert len(guarded.server.connections) == 1


FLEET = b"/v1/fleet/pull-messages"
CONTROL = b"/v1/control/start-run"
HEAD = b" HTTP/1.1\r\nhost: a\r\ncontent-type: application/x-protobuf\r\ncontent-length: 2\r\n\r\nhi"
LINE = b"POST " + FLEET + b" HTTP/1.1\r\nhost: a\r\n"

ATTACKS = {
    "control": b"POST " + CONTROL + HEAD,
    "register a key": b"POST /v1/control/register-node" + HEAD,
    "processes": b"POST /v1/runtime/acquire-task" + HEAD,
    "documentation": b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n",
    "health": b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "a node registers itself": b"POST /v1/fleet/register-node" + HEAD,
    "code": b"POST /v1/fleet/get-fab" + HEAD,
    "dots": b"POST /v1/fleet/../control/start-run" + HEAD,
    "dots after a call": b"POST " + FLEET + b"/../../control/start-run" + HEAD,
    "coded dots": b"POST /v1/fleet/%2e%2e/control/start-run" + HEAD,
    "coded slash": b"POST /v1/fleet/..%2fcontrol%2fstart-run" + HEAD,
    "coded letter": b"POST /v1/fleet/%70ull-messages" + HEAD,
    "twice coded": b"POST /v1/fleet/%252e%252e/control/start-run" + HEAD,
    "two slashes": b"POST //v1/control/start-run" + HEAD,
    "two slashes within": b"POST /v1//fleet/pull-messages" + HEAD,
    "backslash": b"POST /v1/fleet/..\\control\\start-run" + HEAD,
    "slash at the end": b"POST " + FLEET + b"/" + HEAD,
    "capitals": b"POST /V1/CONTROL/start-run" + HEAD,
    "parameter": b"POST " + FLEET + b";/../../control/start-run" + HEAD,
    "query": b"POST " + FLEET + b"?a=/v1/control/start-run" + HEAD,
    "fragment": b"POST " + FLEET + b"#/v1/control/start-run" + HEAD,
    "whole address": b"POST https://127.0.0.1" + CONTROL + HEAD,
    "whole address of a call": b"POST https://127.0.0.1" + FLEET + HEAD,
    "host": b"POST @127.0.0.1" + CONTROL + HEAD,
    "tunnel": b"CONNECT 127.0.0.1:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    "tunnel to a call": b"CONNECT " + FLEET + HEAD,
    "other method": b"GET " + FLEET + HEAD,
    "small method": b"post " + FLEET + HEAD,
    "two methods": b"POST " + FLEET + b" POST " + CONTROL + HEAD,
    "zero byte": b"POST " + FLEET + b"\0" + CONTROL + HEAD,
    "tab": b"POST\t" + CONTROL + HEAD,
    "websocket": LINE + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 2\r\n\r\nhi",
    "HTTP/2 by upgrade": LINE + b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "chunks": LINE + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    "chunks and length": LINE
    + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nPOST "
    + CONTROL
    + HEAD,
    "hidden chunks": LINE + b"content-length: 4\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\nPOST " + CONTROL + HEAD,
    "spaced chunks": LINE + b"content-length: 4\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\nPOST " + CONTROL + HEAD,
    "two lengths": LINE + b"content-length: 2\r\ncontent-length: 90\r\n\r\nhiPOST " + CONTROL + HEAD,
    "lengths in one": LINE + b"content-length: 2, 90\r\n\r\nhi",
    "negative length": LINE + b"content-length: -1\r\n\r\nhi",
    "signed length": LINE + b"content-length: +2\r\n\r\nhi",
    "no length": LINE + b"\r\nhi",
    "too long": LINE + b"content-length: 2147483649\r\n\r\n",
    "too long for a call without a message": LINE + b"content-length: 5000000\r\n\r\n",
    "folded header": LINE
    + b"content-length: 2\r\nx: y\r\n z\r\ncontent-type:\r\n a\r\n\r\nhi\r\n\r\nPOST "
    + CONTROL
    + HEAD,
    "a header twice": LINE + b"flwr-public-key: a\r\nflwr-public-key: b\r\ncontent-length: 2\r\n\r\nhi",
    "no host": b"POST " + FLEET + b" HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi",
    "old protocol": b"POST " + CONTROL + b"\r\n\r\n",
    "long head": LINE + b"x: " + b"a" * 20_000,
    "continue": LINE + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n",
}
LET_THROUGH = ("folded header",)  # as the one plain call that it is


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_else_passes(guarded, name):
    guarded.server.seen.clear()
    heard = guarded.say(ATTACKS[name])
    if name in LET_THROUGH:
        assert [line for line, *_ in guarded.server.seen] == [f"POST {FLEET.decode()} HTTP/1.1"]
        assert heard.startswith(b"HTTP/1.1 200")
    else:
        assert guarded.server.seen == []
        assert heard.split()[1] in (b"400", b"404", b"411", b"413", b"431", b"501")  # 401, 403 mean more to a node
    with guarded.client() as client:  # and it goes on
        assert client.post(FLEET.decode(), content=b"x").content == b"x"


def test_a_request_within_a_body_stays_a_body_and_one_after_it_is_refused(guarded):
    guarded.server.seen.clear()
    inner = (b"POST " + CONTROL + HEAD).replace(b"host: a", b"host: b")
    heard = guarded.say(LINE + b"content-length: %d\r\n\r\n" % len(inner) + inner + inner)
    ((line, headers, digest),) = guarded.server.seen
    assert (line, headers["content-length"]) == (f"POST {FLEET.decode()} HTTP/1.1", str(len(inner)))
    assert digest == hashlib.sha256(inner).hexdigest()
    assert heard.count(b"HTTP/1.1 200") == 1
    assert heard.count(b"HTTP/1.1 404") == 1


def test_a_call_that_breaks_off_never_looks_whole(guarded):
    guarded.server.seen.clear()
    with guarded.connect() as connection:
        connection.sendall(guarded.signed(LINE) + b"content-length: 100\r\n\r\nonly this")
    with guarded.client() as client:
        assert client.post(FLEET.decode(), content=b"x").content == b"x"
    whole = hashlib.sha256(b"x").hexdigest()
    assert [digest for _, headers, digest in guarded.server.seen if headers["content-length"] == "1"] == [whole]
    assert all(headers["content-length"] != "9" for _, headers, _ in guarded.server.seen)


def test_who_speaks_no_tls_is_not_heard(guarded):
    guarded.server.seen.clear()
    with socket.create_connection(("127.0.0.1", guarded.port), 30) as connection:
        connection.sendall(b"POST " + FLEET + HEAD)
        try:
            heard = connection.recv(65536)
        except ConnectionError:
            heard = b""
    assert not heard.startswith(b"HTTP")
    assert guarded.server.seen == []


def test_messages_of_any_size_stream_through(guarded):
    body = b"0123456789abcdef" * (64 << 16)  # 64 MiB
    with guarded.client() as client:
        client.post(FLEET.decode(), content=b"x")
        before = peak(guarded.process.pid)
        answer = client.post("/v1/fleet/push-object", content=body)
    assert answer.content == body
    assert peak(guarded.process.pid) - before < 24 << 20


def peak(process: int) -> int:
    """The most memory that a process has had, in bytes."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


# A gateway of its own for each


def test_a_superlink_that_is_away_or_is_another_costs_a_node_a_retry(tmp_path):
    for folder in (tmp_path / "here", tmp_path / "other"):
        federation(folder)
    impostor = Server(tmp_path / "other")  # whose certificate another authority has signed
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen; nor can the gateway have this port, and call itself
        for port in (silent.getsockname()[1], impostor.server_address[1]):
            process, listens = started(tmp_path / "here", port)
            with Guarded(tmp_path / "here", impostor, process, listens).client() as client:
                assert client.post(FLEET.decode(), content=b"x").status_code == 502
            process.kill()
            process.wait()
    assert impostor.seen == []
    impostor.shutdown()
    impostor.server_close()


def test_who_is_slow_is_cut_off(another, guarded):
    change = "SECONDS = gateway.FIRST = 0.5; gateway.RATE = 1000"
    slow = another(change)
    with socket.create_connection(("127.0.0.1", slow.port), 30) as connection:  # without TLS
        assert any(ended(connection, b"") for _ in range(300))
    call = guarded.signed(LINE) + b"content-length: 1000000\r\n\r\n"
    for begin in (b"", LINE, call, call + bytes(100_000)):  # after a fast start, too
        guarded.server.seen.clear()
        with slow.connect() as connection:
            connection.sendall(begin)
            assert any(ended(connection, b"x" if begin else b"") for _ in range(300))  # trickling on does not help


def ended(connection: socket.socket, data: bytes) -> bool:
    """Whether a connection is cut off within a twentieth of a second after this was sent."""
    connection.settimeout(0.05)
    try:
        connection.sendall(data)
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except (ConnectionError, ssl.SSLError):
        return True


def test_a_first_request_has_less_time_than_those_of_a_member(another, guarded):
    other = another("FIRST = 0.5")
    with other.connect() as known:
        for _ in range(2):
            known.sendall(other.signed(b"POST " + FLEET + HEAD))
            until(lambda: known.recv(65536).endswith(b"hi"))
            with other.connect() as unknown:
                assert any(ended(unknown, b"") for _ in range(300))


def test_strangers_who_say_nothing_leave_files_and_places_to_members(another, guarded):
    change = "FIRST = 600; import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))"
    other = another(change)
    assert resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE) == (256, 256)
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", other.port), 30, ("127.0.0.2", 0)))
        with other.client() as client:
            assert client.post(FLEET.decode(), content=b"x").status_code == 200
    assert len(other.log.read_text().splitlines()) == 1


def test_strangers_who_come_back_again_and_again_keep_no_member_out_behind_their_address(another, guarded):
    """More of them than there are places, each of which connects again as soon as it is cut off."""
    other, going = another("FIRST = 600; gateway.STRANGERS = 20"), threading.Event()

    def stall() -> None:
        while not going.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", other.port), 30) as connection:
                connection.settimeout(1)
                connection.recv(1)
            time.sleep(0.5)

    stalled = [threading.Thread(target=stall) for _ in range(25)]
    for one in stalled:
        one.start()
    try:
        until(lambda: psutil.Process(other.process.pid).num_fds() > 20)
        for _ in range(5):
            with other.client() as client:
                assert client.post(FLEET.decode(), content=b"x").status_code == 200
    finally:
        going.set()
        for one in stalled:
            one.join()


def test_one_caller_of_ipv6_is_one_address_however_many_it_has():
    ours = [gateway.neighbourhood(f"2001:db8:1:2:{n:x}::{n:x}") for n in range(1, 9)]
    assert set(ours) == {"2001:db8:1:2::/64"}
    assert gateway.neighbourhood("2001:db8:1:3::1") != ours[0]
    assert gateway.neighbourhood("192.0.2.7") == "192.0.2.7"
    assert gateway.neighbourhood("::ffff:192.0.2.7") != gateway.neighbourhood("::ffff:192.0.2.8")
    assert gateway.neighbourhood("") == ""


def test_one_address_does_not_push_out_another(another, guarded):
    other = another("FIRST = 600; gateway.STRANGERS = 5")
    with ExitStack() as stack:
        slow = stack.enter_context(other.connect())  # begins before the crowd of another address, and goes on after it
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", other.port), 30, ("127.0.0.2", 0)))
        stack.enter_context(other.connect())  # when this is served, so were those before it
        slow.sendall(other.signed(b"POST " + FLEET + HEAD))
        assert rest(slow).endswith(b"hi")


def test_a_head_that_comes_at_once_has_the_same_limit_as_one_in_pieces(guarded):
    long = b"POST " + FLEET + b" HTTP/1.1\r\nhost: a\r\nx-long: " + b"x" * 20_000 + b"\r\ncontent-length: 2\r\n\r\nhi"
    assert b" 431 " in guarded.say(long)


def test_a_refusal_tells_the_time(guarded):
    """By which a site compares its clock with the server's."""
    (date,) = re.findall(rb"\r\ndate: (.*?)\r\n", guarded.say(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"))
    assert abs((keys.now() - parsedate_to_datetime(date.decode())).total_seconds()) < 60


def test_nobody_can_fill_the_log(another, guarded):
    other = another("QUIET = 600")
    _, most = resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE, (psutil.Process(other.process.pid).num_fds(), most))
    with socket.create_connection(("127.0.0.1", other.port), 30):
        until(lambda: "out of system resource" in other.log.read_text())
        resource.prlimit(other.process.pid, resource.RLIMIT_NOFILE, (most, most))
        for _ in range(3):
            assert b" 404 " in other.say(ATTACKS["control"])
    assert len(other.log.read_text().splitlines()) == 2


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to_whoever_is_connected(another, guarded, told):
    other = another()
    with other.connect() as idle, other.connect() as busy:
        busy.sendall(other.signed(LINE) + b"content-length: 1000000\r\n\r\n")
        other.process.send_signal(told)
        assert other.process.wait(10) == 0
        assert rest(idle) == b""
    assert len(other.log.read_text().splitlines()) == 1  # and no traceback
    assert not psutil.pid_exists(other.process.pid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--listen": "8443"}, "an address is HOST:PORT, such as learn.example.org:9443, found '8443'"),
        ({"--to": "127.0.0.1:x"}, "an address is HOST:PORT, such as learn.example.org:9443, found '127.0.0.1:x'"),
        ({"--key": "nothing.key"}, "are not a certificate, its key and an authority"),
        ({"--ca": "server.key"}, "are not a certificate, its key and an authority"),
        ({"--listen": "taken"}, "cannot be listened on"),
        ({"--members": "trust"}, "the members in trust cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(guarded, change, message):
    given = {"--certificate": "server.pem", "--key": "server.key", "--ca": "ca.pem", "--members": "."}
    given |= {"--listen": f"127.0.0.1:{free_ports(1)[0]}", "--to": "127.0.0.1:1"}
    given |= {k: f"127.0.0.1:{guarded.port}" if v == "taken" else v for k, v in change.items()}
    command = [sys.executable, "-m", "fewlabel.deploy.gateway", *(part for pair in given.items() for part in pair)]
    environment = {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, cwd=guarded.folder, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode in (2, 4)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# What it knows of Flower


def test_the_calls_and_headers_are_those_of_this_flower():
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore import constant
    from flwr.superlink.routers.fleet.router import router

    routes = {(method, route.path.encode()) for route in router.routes for method in route.methods}
    withheld = {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node", b"/v1/fleet/get-fab"}
    assert routes == {("POST", path) for path in gateway.PATHS | withheld}
    named = {
        TIMESTAMP_HEADER,
        constant.FLEET_HTTP_PUBLIC_KEY_HEADER,
        constant.FLEET_HTTP_SIGNATURE_HEADER,
        constant.FLWR_PACKAGE_NAME_METADATA_KEY,
        constant.FLWR_PACKAGE_VERSION_METADATA_KEY,
        constant.FLWR_COMPONENT_NAME_METADATA_KEY,
    }
    assert {name.encode() for name in named | {"content-type", "accept"}} == gateway.HEADERS
    assert (members.AHEAD, members.LATE) == (SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)
    assert constant.VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY.encode() in gateway.ANSWERED


def test_it_loads_neither_flower_nor_pytorch():
    code = "import sys, fewlabel.deploy.gateway; print({'torch', 'flwr'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
