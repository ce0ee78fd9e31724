"""A coordinator cannot read a site's test images by choosing weights: the attack that could, and what stops it."""

import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.core import coarse, wire
from fewlabel.core.federation import Model
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.deploy import evaluation, experiments
from fewlabel.deploy import site as deployed
from fewlabel.deploy.messages import Order
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.engine.executor import Job
from fewlabel.engine.worker import Worker
from fewlabel.experiment import Evaluate, Experiment, dumps, read
from tests.deploy import evaluation_attack
from tests.deploy.federated import split
from tests.deploy.test_site import give_tests

EMPTY = 9  # a class of which the site has no test image
RUN = "a" * 32


class Attacked:
    """A site with test images, and a coordinator who asks what it likes."""

    def __init__(self, folder: Path) -> None:
        changes = ["method=fedavg", "model=simple-cnn", "clients.count=2", "clients.alpha=2.0", "rounds=1000", "seed=5"]
        self.experiment = read({}, [*changes, "data.image_size=32"])
        data = split(self.experiment, folder / "sites")
        give_tests(data, {0: 300})
        with np.load(data / "client-0.npz") as file:
            arrays = dict(file)
        kept = arrays["test_labels"].flatten() != EMPTY
        arrays |= {name: arrays[name][kept] for name in ("test_images", "test_labels")}
        np.savez(data / "client-0.npz", **arrays)
        self.terms = deployed.load_terms(data)
        self.config = SiteConfig(0, str(data / "client-0.npz"), str(folder / "state"))
        self.policy = folder / "policy.toml"
        whole = deployed.site_world(self.config, self.experiment, self.terms)
        test = whole.dataset.splits["test"]
        self.images = torch.cat([x for x, _ in whole.whole("test", Rng(0)).batches("plain", 500, shuffle=False)])
        self.world, self.labels = whole, test.labels
        self.blocks = evaluation_attack.features(self.images)

    def order(self, run: str = RUN, round: int = 1, experiment: Experiment | None = None) -> Order:
        job = Job(run, "evaluate", "test", client=0, round=round)
        return Order(dumps(experiment or self.experiment), self.terms, job)

    def ask(self, weights: Tree, **order) -> dict:
        parts = {"order": wire.pack(self.order(**order)), "message": wire.pack(Model(weights))}
        config = replace(self.config, policy=str(self.policy))
        return deployed.reply(vars(config), parts)

    def answer(self, weights: Tree, **order) -> coarse.Answer:
        return wire.unpack(coarse.Answer, self.ask(weights, **order)["upload"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Attacked:
    return Attacked(tmp_path_factory.mktemp("attacked"))


@pytest.fixture
def site(shared, tmp_path) -> Attacked:
    """The same site with nothing asked yet."""
    shared.config = replace(shared.config, state=str(tmp_path / "state"))
    shared.policy = tmp_path / "policy.toml"
    return shared


def some_weights(seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    zero = evaluation_attack.crafted(torch.zeros(25), 0.0, 0)
    return {name: torch.rand(value.shape, generator=generator) - 0.5 for name, value in zero.items()}


# The attack


def test_exact_counts_show_the_label_and_the_blocks_of_one_image(site, tmp_path):
    """This is why answers are coarse: about thirty models are enough."""
    worker = Worker(tmp_path, site.world)

    def observe(weights: Tree) -> evaluation_attack.Exact:
        return evaluation_attack.exact(*worker.scores(site.order().job, weights, Rng(0)))

    direction = torch.rand(25, generator=torch.Generator().manual_seed(0))
    found = evaluation_attack.attack(observe, direction, most=16)
    which = int((site.blocks @ direction).argmax())
    correlation = evaluation_attack.correlation(found.blocks, site.blocks[which])
    print(f"exact counts: {found.orders} orders, correlation {correlation:.3f}")
    assert found.orders <= 41
    assert found.label == int(site.labels[which])
    assert evaluation_attack.correlation(found.blocks, site.blocks[which]) > 0.99


def test_a_patient_attacker_hardly_reads_an_image_from_all_answers_that_a_site_gives(site, tmp_path):
    """Not even one who already knows how to single out an image, and its label, and whose other images are all wrong.

    500 answers are 20 for each of 25 blocks. The image is right in 394 of them. It shows in one of 54, since 270 images
    make 5 steps: about 7 times in all. From so few hits, blocks cannot be told apart.
    """
    worker, direction = Worker(tmp_path, site.world), torch.ones(25)
    sums = site.blocks @ direction
    threshold, which = float(sums.topk(2).values.mean()), int(sums.argmax())
    told: list[tuple[torch.Tensor, torch.Tensor, bytes]] = []

    def note(weights: Tree) -> None:
        told.append((*worker.scores(site.order().job, weights, Rng(0)), wire.pack(Model(weights))))

    evaluation_attack.patient(note, direction, threshold, int(site.labels[which]), EMPTY, 20)
    shown = sum(bool((scores.argmax(1) == y).any()) for scores, y, _ in told)
    assert 100 < shown < 400  # without rounding, the attack works: only this image is ever right
    assert correlation_of([float((scores.argmax(1) == y).any()) for scores, y, _ in told], site.blocks[which]) > 0.98

    found, hits = [], []
    for number in range(20):  # sites with secrets of their own
        (state := tmp_path / str(number)).mkdir()
        above = [
            float(coarse.answer(scores, y, 50, evaluation.chance(state, message)).accuracy > 0)
            for scores, y, message in told
        ]
        hits.append(sum(above))
        found.append(correlation_of(above, site.blocks[which]))
    print(f"hits {sum(hits) / 20:.1f} of {shown}, correlation {sum(found) / 20:.3f}")
    assert sum(hits) / 20 < 10
    assert sum(found) / 20 < 0.35


def correlation_of(above: list[float], true: torch.Tensor) -> float:
    return evaluation_attack.correlation(torch.tensor(above).view(25, -1).sum(1).tolist(), true)


# The rules


def test_a_round_is_measured_once_and_the_same_weights_get_the_same_answer(site):
    one, two = some_weights(1), some_weights(2)
    first = site.ask(one)
    assert "upload" in first
    assert site.ask(one) == first
    assert site.ask(two) == {
        "refused": "round 1 of this run was measured with other weights, and each is measured once"
    }
    assert len(evaluation.given(Path(site.config.state))) == 1
    assert experiments.load(Path(site.config.state), RUN).measured == {"1": evaluation.digest(wire.pack(Model(one)))}


def test_rounds_are_measured_in_their_order_and_only_those_that_the_experiment_measures(site):
    every = replace(site.experiment, evaluate=Evaluate(every=5))
    assert site.ask(some_weights(), round=3, experiment=every) == {
        "refused": "round 3 of this run is not measured (evaluate.every)"
    }
    assert "upload" in site.ask(some_weights(), round=10, experiment=every)
    assert site.ask(some_weights(1), round=5, experiment=every) == {
        "refused": "round 10 of this run was measured before, and rounds are measured in their order"
    }
    assert "upload" in site.ask(some_weights(1), round=1000, experiment=every)


def test_a_run_has_one_experiment(site):
    """Otherwise a coordinator could choose anew which rounds are measured."""
    assert "upload" in site.ask(some_weights())
    other = replace(site.experiment, rounds=999)
    assert site.ask(some_weights(), round=2, experiment=other) == {
        "refused": "this run began with another experiment, and a run has one"
    }


def test_a_site_gives_as_many_answers_as_its_policy_says_whatever_the_run(site):
    site.policy.write_text("[evaluate]\nmost = 2\nleast = 90\n")
    assert site.answer(some_weights(), run="1" * 32).least == 90
    assert "upload" in site.ask(some_weights(), run="2" * 32)
    assert site.ask(some_weights(), run="3" * 32) == {
        "refused": "this site gives 2 answers about its test images in all, and has given them "
        "(evaluate.most in its policy)"
    }
    assert "upload" in site.ask(some_weights(), run="2" * 32)  # told before


def test_fewer_test_images_than_the_policy_asks_for_are_not_spoken_of(site):
    site.policy.write_text("[evaluate]\nleast = 400\n")
    assert site.ask(some_weights()) == {"refused": "this site has fewer than 400 images to test on"}


def test_the_attack_as_it_was_gets_one_answer_a_run_and_only_coarse_ones(site):
    """Orders by the dozen, each with other weights: in one round of one run, and each in a run of its own."""
    site.policy.write_text("most_runs = 3\n")
    crafted = [evaluation_attack.crafted(torch.ones(25), 60.0, block) for block in range(5)]
    replies = [site.ask(weights) for weights in crafted]
    assert ["upload" in reply for reply in replies] == [True, False, False, False, False]
    replies += [site.ask(weights, run=secrets.token_hex(16)) for weights in crafted]
    assert sum("upload" in reply for reply in replies) == 3
    assert "most_runs" in replies[-1]["refused"]
    answer = wire.unpack(coarse.Answer, replies[0]["upload"])
    assert (answer.images, answer.per_class.tolist()) == (250, [0] * 10)
    assert answer.accuracy in [n / 5 for n in range(6)]


def test_mean_and_std_are_those_of_the_first_order(site):
    assert "upload" in site.ask(some_weights())
    site.terms, honest = replace(site.terms, mean=(0.9,)), site.terms
    try:
        assert site.ask(some_weights(), round=2) == {
            "refused": "its terms are not those that this site was given: mean and std were fixed when it joined"
        }
        site.terms = replace(honest, mean=None, std=None)
        pixels = replace(site.order(), job=Job(RUN, "pixels", client=0))
        parts = {"order": wire.pack(pixels), "message": b""}
        assert deployed.reply(vars(site.config), parts) == {"refused": "mean and std are known"}
    finally:
        site.terms = honest


@pytest.mark.parametrize("odd", [{"std": (0.6,)}, {"mean": (1.5,)}, {"std": (1e-9,)}])
def test_a_mean_and_std_that_no_images_have_are_not_taken_for_the_first(odd, site):
    site.terms, honest = replace(site.terms, **odd), site.terms
    try:
        assert "pixels in 0..1 have a mean" in site.ask(some_weights())["refused"]
    finally:
        site.terms = honest
