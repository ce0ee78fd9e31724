"""Tutor, FewLabel's own method: tutors learn, then they label, and sites without labels study.

A run has two terms. In the first, the tutors learn: a few models that sites with labels train on labels alone, each for
itself. They begin with other weights, so each makes other mistakes. By the end of the term each has had as many passes
over labels as labels alone have in a whole run, and its learning rate has fallen to nothing, because a tutor that is
still learning fast labels badly. What counts is the average of each over rounds. In the second term the tutors stay as
they are. A site without labels gets them once. It shows its images to all tutors in several views and takes what they
say together: the mean of their log-probabilities, which is better than any one tutor's. The tutors were trained as if
classes were equally frequent (`train.balance`), but at a site they are not. So the site estimates its own class shares
from these predictions, and weighs the predictions by them (`learn.priors.adapted`, EM). The most likely class becomes
the label of an image, and the site keeps it. In each round, the site trains the last round's model, which began as the
first tutor, on these labels, and the server averages the sites' models, with momentum. Then sites with labels train the
average on true labels (`learn.alternate.corrected`). No tutor ever learns from a label that was guessed, so mistakes
cannot feed themselves.

Where labels are held out (`labels.held_out`, or a validation set at the server), the method can tell whether unlabeled
images help, because the first tutor is what labels alone gave. In the last round it and the shipped model sit an exam
on held-out labels, and only counts leave a site (`learn.evidence`). If labels alone are better beyond doubt, the first
tutor is what is shipped. The report tells the difference and its interval.

There is no paper. The manual has the equations, and `experiments/own/README.md` tells what was tried.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Site, Weights, broadcast
from fewlabel.core.images import Unlabeled
from fewlabel.core.schedule import during, factor
from fewlabel.core.schema import Count, Natural, Share
from fewlabel.core.tasks import Asked, on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.alternate import State as Alternate
from fewlabel.learn.alternate import averaged, corrected, fine_tuned, most_passes_in_terms
from fewlabel.learn.evidence import Exam, bounded, exam, gain, nothing, right, told, total, worse_without_any
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import supervised
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.priors import adapted
from fewlabel.learn.thresholds import predict

LEAST = 1e-6  # probability of a class: tutors that are sure of different classes do not exclude all classes


@dataclass(frozen=True)
class State:
    model: Tree
    velocity: Tree  # what the study phase changed in the last round, momentum included
    tutors: tuple[Tree, ...]  # while they learn
    means: tuple[Tree, ...]  # of the tutors over the rounds of the first term
    informed: tuple[int, ...] = ()  # sites that keep the tutors' labels


@dataclass(frozen=True)
class Drill:
    model: Weights
    rate: float  # the schedule's factor of the learning rate, from the beginning of the term
    epochs: int


@dataclass(frozen=True)
class Lesson:
    model: Weights
    tutors: tuple[Tree, ...]  # none, if the site keeps their labels
    rate: float


@dataclass(frozen=True)
class Kept:
    label: Tensor  # of each image
    brightness: Tensor  # of each image, by which a site notices that its images have changed


@dataclass(frozen=True)
class Update:
    model: Weights
    images: int  # that it was trained on

    def check_answer(self, asked: Asked) -> None:
        asked.check_images(self.images)


@dataclass(frozen=True)
class Models:
    first: Tree
    second: Tree


@dataclass(frozen=True)
class Tutor:
    """FewLabel's own: models from labels alone label together, sites without labels study, labeled sites correct."""

    tutors: Count = 4  # models that learn from labels alone and label together
    first_term: Share = 0.5  # share of the rounds in which tutors learn and nobody studies
    views: Natural = 7  # weak views of an image, beside the plain one, that tutors label it by
    prior_steps: Natural = 2  # steps of EM that estimate how frequent classes are at a site; 0 takes them as equal
    epochs_unlabeled: Count = 3  # passes over unlabeled images in a round
    server_momentum: Share = 0.5  # of the server, over rounds, in what sites without labels change
    guard: bool = True  # where labels are held out: compare with labels alone, and ship them if they are better
    local: Local = Local(epochs=5, batch_size=32, lr=0.03, lr_unlabeled=0.06)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    warms_up = takes_turns = True
    most_passes = most_passes_in_terms
    leaves = (
        f"The weights after training. {SUMS_DO} If the experiment has labels held out: for each class their exact "
        "number, and how many of them only one of two models gets right. A dishonest server can choose these models, "
        "and learn about single images."
    )

    def cautions(self, experiment: Any) -> Iterable[str]:
        if experiment.model.buffers != "global":
            yield 'tutor: tutors with BatchNorm need their own statistics to label well; use model.buffers = "global"'

    def init(self, fed: Federation) -> State:
        weights = fed.server.weights()
        tutors = (weights, *(fed.drawn(number) for number in range(1, self.tutors)))
        return State(weights, tree.sub(weights, weights), tutors, tutors)

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        first = max(1, round(self.first_term * fed.rounds))
        if fed.round <= first:
            epochs = round(self.local.epochs * fed.rounds / first)
            return self.taught(state, fed, partial(Drill, rate=factor(fed.schedule, fed.round, first), epochs=epochs))
        if state.tutors:  # the second term begins
            state = replace(state, model=state.means[0], tutors=())
        studied = first + 1 < fed.round and fed.unlabeled
        if self.guard and studied and fed.round == fed.rounds and self.did_harm(state, fed):
            fed.shipped = None  # so that the first tutor is shipped as it is, and not in a mean over rounds
            return replace(state, model=state.means[0])
        return self.studied(state, fed, factor(fed.schedule, fed.round - first, fed.rounds - first))

    def taught(self, state: State, fed: Federation, drill: Callable[[Tree], Drill]) -> State:
        """Let the tutors learn from labels. The first is what is shipped until the second term."""
        tutors = tuple(corrected(fed, tutor, self.correct, drill) for tutor in state.tutors)
        decay = min(0.8, 1 - 1 / fed.round)  # of the mean over rounds, as in the recipe
        means = tuple(tree.mean([(decay, old), (1 - decay, new)]) for old, new in zip(state.means, tutors, strict=True))
        return replace(state, model=tutors[0], tutors=tutors, means=means)

    def studied(self, state: State, fed: Federation, rate: float) -> State:
        """Let unlabeled sites train on what the tutors say about their images, and let labels have the last word."""
        chosen = fed.sample(among=fed.unlabeled, name="unlabeled")
        new, known = Lesson(state.model, state.means, rate), Lesson(state.model, (), rate)
        jobs = [(one, known if one.id in state.informed else new) for one, _ in broadcast(chosen, None)]
        found = fed.mean(self.learn, jobs, state.model, weight=lambda reply: reply.upload.images)
        step = Alternate(state.model, state.velocity)
        if found.replies:
            step = averaged(step, found.model, self.server_momentum)
        model = corrected(fed, step.model, self.correct, partial(Drill, rate=rate, epochs=self.local.epochs))
        # A site that did not answer may have no labels, or other images: it gets the tutors again.
        informed = {*state.informed} - {one.id for one in chosen} | {reply.client.id for reply in found.replies}
        return replace(state, model=model, velocity=step.velocity, informed=tuple(sorted(informed)))

    def did_harm(self, state: State, fed: Federation) -> bool:
        """Compare what is shipped with labels alone, as both were before this round."""
        exams, own = self.exams(fed, Models(fed.shipped or state.model, state.means[0]))
        found = gain(total(exams + own)) if exams + own else None
        if not found:
            return False
        harm = worse_without_any(exams, own)
        fed.log(gain=found.value, gain_low=found.low, gain_high=found.high)
        fed.log(gain_images=found.images, given_up=float(harm))
        return harm

    def exams(self, fed: Federation, models: Models) -> tuple[list[Exam], list[Exam]]:
        """Return the exams of two models, at sites with labels and at the server."""
        exams = [bounded(one.upload, one.counts) for one in fed.run(self.sit_exam, broadcast(fed.labeled, models))]
        there = fed.server.validation or fed.server.held_out
        return exams, [*fed.map(self.sit_exam, [models])] if there else []

    @on_client
    def learn(self, site: Site[Kept], msg: Lesson) -> Update | None:
        """Train on the tutors' labels of the site's images. Without tutors, these are the labels that it keeps."""
        if not site.unlabeled:
            return None
        brightness = torch.cat([x.flatten(1).mean(1) for x, _ in site.unlabeled.batches(("plain",), shuffle=False)])
        if msg.tutors:
            site.state = Kept(self.labels(site, site.unlabeled, msg.tutors), brightness)
        elif site.state is None or not torch.equal(site.state.brightness, brightness):
            return None
        label = site.state.label
        everything = torch.arange(len(label), device=label.device)
        site.audit(everything, label)
        images, model, local = site.unlabeled.with_labels(everything, label), site.load(msg.model), self.local
        batches = (batch for _ in range(self.epochs_unlabeled) for batch in images.batches("weak", local.batch_size))
        with during(msg.rate):
            fit(model, optimizer(model, local, labels=False), batches, partial(supervised, model, images), local.clip)
        site.score(model)
        return Update(site.weights(), len(label))

    def labels(self, site: Site[Kept], images: Unlabeled, tutors: tuple[Tree, ...]) -> Tensor:
        """Return what the tutors say together about each image, adapted to the classes of the site."""
        views = ("plain", *["weak"] * self.views)
        seen = [predict(site.load(tutor), images, view) for tutor in tutors for view in views]
        together = torch.stack(seen).clamp_min(LEAST).log().mean(0).softmax(1)
        return adapted(together, self.prior_steps)[0].argmax(1)

    @on_client
    @on_server
    def correct(self, site: Site[Kept], msg: Drill) -> Model | None:
        with during(msg.rate):
            return fine_tuned(site, Model(msg.model), replace(self.local, epochs=msg.epochs))

    @on_client
    @on_server
    def sit_exam(self, site: Site[Kept], msg: Models) -> Exam:
        images = site.held_out or site.validation
        if not images:
            return nothing(site.num_classes)
        first, second = (right(site.load(model), images) for model in (msg.first, msg.second))
        return exam(first, second, images.y, site.num_classes)

    def conclusions(self, lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
        return told(lines)
