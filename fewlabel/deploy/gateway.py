"""The gateway: the one port of a federation that others can reach. It lets Flower's nodes pass and nobody else.

Flower's SuperLink has one port for three kinds of callers: nodes, whoever submits runs or registers keys, and its own
processes. It asks only the nodes who they are. So the SuperLink listens on its own machine alone, and the gateway
stands before it. The gateway makes a new request out of each one that passes: a method and a path that are byte for
byte one of `PATHS`, the headers of `HEADERS`, and a body. FewLabel's nodes do without two of the nodes' calls, so those
do not pass: the one by which a node registers itself, and the one that fetches code. A node takes 401 and 403 for
orders of its SuperLink, so what is refused is answered as not found.

The SuperLink reads a whole call before it asks who makes it. So the gateway asks first: it passes nothing of a body on
unless the call's head has the key of a member and its signature of the time.
"""

import argparse
import asyncio
import ipaddress
import json
import math
import resource
import signal
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any

import h11
import httpx

from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.deploy.keys import host_and_port
from fewlabel.deploy.members import Roll

PATHS = frozenset(
    b"/v1/fleet/" + name
    for name in (
        b"activate-node",
        b"deactivate-node",
        b"send-node-heartbeat",
        b"pull-messages",
        b"push-messages",
        b"get-run",
        b"push-object",
        b"pull-object",
        b"confirm-message-received",
    )
)
HEADERS = frozenset(
    {
        b"content-type",
        b"accept",
        b"flwr-public-key",
        b"flwr-timestamp",
        b"flwr-signature",
        b"flwr-package-name",
        b"flwr-package-version",
        b"flwr-component-name",
    }
)
SIGNED = (b"flwr-public-key", b"flwr-timestamp", b"flwr-signature")
ANSWERED = frozenset({b"content-type", b"content-length", b"flwr-version-incompatibility-message"})

MAX_HEAD = 16 << 10  # bytes
MAX_BODY = 2 << 30  # bytes, which is as much as Flower can put into a message's part
MAX_CALL = 4 << 20  # bytes of a call that carries no message
LARGE = frozenset({b"/v1/fleet/push-messages", b"/v1/fleet/push-object"})
CHUNK = 256 << 10  # bytes that are read at once
CONNECTIONS = 400  # of members at a time, kept for them alone; each takes two of the process's files
STRANGERS = 100  # connections at a time that have not shown a member's key yet, from before TLS on
EACH = 50  # connections of one member
UNDER_WAY = 4 * MAX_BODY  # bytes of large calls at a time, which the SuperLink keeps in memory; of a member, MAX_BODY
FIRST = 5.0  # seconds for TLS, for the first head of a connection, and for its end
SECONDS = 60.0  # without a complete request, or without any progress of one
RATE = 50_000  # bytes a second; slower transfers are given up
QUIET = 1.0  # seconds between two lines of the log, or strangers could fill the disk


class Refusal(Exception):
    """A request that does not pass, and the status that it is answered with."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def check_head(request: h11.Request) -> int:
    """Refuse a request that may not pass. Return the length of its body."""
    given = [(name, value) for name, value in request.headers if name in HEADERS]
    others = {name: value for name, value in request.headers if name not in HEADERS}
    if sum(len(name) + len(value) for name, value in request.headers) + len(request.target) > MAX_HEAD:
        raise Refusal(431, f"has a head of more than {MAX_HEAD} bytes")  # h11 counts only heads that come in pieces
    if request.method != b"POST" or request.target not in PATHS:
        raise Refusal(404, "is no call of a node")
    if b"transfer-encoding" in others or b"upgrade" in others or b"expect" in others:
        raise Refusal(400, "is not sent as nodes send it")
    if len(dict(given)) < len(given):
        raise Refusal(400, "has a header twice")
    if b"content-length" not in others:
        raise Refusal(411, "does not tell its length")
    length = int(others[b"content-length"])  # h11 has made sure that it is one number
    most = MAX_BODY if request.target in LARGE else MAX_CALL
    if length > most:
        raise Refusal(413, f"has {length} bytes, more than {most}")
    return length


def neighbourhood(host: str) -> str:
    """Return the address by which strangers are counted: of IPv6 the first half, for one caller has all the rest."""
    with suppress(ValueError):
        if (address := ipaddress.ip_address(host)).version == 6 and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return host


@dataclass
class Caller:
    """A connection from outside, with one request after the other."""

    transport: asyncio.Transport
    peer: str  # its address, or the member as soon as that is known
    limit: asyncio.Timeout | None = None
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.SERVER, MAX_HEAD))
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    async def secure(self, context: ssl.SSLContext) -> None:
        """Begin TLS."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(CHUNK, loop)
        protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        transport = await loop.start_tls(
            self.transport, protocol, context,
            server_side=True, ssl_handshake_timeout=FIRST, ssl_shutdown_timeout=FIRST,
        )  # fmt: skip
        if transport is None:
            raise ConnectionResetError
        protocol.connection_made(transport)
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)

    async def event(self) -> h11.Event:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.reader.read(CHUNK))
        if isinstance(event, type):  # paused: it speaks out of turn, or wants to speak another protocol
            raise h11.RemoteProtocolError("is not HTTP/1.1 of a node")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self.event(), h11.Data):
            yield bytes(event.data)
            self.progress(len(event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise h11.RemoteProtocolError("ends too early")

    async def send(self, *events: h11.Event) -> None:
        for event in events:
            self.writer.write(self.http.send(event) or b"")
        await self.writer.drain()

    def progress(self, size: int = 0) -> None:
        """Give a connection more time: for bytes that have passed, or by default for a whole head."""
        if self.limit is not None:
            now = asyncio.get_running_loop().time()
            before = self.limit.when() or now
            self.limit.reschedule(min(before + size / RATE, now + SECONDS) if size else now + SECONDS)

    async def refuse(self, status: int, why: str) -> None:
        """Answer why, in the form in which nodes show it."""
        if self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"code": status, "detail": why}).encode()
            date = formatdate(usegmt=True)  # by which `site check` compares the clocks
            headers = [("content-length", str(len(body))), ("connection", "close"), ("date", date)]
            answer = h11.Response(status_code=status, headers=headers)
            await self.send(answer, h11.Data(data=body), h11.EndOfMessage())


@dataclass
class Log:
    """Prints what went wrong, at most one line in `QUIET` seconds, and counts the lines that it leaves out."""

    last: float = -math.inf  # when a line was printed
    left_out: int = 0

    def __call__(self, line: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self.last + QUIET:
            self.left_out += 1
            return
        others = f"; before it, {self.left_out} lines were left out" if self.left_out else ""
        print(f"fewlabel: {line}{others}", flush=True)
        self.last, self.left_out = now, 0

    def error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self(f"{context['message']}: {context.get('exception')!r}")


@dataclass
class Gateway:
    """Passes the calls of nodes on to the SuperLink at `to`."""

    to: str
    client: httpx.AsyncClient
    roll: Roll
    outside: ssl.SSLContext
    log: Log
    strangers: dict["asyncio.Task[None]", Caller] = field(default_factory=dict)  # the oldest first
    callers: Counter[str] = field(default_factory=Counter)  # connections of members, by peer
    under_way: Counter[str] = field(default_factory=Counter)  # bytes by peer
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def accept(self, transport: asyncio.Transport) -> None:
        """Count a connection before a byte of it is read, and serve it.

        If there are too many strangers, the oldest of the address with the most of them makes place. So those who say
        nothing do not keep out a member behind the same address, nor one address another.
        """
        host, *_ = transport.get_extra_info("peername") or ("",)
        if len(self.strangers) == STRANGERS:
            ((crowded, _),) = Counter(one.peer for one in self.strangers.values()).most_common(1)
            oldest = next(task for task, one in self.strangers.items() if one.peer == crowded)
            self.strangers.pop(oldest).transport.abort()  # at once, because each takes a file
            oldest.cancel()
        transport.pause_reading()  # or bytes of TLS would be read before TLS begins
        caller = Caller(transport, neighbourhood(host))
        self.tasks.add(task := asyncio.create_task(self.serve_connection(caller)))
        self.strangers[task] = caller
        task.add_done_callback(lambda task: self.forget(task, caller))

    def forget(self, task: asyncio.Task[None], caller: Caller) -> None:
        self.tasks.discard(task)
        if self.strangers.pop(task, None) is None:  # a member's, or one that had to make place and is not counted
            self.callers = self.callers - Counter([caller.peer])

    async def serve_connection(self, caller: Caller) -> None:
        with suppress(OSError):  # it is gone, or speaks no TLS
            await caller.secure(self.outside)
            try:
                seconds = FIRST
                while await self.serve_request(caller, seconds):
                    seconds = SECONDS
            except (OSError, TimeoutError, h11.ProtocolError):  # it is gone, too slow, or was cut off within an answer
                pass
            finally:
                if caller.http.our_state is h11.SEND_BODY:
                    caller.writer.transport.abort()
                else:
                    caller.writer.close()
            await caller.writer.wait_closed()

    async def serve_request(self, caller: Caller, seconds: float) -> bool:
        """Pass one request on, or answer why not. Return True if another may follow on this connection."""
        what = "what came"
        try:
            async with asyncio.timeout(seconds) as caller.limit:
                head = await caller.event()
                if not isinstance(head, h11.Request):
                    return False
                what = f"{head.method.decode('ascii', 'replace')} {head.target.decode('ascii', 'replace')[:200]!r}"
                length = check_head(head)
                await self.identify(caller, head, length)
                with self.counted(caller.peer, length):
                    await self.forward(caller, head, length)
                if caller.http.our_state is h11.MUST_CLOSE:
                    return False
                caller.http.start_next_cycle()
                return True
        except Refusal as refusal:
            status, why = refusal.status, str(refusal)
        except h11.RemoteProtocolError as error:
            status, why = error.error_status_hint, str(error)
        except httpx.HTTPError as error:
            status, why = 502, f"did not reach the SuperLink: {type(error).__name__}"
        self.log(f"refused {what} from {caller.writer.get_extra_info('peername')}: {why}")
        async with asyncio.timeout(SECONDS):
            await caller.refuse(status, why)
        return False

    async def identify(self, caller: Caller, head: h11.Request, length: int) -> None:
        """Find out from a call's head which member makes it."""
        given = dict(head.headers)
        try:
            member = self.roll.signer(*(given.get(name, b"") for name in SIGNED))
        except StorageError as error:
            raise Refusal(503, str(error)) from None
        except BadInput as error:
            if length <= CHUNK:  # if it were not read, the connection would be reset before the node learns why
                async for _ in caller.body():
                    pass
            raise Refusal(412, str(error)) from None
        if (peer := f"client {member.client}") != caller.peer:
            if self.callers[peer] == EACH or self.callers.total() == CONNECTIONS:
                raise Refusal(503, f"is by a member with {self.callers[peer]} of {self.callers.total()} connections")
            task = asyncio.current_task()
            assert task is not None
            if self.strangers.pop(task, None) is None:  # it was another member before
                self.callers = self.callers - Counter([caller.peer])
            self.callers[peer] += 1
            caller.peer = peer

    @contextmanager
    def counted(self, peer: str, length: int) -> Iterator[None]:
        """Count the bytes of a large call while it is under way. Refuse it if there are too many; nodes try again."""
        if length > CHUNK:
            if self.under_way[peer] + length > MAX_BODY or self.under_way.total() + length > UNDER_WAY:
                raise Refusal(503, f"has {length} bytes, beside too many that are under way")
            self.under_way[peer] += length
        try:
            yield
        finally:
            if length > CHUNK:
                self.under_way = self.under_way - Counter({peer: length})

    async def forward(self, caller: Caller, head: h11.Request, length: int) -> None:
        caller.progress()
        headers = [(name, value) for name, value in head.headers if name in HEADERS]
        headers.append((b"content-length", str(length).encode()))
        url = f"{self.to}{head.target.decode()}"
        async with self.client.stream("POST", url, headers=headers, content=caller.body()) as answer:
            kept = [(name, value) for name, value in answer.headers.raw if name.lower() in ANSWERED]
            await caller.send(h11.Response(status_code=answer.status_code, headers=kept))
            async for chunk in answer.aiter_raw():
                await caller.send(h11.Data(data=chunk))
                caller.progress(len(chunk))
        await caller.send(h11.EndOfMessage())


class Listener(asyncio.Protocol):
    """Hands new connections to the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.gateway.accept(transport)


async def serve(listen: str, to: str, roll: Roll, outside: ssl.SSLContext, inside: ssl.SSLContext) -> None:
    """Pass nodes on until the process is told to end."""
    stop, loop, log = asyncio.Event(), asyncio.get_running_loop(), Log()
    loop.set_exception_handler(log.error)
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    limits = httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=4)  # the SuperLink closes idle ones after 5 s
    client = httpx.AsyncClient(
        verify=inside,
        limits=limits,
        timeout=SECONDS,
        trust_env=False,
        headers={"accept-encoding": "identity", "user-agent": "fewlabel"},
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # or one caller's would go out with another's call
    )
    async with client:
        gateway = Gateway(f"https://{to}", client, roll, outside, log)
        server = await loop.create_server(lambda: Listener(gateway), *host_and_port(listen))
        print(f"fewlabel: nodes reach the SuperLink at {to} by {listen}", flush=True)
        await stop.wait()
        server.close()
        for task in (ending := list(gateway.tasks)):
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fewlabel.deploy.gateway", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where nodes from outside connect")
    parser.add_argument("--to", required=True, metavar="127.0.0.1:PORT", help="where the SuperLink listens")
    parser.add_argument("--certificate", required=True, help="PEM file that is shown to nodes")
    parser.add_argument("--key", required=True, help="PEM file with its private key")
    parser.add_argument("--ca", required=True, help="PEM file of the authority that signed the SuperLink's certificate")
    parser.add_argument("--members", required=True, metavar="DIR", help="folder of the federation")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        host_and_port(given.to)
        roll = Roll(Path(given.members))
        outside = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            outside.load_cert_chain(given.certificate, given.key)
            inside = ssl.create_default_context(cafile=given.ca)
        except OSError as error:
            files = f"{given.certificate}, {given.key} and {given.ca}"
            raise BadInput(f"{files} are not a certificate, its key and an authority: {error}") from None
        try:
            asyncio.run(serve(given.listen, given.to, roll, outside, inside))
        except OSError as error:
            raise BadInput(f"{given.listen} cannot be listened on: {error}") from None
    except FewLabelError as error:
        print(f"fewlabel: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
