"""What a site tells of weights that it is sent, an attack by crafted weights that it cannot see, and what stops it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.core import wire
from fewlabel.core.federation import Model
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.deploy import received
from fewlabel.deploy import site as deployed
from fewlabel.deploy.messages import Order, Refused
from fewlabel.deploy.server import serve
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.engine.executor import Job
from fewlabel.experiment import dumps, read
from fewlabel.methods.fedavg import Message
from fewlabel.methods.tutor import Lesson
from tests.deploy import training_attack
from tests.deploy.evaluation_attack import BLOCKS, features
from tests.deploy.federated import experiment, federate, local_grid, split
from tests.hand import weights

RUN = "a" * 32
NONE = torch.zeros(2, 2, dtype=torch.int64)


def test_the_norm_is_that_of_the_largest_model_and_the_hash_that_of_all():
    small, large = weights([3.0, 4.0]), weights([6.0, 8.0])  # of norms 5 and 10
    found = received.received(Lesson, wire.pack(Lesson(small, (large, small), NONE, False, 1.0)))
    assert found.norm == 10.0
    assert found == received.received(
        Lesson, wire.pack(Lesson(dict(reversed(small.items())), (large, small), NONE, False, 1.0))
    )
    assert found.sha256 != received.received(Lesson, wire.pack(Lesson(small, (small, large), NONE, False, 1.0))).sha256


@pytest.mark.parametrize(("value", "why"), [(float("nan"), "NaN or Inf"), (1e19, "numbers beyond 1e\\+18")])
def test_numbers_that_no_training_gives_are_refused(value, why):
    with pytest.raises(Refused, match=f"these weights are not trained here: .*{why}"):
        received.received(Model, wire.pack(Model(weights([value, 0.0]))))


def test_weights_that_grow_more_than_tenfold_are_told():
    assert received.oddity(received.Received(50.0, ""), 5.0) == ""
    assert received.oddity(received.Received(10.0, ""), 0.0) == ""  # a network may begin with zeros
    told = received.oddity(received.Received(50.1, ""), 5.0)
    assert told.startswith("the weights have norm 50.1, and those before had 5; a member may have spoilt the average")


def test_sites_of_an_honest_run_have_received_the_same_weights(tmp_path):
    whole = experiment("method=fedavg", "labels.at=every-client", "labels.fraction=0.5", "clients.count=3", "rounds=2")
    data = split(whole, tmp_path / "sites")
    serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "run"))
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "state").glob("client-*/*/work.json"))]
    hashes = [[calls["0"]["sha256"] for calls in one.values()] for one in kept]
    assert len(hashes) == 3
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(set(hashes[0])) == 2


# The attack


class Attacked:
    """A site of 58 labels, and a coordinator who sends crafted weights and knows images of the same kind."""

    def __init__(self, folder: Path) -> None:
        how = ["views.weak=none", "method.local.epochs=1", "method.local.batch_size=32", "method.local.lr=0.001"]
        how += ["method.local.momentum=0", "method.local.weight_decay=0", "method.local.clip=none", "rounds=1"]
        who = ["clients.count=3", "clients.alpha=100", "labels.at=every-client", "labels.fraction=0.15", "seed=5"]
        self.experiment = read({}, ["method=labels-only", "model=simple-cnn", "data.image_size=32", *who, *how])
        data = split(self.experiment, folder / "sites")
        self.terms, self.folder = deployed.load_terms(data), folder
        self.config = SiteConfig(0, str(data / "client-0.npz"), str(folder / "state"))
        world = deployed.site_world(self.config, self.experiment, self.terms)
        own = world.training(world.share(0, 1).labeled, Rng(0).torch)
        self.blocks = features(torch.cat([x for x, _ in own.batches("plain", 500, shuffle=False)]))
        split_, _ = deployed.images(data / "validation.npz", "", self.experiment, self.terms)
        images = split_["train"].images
        self.similar = features(images.views(torch.arange(len(images.pixels)), ("plain",), Rng(0).torch)[0])

    def ask(self, sent: Tree, policy: str = "") -> dict:
        (self.folder / "policy.toml").write_text(policy)
        config = vars(replace(self.config, policy=str(self.folder / "policy.toml")))
        order = Order(dumps(self.experiment), self.terms, Job(RUN, "client", "local_update", client=0, round=1))
        return deployed.reply(config, {"order": wire.pack(order), "message": wire.pack(Message(sent, 1.0))})

    def read(self, strength: float, policy: str = "") -> torch.Tensor:
        """Return how well what the attacker reads fits images of the site."""
        direction = strength * torch.randn(BLOCKS, generator=Rng(3).torch)
        sent = training_attack.trap(direction, self.similar)
        found = self.ask(sent.weights, policy)
        trained = wire.unpack(Model, found["upload"]).model if "upload" in found else sent.weights
        return training_attack.matches(training_attack.read(sent, trained), self.blocks, self.similar.double().mean(0))


@pytest.fixture
def attacked(tmp_path) -> Attacked:
    return Attacked(tmp_path)


def test_crafted_weights_show_single_images_to_whoever_sees_one_sites_update(attacked):
    """As `docs/officer.md` says: without masks and noise, nothing stops this, also within every limit of the policy."""
    found = attacked.read(0.05, "least_batch = 8\nleast_steps = 2\nlargest_rate = 0.1\n")
    assert int((found > 0.99).sum()) >= 10
    assert float(found.median()) > 0.95


def test_large_crafted_weights_are_told_at_the_site(attacked, capfd):
    """They are no better for the attacker, and a member could end any run if they were refused."""
    attacked.read(1.0)
    assert "fewlabel: round 1, local_update: the weights have norm 264, and those before had " in capfd.readouterr().err


def test_noise_hides_single_images_from_crafted_weights(attacked):
    pytest.importorskip("opacus", reason="Opacus is not installed: pip install '.[privacy]'")
    found = attacked.read(0.05, "[privacy]\nepsilon = 8.0\n")
    assert training_attack.UNITS - 10 <= len(found) < training_attack.UNITS  # two noisy changes may be equal by chance
    assert float(found.max()) < 0.9
