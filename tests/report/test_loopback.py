"""The server of pages on this machine: who gets an answer, and that nobody else does."""

import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.report.loopback import LoopbackServer, Request, Response

ASKED: list[Request] = []


def echo(request: Request) -> Response:
    ASKED.append(request)
    if request.path == "/bad":
        raise BadInput("there is no such image")
    if request.path == "/bug":
        raise ZeroDivisionError
    return Response.json([request.method, request.path, dict(request.query), request.body.decode()])


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    ASKED.clear()
    with LoopbackServer(echo, methods=("GET", "POST"), max_body=10) as served:
        yield served.start()


def token(server: LoopbackServer) -> str:
    return server.address.split("/")[3]


def ask(server: LoopbackServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    with connection.getresponse() as found:
        return found.status, found.read().decode()


def raw(server: LoopbackServer, text: str) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def test_who_has_the_address_gets_the_answer(server: LoopbackServer) -> None:
    with urllib.request.urlopen(f"{server.address}a%20b/c?x=1&y=") as found:
        assert json.load(found) == ["GET", "/a b/c", {"x": "1", "y": ""}, ""]
    status, text = ask(server, "POST", f"/{token(server)}/save", b"0123456789")
    assert (status, json.loads(text)) == (200, ["POST", "/save", {}, "0123456789"])


def test_it_listens_on_the_loopback_alone(server: LoopbackServer) -> None:
    """Every process of Linux sees who listens where: 0100007F is 127.0.0.1."""
    with open("/proc/net/tcp") as file:
        lines = [line.split() for line in file if line.split()[1].endswith(f":{server.port:04X}")]
    assert {line[1].split(":")[0] for line in lines if line[3] == "0A"} == {"0100007F"}
    with open("/proc/net/tcp6") as file:
        assert not [line for line in file if f":{server.port:04X} " in line.split(maxsplit=2)[1] + " "]


@pytest.mark.parametrize("path", ["/", "/index.html", "/{}", "/{}x/", "/x{}/", "/{}%2F", "/é/", "http://a]/"])
def test_without_the_token_nothing_is_answered(server: LoopbackServer, path: str) -> None:
    status = raw(server, f"GET {path.format(token(server))} HTTP/1.1\nHost: 127.0.0.1:{server.port}\n\n").split()[1]
    assert status == ("400" if "]" in path else "403")
    assert ASKED == []


def test_each_server_has_its_own_token(server: LoopbackServer) -> None:
    with LoopbackServer(echo) as other:
        assert len(token(server)) >= 32
        assert token(server) != token(other)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{}", "127.0.0.1", "localhost:1", "127.0.0.1:{}.evil.example", "[::1]:{}", ""]
)
def test_another_host_is_refused_even_with_the_token(server: LoopbackServer, host: str) -> None:
    """A page of evil.example whose name was bound to 127.0.0.1 afterwards sends its own name."""
    assert ask(server, "GET", f"/{token(server)}/", Host=host.format(server.port))[0] == 403
    assert ASKED == []


def test_two_hosts_or_none_are_refused(server: LoopbackServer) -> None:
    own = f"Host: 127.0.0.1:{server.port}\n"
    assert "403" in raw(server, f"GET /{token(server)}/ HTTP/1.1\n{own}Host: evil.example\n\n").split()[1]
    assert "403" in raw(server, f"GET /{token(server)}/ HTTP/1.1\n\n").split()[1]
    assert "200" in raw(server, f"GET /{token(server)}/ HTTP/1.1\n{own}\n").split()[1]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost", "https://127.0.0.1:{}", "http://127.0.0.1:1"]
)
def test_another_origin_is_refused_even_with_the_token(server: LoopbackServer, origin: str) -> None:
    found = ask(server, "POST", f"/{token(server)}/save", b"x", Origin=origin.format(server.port))
    assert found == (403, "this server answers only to its own pages")
    assert ASKED == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_both_own_names_are_known(server: LoopbackServer, name: str) -> None:
    host = f"{name}:{server.port}"
    assert ask(server, "GET", f"/{token(server)}/", Host=host, Origin=f"http://{host}")[0] == 200


def test_only_the_given_methods_are_possible(server: LoopbackServer) -> None:
    assert ask(server, "DELETE", f"/{token(server)}/") == (405, "only GET, POST is possible here")
    assert ask(server, "BREW", f"/{token(server)}/")[0] == 501
    with LoopbackServer(echo) as reading:
        assert ask(reading.start(), "POST", f"/{token(reading)}/", b"x")[0] == 405
    assert ASKED == []


def test_a_body_is_limited_and_its_length_is_known(server: LoopbackServer) -> None:
    path = f"/{token(server)}/"
    assert ask(server, "POST", path, b"01234567890") == (413, "the body is larger than 10 bytes")
    assert ask(server, "POST", path, None, Content_Length="9" * 5000)[0] == 413
    assert ask(server, "POST", path, None, Content_Length="-1")[0] == 400
    assert ask(server, "POST", path, b"1\r\nx\r\n0\r\n\r\n", Transfer_Encoding="chunked")[0] == 411
    head = f"POST {path} HTTP/1.1\nHost: 127.0.0.1:{server.port}\nContent-Length: 5\n"
    assert "411" in raw(server, f"{head}Content-Length: 5\n\nabcde").split()[1]
    assert "the body ends early" in raw(server, f"{head}\nabc")
    assert ASKED == []


def test_every_answer_tells_the_browser_to_keep_others_out(server: LoopbackServer) -> None:
    own = f"Host: localhost:{server.port}\n\n"
    answers = [raw(server, f"{line} HTTP/1.1\n{own}") for line in (f"GET /{token(server)}/", "GET /", "BREW /")]
    assert [answer.split()[1] for answer in answers] == ["200", "403", "501"]
    for answer in answers:
        assert "Content-Security-Policy: default-src 'none'; script-src 'self'; " in answer
        for header in ("X-Content-Type-Options: nosniff", "Referrer-Policy: no-referrer", "Cache-Control: no-store"):
            assert f"\r\n{header}\r\n" in answer
        assert "Access-Control" not in answer


def test_a_sentence_for_the_user_reaches_the_page_and_a_bug_the_terminal(
    server: LoopbackServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, "GET", f"/{token(server)}/bad") == (400, "there is no such image")
    assert capfd.readouterr().err == ""
    assert ask(server, "GET", f"/{token(server)}/bug")[0] == 500
    assert ask(server, "GET", f"/{token(server)}/")[0] == 200  # and it goes on
    out, err = capfd.readouterr()
    assert "ZeroDivisionError" in err
    assert token(server) not in out + err


def test_a_port_in_use_is_a_sentence(server: LoopbackServer) -> None:
    with pytest.raises(
        BadInput, match=rf"cannot listen on 127.0.0.1:{server.port} .*choose another port, or 0 for any"
    ):
        LoopbackServer(echo, server.port)
    with pytest.raises(BadInput, match="choose another port"):
        LoopbackServer(echo, 70000)


def test_a_closed_server_answers_no_more(server: LoopbackServer) -> None:
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.address)
