"""Tutor, FewLabel's own method: tutors learn, then they label, and sites without labels study.

A run has two terms. In the first, the tutors learn: a few models that sites with labels train on labels alone, each for
itself. They begin with other weights, so each makes other mistakes. By the end of the term each has had as many passes
over labels as labels alone have in a whole run, and its learning rate has fallen to nothing, because a tutor that is
still learning fast labels badly. What counts is the average of each over rounds. Each tutor but the first leaves out
some labels of every class, a quarter of all, and each of them others. At the end of the term, sites with labels count
what the tutors make of these: how often they take which class for which, in weak views and in a strong one
(`learn.panel.mark`).

In the second term the tutors stay as they are. A site without labels gets them once. It shows its images to all tutors
in several views and takes what they say together (`learn.panel.label`): the mean of their log-probabilities, which is
better than any one tutor's. The tutors were trained as if classes were equally frequent (`train.balance`), but at a
site they are not. So the site estimates its own class shares, from how often tutors say each class and from the
mistakes that they are known to make, and weighs the predictions by them. The most likely class becomes the label of an
image, and the site keeps it. In each round, it trains the last round's model, which began as the first tutor, on these
labels, and the server averages the sites' models, with momentum. It trains on strong views if they still show the
classes: if tutors get new labels right in them at least half as far beyond chance, by Cohen's kappa, as in weak ones
(Fashion-MNIST). If not, it trains on weak ones (blood cells, where strong views change the telling colors). Then sites
with labels train the average on true labels (`learn.alternate.corrected`). No tutor ever learns from a label that was
guessed, so mistakes cannot feed themselves.

Where labels are held out (`labels.held_out`, or a validation set at the server), the method can tell whether unlabeled
images help. Sites with labels then train a second model beside, from the first tutor on, in the same way but on labels
alone. In the last round it and the shipped model sit an exam on held-out labels, and only counts leave a site
(`learn.evidence`). If labels alone are better beyond doubt, their model is what is shipped. The report tells the
difference and its interval.

There is no paper. The manual has the equations, and `experiments/own/README.md` tells what was tried.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Site, Weights, broadcast
from fewlabel.core.schedule import during, factor
from fewlabel.core.schema import Count, Natural, Share
from fewlabel.core.tasks import Asked, on_client, on_server, once
from fewlabel.core.tree import Tree
from fewlabel.learn import panel
from fewlabel.learn.alternate import averaged, corrected, fine_tuned, trained
from fewlabel.learn.evidence import Exam, Models, examined, sat, told
from fewlabel.learn.optim import Local
from fewlabel.learn.panel import Kept, Mistakes


@dataclass(frozen=True)
class State:
    model: Tree
    velocity: Tree  # what the study phase changed in the last round, momentum included
    tutors: tuple[Tree, ...]  # while they learn
    means: tuple[Tree, ...]  # of the tutors over the rounds of the first term
    mistakes: Mistakes | None = None  # of the tutors
    informed: tuple[int, ...] = ()  # sites that keep the tutors' labels
    alone: tuple[Tree, ...] = ()  # what labels alone make of the first tutor, and its mean over rounds, for the exam


@dataclass(frozen=True)
class Drill:
    model: Weights
    rate: float  # the schedule's factor of the learning rate, from the beginning of the term
    epochs: int
    tutor: int = 0  # its number; each but the first leaves out other labels


@dataclass(frozen=True)
class Tutors:
    models: tuple[Tree, ...]


@dataclass(frozen=True)
class Lesson:
    model: Weights
    tutors: tuple[Tree, ...]  # none, if the site keeps their labels
    mistakes: Tensor | None  # labels of each class (column) that tutors take for each class (row)
    strong: bool  # study strong views, not weak ones
    rate: float


@dataclass(frozen=True)
class Update:
    model: Weights
    images: int  # that it was trained on

    def check_answer(self, asked: Asked) -> None:
        asked.check_images(self.images)


@dataclass(frozen=True)
class Tutor:
    """FewLabel's own: models from labels alone label together, sites without labels study, labeled sites correct."""

    tutors: Count = 5  # models that learn from labels alone and label together
    first_term: Share = 0.25  # share of the rounds in which tutors learn and nobody studies
    views: Natural = 7  # weak views of an image, beside the plain one, that tutors label it by
    shares: bool = True  # weigh labels by how frequent classes are at a site; if false, take them as equal
    epochs_unlabeled: Count = 3  # passes over unlabeled images in a round
    strong: bool = True  # sites study strong views, if tutors know classes in them; if false, weak ones
    server_momentum: Share = 0.5  # of the server, over rounds, in what sites without labels change
    guard: bool = True  # where labels are held out: compare with labels alone, and ship them if they are better
    local: Local = Local(epochs=5, batch_size=32, lr=0.03)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    warms_up = takes_turns = True
    most_passes, cautions, conclusions = panel.most_passes, panel.cautions, staticmethod(told)
    leaves = (
        f"The weights after training. {SUMS_DO} Once, from a site with labels: for each class, how many of its labels "
        "models take for which class, in two kinds of views, which tells how many labels of each class it has. All "
        "sites get the sum. If only one site has labels, that is what it counted. If the experiment has labels held "
        "out: for each class their exact number, and how many of them only one of two models gets right. A dishonest "
        "server can choose these models, and learn about single images."
    )

    def init(self, fed: Federation) -> State:
        weights = fed.server.weights()
        tutors = (weights, *(fed.drawn(number) for number in range(1, self.tutors)))
        return State(weights, tree.sub(weights, weights), tutors, tutors)

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        first, epochs = panel.first_term(self, fed.rounds)
        if fed.round <= first:
            return self.taught(state, fed, factor(fed.schedule, fed.round, first), epochs)
        if state.tutors:  # the second term begins
            state = replace(state, model=state.means[0], tutors=())
            if (self.shares or self.strong) and len(state.means) > 1:
                state = replace(state, mistakes=self.marked(state, fed))
        rate = factor(fed.schedule, fed.round - first, fed.rounds - first)
        if self.guard and fed.held_out and fed.unlabeled:
            if state.alone and fed.round == fed.rounds and self.did_harm(state, fed):
                fed.shipped = None  # so that labels alone are shipped as they are, and not in a mean over rounds
                return replace(state, model=state.alone[1])
            state = replace(state, alone=self.went_on(state, fed, rate))
        return self.studied(state, fed, rate)

    def taught(self, state: State, fed: Federation, rate: float, epochs: int) -> State:
        """Let the tutors learn from labels. The first learns all of them, and is shipped until the second term."""
        tutors = tuple(self.on_labels(one, fed, rate, epochs, number) for number, one in enumerate(state.tutors))
        means = tuple(panel.over_rounds(fed, old, new) for old, new in zip(state.means, tutors, strict=True))
        return replace(state, model=tutors[0], tutors=tutors, means=means)

    def marked(self, state: State, fed: Federation) -> Mistakes | None:
        """Count what the tutors make of labels that they did not learn, over all sites with labels."""
        message = Tutors(state.means)
        found = [(one.counts, one.upload) for one in fed.run(self.mark, broadcast(fed.labeled, message))]
        found += [(1.0, own) for own in fed.map(self.mark, [message])] if fed.server.labeled else []
        return panel.pooled(found)

    def studied(self, state: State, fed: Federation, rate: float) -> State:
        """Let unlabeled sites train on what the tutors say about their images, and let labels have the last word."""
        chosen = fed.sample(among=fed.unlabeled, name="unlabeled")
        mistakes = state.mistakes.counts if self.shares and state.mistakes else None
        strong = self.strong and panel.known(state.mistakes)
        new, known = (Lesson(state.model, tutors, mistakes, strong, rate) for tutors in (state.means, ()))
        jobs = [(one, known if one.id in state.informed else new) for one, _ in broadcast(chosen, None)]
        found = fed.mean(self.learn, jobs, state.model, weight=lambda reply: reply.upload.images)
        state = averaged(state, found, self.server_momentum)
        model = self.on_labels(state.model, fed, rate, self.local.epochs)
        # A site that did not answer may have no labels, or other images: it gets the tutors again.
        informed = {*state.informed} - {one.id for one in chosen} | {reply.client.id for reply in found.replies}
        return replace(state, model=model, informed=tuple(sorted(informed)))

    def on_labels(self, model: Tree, fed: Federation, rate: float, epochs: int, tutor: int = 0) -> Tree:
        return corrected(fed, model, self.correct, partial(Drill, rate=rate, epochs=epochs, tutor=tutor))

    def went_on(self, state: State, fed: Federation, rate: float) -> tuple[Tree, ...]:
        """Train labels alone beside: what the second term would be without unlabeled images."""
        model, mean = state.alone or (state.model, fed.shipped or state.model)  # until now it has seen labels alone
        new = self.on_labels(model, fed, rate, self.local.epochs)
        return new, panel.over_rounds(fed, mean, new)

    def did_harm(self, state: State, fed: Federation) -> bool:
        """Compare what is shipped with labels alone, as both were before this round."""
        return examined(fed, self.sit_exam, Models(fed.shipped or state.model, state.alone[bool(fed.shipped)]))

    @on_client
    def learn(self, site: Site[Kept], msg: Lesson) -> Update | None:
        """Train on the tutors' labels of the site's images. Without tutors, these are the labels that it keeps."""
        if not (images := site.unlabeled):
            return None
        if msg.tutors:
            said = panel.label(site, images, msg.tutors, self.views, msg.mistakes)
            site.state = Kept(said.argmax(1), panel.brightness(images))
        if not site.state or not site.state.fits(images):
            return None
        everything = torch.arange(len(images), device=site.device)
        site.audit(everything, site.state.label)
        labeled = images.with_labels(everything, site.state.label)
        local, view = replace(self.local, epochs=self.epochs_unlabeled), "strong" if msg.strong else "weak"
        with during(msg.rate):
            weights = trained(site, msg.model, labeled, local, labels=False, view=view)
        site.score(weights)
        return Update(weights, len(images))

    @on_client
    @on_server
    def correct(self, site: Site[Kept], msg: Drill) -> Model | None:
        site.labeled = panel.part(site, self.tutors, msg.tutor, new=False)
        with during(msg.rate):
            return fine_tuned(site, Model(msg.model), replace(self.local, epochs=msg.epochs))

    @once
    @on_client
    @on_server
    def mark(self, site: Site[Kept], msg: Tutors) -> Mistakes:
        return panel.mark(site, msg.models, self.tutors, self.views, self.strong)

    @once
    @on_client
    @on_server
    def sit_exam(self, site: Site[Kept], msg: Models) -> Exam:
        return sat(site, msg)
