"""A small web server for pages on this machine alone: only its user's browser may ask, and only with a secret address.

It listens on 127.0.0.1 and on nothing else. The address has a random token as its first part, so that other users of
the machine cannot guess it, and relative links in a page keep it. Two checks keep foreign web pages out, whose scripts
run in the same browser: `Host` must be this server's (against rebound names), and `Origin`, if a browser sends one.

    def answer(request: Request) -> Response:
        return Response.text("hello") if request.path == "/" else Response.text("there is no such page", 404)

    with LoopbackServer(answer) as server:
        print(server.address)     # http://127.0.0.1:41235/6f0c…/
        server.serve()            # until Ctrl-C
"""

import hmac
import json
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from fewlabel.core.errors import BadInput, FewLabelError

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # what a browser on this machine may call it
SECONDS = 20.0  # that a connection may keep silent
AT_ONCE = 32  # connections; a browser opens about six
MAX_BODY = 1 << 20

# A page loads only what this server serves: scripts and styles are files of their own, or a page's own styles.
# A picture may also be a `data:` or `blob:` address that the page made itself.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address is the secret
    "Cache-Control": "no-store",
    "Connection": "close",
}


@dataclass(frozen=True)
class Request:
    """What a browser asks for."""

    method: str
    path: str  # without the token; begins with "/", decoded once
    query: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    """What it gets."""

    status: int
    content_type: str
    body: bytes

    @classmethod
    def text(cls, text: str, status: int = 200) -> Self:
        """Return plain text."""
        return cls(status, "text/plain; charset=utf-8", text.encode())

    @classmethod
    def html(cls, page: str, status: int = 200) -> Self:
        """Return a page."""
        return cls(status, "text/html; charset=utf-8", page.encode())

    @classmethod
    def json(cls, found: Any, status: int = 200) -> Self:
        """Return what JSON can hold."""
        return cls(status, "application/json", json.dumps(found).encode())


Answer = Callable[[Request], Response]


class LoopbackServer:
    """Serves `answer` on 127.0.0.1, each request in a thread of its own.

    `port` 0 takes a free one. `methods` are the ones that `answer` gets; ("GET",) makes a server read-only. A body
    larger than `max_body` is refused unread. If `answer` raises a FewLabelError, the page gets its sentence with status
    400.
    """

    def __init__(
        self, answer: Answer, port: int = 0, methods: Sequence[str] = ("GET",), max_body: int = MAX_BODY
    ) -> None:
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = Listener((HOST, port), handler_of(self, answer, tuple(methods), max_body))
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot listen on {HOST}:{port} ({error}); choose another port, or 0 for any") from None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The secret address of the first page. It ends with a slash."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Serve until another thread calls `close`, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def start(self) -> Self:
        """Serve from a thread of its own."""
        self._thread = threading.Thread(target=self.serve, name="fewlabel-loopback", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving, and give the port back."""
        if self._thread:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def own_hosts(self) -> set[str]:
        """Return what `Host` may be."""
        return {f"{name}:{self.port}" for name in NAMES}

    def below_token(self, path: str) -> str | None:
        """Return the path behind the token, or None if it does not begin with it."""
        token, slash, rest = path.removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())
        return f"/{rest}" if known and slash and path.startswith("/") else None


class Listener(ThreadingTCPServer):
    """Takes a limited number of connections at once. Unlike `http.server`, it asks no name server for its own name."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(timeout=SECONDS):
            return self.shutdown_request(request)
        return super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def handler_of(
    server: LoopbackServer, answer: Answer, methods: tuple[str, ...], max_body: int
) -> type[BaseHTTPRequestHandler]:
    """Return the class that `http.server` makes for each connection."""

    class Handler(BaseHTTPRequestHandler):
        timeout = SECONDS
        server_version, sys_version = "FewLabel", ""

        def respond(self) -> None:
            try:
                response = self.answered()
            except FewLabelError as error:
                response = Response.text(str(error), 400)
            except Exception:  # a bug of a page: the server and its other pages go on
                traceback.print_exc()
                response = Response.text("FewLabel could not answer; its terminal says why", 500)
            self.reply(response)

        def answered(self) -> Response:
            """Return the answer, or why there is none. Nothing is read or run before the checks are passed."""
            if self.headers.get_all("Host", []) not in [[host] for host in server.own_hosts()]:
                return Response.text("this server answers only to its own name", 403)
            if not {f"http://{host}" for host in server.own_hosts()}.issuperset(self.headers.get_all("Origin", [])):
                return Response.text("this server answers only to its own pages", 403)
            try:
                parts = urlsplit(self.path)
                query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
            except ValueError:
                return Response.text("this is no address", 400)
            if (path := server.below_token(parts.path)) is None:
                return Response.text("the address lacks its token; use the one that FewLabel printed", 403)
            if self.command not in methods:
                return Response.text(f"only {', '.join(methods)} is possible here", 405)
            body = self.body()
            if isinstance(body, Response):
                return body
            return answer(Request(self.command, unquote(path), query, body))

        def body(self) -> bytes | Response:
            lengths = self.headers.get_all("Content-Length", [])
            if "Transfer-Encoding" in self.headers or len(lengths) > 1:
                return Response.text("a body needs one Content-Length", 411)
            length = (lengths or ["0"])[0]
            if not (length.isascii() and length.isdigit()):
                return Response.text("Content-Length is not a number", 400)
            if len(length) > 12 or int(length) > max_body:
                return Response.text(f"the body is larger than {max_body} bytes", 413)
            found = self.rfile.read(int(length))
            return found if len(found) == int(length) else Response.text("the body ends early", 400)

        def reply(self, response: Response) -> None:
            self.close_connection = True
            self.send_response(response.status)
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(len(response.body)))
            self.end_headers()
            self.wfile.write(response.body)

        def end_headers(self) -> None:
            for name, value in HEADERS.items():  # here, so that the errors of http.server have them, too
                self.send_header(name, value)
            super().end_headers()

        def handle(self) -> None:
            with suppress(ConnectionError, TimeoutError):  # the browser went away
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the terminal belongs to the command, and a log would hold the token."""

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = respond  # noqa: N815

    return Handler
