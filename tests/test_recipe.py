"""The recipe: a schedule, a mean over rounds, a loss that treats classes alike and a warm-up, for every method."""

import math
import tomllib
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fewlabel.api import bounds
from fewlabel.core import schedule, tree
from fewlabel.core.errors import BadInput
from fewlabel.core.images import Mixup
from fewlabel.core.rng import Rng
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.engine.sweep import grid
from fewlabel.experiment import RECIPES, Experiment, Train, dumps, read
from fewlabel.learn.loop import paired
from fewlabel.learn.losses import adjusted, annealed
from fewlabel.learn.optim import SGD, Adam, Local
from fewlabel.learn.relation import class_sums
from fewlabel.methods import METHODS
from tests.hand import site
from tests.own_methods import Idle

LN2 = math.log(2)


# Settings


def test_a_recipe_sets_all_four_and_train_changes_them_in_part():
    whole = read({"recipe": "fewlabel", "train": {"average": 0.5}}, ["train.warmup=0"])
    assert whole.train == replace(RECIPES["fewlabel"], average=0.5, warmup=0.0)
    assert read({}, ["recipe=printed"]).train == Train()
    assert Experiment(train="fewlabel").train == RECIPES["fewlabel"]


def test_without_a_recipe_an_experiment_is_as_printed_and_stays_so():
    old = read({})
    assert old.train is None
    assert old.recipe == RECIPES["printed"]
    assert "[train]" not in dumps(old)
    whole = {"schedule": "cosine", "average": 0.8, "balance": "logit-adjusted", "warmup": 0.25, "batches": 4}
    assert read({"recipe": "fewlabel"}).train == read({"train": whole | {"mixup": 0.4}}).train
    assert read({"train": whole}).train.mixup == 0  # a run stored before images were mixed


def test_an_unknown_recipe_is_one_sentence():
    with pytest.raises(BadInput, match="there is no recipe 'fewlable'; did you mean 'fewlabel'"):
        read({"recipe": "fewlable"})


# How sites train


@pytest.mark.parametrize("name", [*METHODS, "labels-only", "all-labels"])
def test_the_recipe_trains_the_sites_of_all_methods_alike(name):
    method = read({"recipe": "fewlabel", "method": name}).method
    assert (method.local.epochs, method.local.batch_size, method.local.momentum) == (5, 32, 0.9)
    assert method.local.lr * getattr(method, "weight_labeled", 1) == pytest.approx(0.03)
    assert method.epochs_unlabeled == (3 if name == "tutor" else 1)
    assert Experiment(method=name, train="fewlabel").method == method


def test_labeled_clients_get_half_of_the_weight_where_they_would_be_outvoted():
    share = {name: read({"recipe": "fewlabel", "method": name}).method.labeled_share for name in ("fedirm", "cbafed")}
    assert share == {"fedirm": 0.5, "cbafed": 0.5}
    assert read({"recipe": "fewlabel", "method": "rscfed-authors"}).method.labeled_share is None  # they count six times


def test_a_changed_part_of_the_recipe_keeps_its_sites_and_those_of_the_floor():
    base = Experiment(method="rscfed", train=replace(RECIPES["fewlabel"], average=0.5))
    [floor, _] = bounds([base])
    assert (base.method.local.batch_size, floor.method.local.batch_size) == (32, 32)
    stored = tomllib.loads(dumps(read({"recipe": "fewlabel", "method": "rscfed"})))
    assert read(stored | {"method": {"name": "cbafed"}}).method.local.epochs == 5  # another method, as compare asks


@pytest.mark.parametrize("recipe", [{}, {"recipe": ["fewlabel", "printed"]}])
def test_what_is_varied_wins_over_the_recipe(recipe):
    changes = [] if recipe else ["recipe=fewlabel"]
    found = grid({"train": {"average": 0.1}}, {"train.average": [0.0, 0.5], **recipe}, changes)
    assert [one.train.average for one in found] == ([0.0, 0.0, 0.5, 0.5] if recipe else [0.0, 0.5])
    assert {one.train.schedule for one in found} == ({"cosine", "constant"} if recipe else {"cosine"})


def test_settings_of_a_method_win_over_the_recipe():
    method = read({"recipe": "fewlabel", "method": {"name": "cbafed", "beta": 0.1}}, ["method.local.lr=0.1"]).method
    assert (method.local.lr, method.local.epochs, method.beta) == (0.1, 5, 0.1)
    assert read({"recipe": "printed", "method": "cbafed"}).method == METHODS["cbafed"]


def test_what_a_recipe_resolved_is_written_and_read_without_it():
    resolved = read({"recipe": "fewlabel", "method": "fedmatch"})
    assert "recipe" not in dumps(resolved)
    assert read(tomllib.loads(dumps(resolved))) == resolved


# Another recipe for a stored run


def stored(method, *changes, recipe="fewlabel"):
    return tomllib.loads(dumps(read({"recipe": recipe, "method": method}, changes)))


@pytest.mark.parametrize("name", [*METHODS, "labels-only", "all-labels"])
def test_a_stored_run_with_another_recipe_trains_its_sites_by_that(name):
    for old, new in (("fewlabel", "printed"), ("printed", "fewlabel"), ("fewlabel", "fewlabel")):
        assert read(stored(name, recipe=old), [f"recipe={new}"]) == read({"recipe": new, "method": name})


def test_what_the_user_had_set_in_a_stored_run_stays_with_another_recipe():
    """The recipe has five epochs in batches of 32; RSCFed has one in batches of 64, without labels at 0.021."""
    table = stored("rscfed", "method.local.lr=0.1", "method.beta=7")
    local = read(table, ["recipe=printed"]).method.local
    assert (local.lr, local.epochs, local.batch_size, local.lr_unlabeled) == (0.1, 1, 64, 0.021)
    assert read(table, ["recipe=printed"]).method.beta == 7
    local = read(table, ["recipe=printed", "method.local.epochs=3"]).method.local
    assert (local.lr, local.epochs) == (0.1, 3)


def test_the_recipe_of_stored_sites_is_known_though_its_training_was_changed():
    table = stored("rscfed", "train.average=0.5", "method.local.lr=0.1", recipe="printed")  # training is no recipe's
    local = read(table, ["recipe=fewlabel"]).method.local
    assert (local.lr, local.epochs, local.batch_size) == (0.1, 5, 32)


def test_a_recipe_in_a_grid_changes_the_sites_of_a_stored_run():
    table = stored("cbafed", "method.beta=0.1")
    by_set, by_axis = grid(table, {"seed": [0]}, ["recipe=printed"]), grid(table, {"recipe": ["printed", "fewlabel"]})
    assert [one.method.local.epochs for one in by_set + by_axis] == [11, 11, 5]
    assert {one.method.beta for one in by_set + by_axis} == {0.1}


def test_a_file_that_says_how_sites_train_keeps_that_with_any_recipe():
    file = {"method": {"name": "rscfed", "local": {"epochs": 5, "batch_size": 64}}}
    for recipe in ("printed", "fewlabel"):
        local = read(file, [f"recipe={recipe}"]).method.local
        assert (local.epochs, local.batch_size) == (5, 64)


# A method as an object


@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_trains_the_sites_of_an_object_as_those_of_its_name(name):
    named = Experiment(method=name, train="fewlabel")
    assert Experiment(method=METHODS[name], train="fewlabel").method == named.method
    assert Experiment(method=named.method, train="fewlabel").method == named.method
    assert Experiment(method=named.method, train="printed").method == named.method  # whoever gives it means it


def test_a_method_of_your_own_is_left_as_it_is():
    own = Idle()
    assert Experiment(method=own, train="fewlabel").method is own


def test_what_is_changed_in_an_object_stays():
    given = replace(METHODS["rscfed"], beta=7, local=Local(lr=0.1))
    method = Experiment(method=given, train="fewlabel").method
    assert (method.beta, method.local.lr, method.local.epochs, method.local.batch_size) == (7, 0.1, 5, 32)
    assert Experiment(method=given, train=RECIPES["fewlabel"]).method == given


# The schedule


@pytest.mark.parametrize(
    ("round", "factor"), [(0, 1.0), (1, 1.0), (2, 0.5 + math.sqrt(0.5) / 2), (3, 0.5), (4, 0.5 - math.sqrt(0.5) / 2)]
)
def test_the_rate_falls_like_a_cosine_of_the_rounds_before(round, factor):
    assert schedule.factor("cosine", round, 4) == pytest.approx(factor)
    assert schedule.factor("constant", round, 4) == 1.0


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_optimizers_follow_the_schedule_and_a_rate_of_zero_stays_zero(kind):
    weights = [torch.ones(2, requires_grad=True)]
    with schedule.during(0.25):
        assert kind(weights, Local(lr=0.4)).lr == pytest.approx(0.1)
        assert kind(weights, Local(lr=0.4), 0.8).lr == pytest.approx(0.2)
    assert kind(weights, Local(lr=0.4)).lr == 0.4
    assert kind(weights, Local(lr=0.4), 0.0).lr == 0.0


def test_every_task_of_a_round_trains_by_the_schedule(run_dir, monkeypatch):
    seen = []

    class Seen(Serial):
        def submit(self, job, message, statistics):
            made, step = SGD.__init__, []

            def init(self, *args):
                made(self, *args)
                step.append(self.lr)

            monkeypatch.setattr(SGD, "__init__", init)
            ticket = super().submit(job, message, statistics)
            monkeypatch.setattr(SGD, "__init__", made)
            seen.extend((job.round, lr) for lr in step)
            return ticket

    execute(run_dir("train.schedule=cosine", "rounds=4", "method.local.lr=0.1"), executor=Seen())
    assert dict(seen) == {n: pytest.approx(0.1 * schedule.factor("cosine", n, 4)) for n in (1, 2, 3, 4)}


# The class prior


def test_the_prior_of_labels_has_one_image_more_of_each_class():
    labeled = site(0, [(0, 0), (0, 0), (0, 0), (1, 1)], classes=2).labeled
    assert labeled.log_prior is None
    labeled._balanced = 2
    del labeled.log_prior
    assert labeled.log_prior.exp().tolist() == pytest.approx([4 / 6, 2 / 6])


def test_adjusted_logits_add_the_prior_and_the_loss_is_what_that_gives():
    labeled = site(0, [(0, 0), (0, 0), (1, 1)], classes=2).labeled
    labeled._balanced = 2  # priors 3/5 and 2/5
    logits, y = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
    assert cross_entropy(adjusted(logits, labeled), y).item() == pytest.approx(-math.log(2 / 5))
    assert cross_entropy(adjusted(logits, None), y).item() == pytest.approx(LN2)
    assert annealed(logits, y, 1.0, labeled).item() == pytest.approx(-math.log(2 / 5))  # sure of 1/2, the bound is 1


def test_pseudo_labels_count_in_the_prior_of_those_they_are_trained_with():
    one = site(0, [(0, 0)], [1, 1, 1], classes=2)
    one.labeled._balanced = one.unlabeled._balanced = 2
    both = one.labeled + one.unlabeled.with_labels(torch.tensor([0, 1]), torch.tensor([1, 1]))
    assert both.log_prior.exp().tolist() == pytest.approx([2 / 5, 3 / 5])


# Few labels


@pytest.mark.parametrize(("images", "size"), [(7, 2), (20, 5), (36, 9), (130, 32), (1000, 32)])
def test_a_pass_over_few_labels_has_at_least_four_batches(images, size):
    labeled = site(0, [(0, 0)] * images, classes=2).labeled
    assert labeled.batch_size(32) == 32
    labeled._least = 4
    assert labeled.batch_size(32) == size
    passed = [len(y) for _, y in labeled.batches("weak", 32)]
    assert sum(passed) == images
    assert passed[0] == size
    assert len(list(paired(labeled, None, ("weak",), 32))) == len(passed)
    assert len(list(labeled.batches("plain", 500, shuffle=False))) == 1 + images // 501  # no training


def test_sets_made_of_a_sites_images_have_small_batches_too():
    one = site(0, [(0, 0)] * 8, [1] * 16, classes=2)
    one.labeled._least = one.unlabeled._least = 4
    pseudo = one.unlabeled.with_labels(torch.arange(16), torch.ones(16, dtype=torch.long))
    assert (pseudo.batch_size(32), (one.labeled + pseudo).batch_size(32)) == (4, 6)


# Mixed images


def test_labels_are_mixed_in_training_alone_and_pseudo_labels_with_them():
    one = site(0, [(1, 0)] * 4 + [(3, 1)] * 4, [5] * 4, classes=2)
    one.labeled._mixup = one.unlabeled._mixup = Mixup(0.4, 2)
    ((x, y),) = one.labeled.batches("weak", 8)
    assert x.flatten().tolist() == pytest.approx((1 + 2 * y[:, 1]).tolist())  # an image is as mixed as its label
    assert y.sum(1).tolist() == pytest.approx([1] * 8)
    assert len(set(y[:, 1].tolist()) - {0.0, 1.0}) == 2  # some pairs are of both classes: share and 1 - share
    ((_, plain),) = one.labeled.batches("plain", 8, shuffle=False)
    assert plain.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    pseudo = one.unlabeled.with_labels(torch.arange(4), torch.tensor([0, 0, 0, 1]))
    ((x, y),) = (one.labeled + pseudo).batches("weak", 12)
    assert y.shape == (12, 2)
    assert x.max() <= 5
    ((x, _),) = one.unlabeled.batches(("weak",), 4)
    assert x.flatten().tolist() == [5] * 4


def test_a_label_that_is_soft_has_the_loss_of_its_parts():
    logits, y = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[0.5, 0.5]])
    assert annealed(logits, y, 1.0).item() == pytest.approx(-(math.log(1 / 4) + math.log(3 / 4)) / 2)
    sums, counts = class_sums(torch.tensor([[2.0, 4.0], [6.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]), 2)
    assert sums.tolist() == [[7, 2], [1, 2]]
    assert counts.tolist() == [1.5, 0.5]


# The mean over rounds


def test_the_shipped_model_is_a_mean_over_rounds(run_dir):
    """With decay 0.5 and models 8, 4, 0: 8; then 1/2 and 1/2, as 1 - 1/2 is the decay; then 1/2 and 1/2."""
    fed = Server(run_dir("train.average=0.5", "rounds=3"))
    for fed.round, value, mean in ((1, 8.0, 8.0), (2, 4.0, 6.0), (3, 0.0, 3.0)):
        fed.ship({"w": torch.full((2,), value)})
        assert fed.shipped["w"].tolist() == [mean, mean]


def test_a_method_that_changes_its_weights_in_place_does_not_change_the_mean(run_dir):
    fed, weights = Server(run_dir("train.average=0.5", "rounds=3")), {"w": torch.full((2,), 8.0)}
    fed.round = 1
    fed.ship(weights)
    weights["w"].zero_()
    assert fed.shipped["w"].tolist() == [8.0, 8.0]


def test_a_run_without_a_shared_model_ships_none_after_a_resume_either(run_dir):
    directory = run_dir("method=local-sl", "train.average=0.8", "rounds=2", "labels.at=every-client")
    execute(directory, executor=Serial())
    (directory / "summary.json").unlink()  # as if it had been killed just before
    execute(directory, executor=Serial())
    assert not list(directory.glob("model*.safetensors"))


def test_without_a_mean_the_shipped_model_is_the_last(run_dir):
    fed = Server(run_dir("rounds=3"))
    for fed.round, model in enumerate(({"w": torch.ones(1)}, {"w": torch.zeros(1)}), 1):
        fed.ship(model)
        assert fed.shipped is model


def test_other_first_weights_are_the_same_again_and_follow_the_seed(run_dir):
    fed = Server(run_dir())
    first, other, again = fed.server.weights(), fed.drawn(1), fed.drawn(1)
    assert first.keys() == other.keys()
    assert all(torch.equal(again[name], value) for name, value in other.items())
    for changed in (first, fed.drawn(2), Server(run_dir("seed=1")).drawn(1)):
        assert not any(torch.equal(changed[name], value) for name, value in other.items() if value.dim() > 1)


def test_other_first_weights_keep_to_the_policy_for_statistics(run_dir):
    fed = Server(run_dir("model.name=resnet9", "model.buffers=local"))
    assert fed.drawn(1).keys() == fed.server.weights().keys()


def test_clients_go_on_from_the_last_model_and_not_from_the_mean(run_dir):
    lines = []
    for changes in ((), ("train.average=0.8",)):
        directory = run_dir("rounds=3", "method=rscfed", *changes)
        execute(directory, executor=Serial())
        lines.append([line["pseudo_labels"]["used_per_class"] for line in read_rounds(directory)])
    assert lines[0] == lines[1]


# The warm-up


@pytest.mark.parametrize("name", ["rscfed", "isofed", "fedavg-fixmatch"])
def test_in_the_warm_up_nobody_has_unlabeled_images(name, run_dir):
    directory = run_dir(f"method={name}", "train.warmup=0.5", "rounds=4", "labels.clients=2")
    execute(directory, executor=Serial())
    lines = read_rounds(directory)
    asked, images = zip(*((line["asked"], line["images_unlabeled"]) for line in lines), strict=True)
    adapted = lines[0]["images_labeled"] if name == "isofed" else 0  # which passes over labeled images without labels
    assert images[:2] == (adapted, adapted)
    assert min(images[2:]) > adapted
    assert asked[:2] == (2, 2)  # each once, in RSCFed too, whose groups would all be the same
    assert min(asked[2:]) > 2


def test_a_method_with_a_warm_up_of_its_own_keeps_it():
    assert Experiment(method="cbafed", train="fewlabel").warmup_rounds == 0
    assert Experiment(method="rscfed", train="fewlabel").warmup_rounds == 8  # of 30, a quarter
    assert Experiment(method=replace(METHODS["rscfed"], warmup=2), train="fewlabel").warmup_rounds == 0


@pytest.mark.parametrize(("rounds", "found"), [(1, 0), (2, 0), (3, 1), (4, 1), (6, 2), (10, 2), (30, 8)])
def test_a_share_of_the_rounds_is_as_many_as_in_stored_runs(rounds, found):
    """A quarter, rounded; a half is rounded to the even number."""
    assert Experiment(method="rscfed", train="fewlabel", rounds=rounds).warmup_rounds == found


def test_a_run_too_short_for_its_warm_up_says_so():
    def told(rounds, method="rscfed", **more):
        return [text for text in Experiment(method=method, rounds=rounds, **more).cautions if "warm-up of" in text]

    (text,) = told(2, train="fewlabel")
    assert text.endswith("raise rounds to 3 or more, or train.warmup to 0.5")
    assert Experiment(method="rscfed", rounds=2, train=replace(RECIPES["fewlabel"], warmup=0.5)).warmup_rounds == 1
    assert told(1, train="fewlabel")[0].endswith("raise rounds to 3 or more")
    assert told(3, train="fewlabel") == told(2) == told(2, "labels-only", train="fewlabel") == []
    assert told(2, "cbafed", train="fewlabel") == []  # it has its own


def test_fedirms_ramp_counts_from_the_end_of_the_warm_up(run_dir):
    fed = Server(run_dir("method=fedirm", "train.warmup=0.5", "rounds=4"))
    assert fed.world.site(0, 3, Rng("task"), fed._model).warmup == 2


def test_a_tree_of_a_mean_has_the_largest_counter():
    mean = tree.mean([(0.8, {"n": torch.tensor(3)}), (0.2, {"n": torch.tensor(5)})])
    assert mean["n"].item() == 5
