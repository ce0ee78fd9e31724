"""A download must survive what networks do to it, and count only when its checksum is right."""

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fewlabel.data import download
from fewlabel.data.download import fetch
from fewlabel.data.files import File
from fewlabel.errors import BadInput, StorageError

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
        self.asked: list[str | None] = []  # ranges

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, asked = self.server, self.headers.get("Range")
        server.asked.append(asked)
        if server.failures:
            self.send_error(server.failures.pop(0))
            return
        start = int(re.findall(r"bytes=(\d+)-", asked)[0]) if asked and server.ranges else 0
        if start >= len(server.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        rest = server.content[start:]
        self.send_response(206 if start else 200)
        if server.length:
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


def wanted(server: Server, content: bytes = CONTENT) -> File:
    return File("file.bin", server.url, (hashlib.md5(content).hexdigest(),))


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
        StorageError, match=r"file.bin cannot be downloaded from http://127.* ended early; .* continues it"
    ):
        fetch([wanted(server)], tmp_path, wait=0)
    assert len(server.asked) == 1 + download.TRIES
    assert (tmp_path / ".file.bin.part").stat().st_size == 300_000
    assert not (tmp_path / "file.bin").exists()


def test_a_file_that_is_not_there_is_not_asked_for_again(server, tmp_path):
    server.failures = [404]
    with pytest.raises(StorageError, match="404 Not Found"):
        fetch([wanted(server)], tmp_path, wait=0)
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_a_sentence(tmp_path):
    nowhere = File("file.bin", "http://127.0.0.1:9/file.bin")
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
    assert fetch([File("file.bin", server.url)], tmp_path, wait=0)[0].read_bytes() == CONTENT


def test_a_file_without_an_address_or_a_folder_that_cannot_be_written_is_a_sentence(server, tmp_path):
    with pytest.raises(BadInput, match=r"metadata.csv cannot be downloaded by a command; get it from its publisher"):
        fetch([File("metadata.csv")], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written: Not a directory"):
        fetch([wanted(server)], tmp_path / "file" / "below")
