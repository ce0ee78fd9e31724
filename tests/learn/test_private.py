"""Private training: each image's gradient is clipped by itself, noise is the accountant's, and its epsilon is right."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("opacus", reason="Opacus is not installed: pip install '.[privacy]'")

from scipy.stats import kstest

from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.core.images import drawn
from fewlabel.engine.executor import Job, Outcome
from fewlabel.engine.ledger import Ledger
from fewlabel.engine.record import is_finished, read_rounds
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.experiment import dumps, read
from fewlabel.inference.predict import read_model
from fewlabel.learn import private
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD, Local
from fewlabel.report.result_tables import run_table
from fewlabel.report.runs import Run
from tests.deploy.federated import simulated

ONE = private.Privacy(epsilon=3.0)
SMALL = (
    *("data.image_size=16", "model=simple-cnn", "clients.count=3", "rounds=2", "seed=5"),
    *("labels.at=every-client", "labels.fraction=0.1", "method.local.epochs=1", "method.local.batch_size=32"),
)


@pytest.fixture
def quiet(monkeypatch):
    """Leave the noise out, to see what it is added to."""
    monkeypatch.setattr(private, "gaussian", lambda shape, deviation: torch.zeros(shape))


class Line(nn.Module):
    """w x, whose gradient of the squared error (w x - y)^2 is 2 x (w x - y)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.layer.weight, 1.0)

    def forward(self, x):
        return self.layer(x)


def step(guard: private.Guard, x: list[float], y: list[float]) -> float:
    """Make a step at rate 1 on these images, of 10 that are drawn with probability 0.2. Return how far it goes."""
    model = Line()
    optimizer = SGD(model.parameters(), Local(lr=1.0, momentum=0.0, weight_decay=0.0))
    guard._plan, images = (10, 0.2, 1.0), (torch.tensor(x)[:, None], torch.tensor(y)[:, None])
    guard._drawn.append(len(x))
    with private.during(guard):
        fit(model, optimizer, [images], lambda batch: (model(batch[0]) - batch[1]).square().mean())
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())  # Opacus left nothing
    return 1.0 - float(model.layer.weight)


def test_the_gradient_of_each_image_is_shortened_by_itself_and_divided_by_the_usual_number_of_images(quiet):
    # Gradients 2x(x - y): 0.4 of (1, 0.8), -6 of (1, 4). Shortened to 1 they are 0.4 and -1; the usual number is 2.
    assert step(private.Guard(ONE, 1), [1.0, 1.0], [0.8, 4.0]) == pytest.approx((0.4 - 1.0) / 2, abs=1e-5)
    # Of one image alone the usual number is still 2: who knows how many were drawn would know more.
    assert step(private.Guard(ONE, 1), [1.0], [0.8]) == pytest.approx(0.4 / 2, abs=1e-5)
    # Clip 0.1: 0.1 and -0.1 cancel.
    narrow = private.Guard(private.Privacy(3.0, clip=0.1), 1)
    assert step(narrow, [1.0, 1.0], [0.8, 4.0]) == pytest.approx(0.0, abs=1e-5)


def test_a_step_without_any_image_is_noise_alone(monkeypatch):
    monkeypatch.setattr(private, "gaussian", lambda shape, deviation: torch.full(shape, 3.0))
    guard = private.Guard(ONE, 1)
    guard._drawn.append(0)
    model = Line()
    optimizer = SGD(model.parameters(), Local(lr=1.0, momentum=0.0, weight_decay=0.0))
    guard._plan = (10, 0.2, 1.0)
    with private.during(guard):
        fit(model, optimizer, [torch.ones(1, 1)], lambda x: model(x).square().mean())
    assert float(model.layer.weight) == pytest.approx(1.0 - 3.0 / 2)
    assert guard.history == [(1.0, 0.2, 1)]


def test_per_image_gradients_are_those_of_one_image_after_the_other(quiet):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    x, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    guard, total = private.Guard(private.Privacy(3.0, clip=0.5), 1), [torch.zeros_like(p) for p in model.parameters()]
    for image, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(cross_entropy(model(image[None]), label[None]), list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for whole, gradient in zip(total, gradients, strict=True):
            whole += gradient * min(1.0, 0.5 / norm)
    before = [p.detach().clone() for p in model.parameters()]
    guard._plan = (20, 0.25, 1.0)
    guard._drawn.append(5)
    optimizer = SGD(model.parameters(), Local(lr=1.0, momentum=0.0, weight_decay=0.0))
    with private.during(guard):
        fit(model, optimizer, [(x, y)], lambda batch: cross_entropy(model(batch[0]), batch[1]))
    for old, new, gradient in zip(before, model.parameters(), total, strict=True):
        assert torch.allclose(old - new, gradient / 5, atol=1e-5)


def test_an_image_whose_gradient_is_no_number_counts_for_nothing(quiet):
    """Or the sum would be none, the site would refuse to send it, and the coordinator would know of that image."""
    assert step(private.Guard(ONE, 1), [1.0, math.inf], [0.8, 0.0]) == pytest.approx(0.4 / 2, abs=1e-5)


def test_a_step_with_two_batches_is_refused_even_if_both_are_alike():
    guard = private.Guard(ONE, 1)
    guard._drawn.append(1)  # of labeled images, and `step` adds one of as many unlabeled ones
    with pytest.raises(BadInput, match="for sites that train on one kind of images, labeled or not"):
        step(guard, [1.0], [0.8])


def test_nobody_can_repeat_the_views_of_private_images_from_the_seed(tmp_path, quiet):
    """They depend on an image's place in its batch: with one more image, those of others would tell of it."""
    whole = read({}, [*SMALL, "privacy.epsilon=3", "rounds=1", "method.local.batch_size=100000"])  # draws all images
    one, two = (simulated(whole, tmp_path / name) / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() != two.read_bytes()


def test_noise_is_gaussian_and_new_each_time():
    found = private.gaussian(torch.Size([100, 200]), 2.5)
    assert kstest(found.flatten().numpy() / 2.5, "norm").pvalue > 1e-9
    assert not torch.equal(found, private.gaussian(torch.Size([100, 200]), 2.5))


def test_batches_are_drawn_by_poisson_sampling():
    """Each of 1000 images with probability 0.1 in each of 10 batches, whatever the seed: about 1000 in all."""
    guard = private.Guard(ONE, 4)
    with private.during(guard):
        batches = list(drawn(torch.arange(1000), 100, torch.Generator().manual_seed(0)))
    assert len(batches) == 10
    assert 700 < sum(map(len, batches)) < 1300  # ten standard deviations
    assert len({len(batch) for batch in batches}) > 1  # their sizes differ
    assert all(len(set(batch.tolist())) == len(batch) for batch in batches)
    with private.during(guard):
        again = list(drawn(torch.arange(1000), 100, torch.Generator().manual_seed(0)))
    assert [batch.tolist() for batch in batches] != [batch.tolist() for batch in again]


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_planned_steps_spend_the_epsilon_and_more_are_refused(epsilon):
    privacy = private.Privacy(epsilon)
    noise = private.noise_multiplier(privacy, 0.05, 400)
    assert 0.95 * epsilon < private.spent([(noise, 0.05, 400)], 1e-5) <= epsilon
    with pytest.raises(BadInput, match=rf"and it spends {epsilon:g} at most \(privacy.epsilon\)"):
        private.Guard(privacy, 1, [(noise, 0.05, 440)]).check_budget()


@pytest.mark.parametrize("steps", [(1.0, 0.05, 400), (0.8, 0.1, 60), (3.0, 0.02, 5000)])
def test_epsilon_agrees_with_that_of_dp_accounting(steps):
    accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    noise, probability, number = steps
    rdp = accounting.rdp.RdpAccountant(private_orders())
    event = accounting.PoissonSampledDpEvent(probability, accounting.GaussianDpEvent(noise))
    rdp.compose(accounting.SelfComposedDpEvent(event, number))
    assert private.spent([steps], 1e-5) == pytest.approx(rdp.get_epsilon(1e-5), rel=0.01)
    pld = accounting.pld.PLDAccountant().compose(accounting.SelfComposedDpEvent(event, number))
    assert pld.get_epsilon(1e-5) <= private.spent([steps], 1e-5)  # the exact one is no more


def private_orders() -> list[float]:
    from opacus.accountants import RDPAccountant

    return list(RDPAccountant.DEFAULT_ALPHAS)


def test_a_run_says_in_each_round_what_it_has_spent_and_keeps_to_its_epsilon(tmp_path):
    whole = read({}, [*SMALL, "privacy.epsilon=3"])
    first, second = read_rounds(simulated(whole, tmp_path / "run"))
    assert 0 < first["epsilon"] < second["epsilon"] <= 3.0
    assert second["epsilon"] > 2.5
    for client in range(3):
        assert private.spent(json.loads((tmp_path / "run" / "privacy" / f"{client}.json").read_text()), 1e-5) <= 3.0
    assert read({}, [*SMALL, "privacy.epsilon=3"]) == whole
    assert "privacy" not in dumps(read({}, SMALL))  # old runs have none
    assert any("no two runs are the same to the bit" in sentence for sentence in whole.cautions)


class Killed(BaseException):
    """What a kill leaves behind: no handler of errors runs."""


def killed_late(directory: Path, rounds: int = 2) -> Path:
    """Run until the line of the last round is written, and no checkpoint of it."""
    run = prepare(read({}, [*SMALL, f"rounds={rounds}", "privacy.epsilon=3"]), directory)

    def watch(line: dict) -> None:
        if line["round"] == rounds:
            raise Killed

    with pytest.raises(Killed):
        execute(run, executor=Serial(), watch=watch)
    assert not is_finished(run)
    return run


def steps_of(run: Path) -> list[int]:
    return [sum(n for *_, n in json.loads((run / "privacy" / f"{c}.json").read_text())) for c in range(3)]


def test_a_round_that_is_repeated_after_a_kill_spends_nothing_more(tmp_path):
    """Sites send the same replies again: they are private already."""
    run = killed_late(tmp_path / "run")
    before, lines = steps_of(run), read_rounds(run)
    execute(run, executor=Serial())
    assert steps_of(run) == before
    again = read_rounds(run)
    assert [line["epsilon"] for line in again] == [line["epsilon"] for line in lines]
    assert again[-1]["test"] == lines[-1]["test"]  # the same model
    assert Run(run).ended == ""


def test_a_kept_reply_is_for_the_same_message_and_until_a_checkpoint(tmp_path):
    ledger, job = Ledger(tmp_path), Job("", "client", "local_update", 1, 4, 0, 2)
    ledger.keep(job, b"model", Outcome(b"one\ntwo", {"steps": 3}))
    assert ledger.reply(job, b"model") == Outcome(b"one\ntwo", {"steps": 3})
    assert ledger.reply(job, b"other") is None
    assert ledger.reply(replace(job, call=1), b"model") is None
    assert ledger.reply(replace(job, client=2), b"model") is None
    ledger.keep(job, b"other", Outcome(b"new", {}))  # one reply for each call
    assert ledger.reply(job, b"model") is None
    ledger.keep(replace(job, round=5, checkpointed=4), b"next", Outcome(b"later", {}))
    assert ledger.reply(job, b"other") is None


def test_a_run_whose_privacy_is_spent_ends_with_what_it_has_and_says_so(tmp_path):
    run = killed_late(tmp_path / "run")
    before = steps_of(run)
    for reply in (run / "privacy").glob("*/*.reply"):  # as if the replies of the kill had been lost
        reply.unlink()
    execute(run, executor=Serial())
    sentence = "It ended after round 1 of 2: every site with labels has spent its privacy (privacy.epsilon)."
    assert Run(run).ended == sentence
    assert sentence in run_table(Run(run)).notes
    assert [line["round"] for line in read_rounds(run)] == [1]
    card, _ = read_model(run)
    assert card.round == 1
    assert steps_of(run) == before  # what is refused is not computed, and so not spent
    assert execute(run, executor=Serial())["ended"] == sentence  # a resume finds it finished


def test_a_run_whose_privacy_is_spent_before_its_first_round_fails_in_a_sentence(tmp_path):
    run = prepare(read({}, [*SMALL, "privacy.epsilon=3"]), tmp_path / "run")
    (run / "privacy").mkdir()
    for client in range(3):
        (run / "privacy" / f"{client}.json").write_text("[[1.0, 0.5, 1000]]")
    with pytest.raises(RunFailed, match="every site with labels has spent its privacy"):
        execute(run, executor=Serial())


def test_the_card_of_a_private_model_says_so(tmp_path):
    from fewlabel.inference.model_card import about_model
    from fewlabel.inference.predict import read_model

    card, _ = read_model(simulated(read({}, [*SMALL, "privacy.epsilon=3"]), tmp_path / "run"))
    assert "with epsilon 3 and delta 1e-05 over all rounds" in about_model(card)


REFUSED = {
    "cbafed is not for it: its loss compares images with each other, or it sends more than weights": ["method=cbafed"],
    "fedmatch is not for it": ["method=fedmatch", "labels.fraction=0.1"],
    "fedavg-uda is not for it": ["method=fedavg-uda"],
    "set train.balance = 'none'": ["train.balance=logit-adjusted"],
    "set train.mixup = 0": ["train.mixup=0.4"],
    "labels.held_out lets exact counts leave": ["labels.held_out=0.2"],
    "privacy.epsilon must be": ["privacy.epsilon=0"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_shows_more_than_single_clipped_images_is_refused_in_a_sentence(why):
    with pytest.raises(BadInput) as found:
        read({}, [*SMALL, "privacy.epsilon=3", *REFUSED[why]])
    assert why in str(found.value)


def test_a_site_with_both_kinds_of_images_in_a_step_is_refused(tmp_path):
    whole = read({}, [*SMALL, "privacy.epsilon=3", "method=fedavg-fixmatch", "labels.fraction=0.5"])
    with pytest.raises(RunFailed, match="for sites that train on one kind of images, labeled or not"):
        simulated(whole, tmp_path / "run")


def test_a_network_with_batchnorm_is_refused_before_anything_runs(tmp_path):
    whole = read({}, [*SMALL, "privacy.epsilon=3", "model=tests.nets:tiny"])
    with pytest.raises(
        BadInput, match=r"not for BatchNorm, which mixes the images of a batch; set model\.norm = 'group'"
    ):
        simulated(whole, tmp_path / "run")
