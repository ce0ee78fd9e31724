"""Tutor, FewLabel's own method: a tutor labels, sites without labels study, and labels have the last word.

The tutor is the model that is shipped: the average over rounds (`train.average`). In a round, each site without labels
shows its images to the tutor in several views, and takes the mean prediction of each image. The tutor was trained as if
classes were equally frequent (`train.balance`), but at a site they are not. So the site estimates its own class shares
from these predictions, and weighs the predictions by them (`learn.priors.adapted`, one step of EM). The most likely
class becomes the label of an image, if its probability is above a threshold. The site trains the last round's model on
these labels, with mixed images (`train.mixup`), and the server averages the sites' models. Then sites with labels train
the average on true labels (`learn.alternate.corrected`). So a round ends with true labels, and the tutor labels again
only after what unlabeled images taught wrongly was corrected.

Where labels are held out (`labels.held_out`, or a validation set at the server), the method can tell whether unlabeled
images help. Then sites with labels also train a second model, on labels alone. From time to time both sit an exam on
held-out labels, and only counts leave a site (`learn.evidence`). If labels alone are better beyond doubt before three
quarters of the rounds are over, the method goes on with them. The report tells the difference and its interval.

There is no paper. The manual has the equations, and `experiments/own/README.md` tells what was tried.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import (
    EVERY_CLIENT,
    SERVER,
    SOME_CLIENTS,
    Federation,
    Model,
    Site,
    Weights,
    broadcast,
)
from fewlabel.core.schema import Count, Natural, Share
from fewlabel.core.tasks import Asked, on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.alternate import corrected, fine_tuned
from fewlabel.learn.evidence import Exam, exam, gain, nothing, right, total
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import supervised
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.priors import adapted
from fewlabel.learn.thresholds import predict

DECAY = 0.8  # of the mean over rounds of the model from labels alone, as in the recipe
EXAMS = 10  # of a run, about
ENOUGH = 30  # held-out labels, before a method is given up
LAST_RESORT = 0.75  # of the rounds; later, the mean over rounds could not forget a model that is given up


@dataclass(frozen=True)
class State:
    model: Tree
    alone: Tree | None = None  # the model from labels alone, while it is kept
    average: Tree | None = None  # its mean over rounds
    held_out: int | None = None  # labels that exams are on, once that is known
    given_up: bool = False  # whether labels alone were better beyond doubt


@dataclass(frozen=True)
class Lesson:
    model: Weights
    tutor: Tree


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
    """FewLabel's own: an average over rounds labels, sites without labels study, and labeled sites correct."""

    views: Natural = 3  # weak views of an image, beside the plain one, that the tutor labels it by
    confidence: Share = 0.8  # probability above which an image gets a label
    prior_steps: Natural = 1  # steps of EM that estimate how frequent classes are at a site; 0 takes them as equal
    study: Literal["weak", "strong"] = "weak"  # the view that sites without labels train on
    epochs_unlabeled: Count = 2  # passes over unlabeled images in a round
    guard: bool = True  # where labels are held out: compare with labels alone, and go on with them if they are better
    local: Local = Local(epochs=5, batch_size=32, lr=0.03, lr_unlabeled=0.06)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    leaves = (
        f"The weights after training. {SUMS_DO} If the experiment has labels held out: for each class their exact "
        "number, and how many of them only one of two models gets right. A dishonest server can choose these models, "
        "and learn about single images."
    )

    def init(self, fed: Federation) -> State:
        return State(fed.server.weights())

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        if state.given_up or not fed.unlabeled:
            return replace(state, model=corrected(fed, state.model, self.correct))
        tutor = fed.shipped or state.model
        jobs = broadcast(fed.sample(among=fed.unlabeled, name="unlabeled"), Lesson(state.model, tutor))
        studied = fed.mean(self.learn, jobs, state.model, weight=lambda reply: reply.upload.images).model
        model = corrected(fed, studied, self.correct)
        if not self.guard or state.held_out == 0:
            return State(model, held_out=state.held_out)
        return self.guarded(replace(state, model=model), fed, tutor, before=state)

    def guarded(self, state: State, fed: Federation, tutor: Tree, before: State) -> State:
        """Train the model from labels alone, too. If an exam is due, compare both as they were before this round."""
        alone, average = before.alone or before.model, before.average or tutor  # they part after the warm-up
        if before.held_out is None or fed.round % max(1, fed.rounds // EXAMS) == 0 or fed.round == fed.rounds:
            exams, everybody = self.exams(fed, Models(tutor, average))
            found = gain(total(exams)) if exams else None
            if found is None and everybody and before.held_out is None:
                return State(state.model, held_out=0)
            state = replace(state, held_out=found.images if found else before.held_out)
            if found and before.alone:  # in the first exam, the two are one model
                give_up = found.high < 0 and found.images >= ENOUGH and fed.round <= LAST_RESORT * fed.rounds
                fed.log(gain=found.value, gain_low=found.low, gain_high=found.high, gain_images=found.images)
                fed.log(given_up=float(give_up))
                if give_up:
                    return State(corrected(fed, alone, self.correct), held_out=found.images, given_up=True)
        # The tutor is the last round's own model where the recipe averages nothing.
        alone, decay = (
            corrected(fed, alone, self.correct),
            0.0 if tutor is before.model else min(DECAY, 1 - 1 / fed.round),
        )
        return replace(state, alone=alone, average=tree.mean([(decay, average), (1 - decay, alone)]))

    def exams(self, fed: Federation, models: Models) -> tuple[list[Exam], bool]:
        """Return the exams of two models at all who have labels, and whether all of them replied."""
        exams = [reply.upload for reply in fed.run(self.sit_exam, broadcast(fed.labeled, models))]
        everybody = len(exams) == len(fed.labeled)
        if fed.server.validation or fed.server.held_out:
            exams += fed.map(self.sit_exam, [models])
        return exams, everybody

    @on_client
    def learn(self, site: Site[None], msg: Lesson) -> Update | None:
        """Let the tutor label the site's images, and train on those that it is sure of."""
        if not site.unlabeled:
            return None
        tutor, local = site.load(msg.tutor), self.local
        seen = [predict(tutor, site.unlabeled, view) for view in ("plain", *["weak"] * self.views)]
        confidence, label = adapted(torch.stack(seen).mean(0), self.prior_steps)[0].max(1)
        sure = (confidence > self.confidence).nonzero().flatten()
        site.audit(sure, label[sure])
        if not len(sure):
            return None
        images, model = site.unlabeled.with_labels(sure, label[sure]), site.load(msg.model)
        batches = (
            batch for _ in range(self.epochs_unlabeled) for batch in images.batches(self.study, local.batch_size)
        )
        fit(model, optimizer(model, local, labels=False), batches, partial(supervised, model, images), local.clip)
        site.score(model)
        return Update(site.weights(), len(sure))

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
