"""Keys and certificates: a site knows its server, and nobody else can read a key."""

import socket
import ssl
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="it comes with Flower: pip install '.[flower]'")

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys
from tests.deploy.test_members import made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path, "lungs")


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path):
    key = tmp_path / "key"
    keys.new_key(key, ssh=True)
    with pytest.raises(BadInput, match="never overwritten"):
        keys.new_key(key, ssh=True)
    key.chmod(0o640)
    with pytest.raises(BadInput, match=r"others may read .*; forbid it by: chmod 600"):
        keys.load_key(key)
    key.chmod(0o600)
    key.write_text("no key")
    with pytest.raises(BadInput, match="is no private key"):
        keys.load_key(key)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "ho st:1", "https://h:1/", "h:x"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(BadInput, match="an address is HOST:PORT"):
        keys.host_and_port(address)


def test_addresses_have_a_host_and_a_port():
    assert keys.host_and_port("learn.example.org:9443") == ("learn.example.org", 9443)
    assert keys.host_and_port("[::1]:9443") == ("::1", 9443)


# Certificates, as Python's ssl sees them


def greeted(folder: Path, authority: Path, name: str) -> str | None:
    """What a client says of a server with this folder's certificate when it calls it by a name."""
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(folder / "server.pem", folder / "server.key")
    context = ssl.create_default_context(cafile=authority)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with plain, suppress(ssl.SSLError, OSError):
                inside.wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with socket.create_connection(listener.getsockname(), 10) as plain:
                return context.wrap_socket(plain, server_hostname=name).version()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        finally:
            thread.join()


@pytest.mark.parametrize("address", ["learn.example.org:9443", "10.0.0.5:9443", "[fd00::5]:9443"])
def test_the_servers_certificate_is_for_its_address_and_this_machine_and_no_other(address, tmp_path):
    folder = made(tmp_path, "lungs", address)
    ca = folder / "trust" / "ca.pem"
    for host in (keys.host_and_port(address)[0], "localhost", "127.0.0.1"):
        assert greeted(folder, ca, host) == "TLSv1.3"
    for host in ("example.org", "10.0.0.6", "fd00::6"):
        assert "mismatch" in str(greeted(folder, ca, host))


def test_a_server_of_another_authority_is_refused(folder, tmp_path):
    other = made(tmp_path, "brains")
    assert "unable to get local issuer" in str(greeted(other, folder / "trust" / "ca.pem", "localhost"))


def test_a_certificate_that_ends_soon_is_made_anew_and_trusted_as_before(folder, monkeypatch):
    assert not keys.renew_if_due(folder, "localhost:9443")
    before, now = (folder / "server.pem").read_bytes(), keys.now()
    with monkeypatch.context() as later:
        later.setattr(keys, "now", lambda: now + timedelta(days=keys.DAYS_SERVER - 10))
        assert keys.renew_if_due(folder, "localhost:9443")
    assert (folder / "server.pem").read_bytes() != before
    keys.create_server_certificate(folder, "localhost:9443")
    assert greeted(folder, folder / "trust" / "ca.pem", "localhost") == "TLSv1.3"
