"""The mean teacher: a slow copy of the student gives it its targets (Tarvainen and Valpola, NeurIPS 2017)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fewlabel.core import tree
from fewlabel.core.images import Labeled, Unlabeled
from fewlabel.core.schema import NonNegative, Positive, Share
from fewlabel.core.tree import Tree
from fewlabel.learn.functional import Borrowed
from fewlabel.learn.loop import fit, paired
from fewlabel.learn.losses import adjusted, consistency
from fewlabel.learn.optim import Local, Optimizer


@dataclass(frozen=True)
class MeanTeacher:
    """RSCFed's mean teacher. The defaults are the paper's; `rscfed-authors` sets what the authors' code does."""

    decay: Share = 0.999  # 1 - alpha: how much of the teacher's weights stays in each step
    temperature: Positive = 0.5  # tau: temperature of the sharpening; the lower, the sharper
    weight: NonNegative = 1.0  # weight of the consistency loss
    student_view: Literal["weak", "strong"] = "weak"  # the student's view of an image; the teacher's is weak
    ramp: bool = False  # the teacher starts as the mean of all students so far, until `decay` is reached
    buffers: bool = True  # BatchNorm's statistics follow the student's; if false, they stay as they were at first
    nominal_batch: bool = False  # the last, smaller batch counts less: its loss is divided by the full batch size


@dataclass(frozen=True)
class Memory:
    """What a client may keep between rounds."""

    optimizer: Tree | None = None
    teacher: Tree | None = None
    step: int = 0  # how often the teacher followed a student


class Teacher:
    """A teacher: weights that follow those of a network, and run on the same network."""

    def __init__(self, model: nn.Module, settings: MeanTeacher, weights: Tree | None = None, step: int = 0) -> None:
        """Start from a copy of `weights`, or from those of the network if there are none."""
        self.model, self.settings, self.step = model, settings, step
        student = model.state_dict(keep_vars=True)
        self.weights = {name: value.clone() for name, value in weights.items()} if weights else tree.of(model)
        kinds = ("parameter", "statistic") if settings.buffers else ("parameter",)
        self._follows = [name for name, value in self.weights.items() if tree.kind(name, value) in kinds]
        self._student = [student[name].detach() for name in self._follows]
        self._borrowed = Borrowed(model)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the teacher's probabilities, sharpened."""
        logits = self._borrowed.judge(self.weights, x)
        return sharpen(logits.softmax(1), self.settings.temperature)

    @torch.no_grad()
    def follow(self) -> None:
        """Set teacher = alpha * student + (1 - alpha) * teacher: RSCFed eq. 4, IsoFed eq. 1."""
        decay = self.settings.decay
        if self.settings.ramp:
            decay = min(1 - 1 / (self.step + 1), decay)
        torch._foreach_lerp_([self.weights[name] for name in self._follows], self._student, 1 - decay)
        self.step += 1


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """Sharpen probabilities, RSCFed eq. 2. Dividing by their maximum first keeps their powers from vanishing."""
    raised = (p / p.amax(1, keepdim=True)).pow(1 / temperature)
    return raised / raised.sum(1, keepdim=True)


def train(
    teacher: Teacher,
    steps: Optimizer,
    local: Local,
    labeled: Labeled | None,
    unlabeled: Unlabeled | None,
    audit: Callable[[Tensor, Tensor, int], None],
) -> None:
    """Train a client for its epochs: cross-entropy on labeled images, consistency with the teacher on unlabeled ones.

    If there are both, a step adds the two losses. After each step the teacher follows the student.
    """
    model, settings, size = teacher.model, teacher.settings, local.batch_size

    def loss(batch: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]) -> Tensor:
        parts = []
        if batch[0]:
            x, y = batch[0]
            parts.append(cross_entropy(adjusted(model(x), labeled), y))  # RSCFed eq. 1
        if batch[1]:
            x, x_student, index = batch[1]
            target = teacher(x)
            audit(index, target.argmax(1), epoch)
            weight = settings.weight * (len(index) / size if settings.nominal_batch else 1)
            parts.append(weight * consistency(target, model(x_student).softmax(1)))
        return torch.stack(parts).sum()

    after = teacher.follow if unlabeled else lambda: None
    for epoch in range(1, local.epochs + 1):  # noqa: B007 (the loss reads it)
        fit(model, steps, paired(labeled, unlabeled, ("weak", settings.student_view), size), loss, local.clip, after)
