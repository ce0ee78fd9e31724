"""What to know about a run's data before its first round, in numbers for reports and in sentences for people."""

from collections.abc import Iterator
from typing import Any

from fewlabel.core.described import needs_unlabeled
from fewlabel.data.labels import known
from fewlabel.data.own.listing import counted
from fewlabel.engine.world import World
from fewlabel.experiment import is_own


def notes_of(world: World) -> dict[str, Any]:
    """Return the notes on a run that is laid out."""
    labels = count_labels(world)
    return {"labels": labels, "sentences": [*world.dataset.notes, *about_labels(world, labels)]}


def count_labels(world: World) -> dict[str, Any]:
    """Count the images that clients and server train on: with a label, with one that is hidden, and without one."""
    dealt, y = world.partition, world.dataset.splits["train"].labels.numpy()
    shares = [dealt.shares[client] for client in dealt.clients]
    unlabeled, hidden = sum(len(one.unlabeled) for one in shares), sum(len(known(y, one.unlabeled)) for one in shares)
    return {
        "clients": len(shares),
        "labeled_clients": sum(len(one.labeled) > 0 for one in shares),
        "labeled": sum(len(one.labeled) for one in shares) + len(dealt.server),
        "at_server": len(dealt.server),
        "validation": len(dealt.validation),
        "hidden": hidden,
        "unknown": unlabeled - hidden,
    }


def about_labels(world: World, labels: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence about who has labels and which are hidden, and another if none are left to learn without."""
    experiment, (holders, clients) = world.experiment, (labels["labeled_clients"], labels["clients"])
    images = labels["labeled"] + labels["hidden"] + labels["unknown"]
    who = ["the server"] if labels["at_server"] else []
    if holders:
        who.append(f"all {clients:,} clients" if holders == clients else f"{holders:,} of {counted(clients, 'client')}")
    whole = images == labels["labeled"]
    sentence = f"Labels: {' and '.join(who)}, "
    sentence += f"all {images:,} images" if whole else f"{labels['labeled']:,} of {images:,} images"
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
