"""A site's node executes the FewLabel that is installed there, whatever code a server would have it fetch."""

import hashlib
import subprocess
from dataclasses import replace
from importlib.metadata import version

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as inner
from flwr.supernode.nodestate import NodeStateFactory

from fewlabel.core.errors import BadInput
from fewlabel.deploy import flower, processes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> bytes:
    """What Flower's command makes of the app; `flwr run` submits the same."""
    folder = tmp_path_factory.mktemp("bundle")
    command = [processes.BIN / "flwr", "build", "--app", flower.write_app(folder)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (made,) = folder.glob("*.fab")
    return made.read_bytes()


class Node:
    """A SuperNode's state, and the step by which it takes a message of a run that the server describes."""

    def __init__(self, run: Run) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.run, self.fetched = run, []
        stores = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(stores).state(), stores.store()
        self.state.set_node_id(5)
        self.message = Message(RecordDict({"a": ConfigRecord({"b": 1})}), 5, "query")
        self.message.metadata.__dict__["_message_id"] = self.message.object_id

    def take(self) -> int | None:
        objects = get_object_tree(self.message)
        return inner._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (self.message, objects),
            get_run=lambda number: self.run,
            get_fab=lambda *which: self.fetched.append(which),
            pull_object=lambda run, name: get_all_nested_objects(self.message)[name].deflate(),
            confirm_message_received=lambda run, name: None,
            trusted_entities=None,
        )


@pytest.fixture
def installed_code_only(monkeypatch) -> None:
    monkeypatch.setattr(inner, "_pull_and_store_message", inner._pull_and_store_message)  # put back at the end
    flower.run_only_installed_code()


def run_of(bundle: bytes) -> Run:
    described = {"fab_id": "fewlabel/fewlabel-app", "fab_version": version("fewlabel")}
    return replace(Run.create_empty(1), fab_hash=hashlib.sha256(bundle).hexdigest(), **described)


@pytest.mark.usefixtures("installed_code_only")
def test_the_installed_fewlabel_runs_and_its_bundle_is_not_even_fetched(bundle):
    node = Node(run_of(bundle))
    assert node.take() == 1
    assert node.fetched == []
    assert node.state.get_run(1) == node.run
    assert node.state.get_fab(node.run.fab_hash).content == bundle


@pytest.mark.usefixtures("installed_code_only")
def test_another_bundle_is_refused_with_both_hashes_and_neither_fetched_nor_kept(bundle, capfd):
    node = Node(replace(run_of(bundle), fab_hash="e" * 63 + "\x1b"))
    assert node.take() == 1
    assert node.fetched == []
    assert node.state.get_run(1) is None
    assert node.state.get_fab(node.run.fab_hash) is None
    said = capfd.readouterr().err
    own = hashlib.sha256(bundle).hexdigest()
    assert said.startswith(f"fewlabel: refused run 1, which brings bundle {'e' * 63}?: this site executes only {own}, ")
    assert said.count("\n") == 1
    (reply,) = node.state.get_messages_legacy(is_reply=True)
    assert reply.error.code == ErrorCode.INVALID_FAB
    assert reply.metadata.reply_to_message_id == node.message.metadata.message_id


@pytest.mark.usefixtures("installed_code_only")
def test_nothing_else_that_a_server_says_of_a_run_has_a_say_in_what_is_executed(bundle):
    """By these words Flower finds the folder that it loads code from, the program that it starts, and settings."""
    lies = {"fab_id": "../../tmp/evil", "fab_version": "../..", "primary_task_type": TaskType.AGENT_APP}
    node = Node(replace(run_of(bundle), **lies, override_config={"no such": "setting"}))
    assert node.take() == 1
    assert node.state.get_run(1) == run_of(bundle)
    (task,) = node.state.get_tasks()
    assert task.type == TaskType.CLIENT_APP


def test_another_flower_than_the_one_it_knows_starts_no_node(monkeypatch):
    before = inner._pull_and_store_message
    monkeypatch.setattr(flower, "FLOWER", "1.40.0")
    with pytest.raises(BadInput, match=r"a site needs Flower 1\.40\.0, and this is"):
        flower.supernode(["--insecure"])
    assert inner._pull_and_store_message is before


def test_every_installation_of_a_version_makes_the_same_bundle(bundle, tmp_path):
    assert build_fab_from_disk(flower.write_app(tmp_path / "elsewhere")) == bundle
    assert b"fewlabel.deploy.flower:client_app" in bundle  # stored plainly, so no version of a compressor has a say
