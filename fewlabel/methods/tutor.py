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

Where labels are held out (`labels.held_out`, or a validation set at the server), the method can tell whether the second
term helps. In the last round the first tutor and the shipped model sit an exam on held-out labels, and only counts
leave a site (`learn.evidence`). If the first tutor is better beyond doubt, it is what is shipped. The report tells the
difference and its interval. Labels have a part in it, because they correct the model in each round of the second term;
a run without unlabeled images (`train.warmup=0.999`) tells how much.

There is no paper. The manual has the equations, and `experiments/own/README.md` tells what was tried.
"""

from collections.abc import Callable
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
from fewlabel.learn.evidence import Exam, Models, bounded, judged, sat, told
from fewlabel.learn.optim import Local
from fewlabel.learn.panel import Kept, Mistakes


@dataclass(frozen=True)
class State:
    model: Tree
    velocity: Tree  # what the study phase changed in the last round, momentum included
    tutors: tuple[Tree, ...]  # while they learn
    means: tuple[Tree, ...]  # of the tutors over the rounds of the first term
    mistakes: Mistakes | None = None  # of the tutors, once a site with labels has answered
    informed: tuple[int, ...] = ()  # sites that keep the tutors' labels


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
    guard: bool = True  # where labels are held out: compare with the first tutor, and ship it if it is better
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
            return self.taught(state, fed, partial(Drill, rate=factor(fed.schedule, fed.round, first), epochs=epochs))
        if state.tutors:  # the second term begins
            state = replace(state, model=state.means[0], tutors=())
        if (self.shares or self.strong) and len(state.means) > 1 and not state.mistakes:  # or nobody has answered yet
            state = replace(state, mistakes=self.marked(state, fed))
        studied = first + 1 < fed.round and fed.unlabeled
        if self.guard and studied and fed.round == fed.rounds and self.did_harm(state, fed):
            fed.shipped = None  # so that the first tutor is shipped as it is, and not in a mean over rounds
            return replace(state, model=state.means[0])
        return self.studied(state, fed, factor(fed.schedule, fed.round - first, fed.rounds - first))

    def taught(self, state: State, fed: Federation, drill: Callable[..., Drill]) -> State:
        """Let the tutors learn from labels. The first learns all of them, and is shipped until the second term."""
        numbered = enumerate(state.tutors)
        tutors = tuple(corrected(fed, one, self.correct, partial(drill, tutor=number)) for number, one in numbered)
        decay = min(0.8, 1 - 1 / fed.round)  # of the mean over rounds, as in the recipe
        means = tuple(tree.mean([(decay, old), (1 - decay, new)]) for old, new in zip(state.means, tutors, strict=True))
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
        model = corrected(fed, state.model, self.correct, partial(Drill, rate=rate, epochs=self.local.epochs))
        # A site that did not answer may have no labels, or other images: it gets the tutors again.
        informed = {*state.informed} - {one.id for one in chosen} | {reply.client.id for reply in found.replies}
        return replace(state, model=model, informed=tuple(sorted(informed)))

    def did_harm(self, state: State, fed: Federation) -> bool:
        """Compare what is shipped with the first tutor, as both were before this round."""
        models = Models(fed.shipped or state.model, state.means[0])
        exams = [bounded(one.upload, one.counts) for one in fed.run(self.sit_exam, broadcast(fed.labeled, models))]
        own = [*fed.map(self.sit_exam, [models])] if fed.server.validation or fed.server.held_out else []
        found = judged(exams, own)
        fed.log(**found)
        return bool(found.get("given_up"))

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
