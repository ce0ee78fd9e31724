"""Members whose Flower is not ours: what they push cannot be read, or never comes. Others go on, and they are named."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import fewlabel
from fewlabel.engine.record import read_rounds
from tests.deploy.federated import experiment, federate, local_grid, split
from tests.flower_processes import Processes, until

pytestmark = pytest.mark.slow

LIAR = 2
# Put into the member's `deploy.flower`, which Flower's node and the process that answers import.
ALTERED = """
import flwr.app
from flwr.supernode import start_client_internal

honest, push = flwr.app.ConfigRecord.deflate, start_client_internal.push_object_contents_from_iterable


def mood():
    return Path({mood!r}).read_text()


def deflate(self):
    content = honest(self)
    body = content.index(b"\\x00") + 1
    return content[:body] + b"\\xff" * len(content[body:]) if mood() == "garbled" else content


def push_less(contents, **more):
    return None if mood() == "withheld" else push(contents, **more)


flwr.app.ConfigRecord.deflate = deflate
start_client_internal.push_object_contents_from_iterable = push_less

"""
MAIN = 'if __name__ == "__main__":'


class Hostile(Processes):
    """Three sites with labels; the last one's FewLabel is altered."""

    def __init__(self, folder: Path, sites: list[dict]) -> None:
        super().__init__(folder, sites)
        self.mood = folder / "mood"
        self.mood.write_text("honest")
        shutil.copytree(Path(fewlabel.__file__).parent, folder / "altered" / "fewlabel")
        file = folder / "altered" / "fewlabel" / "deploy" / "flower.py"
        text = file.read_text()
        assert text.count(MAIN) == 1
        file.write_text(text.replace(MAIN, ALTERED.format(mood=str(self.mood)) + MAIN))

    def node(self, number: int) -> None:
        before = self.environment
        if number == LIAR:
            path = f"{self.folder / 'altered'}{os.pathsep}{before['PYTHONPATH']}"
            self.environment = {**before, "PYTHONPATH": path}
        super().node(number)
        self.environment = before


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Iterator[tuple[Hostile, Path]]:
    folder = tmp_path_factory.mktemp("hostile")
    data = split(fedavg(), folder / "sites")
    sites = list(local_grid(data, folder / "state").configs.values())
    with Hostile(folder / "processes", sites) as processes:
        yield processes, data


def fedavg(*changes: str):
    return experiment("method=fedavg", "clients.count=3", "labels.at=every-client", "labels.fraction=0.5", *changes)


@pytest.mark.parametrize("mood", ["garbled", "withheld"])
def test_a_reply_that_cannot_be_read_costs_one_reply(mood, hostile, tmp_path):
    processes, data = hostile
    run = federate(fedavg("rounds=5"), data, tmp_path / mood, patience=300.0, least=40.0, deadline=90.0)
    processes.mood.write_text("honest")
    running = processes.submit(run)
    until(lambda: read_rounds(run))
    processes.mood.write_text(mood)
    running.wait(900)
    processes.mood.write_text("honest")
    found = read_rounds(run)
    print(f"{mood}: seconds of each round:", [round(line["seconds"], 1) for line in found])
    assert len(found) == 5, processes.log(f"run-{mood}").read_text()[-3000:]
    failed = [failure for line in found for failure in line.get("failures", ())]
    assert {failure["client"] for failure in failed} == {LIAR}
    assert max(line["seconds"] for line in found) < 120
