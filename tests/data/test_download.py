"""A download must survive what networks do to it, and count only when its checksum is right."""

import hashlib
import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.published import download
from fewlabel.data.published.download import fetch
from fewlabel.data.published.files import PublishedFile

CONTENT = bytes(range(256)) * 4000  # about a megabyte


class Server(ThreadingHTTPServer):
    """Serves CONTENT on this machine, and fails as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges = True  # whether it can begin in the middle
        self.length = True  # whether it says how much it will send
        self.most = len(CONTENT)  # bytes of one answer, after which the connection ends
        self.failures: list[int] = []  # status codes of the next answers
        self.content = CONTENT
        self.version = '"1"'  # its ETag
        self.early = 0  # bytes before the range that was asked for, with which an answer begins
        self.chunked = False
        self.asked: list[str | None] = []  # ranges

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        if server.failures:
            self.send_error(server.failures.pop(0))
            return
        same = self.headers.get("If-Range", server.version) == server.version
        start = int(re.findall(r"bytes=(\d+)-", asked)[0]) if asked and server.ranges and same else 0
        if start >= len(server.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        begin = max(0, start - server.early)
        rest = server.content[begin:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {begin}-{len(server.content) - 1}/{len(server.content)}")
        if server.version:
            self.send_header("ETag", server.version)
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            rest = b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest)
        elif server.length:
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: server.most])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def wanted(server: Server, md5: bool = True) -> PublishedFile:
    return PublishedFile("file.bin", server.url, (hashlib.md5(CONTENT).hexdigest(),) if md5 else ())


def test_a_file_arrives_whole_with_progress_and_nothing_beside_it(server, tmp_path):
    seen: list[tuple[str, int, int | None]] = []
    paths = fetch([wanted(server)], tmp_path / "new" / "folder", lambda *step: seen.append(step))
    assert paths == [tmp_path / "new" / "folder" / "file.bin"]
    assert paths[0].read_bytes() == CONTENT
    assert [path.name for path in paths[0].parent.iterdir()] == ["file.bin"]
    assert seen[0] == ("file.bin", 0, len(CONTENT))
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    done = [have for _, have, _ in seen]
    assert done == sorted(done)


def test_what_lies_there_is_never_downloaded_but_must_be_right(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    assert fetch([wanted(server)], tmp_path) == [tmp_path / "file.bin"]
    (tmp_path / "file.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(BadInput, match=r"file.bin is damaged or another file: .* delete it and download it again"):
        fetch([wanted(server)], tmp_path)
    assert server.asked == []


FIRST = CONTENT[:1000]


@pytest.mark.parametrize(
    ("faults", "left", "asked"),
    [
        ({"most": 300_000}, b"", [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]),
        ({}, FIRST, ["bytes=1000-"]),  # by an earlier command
        ({}, CONTENT, [f"bytes={len(CONTENT)}-"]),  # complete, but not yet in place
        ({}, b"something else", ["bytes=14-", None]),
        ({}, CONTENT + b"too much", [f"bytes={len(CONTENT) + 8}-", None]),
        ({"ranges": False}, FIRST, ["bytes=1000-"]),  # it sends all of it again
        ({"early": 10}, FIRST, ["bytes=1000-", None]),  # its answer begins elsewhere than asked
        ({"length": False}, b"", [None]),
        ({"failures": [503, 500, 429]}, b"", [None] * 4),
    ],
)
def test_a_file_arrives_whole_whatever_the_server_and_earlier_commands_did(server, tmp_path, faults, left, asked):
    vars(server).update(faults)
    if left:
        (tmp_path / ".file.bin.part").write_bytes(left)
    have: list[int] = []
    paths = fetch([wanted(server)], tmp_path, lambda _, done, __: have.append(done), wait=0)
    assert paths[0].read_bytes() == CONTENT
    assert server.asked == asked
    if left == FIRST and not faults:
        assert have[0] == 1000


def test_a_server_that_goes_on_failing_is_given_up_and_what_arrived_is_kept(server, tmp_path):
    server.ranges, server.most = False, 300_000  # so that it never gets further
    with pytest.raises(
        StorageError, match=r"file.bin cannot be downloaded from http://127.* ended early.*; .* continues it"
    ):
        fetch([wanted(server)], tmp_path, wait=0)
    assert len(server.asked) == 1 + download.TRIES
    assert (tmp_path / ".file.bin.part").stat().st_size == 300_000
    assert not (tmp_path / "file.bin").exists()


def test_a_file_that_is_not_there_is_not_asked_for_again(server, tmp_path):
    server.failures = [404]
    with pytest.raises(StorageError, match="404 Not Found; try again later, or get it in another way and put it into"):
        fetch([wanted(server)], tmp_path / "new" / "folder", wait=0)
    assert len(server.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_a_sentence(tmp_path):
    nowhere = PublishedFile("file.bin", "http://127.0.0.1:9/file.bin")
    with pytest.raises(StorageError, match=r"cannot be downloaded from http://127.0.0.1:9/file.bin: .*refused"):
        fetch([nowhere], tmp_path, wait=0)


def test_wrong_bytes_are_found_at_the_end_and_not_kept(server, tmp_path):
    server.content = CONTENT[:5000] + b"!" + CONTENT[5001:]
    with pytest.raises(BadInput, match=r"does not give the published file.bin: its md5 is .*; it was not kept"):
        fetch([wanted(server)], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("faults", "left", "version"),
    [
        ({"most": 600_000}, b"", ""),
        ({"chunked": True}, b"", ""),  # which marks the end
        ({}, b"of an earlier version", '"0"'),
        ({}, b"of an unknown version", ""),
        ({}, CONTENT + b"too much", '"1"'),
        ({"early": 10}, FIRST, '"1"'),
    ],
)
def test_without_a_checksum_a_file_is_taken_when_it_is_complete_and_of_one_version(
    server, tmp_path, faults, left, version
):
    vars(server).update(faults)
    if left:
        (tmp_path / ".file.bin.part").write_bytes(left)
        (tmp_path / ".file.bin.version").write_text(version)
    assert fetch([wanted(server, md5=False)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_file_that_changes_at_the_server_while_it_is_downloaded_is_begun_anew(server, tmp_path):
    server.most = 600_000

    def progress(_: str, have: int, __: int | None) -> None:
        if have == 600_000:
            server.most, server.version, server.content = len(CONTENT), '"2"', CONTENT[::-1]

    assert fetch([wanted(server, md5=False)], tmp_path, progress, wait=0)[0].read_bytes() == CONTENT[::-1]


def test_without_a_checksum_an_end_that_nobody_announced_is_no_end(server, tmp_path):
    server.length, server.most, server.version = False, 600_000, ""
    with pytest.raises(StorageError, match="the connection ended early, or the server did not say how much there is"):
        fetch([wanted(server, md5=False)], tmp_path, wait=0)
    assert not (tmp_path / "file.bin").exists()


@pytest.mark.parametrize("error", [ssl.SSLError(1, "bad record mac"), OSError(113, "No route to host")])
def test_a_network_that_fails_while_reading_is_tried_again_and_no_fault_of_the_disk(
    server, tmp_path, monkeypatch, error
):
    failures, read = [error, error], http.client.HTTPResponse.read

    def failing(response: http.client.HTTPResponse, size: int | None = None) -> bytes:
        if failures:
            raise failures.pop()
        return read(response, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read", failing)
    assert fetch([wanted(server)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    failures += [error] * 20
    with pytest.raises(StorageError, match=r"other.bin cannot be downloaded from .*(bad record mac|No route to host)"):
        fetch([PublishedFile("other.bin", server.url)], tmp_path, wait=0)


def test_two_downloads_of_one_file_do_not_disturb_each_other(server, tmp_path):
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda _: fetch([wanted(server)], tmp_path, wait=0)[0].read_bytes(), range(2)))
    assert found == [CONTENT, CONTENT]
    assert server.asked == [None]


def test_a_file_without_an_address_or_a_folder_that_cannot_be_written_is_a_sentence(server, tmp_path):
    with pytest.raises(BadInput, match=r"metadata.csv cannot be downloaded by a command; get it from its publisher"):
        fetch([PublishedFile("metadata.csv")], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: Not a directory"):
        fetch([wanted(server)], tmp_path / "file" / "below")
