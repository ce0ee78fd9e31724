"""Tutor, FewLabel's own method, worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fewlabel.core import tree
from fewlabel.core.federation import ClientInfo, Model, Site
from fewlabel.core.tasks import Asked
from fewlabel.data.images import Images
from fewlabel.data.partition import Partition
from fewlabel.engine.record import PARTITION, read_rounds
from fewlabel.engine.run import execute
from fewlabel.learn.evidence import Models
from fewlabel.learn.panel import Mistakes, known, label, part, pooled, say
from fewlabel.methods.tutor import Drill, Lesson, State, Tutor, Tutors, Update
from tests.hand import STEP, passes, site, weights
from tests.methods.test_rscfed import START, SUPERVISED, approx, moved
from tests.methods.test_semifl import Served, sigmoid

# At START the network says (3/4, 1/4) of any image. All are seen as 1: a step towards label 0 moves a network by 1/4.
PLAIN = Tutor(
    tutors=1, first_term=0.5, views=0, shares=False, epochs_unlabeled=1, strong=False, server_momentum=0, local=STEP
)
OTHER = Model(weights([0.0, 0.0], [0.0, math.log(9)]))  # says (1/10, 9/10) of any image
SURE = Model(weights([0.0, 0.0], [0.0, math.log(99)]))  # says (1/100, 99/100) of any image
SAYS_0 = Model(weights([0.0, 0.0], [200.0, 0.0]))  # is certain of class 0 for any image
NONE = torch.zeros(2, 2)  # mistakes, if no label was marked
ROUNDS, BEGINS = 100, 51  # rounds, and the first of the second term


def steps(number: int) -> float:
    """How far steps towards label 0 move START: each by what is lacking to certainty."""
    move = 0.0
    for _ in range(number):
        move += 1 - sigmoid(math.log(3) + 4 * move)
    return move


def lesson(model: Model = START, *tutors: Model, rate: float = 1.0, mistakes: Any = None) -> Lesson:
    return Lesson(model.model, tuple(tutor.model for tutor in tutors or (SAYS_0,)), mistakes, False, rate)


KNOWN = Lesson(START.model, (), None, False, 1.0)  # for a site that keeps the tutors' labels


def first_term(*tutors: Model) -> State:
    trees = tuple(tutor.model for tutor in tutors or (START,))
    return State(trees[0], tree.sub(trees[0], trees[0]), trees, trees)


def second_term(model: Model = START, *tutors: Model, **more: Any) -> State:
    """The state in the second term: tutors are frozen."""
    trees = tuple(tutor.model for tutor in tutors or (model,))
    return State(model.model, tree.sub(model.model, model.model), (), trees, **more)


def serving(*sites: Site[Any], shipped: Model | None = START, schedule: str = "constant", **more: Any) -> Served:
    fed = Served(*sites, **{"round": BEGINS + 1, **more})
    fed.shipped, fed.rounds, fed.schedule = shipped.model if shipped else None, ROUNDS, schedule
    fed.held_out = any(one.held_out for one in sites)
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


def test_tutors_label_together_by_the_mean_of_their_log_probabilities():
    # Two say (3/4, 1/4) and one (1/100, 99/100). The mean is (151, 149) / 300, for class 0. But the products are
    # 9/16 * 1/100 and 1/16 * 99/100, for class 1. With three more of the first: 27/64 times as much, and 1/64 times.
    one = site(0, unlabeled=[1])
    PLAIN.learn(one, lesson(START, START, SURE, START))
    PLAIN.learn(one, lesson(START, START, SURE, *[START] * 4))
    assert [label.tolist() for _, label, _ in one.audited] == [[1], [0]]


def test_a_tutor_says_the_mean_of_its_log_probabilities_over_the_plain_view_and_the_weak_ones(monkeypatch):
    # Of an image 2 the tutor says (9/10, 1/10), and of -1, which weak views show, (1/4, 3/4).
    seen_as(monkeypatch, -1, "weak")
    slope, one = Model(weights([math.log(3), 0.0])), site(0, unlabeled=[2])
    [found] = say(one, slope.model, one.unlabeled, 2).tolist()
    assert found == approx([math.log(part * weak**2) / 3 for part, weak in ((9 / 10, 1 / 4), (1 / 10, 3 / 4))])


def test_tutors_that_are_sure_of_different_classes_leave_a_label():
    # In single precision both say exactly 0 of the other's class. The third decides.
    zero, last = SAYS_0, Model(weights([0.0, 0.0], [0.0, 200.0]))
    one = site(0, unlabeled=[1])
    PLAIN.learn(one, lesson(START, zero, last, START))
    PLAIN.learn(one, lesson(START, zero, last, OTHER))
    assert [label.tolist() for _, label, _ in one.audited] == [[0], [1]]


def test_tutors_see_an_image_in_all_views_before_a_site_learns():
    one = site(0, unlabeled=[1] * 4)
    seen = passes(one)
    how = replace(PLAIN, views=2, epochs_unlabeled=2, local=replace(STEP, batch_size=2))
    how.learn(one, lesson(START, START, OTHER))
    assert seen == [*[(False, 4)] * 6, *[(True, 2)] * 4]


def test_tutors_label_by_the_sites_own_classes():
    # By these weights an image 2 is of class 0 with 9/10, an image -1 of class 1 with 3/4. Of nine images 2 and one -1,
    # the tutor says class 0 of 9/10. Nothing is known of its mistakes, so these are the shares, smoothed 0.892 : 0.108.
    # By them the image -1 is of class 0, too: 0.25 * 0.892 > 0.75 * 0.108.
    slope = Model(weights([math.log(3), 0.0]))
    one = site(0, unlabeled=[2] * 9 + [-1])
    PLAIN.learn(one, lesson(slope, slope, mistakes=NONE))
    PLAIN.learn(one, lesson(slope, slope))
    assert [label[-1].item() for _, label, _ in one.audited] == [0, 1]


def test_a_site_takes_the_tutors_mistakes_into_account():
    # Both tutors say class 0 of an image 1 and class 1 of -1. Half of the labels of class 1 they took for class 0, and
    # class 0 they always know. Of four images they say class 0 of three: 3/4 = a + (1 - a) / 2, so a is 1/2, and shares
    # that are equal change no probability.
    slope = Model(weights([math.log(3), 0.0]))
    mistakes = torch.tensor([[10**6, 5 * 10**5], [0, 5 * 10**5]])
    one = site(0, unlabeled=[1, 1, 1, -1])
    found = label(one, one.unlabeled, (slope.model, slope.model), 0, mistakes)
    assert found[:, 0].tolist() == pytest.approx([3 / 4] * 3 + [1 / 4], abs=1e-3)
    # Without mistakes the shares would be 3 : 1.
    found = label(one, one.unlabeled, (slope.model, slope.model), 0, NONE)
    share = 0.98 * 3 / 4 + 0.01
    assert found[0, 0].item() == approx(3 * share / (3 * share + 1 - share))


def test_shares_are_those_of_what_tutors_say_whose_mistakes_are_known():
    # The first tutor says class 1 of all, the others class 0 of three images in four. Its mistakes are not known, so
    # 3/4 it is. Of an image 1 the three say class 0 and 1 alike: 1/10 * 3/4 * 3/4 = 9/10 * 1/4 * 1/4.
    slope = Model(weights([math.log(3), 0.0]))
    one, never = site(0, unlabeled=[1, 1, 1, -1]), 10**6 * torch.eye(2)
    found = label(one, one.unlabeled, (OTHER.model, slope.model, slope.model), 0, never)
    assert found[0, 0].item() == approx(0.98 * 3 / 4 + 0.01)


def test_a_site_keeps_the_tutors_labels():
    # The tutor says 1 of all images. Afterwards the site trains on that without tutors, and asks no network.
    one = site(0, unlabeled=[1, 1, 1])
    PLAIN.learn(one, lesson(START, OTHER))
    seen = passes(one)
    assert moved(PLAIN.learn(one, KNOWN)) == approx(-3 / 4)
    assert seen == [(True, 3)]


def test_a_site_with_other_images_than_it_labeled_asks_for_tutors_by_its_silence():
    assert PLAIN.learn(site(0, unlabeled=[1, 1, 1]), KNOWN) is None  # it has no labels
    for others in ([1, 1, 2], [1, 1], [2, 1, 1]):
        one, changed = site(0, unlabeled=[1, 1, 1]), site(0, unlabeled=others)
        PLAIN.learn(one, lesson())
        changed.state = one.state
        assert PLAIN.learn(changed, KNOWN) is None
        assert PLAIN.learn(changed, lesson()).images == len(others)


def test_tutor_skips_a_site_without_unlabeled_images():
    assert PLAIN.learn(site(1, [(1, 0)]), lesson()) is None


def test_tutor_trains_at_the_rate_of_its_term():
    # Half of the rate moves by half of SUPERVISED, for a site that studies and for one that has labels.
    assert moved(PLAIN.learn(site(0, unlabeled=[1, 1]), lesson(rate=0.5))) == approx(SUPERVISED / 2)
    assert moved(PLAIN.correct(site(1, [(1, 0)]), Drill(START.model, 0.5, 1))) == approx(SUPERVISED / 2)
    assert PLAIN.correct(site(1, unlabeled=[1]), Drill(START.model, 0.5, 1)) is None


# The first term


def test_tutors_begin_with_other_weights():
    class Drawing:
        server, num_classes = site(-1), 2

        def drawn(self, number: int) -> Any:
            return weights([float(number), 0.0])

    Drawing.server.load(START.model)
    state = replace(PLAIN, tutors=3).init(Drawing())
    assert [tutor["1.weight"].flatten().tolist() for tutor in state.tutors[1:]] == [[1.0, 0.0], [2.0, 0.0]]
    assert moved(Model(state.tutors[0])) == moved(Model(state.model)) == 0.0
    assert state.means == state.tutors


def test_tutors_learn_from_labels_alone_in_the_first_term():
    fed = serving(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), labeled=[(1, 0)], round=1)
    after = PLAIN.round(first_term(START, OTHER), fed)
    assert fed.asked == [1, -1, 1, -1]  # each tutor at the labeled site, then at the server; nobody studies
    assert moved(Model(after.model)) == moved(Model(after.tutors[0])) == approx(steps(4))  # two here and two there
    assert after.tutors[1]["1.bias"][1] < OTHER.model["1.bias"][1]  # it learned label 0


def test_each_tutor_but_the_first_leaves_out_other_labels():
    # Of eight labels, four of each class, each of four tutors leaves out one of each class.
    how, labels = replace(PLAIN, tutors=5), [(1, 0), (1, 1)] * 4
    for number, images in ((0, 8), (1, 6), (2, 6), (3, 6), (4, 6)):
        seen = passes(one := site(1, labels))
        how.correct(one, Drill(START.model, 1.0, 1, number))
        assert sum(size for _, size in seen) == images
    fed = serving(site(1, labels), round=1)
    how.round(first_term(*[START] * 5), fed)
    assert [message.tutor for _, message in fed.sent] == [0, 1, 2, 3, 4]
    fed = serving(site(1, labels), round=BEGINS + 1)
    how.round(second_term(), fed)
    assert [message.tutor for _, message in fed.sent] == [0]


@pytest.mark.parametrize(("tutors", "learned"), [(1, [4]), (2, [4, 2]), (3, [4, 2, 2])])
def test_few_tutors_leave_out_half_at_most(tutors, learned):
    one = site(1, [(1, 0), (1, 1)] * 2)
    assert [len(part(one, tutors, number, new=False)) for number in range(tutors)] == learned


def test_sites_with_few_labels_leave_them_out_of_different_tutors():
    for number in range(8):
        two = site(number, [(1, 0), (1, 1)])
        left_out = [len(part(two, 5, tutor, new=True)) for tutor in range(1, 5)]
        assert [tutor for tutor in range(4) if left_out[tutor]] == sorted({number % 4, (number + 1) % 4})
    one = site(0, [(1, 0)])
    assert [len(part(one, 5, tutor, new=False)) for tutor in range(5)] == [
        1
    ] * 5  # the only label is left out by nobody
    assert [len(part(one, 5, tutor, new=True)) for tutor in range(5)] == [0] * 5


def test_sites_with_labels_count_the_tutors_mistakes_once():
    # Tutors 1 to 4 take everything for class 0, each one label of each class.
    how, labels, five = replace(PLAIN, tutors=5, shares=True), [(1, 0), (1, 1)] * 4, (START,) * 5
    message = Tutors(tuple(tutor.model for tutor in five))
    assert how.mark(site(1, labels), message).counts.tolist() == [[4, 4], [0, 0]]
    assert how.mark(site(1, unlabeled=[1]), message).counts.tolist() == [[0, 0], [0, 0]]
    assert how.mark(site(1, [(1, 1)]), message).counts.sum() == 0  # nobody leaves out a site's only label
    fed = serving(site(0, unlabeled=[1]), site(1, labels), site(2, labels), labeled=[(1, 0), (1, 0)], round=BEGINS)
    after = how.round(first_term(START, OTHER, START, START, START), fed)
    # OTHER takes everything for class 1: one label of each class at each site, and the first of the server's two.
    assert after.mistakes.counts.tolist() == [[3 + 3 + 1, 3 + 3], [1 + 1 + 1, 1 + 1]]
    assert [message.mistakes.tolist() for _, message in fed.sent if isinstance(message, Lesson)] == [[[7, 6], [3, 2]]]
    assert how.round(after, serving(site(1, labels), round=BEGINS + 1)).mistakes is after.mistakes


def seen_as(monkeypatch: pytest.MonkeyPatch, pixel: int, view: str = "strong") -> None:
    """Let every view of this name show this pixel."""
    views = Images.views

    def changed(images: Images, index: Any, names: Any, rng: Any) -> Any:
        found = views(images, index, names, rng)
        return [torch.full_like(x, pixel) if name == view else x for x, name in zip(found, names, strict=True)]

    monkeypatch.setattr(Images, "views", changed)


def test_tutors_are_marked_in_strong_views_too(monkeypatch):
    # An image 1 is of class 0, and -1 of class 1. Tutors 1 to 4 know that. If strong views show 1, class 0 remains.
    slope, labels = Model(weights([math.log(3), 0.0])), [(1, 0), (-1, 1)] * 4
    message = Tutors((slope.model,) * 5)
    seen_as(monkeypatch, 1)
    found = replace(PLAIN, tutors=5, strong=True).mark(site(1, labels), message)
    assert (found.counts.tolist(), found.strong.tolist()) == ([[4, 0], [0, 4]], [[4, 4], [0, 0]])
    found = replace(PLAIN, tutors=5, shares=True).mark(site(1, labels), message)
    assert (found.counts.tolist(), found.strong.tolist()) == ([[4, 0], [0, 4]], [[0, 0], [0, 0]])  # not asked for


@pytest.mark.parametrize(("strong", "views"), [(False, 3), (True, 4)])
def test_tutors_are_marked_in_as_many_views_as_they_label_by(strong, views):
    # Four tutors leave out two labels each, and see them in the plain view, two weak ones and perhaps a strong one.
    seen = passes(one := site(1, [(1, 0), (1, 1)] * 4))
    replace(PLAIN, tutors=5, views=2, strong=strong).mark(one, Tutors((START.model,) * 5))
    assert seen == [(False, 2)] * 4 * views


@pytest.mark.parametrize(
    ("counts", "strong", "answer"),
    [
        # Of two classes of ten, 18 right in weak views: kappa (0.9 - 0.5) / 0.5 = 0.8. Strong views must have 0.4: 14.
        ([[9, 1], [1, 9]], [[7, 3], [3, 7]], True),
        ([[9, 1], [1, 9]], [[7, 4], [3, 6]], False),
        ([[9, 1], [1, 9]], [[349, 151], [151, 349]], False),  # kappa 0.396
        ([[9, 1], [1, 9]], [[10, 10], [0, 0]], False),  # always the same class
        # Ninety labels of one class: who always says it is right nine times in ten, and knows nothing.
        ([[81, 1], [9, 9]], [[90, 10], [0, 0]], False),
        ([[5, 5], [5, 5]], [[5, 5], [5, 5]], False),  # tutors that guess
        ([[5, 0], [0, 0]], [[5, 0], [0, 0]], False),  # one class says nothing
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], False),  # no labels
    ],
)
def test_strong_views_must_be_known_half_as_far_beyond_chance(counts, strong, answer):
    assert known(Mistakes(torch.tensor(counts).double(), torch.tensor(strong).double())) is answer
    assert known(None) is False


def test_what_sites_counted_is_added_up_by_how_much_each_counts():
    weak, strong = torch.tensor([[4, 1], [0, 3]]), torch.tensor([[2, 2], [2, 2]])
    one, two = Mistakes(weak, strong), Mistakes(weak, 2 * strong)
    found = pooled([(1.0, one), (0.5, two)])
    assert (found.counts.tolist(), found.strong.tolist()) == ([[6, 1.5], [0, 4.5]], [[4, 4], [4, 4]])
    assert pooled([]) is None


def test_sites_study_the_views_that_tutors_know_and_mistakes_travel_only_for_shares(monkeypatch):
    slope, labels = Model(weights([math.log(3), 0.0])), [(1, 0), (-1, 1)] * 4
    sites = site(0, unlabeled=[1]), site(1, labels)

    def lessons(method: Tutor) -> list[tuple[bool, Any]]:
        fed = serving(*sites, round=BEGINS)
        method.round(first_term(*[slope] * 5), fed)
        found = [message for _, message in fed.sent if isinstance(message, Lesson)]
        return [(one.strong, None if one.mistakes is None else one.mistakes.tolist()) for one in found]

    both = replace(PLAIN, tutors=5, strong=True, shares=True)
    assert lessons(both) == [(True, [[4, 0], [0, 4]])]
    assert lessons(replace(both, shares=False)) == [(True, None)]
    assert lessons(replace(both, strong=False)) == [(False, [[4, 0], [0, 4]])]
    seen_as(monkeypatch, 1)
    assert lessons(both) == [(False, [[4, 0], [0, 4]])]


def test_a_site_studies_the_view_that_it_is_told_and_tutors_label_by_weak_ones():
    one, seen = site(0, unlabeled=[1, 1]), []
    views = Images.views
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Images, "views", lambda self, index, names, rng: seen.append(names) or views(self, index, names, rng)
        )
        replace(PLAIN, views=1).learn(one, lesson())
        replace(PLAIN, views=1).learn(one, replace(KNOWN, strong=True))
    # First the tutor labels by two views, and brightness is noted and compared; the training is what comes last.
    told = ["plain", "weak", "plain", "plain", "weak"]
    assert [name for [name] in seen] == [*told, "plain", "strong"]


def test_mistakes_are_asked_for_when_the_second_term_begins_and_never_again():
    """A site answers once in a run. What it says later would come too late: sites keep their labels."""
    how, sites = replace(PLAIN, tutors=5, shares=True), [site(1, [(1, 0), (1, 1)] * 4)]
    fed = serving(*sites, round=BEGINS)
    state = how.round(first_term(*[START] * 5), fed)
    assert fed.asked == [1, 1]  # to count, and to correct
    assert state.mistakes.counts.sum() == 8
    state = how.round(first_term(*[START] * 5), serving(*sites, round=BEGINS, silent=[1]))
    assert state.mistakes is None
    fed = serving(*sites)
    assert how.round(state, fed).mistakes is None
    assert fed.asked == [1]  # to correct
    fed = serving(*sites, round=BEGINS)
    PLAIN.round(first_term(), fed)
    assert fed.asked == [1]  # without shares or other tutors, there is nothing to count


def test_a_site_cannot_claim_more_mistakes_than_it_has_labels():
    asked = Asked(ClientInfo(0, 5, 0), 2)
    good = torch.tensor([[3, 1], [0, 1]])
    Mistakes(good, good).check_answer(asked)
    Mistakes(good, torch.tensor([[0, 1], [3, 1]])).check_answer(asked)  # the same labels, more of them wrong
    Mistakes(good, torch.zeros_like(good)).check_answer(asked)  # nobody asked for strong views
    with pytest.raises(ValueError, match="not of the same labels"):
        Mistakes(good, torch.tensor([[2, 0], [0, 2]])).check_answer(asked)
    for counts in ([[3, 1], [1, 1]], [[-1, 1], [1, 1]], [[2**62, 2**62], [2**62, 2**62]]):
        with pytest.raises(ValueError, match="the 5 that it has"):
            Mistakes(torch.tensor(counts), good).check_answer(asked)
        with pytest.raises(ValueError, match="the 5 that it has"):
            Mistakes(good, torch.tensor(counts)).check_answer(asked)
    for wrong in (torch.ones(2, 2), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="2 by 2 whole numbers"):
            Mistakes(wrong, good).check_answer(asked)
        with pytest.raises(ValueError, match="2 by 2 whole numbers"):
            Mistakes(good, wrong).check_answer(asked)


@pytest.mark.parametrize(
    ("rounds", "share", "passes", "studying"),
    [(1, 0, [1], []), (1, 1, [1], []), (2, 0, [2, 1], [2]), (2, 1, [1, 1], []), (3, 0, [3, 1, 1], [2, 3])],
)
def test_the_first_term_has_one_round_at_least_and_a_run_of_any_length_ends(rounds, share, passes, studying, small_run):
    """One tutor, one epoch a round: round 1 has all passes of the run if it is the only one of the first term."""
    changes = ("method=tutor", "method.tutors=1", f"method.first_term={share}", f"rounds={rounds}", "labels.clients=2")
    run = small_run(*changes, "method.guard=false")
    execute(run, workers=1)
    lines, shares = read_rounds(run), Partition.load(run / PARTITION).shares
    labeled = sum(len(holding.labeled) for holding in shares)
    assert [line["images_labeled"] / labeled for line in lines] == passes
    assert [line["round"] for line in lines if line["images_unlabeled"]] == studying
    assert (run / "model.safetensors").exists()


def test_tutors_have_all_passes_of_a_run_in_the_first_term():
    # Of 100 rounds with 2 epochs, the first 40 have 200 / 40 = 5 epochs, the others 2.
    how = replace(PLAIN, first_term=0.4, guard=False, local=replace(STEP, epochs=2))
    for number, state, epochs in ((1, first_term(), 5), (40, first_term(), 5), (41, second_term(), 2)):
        fed = serving(site(1, [(1, 0)]), round=number)
        how.round(state, fed)
        assert [message.epochs for _, message in fed.sent] == [epochs]
    seen = passes(one := site(1, [(1, 0)]))
    how.correct(one, Drill(START.model, 1.0, 5))
    assert len(seen) == 5


def test_a_tutor_is_the_average_of_its_rounds():
    fed = serving(site(1, [(1, 0)]), round=4)
    assert moved(Model(PLAIN.round(first_term(), fed).means[0])) == approx(steps(2) / 4)  # decay 1 - 1/4
    fed = serving(site(1, [(1, 0)]), round=50)
    assert moved(Model(PLAIN.round(first_term(), fed).means[0])) == approx(steps(2) / 5)  # decay 0.8


def test_the_schedule_begins_anew_in_each_term():
    # Cosine: of the 50 rounds of a term, the 26th has half of the rate, and the first all of it.
    sites = site(0, unlabeled=[1, 1]), site(1, [(1, 0)])
    for number, rate in ((1, 1.0), (26, 0.5), (BEGINS, 1.0), (BEGINS + 25, 0.5)):
        fed = serving(*sites, round=number, schedule="cosine")
        replace(PLAIN, guard=False).round(first_term() if number < BEGINS else second_term(), fed)
        assert [message.rate for _, message in fed.sent] == approx([rate] * len(fed.sent))


# The second term


def test_the_second_term_begins_with_the_first_tutors_average():
    fed = serving(site(0, unlabeled=[1, 1]), round=BEGINS)
    before = replace(first_term(OTHER), means=(START.model, OTHER.model))
    after = PLAIN.round(before, fed)
    # By 3/4 * 1/10 against 1/4 * 9/10 the two say class 1, and a step towards it moves by -3/4.
    assert moved(Model(after.model)) == approx(-3 / 4)
    assert (after.tutors, after.means) == ((), before.means)


def test_labels_have_the_last_word_and_tutors_stay_as_they_are():
    fed = serving(site(0, unlabeled=[1, 1]), site(1, unlabeled=[1] * 3), site(2, [(1, 0)]))
    before = second_term(START, START, OTHER)
    after = PLAIN.round(before, fed)
    # By (3/4 * 1/10, 1/4 * 9/10) the sites learn label 1: by -3/4. The label 0 then moves it by what it lacks.
    assert moved(Model(after.model)) == approx(-3 / 4 + 1 - sigmoid(math.log(3) - 4 * 3 / 4))
    assert after.means == before.means
    assert fed.asked == [1, 0, 2]  # study, and correct


def test_tutors_are_sent_once_to_a_site_and_again_if_it_does_not_answer():
    sites = [site(0, unlabeled=[1, 1]), site(1, unlabeled=[1] * 3)]

    def play(state: State, *silent: int) -> tuple[State, list[int]]:
        fed = serving(*sites, silent=list(silent))
        state = PLAIN.round(state, fed)
        return state, [len(message.tutors) for _, message in fed.sent]

    state, sent = play(second_term(START, START, OTHER), 0)
    assert (state.informed, sent) == ((1,), [2, 2])  # the larger site comes first
    state, sent = play(state)
    assert (state.informed, sent) == ((0, 1), [0, 2])
    state, sent = play(state, 1)
    assert (state.informed, sent) == ((0,), [0, 0])
    assert play(state)[1] == [2, 0]


def test_tutor_counts_sites_by_their_images():
    # The model says 9 : 1 for class 0 of an image 1, and for class 1 of -1, of which the tutor is certain. A step moves
    # the bias of class 0 by 1/10 at the first site, with two images, and by -1/10 at the second, with three.
    slope, steep = Model(weights([math.log(9), 0.0])), Model(weights([200.0, 0.0]))
    after = PLAIN.round(second_term(slope, steep), serving(site(0, unlabeled=[1, 1]), site(1, unlabeled=[-1] * 3)))
    assert after.model["1.bias"].tolist() == approx([(2 - 3) / 50, (3 - 2) / 50])


def test_tutor_goes_on_in_the_direction_of_the_last_study():
    # The sites move the model by 1/4, and half of what the last study changed comes on top.
    before = replace(second_term(START, SAYS_0), velocity=weights([0.2, -0.2], [0.2, -0.2]))
    how = replace(PLAIN, server_momentum=0.5)
    after = how.round(before, serving(site(0, unlabeled=[1, 1])))
    assert moved(Model(after.model)) == approx(SUPERVISED + 0.1)
    assert moved(Model(tree.add(START.model, after.velocity))) == approx(SUPERVISED + 0.1)
    assert moved(Model(how.round(before, serving(site(0, unlabeled=[1, 1]), silent=[0])).model)) == 0.0


@pytest.mark.parametrize(("silent", "end"), [([0], SUPERVISED), ([1], SUPERVISED), ([0, 1], 0.0)])
def test_tutor_whoever_is_missing_the_others_go_on(silent, end):
    fed = serving(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), silent=silent)
    assert moved(Model(PLAIN.round(second_term(START, SAYS_0), fed).model)) == approx(end)


# The guard


def test_labels_alone_go_on_from_the_first_tutor_beside_the_study():
    sites = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), (1, 0))
    fed = serving(*sites)
    after = PLAIN.round(second_term(START, START), fed)
    assert fed.asked == [1, 0, 1]  # labels alone; study, and correct
    model, mean = map(Model, after.alone)
    assert (moved(model), moved(mean)) == approx((steps(1), steps(1) / 5))  # decay 0.8
    model, mean = map(Model, PLAIN.round(after, serving(*sites)).alone)
    assert (moved(model), moved(mean)) == approx((steps(2), 0.8 * steps(1) / 5 + steps(2) / 5))
    # With a longer warm-up (train.warmup), labels alone go on from where they are, and not from the first tutor.
    later = PLAIN.round(second_term(START, OTHER), serving(*sites))
    assert moved(Model(later.alone[0])) == approx(steps(1))
    without_guard = replace(PLAIN, guard=False), sites
    nothing_held_out = PLAIN, (site(0, unlabeled=[1, 1]), site(1, [(1, 0)]))
    no_unlabeled_images = PLAIN, (holding_out(site(1, [(1, 0)]), (1, 0)),)
    for how, others in (without_guard, nothing_held_out, no_unlabeled_images):
        assert how.round(second_term(START, START), serving(*others)).alone == ()


def test_labels_alone_are_what_a_run_without_unlabeled_images_would_have(small_run, monkeypatch):
    played: list[State] = []
    studied = Tutor.studied
    monkeypatch.setattr(Tutor, "studied", lambda *given: played.append(studied(*given)) or played[-1])
    changes = ("recipe=fewlabel", "method=tutor", "method.tutors=2", "labels.held_out=0.4", "rounds=6")
    execute(small_run(*changes), workers=1)
    whole = list(played)  # rounds 3 to 6: the second term
    played.clear()
    execute(small_run(*changes, "train.warmup=0.999"), workers=1)
    mean = played[0].means[0]
    for state, other in zip(
        whole[:3], played[:3], strict=True
    ):  # in the last round, the exam draws random numbers first
        assert all(torch.equal(state.alone[0][name], value) for name, value in other.model.items())
        assert not all(torch.equal(state.model[name], value) for name, value in other.model.items())
    for number, other in enumerate(played[:3], 3):  # the mean over rounds, as in the recipe
        decay = min(0.8, 1 - 1 / number)
        mean = tree.mean([(decay, mean), (1 - decay, other.model)])
    assert all(torch.allclose(whole[2].alone[1][name], value, atol=1e-6) for name, value in mean.items())


def test_tutor_compares_what_is_shipped_with_labels_alone():
    # What is shipped gets the five held-out labels right, and labels alone do not.
    sites = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 5)
    state = second_term(START, alone=(START.model, OTHER.model))
    fed = serving(*sites, round=ROUNDS)
    PLAIN.round(state, fed)
    assert fed.logged["gain"] == approx(1)
    assert fed.asked == [1, 1, 0, 1]  # the exam is before anybody trains
    assert fed.sent[0][1] == Models(START.model, OTHER.model)
    fed = serving(*sites, round=ROUNDS, shipped=None)  # without a mean over rounds, of neither
    PLAIN.round(replace(state, alone=(OTHER.model, START.model)), fed)
    assert fed.logged["gain"] == approx(1)
    for how, number in ((PLAIN, ROUNDS - 1), (replace(PLAIN, guard=False), ROUNDS)):
        fed = serving(*sites, round=number)
        how.round(state, fed)
        assert not fed.logged


def test_tutor_has_no_exam_before_anybody_studied():
    # Of two rounds the first is the first term.
    fed = serving(site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 5), round=2)
    fed.rounds = 2
    PLAIN.round(first_term(), fed)
    assert fed.asked == [1, 0, 1]  # labels alone; study, and correct
    assert not fed.logged


def test_tutor_says_nothing_if_nobody_holds_labels_out():
    fed = serving(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), round=ROUNDS)
    PLAIN.round(second_term(), fed)
    assert not fed.logged


def test_tutor_ships_labels_alone_if_they_are_better_beyond_doubt():
    # On 40 held-out labels 0, of which what is shipped gets none right and labels alone all: -100 points. The variance
    # is (0.5 + 40.5 - 40^2 / 42) / 42^2.
    sites = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 40)
    state = second_term(OTHER, OTHER, alone=(OTHER.model, START.model))
    fed = serving(*sites, round=ROUNDS, shipped=OTHER)
    after = PLAIN.round(state, fed)
    assert fed.asked == [1]  # nobody trains
    assert moved(Model(after.model)) == 0.0
    assert fed.shipped is None  # no mean with what was shipped before
    high = -1 + 1.96 * math.sqrt((41 - 1600 / 42) / 42**2)
    assert (fed.logged["gain"], fed.logged["gain_high"], fed.logged["given_up"]) == approx((-1, high, 1))
    few = site(0, unlabeled=[1, 1]), holding_out(site(1, [(1, 0)]), *[(1, 0)] * 20)
    fed = serving(*few, round=ROUNDS, shipped=OTHER)
    PLAIN.round(state, fed)
    assert (fed.logged["gain"], fed.logged["given_up"]) == approx((-1, 0))  # too few to tell
    assert fed.shipped is not None


def test_tutor_warns_where_tutors_share_statistics():
    assert list(PLAIN.cautions(SimpleNamespace(model=SimpleNamespace(buffers="global"), stream=None))) == []
    [caution] = PLAIN.cautions(SimpleNamespace(model=SimpleNamespace(buffers="local"), stream=None))
    assert 'use model.buffers = "global"' in caution
    [caution] = PLAIN.cautions(SimpleNamespace(model=SimpleNamespace(buffers="global"), stream=1))
    assert "a site gets labels for new ones a round later" in caution
    for view, number in (("none", 1), ("randaugment", 0)):
        experiment = SimpleNamespace(
            model=SimpleNamespace(buffers="global"), stream=None, views=SimpleNamespace(strong=view)
        )
        assert len(list(Tutor().cautions(experiment))) == number


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
        (
            0.004,
            0.058,
            0,
            "Unlabeled images helped: +3.1 points of balanced accuracy against the same training without them",
        ),
        (-0.01, 0.07, 0, "Unlabeled images may or may not have helped: +3.1 points"),
        (-0.09, -0.01, 1, "So labels alone are what is shipped."),
    ],
)
def test_tutor_tells_whether_unlabeled_images_helped(low, high, given_up, words):
    line = {"round": 30, "gain": 0.031, "gain_low": low, "gain_high": high, "gain_images": 512.0, "given_up": given_up}
    [sentence] = PLAIN.conclusions([{"round": 1, "gain": 0.0}, line, {"round": 31}])
    assert words in sentence
    assert "on 512 held-out or validation labels in round 30" in sentence
    [sentence] = PLAIN.conclusions([{**line, "gain_images": 29.0}])
    assert "may or may not have helped" in sentence  # too few to tell
    assert list(PLAIN.conclusions([{"round": 1}])) == []
