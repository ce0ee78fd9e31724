"""How a site reaches its server: directly or by a proxy, as Flower's node does; and what the clock there says."""

import base64
import datetime
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members

PATIENCE = 10.0  # seconds
LONGEST = 1 << 14  # bytes of a head that is read


def proxy_for(host: str) -> str | None:
    """Return the proxy that the environment names for a host. Flower's node uses it, too."""
    found = urllib.request.getproxies()
    return None if urllib.request.proxy_bypass(host) else found.get("https") or found.get("all")


def described(proxy: str) -> str:
    """Return a proxy's address without the password that it may have."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or 80}"


@contextmanager
def connected(trust: Path) -> Iterator[ssl.SSLSocket]:
    """Connect to the server of a federation, by TLS, and check that it is the one that the coordinator named."""
    address = members.read_trust(trust).address
    host, port = keys.host_and_port(address)
    context = ssl.create_default_context(cafile=trust / f"{keys.CA}.pem")
    proxy = proxy_for(host)
    where = f"{address} by the proxy {described(proxy)}" if proxy else address
    try:
        with dial(host, port, proxy) as plain, context.wrap_socket(plain, server_hostname=host) as secure:
            yield secure
    except ssl.SSLError as error:
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise BadInput(f"{where} closes the connection; it may be busy, or a firewall stands between") from None
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        why = "it does not speak TLS, as if served with --insecure" if why == "WRONG_VERSION_NUMBER" else why
        raise BadInput(f"{where} is not the server of this federation: {why}") from None
    except OSError as error:
        raise BadInput(f"{where} does not answer: {error.strerror or error}") from None


def dial(host: str, port: int, proxy: str | None) -> socket.socket:
    """Open a connection, directly or by a proxy."""
    if proxy is None:
        return socket.create_connection((host, port), PATIENCE)
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme != "http" or parts.hostname is None:
        raise BadInput(
            f"the proxy {described(proxy)} is none that FewLabel can use; set https_proxy to http://HOST:PORT, or "
            f"no_proxy to {host}"
        )
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(login.encode()).decode()}")
    connection = socket.create_connection((parts.hostname, parts.port or 80), PATIENCE)
    try:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        status = read_head(connection).partition(b"\r\n")[0].split(b" ")
        if len(status) < 2 or not status[1].startswith(b"2"):
            said = b" ".join(status[1:]).decode("ascii", "replace")[:80] or "nothing"
            raise BadInput(f"the proxy {described(proxy)} does not connect to {target}; it says: {said}")
    except BaseException:
        connection.close()
        raise
    return connection


def read_head(connection: socket.socket) -> bytes:
    """Read the head of an answer."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LONGEST and (more := connection.recv(LONGEST)):
        head += more
    return head


def seconds_ahead(trust: Path) -> float | None:
    """Return by how many seconds the clock here is ahead of the server's, or None if the server does not tell."""
    host, _ = keys.host_and_port(members.read_trust(trust).address)
    with connected(trust) as secure:
        secure.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        lines = read_head(secure).decode("ascii", "replace").split("\r\n")
    given = [line.partition(":")[2] for line in lines if line.lower().startswith("date:")]
    try:
        theirs = parsedate_to_datetime(given[0].strip())
    except (IndexError, ValueError):
        return None
    return (keys.now() - theirs - datetime.timedelta(seconds=0.5)).total_seconds()  # it tells whole seconds
