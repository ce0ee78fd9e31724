"""How sites train by a recipe: the settings of methods that it changes, and how to change them to another recipe's."""

from functools import reduce
from typing import Any

from fewlabel.core.schema import flatten, plain
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.cbafed import CBAFed
from fewlabel.methods.fedirm import FedIRM
from fewlabel.methods.fedmatch import FedMatch
from fewlabel.methods.tutor import Tutor
from fewlabel.methods.twinsight import TwinSight

# How sites train by the recipe `fewlabel`: the same for all methods, because the papers' settings differ widely.
SITES = Local(epochs=5, batch_size=32, lr=0.03, lr_unlabeled=0.02)


def by_recipe(name: str) -> dict[str, Any]:
    """Return what the recipe `fewlabel` changes in a method's settings.

    In a round, sites train for five epochs on labels and for one on unlabeled images. In CBAFed, FedIRM and Twin-sight,
    sites with labels get half of the weight in the average, as in RSCFed; by its size, a single one would be outvoted.
    """
    method = METHODS[name]
    if isinstance(method, Tutor):  # its defaults were chosen with the recipe
        return {}
    found: dict[str, Any] = {"local": plain(SITES), "epochs_unlabeled": 1}
    if isinstance(method, FedMatch):  # its loss on labels is ten times larger
        found["local"] |= {"lr": SITES.lr / 10, "lr_unlabeled": "none", "weight_decay": 0.0, "clip": 50.0}
    if hasattr(method, "server_epochs"):
        found["server_epochs"] = SITES.epochs
    if isinstance(method, CBAFed | FedIRM | TwinSight):
        found["labeled_share"] = 0.5
    if name == "fed-selftraining":
        found["warmup"] = 0  # the recipe has one
    return found


def changed_sites(method: Any, old: str, new: str) -> dict[str, Any]:
    """Return the settings, by dotted names, that a method gets where one recipe takes the place of another.

    They are those that have the old recipe's value. All others are the user's own.
    """
    name = nearest_name(method)
    if name is None or old == new:
        return {}
    before, after = sites(name, old), sites(name, new)
    same = [key for key in after if value_at(method, key) == before[key]]
    return {key: after[key] for key in same if after[key] != before[key]}


def own_sites(method: Any, recipe: str) -> list[str]:
    """Return the settings of a method that a recipe sets, and that have another value than the recipe's."""
    name = nearest_name(method)
    return [] if name is None else [key for key, value in sites(name, recipe).items() if value_at(method, key) != value]


def recipe_of_sites(method: Any, usual: str) -> str:
    """Return the recipe whose settings the sites of a method have most of; the `usual` one if both are as near."""
    return min(dict.fromkeys((usual, "printed", "fewlabel")), key=lambda recipe: len(own_sites(method, recipe)))


def nearest_name(method: Any) -> str | None:
    """Return the name whose settings are most like a method's, or None for a method of your own.

    Several names may belong to one class. What a recipe changes does not tell them apart.
    """

    def differences(name: str) -> int:
        mine, its = dict(flatten(plain(method))), dict(flatten(plain(METHODS[name])))
        return sum(
            mine.get(key) != its.get(key) for key in mine.keys() | its.keys() if key not in sites(name, "printed")
        )

    return min((name for name, base in METHODS.items() if type(base) is type(method)), key=differences, default=None)


def sites(name: str, recipe: str) -> dict[str, Any]:
    """Return the settings, by dotted names, that recipes set in a method, as one recipe has them."""
    found = dict(flatten(by_recipe(name)))
    if recipe == "printed":
        return {key: value_at(METHODS[name], key) for key in found}
    return {key: None if value == "none" else value for key, value in found.items()}


def value_at(method: Any, dotted: str) -> Any:
    return reduce(getattr, dotted.split("."), method)
