"""How far a metric may be off because the test set is small: 95 % intervals over test images."""

from collections.abc import Sequence
from math import sqrt

Z = 1.96  # standard deviations on each side that hold 95 % of a normal distribution


def of_accuracy(share: float, images: int) -> tuple[float, float]:
    """Return Wilson's interval of a share of so many images."""
    middle = (share + Z**2 / (2 * images)) / (1 + Z**2 / images)
    half = Z / (1 + Z**2 / images) * sqrt(share * (1 - share) / images + (Z / (2 * images)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_balanced_accuracy(confusion: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the interval of the mean recall, from counts with a row for each true class.

    The recall r of a class with n test images has the variance r (1 - r) / n, and recalls of different classes are
    independent. Classes without a test image do not count.
    """
    recalls = [(row[n] / sum(row), sum(row)) for n, row in enumerate(confusion) if sum(row)]
    mean = sum(recall for recall, _ in recalls) / len(recalls)
    half = Z * sqrt(sum(recall * (1 - recall) / images for recall, images in recalls)) / len(recalls)
    return max(0.0, mean - half), min(1.0, mean + half)
