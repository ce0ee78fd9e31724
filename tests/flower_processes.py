"""A real federation on this machine: SuperLink, SuperNodes and residents as processes, with TLS and node keys."""

import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fewlabel import flower

RESIDE = "import json, sys; from fewlabel.resident import reside; from pathlib import Path; "
RESIDE += "reside(json.loads(sys.argv[1]), Path(sys.argv[2]))"


def certificates(folder: Path) -> None:
    """ca.pem, and server.pem with server.key that it has signed for this machine."""
    now, keys = datetime.datetime.now(datetime.UTC), {name: ec.generate_private_key(ec.SECP256R1()) for name in "cs"}
    names = {key: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, key)]) for key in keys}
    for key, file in (("c", "ca"), ("s", "server")):
        made = (
            x509.CertificateBuilder()
            .subject_name(names[key])
            .issuer_name(names["c"])
            .public_key(keys[key].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(key == "c", None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        )
        if key == "s":
            identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(keys["c"].public_key())
            made = made.add_extension(identifier, False)
        else:
            made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(keys["c"].public_key()), False)
        signed = made.sign(keys["c"], hashes.SHA256())
        (folder / f"{file}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(private(keys["s"], serialization.PrivateFormat.PKCS8))


def private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Processes:
    """A SuperLink and a node with its resident for each site, below a folder of their own."""

    def __init__(self, folder: Path, places: list[dict]) -> None:
        self.folder, self.places, self.started = folder, places, []
        folder.mkdir()
        (folder / "home").mkdir()
        self.bin = Path(sys.executable).parent
        self.port, *self.ports = free_ports(1 + len(places))
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
        }
        certificates(folder)
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.pem"}"\n'
        (folder / "home" / "config.toml").write_text(f"[superlink.here]\n{connection}")
        self.app = flower.write_app(folder)

    def __enter__(self) -> "Processes":
        try:
            tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
            self.start(
                "link", self.bin / "flower-superlink", *tls, "--enable-supernode-auth", "--port", self.port,
                "--database", "link.db", "--disable-runtime-dependency-installation",
            )  # fmt: skip
            self.until_open()
            for number in range(len(self.places)):
                self.join(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in self.started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
            for process in self.started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)

    def start(self, name: str, *command: object) -> subprocess.Popen:
        """A process at the head of a group of its own, with all that it starts."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=self.folder, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def until_open(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                return socket.create_connection(("127.0.0.1", self.port), 1).close()
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / "link.log").read_text())
            time.sleep(0.1)

    def flwr(self, *arguments: object, timeout: float = 300) -> str:
        command = [str(self.bin / "flwr"), *map(str, arguments)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def join(self, number: int) -> None:
        """A site's key is made and registered; its resident and its node start."""
        key = ec.generate_private_key(ec.SECP384R1())
        file, public = self.folder / f"key{number}", self.folder / f"key{number}.pub"
        file.write_bytes(private(key, serialization.PrivateFormat.OpenSSH))
        file.chmod(0o600)
        ssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        public.write_bytes(ssh)
        self.flwr("supernode", "register", public, "here")
        path = self.folder / f"site{number}.socket"
        self.start(f"resident{number}", sys.executable, "-c", RESIDE, json.dumps(self.places[number]), path)
        self.start(
            f"node{number}", self.bin / "flower-supernode", "--root-certificates", "ca.pem",
            "--auth-supernode-private-key", file, "--superlink", f"127.0.0.1:{self.port}",
            "--node-config", f'resident="{path}"', "--port", self.ports[number],
        )  # fmt: skip

    def run(self, directory: Path) -> str:
        return self.flwr("run", self.app, "here", "--stream", "--run-config", f'directory="{directory}"')
