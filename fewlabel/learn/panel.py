"""A panel of models that label images together, and what is known about their mistakes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import Federation, Site
from fewlabel.core.images import Labeled, Unlabeled
from fewlabel.core.tasks import Asked
from fewlabel.core.tree import Tree
from fewlabel.learn import alternate
from fewlabel.learn.priors import explained, folds, kappa, mistaken
from fewlabel.learn.thresholds import predict

LEAST = 1e-6  # probability of a class: models that are sure of different classes do not exclude all classes
RARE = 0.02  # share of a site's images that is spread over all classes: no class is ruled out there


@dataclass(frozen=True)
class Mistakes:
    """How many labels of each class (column), all new to models, they take for each class (row)."""

    counts: Tensor
    strong: Tensor  # the same of one strong view; zeros if nobody asked

    def check_answer(self, asked: Asked) -> None:
        """Raise ValueError if these cannot be counts of a site's labels."""
        labels = asked.client.num_labeled
        for counts in (self.counts, self.strong):
            if counts.dtype != torch.int64 or counts.shape != (asked.classes, asked.classes):
                raise ValueError(f"its counts of mistakes must be {asked.classes} by {asked.classes} whole numbers")
            # One by one first: a sum of large numbers may wrap around.
            if (counts < 0).any() or (counts > labels).any() or int(counts.sum()) > labels:
                raise ValueError(f"its counts of mistakes are below 0, or of more labels than the {labels} that it has")
        if self.strong.any() and not torch.equal(self.strong.sum(0), self.counts.sum(0)):
            raise ValueError("its counts of mistakes in strong views are not of the same labels as those in weak views")


@dataclass(frozen=True)
class Kept:
    """Labels that a site keeps for its images. It notices by their brightness if the images have changed."""

    label: Tensor  # of each image
    brightness: Tensor

    def fits(self, images: Unlabeled) -> bool:
        return torch.equal(self.brightness, brightness(images))


def first_term(method: Any, rounds: int) -> tuple[int, int]:
    """Return how many rounds a panel learns, and its epochs in each of them: as many in all as in a whole run."""
    first = max(1, round(method.first_term * rounds))
    return first, round(method.local.epochs * rounds / first)


def over_rounds(fed: Federation, old: Tree, new: Tree) -> Tree:
    """Return the mean over rounds after another one, as in the recipe."""
    decay = min(0.8, 1 - 1 / fed.round)
    return tree.mean([(decay, old), (1 - decay, new)])


def most_passes(method: Any, rounds: int) -> int:
    """Return the most passes of a round over a site's images. A method uses this as its `most_passes`."""
    alone = int(method.local.epochs) if method.guard else 0
    return max(int(method.tutors) * first_term(method, rounds)[1], alternate.most_passes(method, rounds) + alone)


def cautions(method: Any, experiment: Any) -> Iterator[str]:
    """Yield what Tutor's user may not have meant. A method uses this as its `cautions`."""
    if experiment.model.buffers != "global":
        yield 'tutor: tutors with BatchNorm need their own statistics to label well; use model.buffers = "global"'
    if method.strong and experiment.views.strong == "none":
        yield 'tutor: sites would study images as they are, because views.strong is "none"; use method.strong = false'
    if experiment.stream is not None:
        yield "tutor: where images arrive over time, a site gets labels for new ones a round later"


def brightness(images: Unlabeled) -> Tensor:
    """Return the mean value of each image, in order."""
    return torch.cat([x.flatten(1).mean(1) for x, _ in images.batches(("plain",), 256, shuffle=False)])


def part(site: Site[Any], panel: int, model: int, new: bool) -> Labeled | None:
    """Return the labels of a site that one of the models of a panel is trained on, or those that stay new to it.

    The first model, 0, is trained on all of them. Each of the others leaves out a fold, so that together they leave out
    all labels once. (If there is one other, it leaves out half of them.) Sites begin with different folds, so that no
    model leaves out most labels of sites that have one or two.
    """
    if not site.labeled:
        return None
    number = max(panel - 1, 2)
    left_out = (folds(site.labeled.y, number) + site.info.id) % number + 1 == model
    if left_out.all():  # of the only label that a site has: then no model leaves it out
        left_out = torch.zeros_like(left_out)
    return site.labeled.at((left_out == new).nonzero().flatten())


def say(site: Site[Any], model: Tree, images: Unlabeled, views: int) -> Tensor:
    """Return a model's log-probabilities of images: the mean over the plain view and so many weak ones."""
    seen = [predict(site.load(model), images, view) for view in ("plain", *["weak"] * views)]
    return torch.stack(seen).clamp_min(LEAST).log().mean(0)


def mark(site: Site[Any], panel: Sequence[Tree], number: int, views: int, strong: bool = True) -> Mistakes:
    """Count what each model but the first makes of the labels that are new to it. The panel has a known number.

    If not `strong`, strong views are left out.
    """
    if len(panel) != number:
        raise BadInput(f"mistakes are counted for {number} tutors, and {len(panel)} were sent")
    weak, changed = (torch.zeros(site.num_classes, site.num_classes, dtype=torch.int64) for _ in range(2))
    for place, model in enumerate(panel):
        new = part(site, number, place, new=True)
        if new:
            images = new.without_labels()
            said = say(site, model, images, views).argmax(1)
            weak += mistaken(said, new.y, site.num_classes).to(weak.device)
            if strong:
                said = predict(site.load(model), images, "strong").argmax(1)
                changed += mistaken(said, new.y, site.num_classes).to(changed.device)
    return Mistakes(weak, changed)


def pooled(found: Sequence[tuple[float, Mistakes]]) -> Mistakes | None:
    """Add up what sites have counted, each as much as it counts; None if nobody has."""
    if not found:
        return None
    counts = torch.stack([times * one.counts.double() for times, one in found]).sum(0)
    strong = torch.stack([times * one.strong.double() for times, one in found]).sum(0)
    return Mistakes(counts, strong)


def known(mistakes: Mistakes | None) -> bool:
    """Return True if models still know classes in strong views: by a kappa at least half of that in weak ones."""
    return mistakes is not None and 1e-9 < kappa(mistakes.counts) <= 2 * kappa(mistakes.strong) * (1 + 1e-9)


def label(
    site: Site[Any], images: Unlabeled, panel: Sequence[Tree], views: int, mistakes: Tensor | None = None
) -> Tensor:
    """Return the probabilities of classes that a panel gives images: by the mean of its log-probabilities.

    With `mistakes`, they are weighed by the class shares of these images. Shares are what explains the classes that the
    models say, given the mistakes of all but the first.
    """
    said = torch.stack([say(site, model, images, views) for model in panel])
    together = said.mean(0)
    if mistakes is not None:
        classes = said[min(1, len(said) - 1) :].argmax(2).flatten()
        predicted = torch.bincount(classes, minlength=site.num_classes) / len(classes)
        shares = (1 - RARE) * explained(predicted, mistakes) + RARE / site.num_classes
        together = together + shares.log().to(together)
    return together.softmax(1)
