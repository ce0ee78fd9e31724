"""What the SuperLink knows about nodes is read from its own listing."""

import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient

from fewlabel.core.errors import RunFailed
from fewlabel.deploy import keys, superlink
from tests.deploy.test_members import made
from tests.flower_processes import free_ports


def test_nodes_are_known_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.connect(made(tmp_path, "lungs"), ("127.0.0.1", 1), insecure=False)
    key = keys.new_key(tmp_path / "key", ssh=True)
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    node = NodeInfo(node_id=2**64 - 1, status="online", online_until=5.0, heartbeat_interval=30.0, public_key=pem)
    monkeypatch.setattr(ControlHttpClient, "ListNodes", lambda *_: ListNodesResponse(nodes_info=[node]))
    found = superlink.nodes(tmp_path / "lungs")
    assert found == {keys.public_half(key): superlink.Node(2**64 - 1, "online", 5.0, 30.0)}


def test_a_superlink_that_does_not_answer_is_not_one_without_nodes(tmp_path: Path) -> None:
    superlink.connect(made(tmp_path, "lungs"), ("127.0.0.1", free_ports(1)[0]), insecure=False)
    with pytest.raises(RunFailed, match=r"the SuperLink at 127\.0\.0\.1:\d+ lists no nodes"):
        superlink.nodes(tmp_path / "lungs")


def test_a_site_is_connected_as_long_as_flower_counts_on_it() -> None:
    """A node that must be heard every 30 s is counted as connected for 60 s since it was."""
    now = time.time()
    assert superlink.Node(1, "online", now + 45, 30.0).state() == {
        "state": "connected", "seconds": pytest.approx(15, abs=1),
    }  # fmt: skip
    for status in ("online", "offline"):
        found = superlink.Node(1, status, now - 20, 30.0).state()
        assert found == {"state": "not connected", "seconds": pytest.approx(20, abs=1)}
    assert superlink.Node(1, "registered", 0.0, 30.0).state() == {"state": "never connected"}
