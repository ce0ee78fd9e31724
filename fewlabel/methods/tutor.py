"""Tutor, FewLabel's own method: tutors label, sites without labels study, and labels have the last word.

The tutors are a few models that sites with labels train on labels alone, each for itself, beside the model that is
shipped. They begin alike, and differ because each sees the images in another order and in other views. What counts is
the average of each over rounds. In a round, each site without labels shows its images to all tutors and takes the mean
prediction of each image, which is better than any one tutor's. The tutors were trained as if classes were equally
frequent (`train.balance`), but at a site they are not. So the site estimates its own class shares from these
predictions, and weighs the predictions by them (`learn.priors.adapted`, EM). The most likely class becomes the label of
an image. The site trains the last round's model on these labels, and the server averages the sites' models, with
momentum. Then sites with labels train the average on true labels (`learn.alternate.corrected`). No tutor ever learns
from a label that was guessed, so mistakes cannot feed themselves.

Where labels are held out (`labels.held_out`, or a validation set at the server), the method can tell whether unlabeled
images help, because the first tutor is what labels alone would give. From time to time it and the shipped model sit an
exam on held-out labels, and only counts leave a site (`learn.evidence`). If labels alone are better beyond doubt before
three quarters of the rounds are over, the method goes on with them. The report tells the difference and its interval.

There is no paper. The manual has the equations, and `experiments/own/README.md` tells what was tried.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Site, Weights, broadcast
from fewlabel.core.schema import Count, Natural, Share
from fewlabel.core.tasks import Asked, on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.alternate import State as Alternate
from fewlabel.learn.alternate import averaged, corrected, fine_tuned
from fewlabel.learn.evidence import Exam, bounded, exam, gain, nothing, right, total, worse_without_any
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import supervised
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.priors import adapted
from fewlabel.learn.thresholds import predict

EXAMS = 10  # of a run, about
ENOUGH = 30  # held-out labels, before a method is given up
LAST_RESORT = 0.75  # of the rounds; later, the mean over rounds could not forget a model that is given up


@dataclass(frozen=True)
class State:
    model: Tree
    velocity: Tree  # what the study phase changed in the last round, momentum included
    tutors: tuple[Tree, ...]
    means: tuple[Tree, ...]  # of the tutors over rounds
    held_out: int | None = None  # labels that exams are on, once that is known
    given_up: bool = False  # whether labels alone were better beyond doubt


@dataclass(frozen=True)
class Lesson:
    model: Weights
    tutors: tuple[Tree, ...]


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
    views: Natural = 1  # weak views of an image, beside the plain one, that tutors label it by
    prior_steps: Natural = 2  # steps of EM that estimate how frequent classes are at a site; 0 takes them as equal
    epochs_unlabeled: Count = 3  # passes over unlabeled images in a round
    server_momentum: Share = 0.5  # of the server, over rounds, in what sites without labels change
    guard: bool = True  # where labels are held out: compare with labels alone, and go on with them if they are better
    local: Local = Local(epochs=5, batch_size=32, lr=0.03, lr_unlabeled=0.06)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    leaves = (
        f"The weights after training. {SUMS_DO} If the experiment has labels held out: for each class their exact "
        "number, and how many of them only one of two models gets right. A dishonest server can choose these models, "
        "and learn about single images."
    )

    def init(self, fed: Federation) -> State:
        weights = fed.server.weights()
        tutors = (weights,) * self.tutors
        return State(weights, tree.sub(weights, weights), tutors, tutors)

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        if state.given_up:
            return replace(state, model=corrected(fed, state.model, self.correct))
        state, before = self.studied(state, fed), state
        model = corrected(fed, state.model, self.correct)
        tutors = tuple(corrected(fed, tutor, self.correct) for tutor in before.tutors)
        decay = min(0.8, 1 - 1 / fed.round)  # of the mean over rounds, as in the recipe
        means = tuple(
            tree.mean([(decay, mean), (1 - decay, tutor)]) for mean, tutor in zip(before.means, tutors, strict=True)
        )
        state = replace(state, model=model, tutors=tutors, means=means)
        return self.guarded(state, fed, before) if self.guard and fed.unlabeled else state

    def studied(self, state: State, fed: Federation) -> State:
        """Let tutors label the images of unlabeled sites, and these sites train."""
        jobs = broadcast(fed.sample(among=fed.unlabeled, name="unlabeled"), Lesson(state.model, state.means))
        found = fed.mean(self.learn, jobs, state.model, weight=lambda reply: reply.upload.images)
        if not found.replies:
            return state
        step = averaged(Alternate(state.model, state.velocity), found.model, self.server_momentum)
        return replace(state, model=step.model, velocity=step.velocity)

    def guarded(self, state: State, fed: Federation, before: State) -> State:
        """If an exam is due, compare what is shipped with labels alone, as both were before this round."""
        due = before.held_out is None or fed.round % max(1, fed.rounds // EXAMS) == 0 or fed.round == fed.rounds
        if not due or before.held_out == 0:
            return state
        shipped = fed.shipped or before.model
        alone = before.tutors[0] if shipped is before.model else before.means[0]  # averaged as what is shipped
        exams, own, everybody = self.exams(fed, Models(shipped, alone))
        found = gain(total(exams + own)) if exams + own else None
        if not found:
            return replace(state, held_out=0) if everybody and before.held_out is None else state
        sure = found.images >= ENOUGH and worse_without_any(exams, own)
        give_up = sure and fed.round <= LAST_RESORT * fed.rounds
        fed.log(gain=found.value, gain_low=found.low, gain_high=found.high, gain_images=found.images)
        fed.log(given_up=float(give_up))
        if give_up:
            return replace(state, model=state.tutors[0], tutors=(), means=(), given_up=True)
        return replace(state, held_out=found.images)

    def exams(self, fed: Federation, models: Models) -> tuple[list[Exam], list[Exam], bool]:
        """Return the exams of two models at sites with labels and at the server, and whether all sites replied."""
        replies = list(fed.run(self.sit_exam, broadcast(fed.labeled, models)))
        there = fed.server.validation or fed.server.held_out
        own = list(fed.map(self.sit_exam, [models])) if there else []
        return [bounded(one.upload, one.counts) for one in replies], own, len(replies) == len(fed.labeled)

    @on_client
    def learn(self, site: Site[None], msg: Lesson) -> Update | None:
        """Let the tutors label the site's images, and train on them."""
        if not site.unlabeled:
            return None
        views = ("plain", *["weak"] * self.views)
        seen = [predict(site.load(tutor), site.unlabeled, view) for tutor in msg.tutors for view in views]
        label = adapted(torch.stack(seen).mean(0), self.prior_steps)[0].argmax(1)
        everything = torch.arange(len(label), device=label.device)
        site.audit(everything, label)
        images, model, local = site.unlabeled.with_labels(everything, label), site.load(msg.model), self.local
        batches = (batch for _ in range(self.epochs_unlabeled) for batch in images.batches("weak", local.batch_size))
        fit(model, optimizer(model, local, labels=False), batches, partial(supervised, model, images), local.clip)
        site.score(model)
        return Update(site.weights(), len(label))

    @on_client
    @on_server
    def correct(self, site: Site[None], msg: Model) -> Model | None:
        return fine_tuned(site, msg, self.local)

    @on_client
    @on_server
    def sit_exam(self, site: Site[None], msg: Models) -> Exam:
        images = site.held_out or site.validation
        if not images:
            return nothing(site.num_classes)
        first, second = (right(site.load(model), images) for model in (msg.first, msg.second))
        return exam(first, second, images.y, site.num_classes)

    def conclusions(self, lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
        """Say whether unlabeled images helped, by the last exam in the lines of a run."""
        for line in [line for line in lines if "gain" in line][-1:]:
            value, low, high = (100 * line[name] for name in ("gain", "gain_low", "gain_high"))
            verdict = "made it worse" if high < 0 else "helped" if low > 0 else "may or may not have helped"
            yield (
                f"Unlabeled images {verdict}: {value:+.1f} points of balanced accuracy against labels alone, on "
                f"{line['gain_images']:,.0f} held-out labels in round {line['round']} (95 % interval {low:+.1f} to "
                f"{high:+.1f}).{' From then on the run used labels alone.' if line['given_up'] else ''}"
            )
