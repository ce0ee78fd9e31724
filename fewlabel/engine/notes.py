"""What to know about a run's data before its first round, in numbers for reports and in sentences for people."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fewlabel.core.described import needs_unlabeled
from fewlabel.data.labels import known
from fewlabel.data.own.listing import counted
from fewlabel.engine.executor import SERVER_ID
from fewlabel.engine.record import FEW
from fewlabel.engine.world import World
from fewlabel.experiment import Clients, Experiment, Labels, is_own

MOST_NAMES = 6  # classes to name in a sentence


def notes_of(world: World) -> dict[str, Any]:
    """Return the notes on a run that is laid out."""
    labels = count_labels(world)
    sentences = [*world.dataset.notes, *world.partition.notes, *about_labels(world, labels)]
    sentences += about_classes(world, labels["per_class"])
    sentences += about_attack(world.experiment)
    return {"labels": labels, "sentences": sentences}


def count_labels(world: World) -> dict[str, Any]:
    """Count the images that clients and server train on: with a label, with one that is hidden, and without one."""
    dealt, y = world.partition, world.dataset.splits["train"].labels.numpy()
    shares = [dealt.shares[client] for client in dealt.clients]
    labeled = np.concatenate([dealt.server, *(one.labeled for one in shares)])
    classes = np.bincount(known(world.known_labels.numpy(), labeled), minlength=len(world.dataset.classes))
    unlabeled, hidden = sum(len(one.unlabeled) for one in shares), sum(len(known(y, one.unlabeled)) for one in shares)
    return {
        "clients": len(shares),
        "labeled_clients": sum(len(one.labeled) > 0 for one in shares),
        "labeled": len(labeled),
        "at_server": len(dealt.server),
        "held_out": sum(len(world.divided(client)[1]) for client in (SERVER_ID, *dealt.clients)),
        "validation": len(dealt.validation),
        "hidden": hidden,
        "unknown": unlabeled - hidden,
        "per_class": classes.tolist(),  # of the labeled images, in the order of the data set's classes
    }


def about_labels(world: World, labels: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence about who has labels and which are hidden, and another if none are left to learn without."""
    experiment, (holders, clients) = world.experiment, (labels["labeled_clients"], labels["clients"])
    images = labels["labeled"] + labels["hidden"] + labels["unknown"]
    who = ["the server"] if labels["at_server"] else []
    if holders:
        every = f"all {clients:,} clients" if clients > 1 else "the only client"
        who.append(every if holders == clients else f"{holders:,} of {counted(clients, 'client')}")
    whole = images == labels["labeled"]
    sentence = f"Labels: {' and '.join(who)}, "
    sentence += f"all {images:,} images" if whole else f"{labels['labeled']:,} of {images:,} images"
    if added := world.partition.added.shape[1]:
        sentence += f", {added:,} of them by labels.file"
    if labels["held_out"]:
        sentence += f"; {labels['held_out']:,} of them {'are' if labels['held_out'] > 1 else 'is'} held out"
    if labels["unknown"]:
        sentence += f"; {counted(labels['unknown'], 'image')} came without one"
    if labels["hidden"]:
        other = f"{labels['hidden']:,}" if labels["unknown"] else "the"
        sentence += f"; {other} other labels are hidden for this experiment"
        if is_own(experiment.data.name):
            sentence += " (labels.at = 'every-client' and labels.fraction = 1 use them all)"
    yield sentence
    if whole and needs_unlabeled(experiment.method):
        yield (
            f"{experiment.name}: every image has a label, so there is nothing to learn from unlabeled images; to see "
            "what the method can do, hide labels with labels.fraction = 0.1 or labels.clients = 1"
        )


def about_classes(world: World, counts: Sequence[int]) -> Iterator[str]:
    """Yield sentences about classes that no label shows, or few do: the cause, and the setting that mends it."""
    y = world.dataset.splits["train"].labels.numpy()
    there = np.bincount(y[y >= 0], minlength=len(counts)).tolist()
    found = [(f"'{name}'", count, most) for name, count, most in zip(world.dataset.classes, counts, there, strict=True)]
    holders = sum(len(one.labeled) > 0 for one in world.partition.shares)
    cause, mend = why_missing(world.experiment.labels, holders)
    if absent := [name for name, _, most in found if not most]:
        yield f"No image to train on is labeled as {named(absent)}. The model cannot learn {them(absent)}; add some"
    if missing := [name for name, count, most in found if most and not count]:
        yield f"No labeled image shows {named(missing)}: {cause}. The model cannot learn {them(missing)}; {mend}"
    if rare := [f"{name} ({count})" for name, count, _ in found if 0 < count < FEW]:
        mend = mend if any(most >= FEW for _, count, most in found if 0 < count < FEW) else "add some"
        yield f"Few labeled images show {named(rare)}. The model will hardly learn {them(rare)}; {mend}"


def about_attack(experiment: Experiment) -> Iterator[str]:
    """Yield a sentence about clients that do wrong on purpose, and what protects the others from them."""
    clients = experiment.clients
    if (attack := clients.attack) is None:
        return
    usual = Clients()
    names = ("clip", "clip_median", "outlier", "exclude_after", "largest_share", "aggregate")
    used = [f"clients.{name} = {found}" for name in names if (found := getattr(clients, name)) != getattr(usual, name)]
    many = f"clients {', '.join(map(str, attack.ids))}" if len(attack.ids) > 1 else f"client {attack.ids[0]}"
    yield f"Attack by {many}: {attack.kind} (clients.attack). Protection: {', '.join(used) or 'none'}"


def why_missing(labels: Labels, holders: int) -> tuple[str, str]:
    """Return why labels may miss a class that the data have, and what to set."""
    if "every-client" in labels.at:
        what = "labels.per_class" if labels.per_class is not None else "labels.fraction, or set labels.per_class"
        return "it was not among the labels that clients keep", f"raise {what}"
    if labels.at == "server":
        return "the server has none", "raise labels.server_per_class"
    others = "other clients with labels.which = 'rule' or labels.ids"
    others = others if labels.which != "rule" else "more clients with labels.clients, or others with labels.ids"
    return "the labeled client has none" if holders == 1 else "the labeled clients have none", f"choose {others}"


def named(classes: Sequence[str]) -> str:
    """Write a list, as in "classes 'a' and 'b'". Of many, name the first ones."""
    shown = list(classes[:MOST_NAMES]) + ([f"{len(classes) - MOST_NAMES} more"] if classes[MOST_NAMES:] else [])
    return f"class{'es' * (len(classes) > 1)} " + " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def them(classes: Sequence[str]) -> str:
    return "it" if len(classes) == 1 else "them"
