"""Differential privacy for the images of a site: DP-SGD (Abadi et al., CCS 2016), with parts of Opacus.

A step draws each image by itself with the same probability (Poisson sampling), shortens the gradient of each image to
`clip`, adds up, and adds Gaussian noise. What leaves the site after all steps of a run is (epsilon, delta)-private:
with any one image left out, no outcome would be more than e^epsilon times as likely or unlikely, except with
probability delta. Draws, noise, views of images and dropout come from the operating system, because the coordinator
knows the experiment's seed. So two runs are never the same to the bit.
"""

import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fewlabel.core import sampling
from fewlabel.core.errors import BadInput, Spent, install
from fewlabel.core.images import count_step
from fewlabel.learn.budget import Privacy
from fewlabel.learn.optim import Optimizer

B = TypeVar("B")
ONE_KIND = (
    "privacy.epsilon is for sites that train on one kind of images, labeled or not; fedavg takes the labeled ones"
)
Steps = tuple[float, float, int]  # noise multiplier, probability of each image, number of such steps


@lru_cache(64)
def noise_multiplier(privacy: Privacy, probability: float, steps: int) -> float:
    """Return how strong the noise must be, in clips, for so many steps to spend no more than epsilon."""
    need_opacus()
    from opacus.accountants.utils import get_noise_multiplier

    with quiet():
        found = get_noise_multiplier(
            target_epsilon=privacy.epsilon, target_delta=privacy.delta, sample_rate=probability, steps=steps
        )
    return float(found)


def spent(history: Iterable[Steps], delta: float) -> float:
    """Return the epsilon that steps have spent together."""
    need_opacus()
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [tuple(steps) for steps in history]
    with quiet():
        return float(accountant.get_epsilon(delta)) if accountant.history else 0.0


def need_opacus() -> None:
    """Raise BadInput if Opacus is not installed."""
    try:
        import opacus  # noqa: F401
    except ImportError:
        raise BadInput(f"privacy needs Opacus: {install('privacy')}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence two warnings of PyTorch and Opacus: images need no gradient, and a bound could be tighter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield


def gaussian(shape: torch.Size, deviation: float) -> Tensor:
    """Return Gaussian noise from the operating system's random numbers.

    It is the sum of four, halved, because the rounding of a single one could tell what it was added to (Mironov 2012).
    """
    count = math.prod(shape)
    bits = np.frombuffer(os.urandom(4 * 2 * 8 * count), np.uint64).reshape(4, 2, count) >> np.uint64(11)
    first, second = ((bits[:, place] + 1.0) / 2.0**53 for place in range(2))
    four = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)  # Box and Muller
    return torch.from_numpy(four.sum(0) / 2 * deviation).reshape(shape)


@dataclass
class Guard:
    """Makes the training of one task private. `passes` over its images are planned for the whole run."""

    privacy: Privacy
    passes: int
    history: list[Steps] = field(default_factory=list)  # of earlier tasks, and then of this one
    task: int = 0  # passes that are planned for this task
    _drawn: deque[int] = field(default_factory=deque)  # how many images each batch has that was not used yet
    _plan: tuple[int, float, float] | None = None  # images, probability, noise multiplier

    def batches(self, images: int, size: int) -> Iterator[Tensor]:
        """Draw the batches of one pass. An empty one has one image, whose gradient is left out."""
        probability = min(1.0, size / images)
        steps = math.ceil(images / size)
        noise = noise_multiplier(self.privacy, probability, self.passes * steps)
        if self._plan not in (None, (images, probability, noise)):
            raise BadInput(ONE_KIND)
        if self._plan is None and self.task:  # before anything is computed, so that nothing is spent for nothing
            check_budget(with_steps(self.history, probability, noise, self.task * steps), self.privacy)
        self._plan = images, probability, noise
        for _ in range(steps):
            bits = np.frombuffer(os.urandom(8 * images), np.uint64) >> np.uint64(11)
            places = torch.from_numpy(np.flatnonzero(bits / 2.0**53 < probability))
            self._drawn.append(len(places))
            yield places if len(places) else torch.zeros(1, dtype=torch.int64)

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Iterable[B],
        loss: Callable[[B], Tensor | None],
        after: Callable[[], None],
    ) -> None:
        """Make one private step for each batch, also if it is empty or has no loss: who knows that would know more."""
        with per_image_gradients(model):
            for batch in batches:
                if not model.training:
                    model.train()
                if len(self._drawn) != 1:  # one image's place in two batches would mix it with two others
                    raise BadInput(ONE_KIND)
                value, drawn = loss(batch), self._drawn.popleft()
                for parameter in optimizer.parameters:
                    parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]
                if value is not None and drawn:
                    value.backward()  # type: ignore[no-untyped-call]
                count_step(batch)
                self.privatize(optimizer.parameters)
                optimizer.step()
                after()

    @torch.no_grad()
    def privatize(self, parameters: list[Tensor]) -> None:
        """Set the gradient: the sum of the shortened gradients of all images and noise, by the usual number of images.

        Refuse a step that would spend more than epsilon.
        """
        assert self._plan is not None  # batches are drawn before
        images, probability, noise = self._plan
        self.history = with_steps(self.history, probability, noise, 1)
        found = [(p, gradient) for p in parameters if (gradient := getattr(p, "grad_sample", None)) is not None]
        factors = torch.empty(0)
        if found:
            norms = torch.stack([gradient.flatten(1).norm(dim=1) for _, gradient in found]).norm(dim=0)
            factors = (self.privacy.clip / (norms + 1e-6)).clamp(max=1.0)
            # A gradient that is no number would make the whole sum none, and that alone would tell of one image.
            whole = norms.isfinite()
            if not whole.all():
                factors = torch.where(whole, factors, 0.0)
                found = [(p, torch.where(whole.view(-1, *[1] * (g.ndim - 1)), g, 0.0)) for p, g in found]
        sums = {id(p): torch.tensordot(factors, gradient, dims=1) for p, gradient in found}
        for parameter in parameters:
            added = gaussian(parameter.shape, noise * self.privacy.clip).to(parameter)
            if id(parameter) in sums:
                added = added + sums[id(parameter)]
            parameter.grad = added / (probability * images)

    def check_budget(self) -> float:
        """Return the epsilon spent so far. Raise Spent if it is more than the site wanted to spend."""
        return check_budget(self.history, self.privacy)


def with_steps(history: list[Steps], probability: float, noise: float, number: int) -> list[Steps]:
    """Return a history with so many steps more."""
    last = history[-1] if history else (0.0, 0.0, 0)
    if last[:2] == (noise, probability):
        return [*history[:-1], (noise, probability, last[2] + number)]
    return [*history, (noise, probability, number)]


def check_budget(history: list[Steps], privacy: Privacy) -> float:
    """Return the epsilon that steps spend together. Raise Spent if it is more than a site wants to spend."""
    found = spent(history, privacy.delta)
    if found > privacy.epsilon:
        raise Spent(
            f"this training would bring the site to epsilon {found:.3g}, and it spends {privacy.epsilon:g} at "
            "most (privacy.epsilon): rounds were repeated after a kill, or the method trains more than planned"
        )
    return found


def check_network(model: nn.Module) -> None:
    """Refuse a network whose layers mix the images of a batch, or that Opacus does not know."""
    need_opacus()
    from opacus.validators import ModuleValidator

    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise BadInput(
            "privacy.epsilon is not for BatchNorm, which mixes the images of a batch; set model.norm = 'group'"
        )
    if errors := ModuleValidator.validate(model, strict=False):
        raise BadInput(f"privacy.epsilon is not for this network: {str(errors[0]).splitlines()[0]}")


@contextmanager
def per_image_gradients(model: nn.Module) -> Iterator[None]:
    """Have Opacus compute the gradient of each image meanwhile. It must know how, for all layers of the network."""
    check_network(model)
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="mean")
    try:
        with quiet():
            yield
    finally:
        wrapped.to_standard_module()
        for parameter in model.parameters():
            vars(parameter).pop("grad_sample", None)


_GUARD: ContextVar[Guard | None] = ContextVar("guard", default=None)


def guard() -> Guard | None:
    """Return what makes training private now, if anything does."""
    return _GUARD.get()


@contextmanager
def during(found: Guard | None) -> Iterator[None]:
    """Make all training of `learn.loop.fit` private meanwhile."""
    token = _GUARD.set(found)
    try:
        with sampling.during(None if found is None else found.batches):
            yield
    finally:
        _GUARD.reset(token)
