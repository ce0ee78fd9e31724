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


def wanted(server: Server, content: bytes = CONTENT) -> PublishedFile:
    return PublishedFile("file.bin", server.url, (hashlib.md5(content).hexdigest(),))


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
    with pytest.raises(BadInput, match=r"file.bin is damaged or another file: .* delete it and get it anew"):
        fetch([wanted(server)], tmp_path)
    assert server.asked == []


def test_a_connection_that_ends_early_is_continued_from_where_it_ended(server, tmp_path):
    server.most = 300_000
    assert fetch([wanted(server)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_what_an_earlier_command_left_is_continued(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[:1000])
    seen: list[int] = []
    assert fetch([wanted(server)], tmp_path, lambda _, have, __: seen.append(have))[0].read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]
    assert seen[0] == 1000


def test_what_was_complete_but_not_yet_in_place_is_put_there(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT)
    assert fetch([wanted(server)], tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


@pytest.mark.parametrize("left", [b"something else", CONTENT + b"too much"])
def test_a_wrong_beginning_is_thrown_away_and_all_of_it_downloaded(server, tmp_path, left):
    (tmp_path / ".file.bin.part").write_bytes(left)
    assert fetch([wanted(server)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(left)}-", None]


def test_a_server_that_cannot_begin_in_the_middle_is_asked_for_all_of_it(server, tmp_path):
    server.ranges = False
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[:1000])
    assert fetch([wanted(server)], tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_server_that_does_not_say_how_much_there_is_is_believed_if_the_checksum_is_right(server, tmp_path):
    server.length = False
    assert fetch([wanted(server)], tmp_path)[0].read_bytes() == CONTENT


def test_a_server_that_fails_for_a_while_is_asked_again(server, tmp_path):
    server.failures = [503, 500, 429]
    assert fetch([wanted(server)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert len(server.asked) == 4


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


def test_a_file_without_a_published_checksum_is_taken_when_it_is_complete(server, tmp_path):
    server.most = 600_000
    assert fetch([PublishedFile("file.bin", server.url)], tmp_path, wait=0)[0].read_bytes() == CONTENT


@pytest.mark.parametrize("left", ['"0"', ""])
def test_without_a_checksum_what_is_there_is_continued_only_if_it_is_of_the_servers_version(server, tmp_path, left):
    (tmp_path / ".file.bin.part").write_bytes(b"of an earlier version")
    (tmp_path / ".file.bin.version").write_text(left)
    assert fetch([PublishedFile("file.bin", server.url)], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_file_that_changes_at_the_server_while_it_is_downloaded_is_begun_anew(server, tmp_path):
    server.most = 600_000

    def progress(_: str, have: int, __: int | None) -> None:
        if have == 600_000:
            server.most, server.version, server.content = len(CONTENT), '"2"', CONTENT[::-1]

    assert fetch([PublishedFile("file.bin", server.url)], tmp_path, progress, wait=0)[0].read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("md5", [True, False])
def test_an_answer_that_begins_elsewhere_than_asked_is_not_appended(server, tmp_path, md5):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[:1000])
    (tmp_path / ".file.bin.version").write_text(server.version)
    server.early = 10
    file = wanted(server) if md5 else PublishedFile("file.bin", server.url)
    assert fetch([file], tmp_path, wait=0)[0].read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-", None]


def test_what_is_longer_than_the_servers_file_is_not_taken_for_it(server, tmp_path):
    (tmp_path / ".file.bin.part").write_bytes(CONTENT + b"too much")
    (tmp_path / ".file.bin.version").write_text(server.version)
    assert fetch([PublishedFile("file.bin", server.url)], tmp_path, wait=0)[0].read_bytes() == CONTENT


def test_without_a_checksum_an_end_that_nobody_announced_is_no_end(server, tmp_path):
    server.length, server.most, server.version = False, 600_000, ""
    with pytest.raises(StorageError, match="the connection ended early, or the server did not say how much there is"):
        fetch([PublishedFile("file.bin", server.url)], tmp_path, wait=0)
    assert not (tmp_path / "file.bin").exists()


def test_an_answer_in_chunks_tells_its_end(server, tmp_path):
    server.chunked = True
    assert fetch([PublishedFile("file.bin", server.url)], tmp_path, wait=0)[0].read_bytes() == CONTENT


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
