"""Alternate training, the round of SemiFL, (FL)2 and Tutor: first unlabeled clients, then whoever has labels."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fewlabel.core import tree
from fewlabel.core.federation import Federation, Mean, Model, Reply, Site, broadcast, by_size
from fewlabel.core.images import Labeled
from fewlabel.core.tree import Tree
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import supervised
from fewlabel.learn.optim import Local, optimizer

S = TypeVar("S", bound=Any)


@dataclass(frozen=True)
class State:
    model: Tree
    velocity: Tree  # what the clients' phase changed in the last round, momentum included


def start(weights: Tree) -> State:
    """Return the state before the first round."""
    return State(weights, tree.sub(weights, weights))


def alternate(
    fed: Federation,
    state: State,
    local_update: Callable[..., Any],
    fine_tune: Callable[..., Any],
    momentum: float,
    weight: Callable[[Reply[Any]], float] = by_size,
) -> State:
    """Play a round: unlabeled clients train, the server averages with momentum, and labels fine-tune the average.

    Labeled clients fine-tune it together, and count by their labels. If the server has labels, it comes last. Both run
    the task `fine_tune`.
    """
    jobs = broadcast(fed.sample(among=fed.unlabeled, name="unlabeled"), Model(state.model))
    state = averaged(state, fed.mean(local_update, jobs, state.model, weight=weight), momentum)
    return State(corrected(fed, state.model, fine_tune), state.velocity)


def corrected(
    fed: Federation, model: Tree, fine_tune: Callable[..., Any], message: Callable[[Tree], Any] = Model
) -> Tree:
    """Return a model after whoever has labels has trained it on them: first labeled clients, then the server."""
    jobs = broadcast(fed.sample(among=fed.labeled, name="labeled"), message(model))
    model = fed.mean(fine_tune, jobs, model, weight=lambda reply: reply.client.num_labeled).model
    if fed.server.labeled:
        [tuned] = fed.map(fine_tune, [message(model)])
        model = tuned.model if tuned else model
    return model


def most_passes(method: Any, rounds: int) -> int:
    """Return the passes of a round at a site with images of both kinds. A method uses this as its `most_passes`."""
    return int(method.epochs_unlabeled or method.local.epochs) + int(method.local.epochs)


def averaged(state: S, mean: Mean[Any], momentum: float) -> S:
    """Return a state after a step of SGD with momentum, at rate 1, from the sent model to the clients' mean.

    The state is a dataclass with the fields of `State`, and may have more. Without any reply, nothing moves.
    """
    if not mean.replies:
        return state
    model = tree.add(mean.model, state.velocity, momentum)
    return replace(state, model=model, velocity=tree.sub(model, state.model))


def fine_tuned(site: Site[Any], msg: Model, local: Local) -> Model | None:
    """Train a received model on the site's labels, as the server of both papers does."""
    return Model(trained(site, msg.model, site.labeled, local)) if site.labeled else None


def trained(
    site: Site[Any], weights: Tree, images: Labeled, local: Local, labels: bool = True, view: str = "weak"
) -> Tree:
    """Return weights after training on a view of images, at the rate of sites with or without labels."""
    model = site.load(weights)
    batches = (batch for _ in range(local.epochs) for batch in images.batches(view, local.batch_size))
    fit(model, optimizer(model, local, labels), batches, partial(supervised, model, images), local.clip)
    return site.weights()
