"""Tutor, FewLabel's own method, worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fewlabel.core import tree
from fewlabel.core.federation import ClientInfo, Model, Site
from fewlabel.core.tasks import Asked
from fewlabel.learn.priors import adapted
from fewlabel.methods.tutor import EXAMS, Lesson, Models, State, Tutor, Update
from tests.hand import STEP, passes, site, weights
from tests.methods.test_rscfed import START, SUPERVISED, approx, moved
from tests.methods.test_semifl import AFTER, Served, sigmoid

# At START the network says (3/4, 1/4) of any image. All are seen as 1: a step towards label 0 moves a network by 1/4.
PLAIN = Tutor(tutors=1, views=0, prior_steps=0, epochs_unlabeled=1, server_momentum=0, local=STEP)
OTHER = Model(weights([0.0, 0.0], [0.0, math.log(9)]))  # says (1/10, 9/10) of any image


def lesson(model: Model = START, *tutors: Model) -> Lesson:
    return Lesson(model.model, tuple(tutor.model for tutor in tutors or (model,)))


def begun(model: Model = START, *tutors: Model, **more: Any) -> State:
    """The state before a round: tutors as they are, and their means over rounds alike."""
    trees = tuple(tutor.model for tutor in tutors or (model,))
    return State(model.model, tree.sub(model.model, model.model), trees, trees, **more)


def with_shipped(fed: Served, shipped: Model | None = None) -> Served:
    fed.shipped, fed.rounds = shipped.model if shipped else None, 100
    return fed


def holding_out(one: Site[Any], *labels: tuple[int, int]) -> Site[Any]:
    one.held_out = site(9, labels).labeled
    return one


# At a site


def test_tutor_labels_and_the_last_model_learns_them():
    one = site(0, unlabeled=[1, 1, 1])
    assert moved(PLAIN.learn(one, lesson())) == approx(SUPERVISED)
    # The other tutor says 1 of all images, and a step towards it from (3/4, 1/4) moves by -3/4.
    assert moved(PLAIN.learn(one, lesson(START, OTHER))) == approx(-3 / 4)
    assert [label.tolist() for _, label, _ in one.audited] == [[0, 0, 0], [1, 1, 1]]


def test_tutors_label_together_by_the_mean_of_what_they_say():
    # (3/4, 1/4) and (1/10, 9/10): the mean is (17/40, 23/40), and with the first tutor once more (64/120, 56/120).
    one = site(0, unlabeled=[1])
    PLAIN.learn(one, lesson(START, START, OTHER))
    PLAIN.learn(one, lesson(START, START, OTHER, START))
    assert [label.tolist() for _, label, _ in one.audited] == [[1], [0]]


def test_tutors_see_an_image_in_all_views_before_a_site_learns():
    one = site(0, unlabeled=[1] * 4)
    seen = passes(one)
    how = replace(PLAIN, views=2, epochs_unlabeled=2, local=replace(STEP, batch_size=2))
    how.learn(one, lesson(START, START, OTHER))
    assert seen == [*[(False, 4)] * 6, *[(True, 2)] * 4]


def test_tutors_label_by_the_sites_own_classes():
    # By these weights an image 2 is of class 0 with 9/10, an image -1 of class 1 with 3/4. Of nine images 2 and one -1
    # the mean is (0.835, 0.165), smoothed (0.8283, 0.1717), and by that image -1 has 0.25 * 0.8283 > 0.75 * 0.1717.
    slope = Model(weights([math.log(3), 0.0]))
    one = site(0, unlabeled=[2] * 9 + [-1])
    prior = adapted(torch.tensor([[0.9, 0.1]] * 9 + [[0.25, 0.75]]), 1)[1]
    assert prior.tolist() == approx([0.8283, 0.1717])
    replace(PLAIN, prior_steps=1).learn(one, lesson(slope))
    PLAIN.learn(one, lesson(slope))
    assert [label[-1].item() for _, label, _ in one.audited] == [0, 1]


def test_tutor_skips_a_site_without_unlabeled_images():
    assert PLAIN.learn(site(1, [(1, 0)]), lesson()) is None


# Rounds


def test_tutor_lets_labels_have_the_last_word_and_tutors_learn_from_labels_alone():
    fed = with_shipped(Served(site(0, unlabeled=[1, 1]), site(1, unlabeled=[1] * 3), site(2, [(1, 0)])), START)
    after = replace(PLAIN, guard=False).round(begun(START, START, OTHER), fed)
    # Of (3/4 + 1/10, 1/4 + 9/10) the sites learn label 1: by -3/4. The label 0 then moves it by what it lacks.
    assert moved(Model(after.model)) == approx(-3 / 4 + 1 - sigmoid(math.log(3) - 4 * 3 / 4))
    assert [moved(Model(tutor)) for tutor in after.tutors[:1]] == approx([SUPERVISED])
    assert fed.asked == [1, 0, 2, 2, 2]  # study, correct, and each tutor


def test_tutor_counts_sites_by_their_images():
    # The tutor says 9 : 1 for class 0 of an image 1, and for class 1 of -1. A step moves the bias of class 0 by 1/10 at
    # the first site, with two images, and by -1/10 at the second, with three.
    slope = Model(weights([math.log(9), 0.0]))
    fed = with_shipped(Served(site(0, unlabeled=[1, 1]), site(1, unlabeled=[-1] * 3)), slope)
    after = replace(PLAIN, guard=False).round(begun(slope), fed)
    assert after.model["1.bias"].tolist() == approx([(2 - 3) / 50, (3 - 2) / 50])


def test_tutor_goes_on_in_the_direction_of_the_last_study():
    # The sites move the model by 1/4, and half of what the last study changed comes on top.
    before = replace(begun(), velocity=weights([0.2, -0.2], [0.2, -0.2]))
    fed = with_shipped(Served(site(0, unlabeled=[1, 1])), START)
    after = replace(PLAIN, guard=False, server_momentum=0.5).round(before, fed)
    assert moved(Model(after.model)) == approx(SUPERVISED + 0.1)
    assert moved(Model(tree.add(START.model, after.velocity))) == approx(SUPERVISED + 0.1)
    silent = with_shipped(Served(site(0, unlabeled=[1, 1]), silent=[0]), START)
    assert moved(Model(replace(PLAIN, server_momentum=0.5).round(before, silent).model)) == 0.0


def test_tutor_trains_on_labels_alone_while_there_are_no_unlabeled_images():
    fed = with_shipped(Served(site(0, [(1, 0)]), labeled=[(1, 0)]))
    after = PLAIN.round(begun(), fed)
    assert [moved(Model(model)) for model in (after.model, *after.tutors)] == approx([SUPERVISED + AFTER] * 2)
    assert fed.asked == [0, -1, 0, -1]


@pytest.mark.parametrize(("silent", "end"), [([0], SUPERVISED), ([1], SUPERVISED), ([0, 1], 0.0)])
def test_tutor_whoever_is_missing_the_others_go_on(silent, end):
    fed = with_shipped(Served(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), silent=silent), START)
    assert moved(Model(PLAIN.round(begun(), fed).model)) == approx(end)


def test_a_tutor_is_the_average_of_its_rounds():
    fed = with_shipped(Served(site(1, [(1, 0)]), round=4), START)
    assert moved(Model(PLAIN.round(begun(), fed).means[0])) == approx(SUPERVISED / 4)  # decay 1 - 1/4
    fed = with_shipped(Served(site(1, [(1, 0)]), round=50), START)
    assert moved(Model(PLAIN.round(begun(), fed).means[0])) == approx(SUPERVISED / 5)  # decay 0.8


# The guard


def test_tutor_asks_for_no_exam_again_if_nobody_holds_labels_out():
    fed = with_shipped(Served(site(0, unlabeled=[1, 1]), site(1, [(1, 0)])), START)
    after = PLAIN.round(begun(), fed)
    assert after.held_out == 0
    fed.sent.clear()
    PLAIN.round(after, fed)
    assert fed.asked == [0, 1, 1]


def test_tutor_compares_what_is_shipped_with_the_first_tutor():
    # What is shipped gets the one held-out label right. So does the first tutor, but not its mean over rounds.
    sites = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), (1, 0))
    before = replace(begun(), means=(OTHER.model,))
    fed = with_shipped(Served(*sites, round=10), Model(dict(START.model)))
    assert PLAIN.round(before, fed).held_out == 1
    assert fed.logged["gain"] == approx(1)
    fed = with_shipped(Served(*sites, round=10), START)  # the recipe averages nothing: what is shipped is the last
    PLAIN.round(before, fed)
    assert fed.logged["gain"] == approx(0)


def test_tutor_gives_up_if_labels_alone_are_better_beyond_doubt():
    # On 40 held-out labels 0, of which what is shipped gets none right and labels alone all: -100 points. The variance
    # is (0.5 + 40.5 - 40^2 / 42) / 42^2.
    sites = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 40)
    state = begun(OTHER, START, held_out=40)
    late, due = 90, 100 // EXAMS
    fed = with_shipped(Served(*sites, round=due), OTHER)
    after = PLAIN.round(state, fed)
    assert after.given_up
    assert moved(Model(after.model)) == approx(SUPERVISED)
    high = -1 + 1.96 * math.sqrt((41 - 1600 / 42) / 42**2)
    assert (fed.logged["gain"], fed.logged["gain_high"], fed.logged["given_up"]) == approx((-1, high, 1))
    fed.sent.clear()
    again = PLAIN.round(after, fed)
    assert fed.asked == [1]  # from then on only labels
    assert moved(Model(again.model)) == approx(SUPERVISED + AFTER)
    for number in (due + 1, late):  # no exam is due, or it is too late to forget
        assert not PLAIN.round(state, with_shipped(Served(*sites, round=number), OTHER)).given_up
    few = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 20)
    assert not PLAIN.round(state, with_shipped(Served(*few, round=due), OTHER)).given_up  # too few to tell


def test_tutor_stays_on_guard_if_those_who_hold_labels_out_are_silent_for_a_while():
    sites = site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), holding_out(site(2, [(1, 0)]), (1, 0))
    fed = with_shipped(Served(*sites, round=4, silent=[2]), START)
    assert PLAIN.round(begun(), fed).held_out is None  # not known yet
    before = begun(held_out=1)
    assert PLAIN.round(before, with_shipped(Served(*sites, round=10, silent=[2]), START)).held_out == 1


def test_tutor_refuses_more_images_than_a_site_has():
    PLAIN.learn(site(0, unlabeled=[1, 1, 1]), lesson()).check_answer(Asked(ClientInfo(0, 0, 3), 2))
    for number in (4, -1, 10**400):
        with pytest.raises(ValueError, match="it has 3"):
            Update(START.model, number).check_answer(Asked(ClientInfo(0, 0, 3), 2))


def test_tutor_exams_are_on_held_out_labels_or_the_servers_validation():
    one, two = holding_out(site(0, [(1, 1)]), (1, 0), (1, 1)), site(1, [(1, 1)])
    models = Models(START.model, OTHER.model)
    found = PLAIN.sit_exam(one, models)
    assert [part.tolist() for part in (found.images, found.first, found.second)] == [[1, 1], [1, 0], [0, 1]]
    assert not PLAIN.sit_exam(two, models).images.any()
    two.validation = site(3, [(1, 0)]).labeled
    assert PLAIN.sit_exam(two, models).first.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("low", "high", "given_up", "words"),
    [
        (0.004, 0.058, 0, "Unlabeled images helped: +3.1 points"),
        (-0.01, 0.07, 0, "Unlabeled images may or may not have helped: +3.1 points"),
        (-0.09, -0.01, 1, "From then on the run used labels alone."),
    ],
)
def test_tutor_tells_whether_unlabeled_images_helped(low, high, given_up, words):
    line = {"round": 30, "gain": 0.031, "gain_low": low, "gain_high": high, "gain_images": 512.0, "given_up": given_up}
    [sentence] = PLAIN.conclusions([{"round": 1, "gain": 0.0}, line, {"round": 31}])
    assert words in sentence
    assert "on 512 held-out labels in round 30" in sentence
    assert list(PLAIN.conclusions([{"round": 1}])) == []
