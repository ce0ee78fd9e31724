"""How the server adds models up in whole numbers, and the mean of models that sites hide by masks.

In a simulation nobody masks anything, but the sum is the same, so the mean is the same to the bit.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fewlabel.core import fixed, updates
from fewlabel.core.described import kinds_apart
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.core.federation import ClientInfo, Mean, Reply
from fewlabel.core.fixed import Kinds
from fewlabel.core.tasks import Task, weights_sent
from fewlabel.core.tree import Tree
from fewlabel.data.partition import Partition
from fewlabel.data.settings import FEWEST
from fewlabel.engine.executor import SERVER_ID, Masking
from fewlabel.experiment import Experiment

if TYPE_CHECKING:
    from fewlabel.engine.rounds import Server

HIDDEN = "hidden"  # the kind of a job whose weights stay at the site, for a masked sum


def largest(experiment: Experiment) -> float:
    """Return the largest number that an upload may hold."""
    return updates.LARGEST if experiment.clients.sums == "float" else fixed.LARGEST


def refuse_single(experiment: Experiment, task: Task) -> None:
    """Refuse a task of which the server would see each model by itself, where sums are masked."""
    if experiment.clients.sums == "masked" and weights_sent(task) is not None:
        raise BadInput(
            f"clients.sums = 'masked' is not for {experiment.name}, whose server looks at each '{task.name}'"
        )


def check_kinds(experiment: Experiment, partition: Partition) -> None:
    """Refuse masked sums where clients with labels, or without, are averaged by themselves and are too few."""
    for kind in kinds_apart(experiment) if experiment.clients.sums == "masked" else ():
        number = sum(len(getattr(holding, kind)) > 0 for holding in partition.shares)
        if 0 < number < FEWEST:
            raise BadInput(
                f"clients.sums = 'masked' needs {FEWEST} clients or more in each mean, and {experiment.name} averages "
                f"{kind} clients by themselves, of which there {'is' if number == 1 else 'are'} {number}; have {FEWEST}"
                f" {kind} clients{' (labels.clients)' if kind == 'labeled' else ''}, or leave clients.sums out"
            )


def kind(fed: "Server", task: Task) -> str:
    """Return the kind of a client's job."""
    masked = fed.remote and fed.experiment.clients.sums == "masked" and weights_sent(task) is not None
    return HIDDEN if masked else "client"


def masked_mean(
    fed: "Server",
    task: Task,
    jobs: Iterable[tuple[ClientInfo, Any]],
    old: Tree,
    weight: Callable[[Reply[Any]], float],
    kinds: Kinds | None,
    keep: bool,
) -> Mean[Any]:
    """Return the weighted mean of models that clients send in a masked sum, or `old` if there is none.

    How much a client counts is fixed when all have trained. If one drops out later, the others count as before.
    """
    asked, name = list(jobs), weights_sent(task)
    if name is None or keep:
        raise BadInput(f"clients.sums = 'masked' is not for {fed.experiment.name}, whose server keeps single models")
    if not asked:
        return Mean(old, [])
    if not FEWEST <= len(asked) == len({client.id for client, _ in asked}):
        raise RunFailed(
            f"clients.sums = 'masked' needs {FEWEST} different clients or more in each mean, and '{task.name}' of "
            f"{fed.experiment.name} asks {len(asked)}; raise clients.per_round, or choose another method"
        )
    replies = list(fed.replies(task, asked))
    labeled = [reply.client.num_labeled > 0 for reply in replies]
    shares = fixed.shares([weight(reply) for reply in replies], labeled, kinds, fed.judge.rule.share)
    counted = {reply.client.id: share for reply, share in zip(replies, shares, strict=True) if share}
    if len(counted) < FEWEST:
        return Mean(old, [])
    bare = [replace(reply, upload=replace(reply.upload, **{name: {}})) for reply in replies]
    if not fed.remote:
        models = ((share, getattr(reply.upload, name)) for reply, share in zip(replies, shares, strict=True))
        return Mean(fixed.mean_of(*fixed.total(models), old), bare)
    there, model = hidden_mean(fed, task, counted, old)
    return Mean(model, [reply for reply in bare if reply.client.id in there])


def hidden_mean(fed: "Server", task: Task, counted: dict[int, int], old: Tree) -> tuple[tuple[int, ...], Tree]:
    """Have the sites add up what they hide. Return who is in the sum, and the mean; nobody and `old` if there is none.

    Nobody sees a single upload, so nonsense in one shows only in the sum, where a mean of models cannot be so large.
    """
    if not isinstance(fed.executor, Masking):
        raise RunFailed("clients.sums = 'masked' needs sites that can mask their weights")
    length = sum(old[name].numel() for name in fixed.names(old))
    jobs = {client: fed.latest_job(HIDDEN, task.name, client) for client in counted}
    found = fed.executor.masked_sum(jobs, counted, length)
    fed.seen.up += found.up
    fed.seen.down += found.down
    for client, step, why in found.failures:
        fed.seen.failures.append({"client": client, "task": f"{task.name}, {step}", "why": why})
    model = fixed.mean_of(sum(counted[client] for client in found.clients), found.numbers, old)
    why = found.why or ("" if is_plausible(model) else "it is no mean of models, so a site has sent something else")
    if not why:
        return found.clients, model
    fed.seen.failures.append({"client": SERVER_ID, "task": task.name, "why": f"there is no masked sum: {why}"})
    return (), old


def is_plausible(model: Tree) -> bool:
    """Return True if a model can be the mean of models that sites may send."""
    numbers = [(name, model[name]) for name in fixed.names(model) if model[name].numel()]
    small = all(float(value.abs().max()) <= fixed.LARGEST for _, value in numbers)
    return small and all(float(value.min()) >= 0 for name, value in numbers if updates.is_variance(name))
