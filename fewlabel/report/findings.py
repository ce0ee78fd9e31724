"""What is wrong with a run, as far as its rounds show it: rules on the lines of rounds.jsonl."""

from collections.abc import Mapping
from typing import Any

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


def predicts_one_class(line: Mapping[str, Any]) -> bool:
    """Return True if a round's model predicts the same class for all test images, and these are of several classes."""
    recalls = line.get("test", {}).get("recall_per_class", [])
    return sorted(recall or 0.0 for recall in recalls if recall is not None)[-2:] == [0.0, 1.0]
