"""What is wrong with a run, as far as its rounds show it, and the setting that mends it.

The rules look only at the experiment and at lines of rounds.jsonl, so a terminal and a report can both use them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewlabel.core.described import own_warmup
from fewlabel.engine.record import Line
from fewlabel.experiment import RECIPES, Experiment
from fewlabel.report.tables import percent

PATIENCE = 10  # a model that has not begun to learn gets one in so many of the rounds
SHORT = 10  # rounds in which the recipe's average over rounds lags behind the model itself
RANKS = 0.55  # AUC of a model that tells classes apart, though it predicts only one

MOST_SUSPECTS = 4  # clients to name in a note
DONE = {  # to a client whose update was odd
    "named": "sent something odd, which counted nevertheless",
    "clipped": "had its update clipped",
    "left out": "was left out of the round",
    "excluded": "is not asked again",
}
BOUND = "To bound what a client can do, set clients.clip_median=2, clients.outlier=5 or clients.largest_share=0.3."

GUESSING = 0.03  # a model guesses if its balanced accuracy is less than this above that of one class for all images


def is_guess(balanced_accuracy: float, classes: int) -> bool:
    """Return True if a model is hardly better than one that gives every image the same class.

    Such a model finds all images of one class and none of the others: its balanced accuracy is 1 / classes.
    """
    return balanced_accuracy < 1 / classes + GUESSING


def guesses(test: Mapping[str, Any]) -> bool:
    """Return True if these metrics are those of a model that guesses. Classes without a test image do not count."""
    classes = sum(recall is not None for recall in test.get("recall_per_class", ()))
    found = test.get("balanced_accuracy")
    return classes > 1 and found is not None and is_guess(found, classes)


def predicts_one_class(line: Line) -> bool:
    """Return True if a round's model predicts the same class for all test images, and these are of several classes."""
    test = line.get("test", {})
    if confusion := test.get("confusion"):
        return sum(map(any, zip(*confusion, strict=True))) == 1 < sum(map(any, confusion))
    recalls = test.get("recall_per_class", [])
    return sorted(recall for recall in recalls if recall is not None)[-2:] == [0.0, 1.0]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what, why as far as it is known, and what to do."""

    kind: str  # each kind is told once
    round: int
    what: str
    why: str
    mend: str

    def __str__(self) -> str:
        return f"{self.what} {self.why} {self.mend}".rstrip()


def findings(experiment: Experiment, lines: Sequence[Line]) -> list[Finding]:
    """Return what is wrong in a run, each kind of thing in the first round that shows it."""
    found: dict[str, Finding] = {}
    for number in range(1, len(lines) + 1):
        for finding in in_last_round(experiment, lines[:number]):
            found.setdefault(finding.kind, finding)
    return list(found.values())


def in_last_round(experiment: Experiment, lines: Sequence[Line]) -> Iterator[Finding]:
    """Yield what the last of these lines shows to be wrong. They start with the first round."""
    line = lines[-1]
    if predicts_one_class(line) and line["round"] > patience(experiment, lines):
        why, mend = cause(experiment, lines)
        yield Finding("one-class", line["round"], "The model predicts the same class for every test image.", why, mend)
    for suspect in line.get("suspects", ()):
        done, why = suspect["did"], f"{suspect['why'][:1].upper()}{suspect['why'][1:]}."
        what = f"C{who(suspect)[1:]} {DONE[done]}."
        yield Finding(f"{done} {suspect['client']}", line["round"], what, why, BOUND if done == "named" else "")


def too_few_rounds(experiment: Experiment) -> str:
    """Say so if a run is so short that the average over its rounds lags behind; nothing if not."""
    if experiment.rounds > SHORT or not experiment.recipe.average:
        return ""
    many = f"{experiment.rounds} rounds are" if experiment.rounds > 1 else "One round is"
    return (
        f"{many} few: what is measured is an average over rounds, which lags behind in so short a run. "
        f"Set rounds={Experiment.rounds} or more, or train.average=0."
    )


def who(suspect: Mapping[str, Any]) -> str:
    """Name a client, by its own name, too, if that is known."""
    return f"client {suspect['client']}" + (f" '{suspect['name']}'" if "name" in suspect else "")


def odd_updates(lines: Sequence[Line]) -> str:
    """Say whose updates were odd in how many rounds, and what was done; nothing if there was none."""
    rounds: dict[str, dict[str, list[int]]] = {}
    for line in lines:
        for suspect in line.get("suspects", ()):
            found = rounds.setdefault(who(suspect), {}).setdefault(suspect["did"], [])
            found.extend([line["round"]] if line["round"] not in found else [])

    def words(done: str, numbers: list[int]) -> str:
        if done == "excluded":
            return f"excluded after round {numbers[0]}"
        return f"{done} in {len(numbers)} round{'s' * (len(numbers) > 1)}"

    each = [f"{client} {', '.join(words(*one) for one in found.items())}" for client, found in rounds.items()]
    more = len(each) - MOST_SUSPECTS
    return "; ".join([*each[:MOST_SUSPECTS], *([f"{more} more"] if more > 0 else [])])


def patience(experiment: Experiment, lines: Sequence[Line]) -> int:
    """Return the rounds in which a model may still predict one class: those of the warm-up, and a few at the start.

    There is none for a model that has learned something before, nor for the last round.
    """
    if lines[-1]["round"] == experiment.rounds:
        return 0
    learned = lines[-1]["test"].get("auc") == 0.5 or any("test" in e and not predicts_one_class(e) for e in lines)
    return max(warmup(experiment), 1, 0 if learned else experiment.rounds // PATIENCE)


def warmup(experiment: Experiment) -> int:
    """Return the rounds at the start that train on labels alone."""
    return own_warmup(experiment.method) or experiment.warmup_rounds


def cause(experiment: Experiment, lines: Sequence[Line]) -> tuple[str, str]:
    """Return why a model predicts one class, as far as it is known, and what mends it."""
    line, rounds = lines[-1], warmup(experiment)
    auc = line["test"].get("auc")
    rate = getattr(getattr(experiment.method, "local", None), "lr", None)
    now = "" if rate is None else f" (now {rate:g})"
    if auc == 0.5:
        return "It gives all images the same scores, so its training has diverged.", f"Lower method.local.lr{now}."
    if any(each.get("images_unlabeled") for each in lines):
        right = line.get("pseudo_labels", {}).get("precision")
        labels = "" if right is None else f" Of its pseudo-labels, {percent(right)} % are right."
        if not rounds:
            why = f"It used unlabeled images from round 1 on, before it had learned from labels.{labels}"
            if share := experiment.recipe.warmup:
                return f"{why} A warm-up of {share:g} of {experiment.rounds} rounds is none.", "Raise rounds."
            share = RECIPES["fewlabel"].warmup
            return why, f"Add a warm-up: set recipe=fewlabel, or train.warmup={share:g} alone."
        name = "method.warmup" if own_warmup(experiment.method) else "train.warmup"
        before = [each for each in lines if "test" in each and each["round"] <= rounds]
        if before and not guesses(before[-1]["test"]):
            was = f"{percent(before[-1]['test'].get('balanced_accuracy'))} % in round {before[-1]['round']}"
            why = f"Unlabeled images misled it: its balanced accuracy was {was}.{labels}"
            return why, f"Raise {name}, or lower method.local.lr{now}."
        return (
            f"Its warm-up of {rounds} round{'s' * (rounds > 1)} was too short to learn from labels.{labels}",
            f"Raise {name}, or rounds.",
        )
    if auc is not None and auc > RANKS:
        even = "set train.balance=logit-adjusted, or " if experiment.recipe.balance == "none" else ""
        why = f"It has begun to tell classes apart (AUC {percent(auc)} %), but one class outweighs the others."
        return why, f"{even}raise rounds or method.local.lr{now}.".capitalize()
    return "It has learned nothing from the labels yet.", f"Change method.local.lr{now}, or raise rounds."
