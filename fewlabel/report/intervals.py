"""How far metrics may be off by chance: 95 % intervals by bootstrap over test images, and over seeds.

A run keeps counts of its test images: how many of each true class got each prediction. To draw images again with
replacement is to draw from these counts, so no image is needed. All seeds are tested on the same images, so their mean
is not surer about images than a single seed is: a draw takes several seeds, but the images of one. The random numbers
are the same each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fewlabel.report.tables import percent

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

DRAWS = 10_000
TAILS = (2.5, 97.5)  # percentiles between which 95 % of the draws are
NONE_SEEN = 3.0  # if none of n images is wrong, up to 3 / n of all may be, with 95 % confidence
ENOUGH = 5  # seeds to tell how much other seeds would differ
METRICS = ("accuracy", "balanced_accuracy")

Confusion = Sequence[Sequence[int]]  # a row for each true class, a column for each predicted class
Interval = tuple[float, float]


def of(confusions: Sequence[Confusion]) -> dict[str, Interval]:
    """Return the interval of each metric, from the counts of each seed. It is the interval of the mean over seeds."""
    return {key: widened(ends(drawn(confusions, key, stream=0)), confusions) for key in METRICS}


@dataclass(frozen=True)
class Difference:
    """How much better one model is than another, with its interval."""

    mean: float
    interval: Interval
    seeds: int = 1  # in which both were compared

    @property
    def chance(self) -> bool:
        """True if the difference may be none: it lies within its interval."""
        return self.interval[0] <= 0 <= self.interval[1]


def difference(ours: Sequence[Confusion], theirs: Sequence[Confusion], metric: str) -> Difference:
    """Compare two models seed by seed, from the counts of the same seeds in the same order.

    Images are drawn for each model by itself. Models tend to fail on the same images, which counts do not tell, so the
    interval is rather too wide than too narrow.
    """
    one, other = (drawn(counts, metric, stream) for stream, counts in enumerate((ours, theirs)))
    exact = [measured(a)[metric] - measured(b)[metric] for a, b in zip(ours, theirs, strict=True)]
    return Difference(sum(exact) / len(exact), ends(one - other), len(exact))


def measured(confusion: Confusion) -> dict[str, float]:
    """Return the metrics of a model from its counts."""
    right, images = [row[n] for n, row in enumerate(confusion)], [sum(row) for row in confusion]
    recalls = [r / n for r, n in zip(right, images, strict=True) if n]
    return {"accuracy": sum(right) / sum(images), "balanced_accuracy": sum(recalls) / len(recalls)}


def resampled(confusion: Confusion, metric: str, stream: int) -> "Array":
    """Draw as many test images as there are, again and again. Return a metric of each draw.

    It matters only whether an image of a class is right, so wrong predictions are counted together.
    """
    right = tuple(row[n] for n, row in enumerate(confusion))
    return draws(right, tuple(sum(row) - row[n] for n, row in enumerate(confusion)), stream)[metric]


@lru_cache(128)
def draws(right: tuple[int, ...], wrong: tuple[int, ...], stream: int) -> "dict[str, Array]":
    """Draw from the images of each class that are right, and from those that are wrong."""
    import numpy as np

    from fewlabel.core.rng import Rng

    cells = np.array([*right, *wrong], dtype=float)
    rng = Rng("bootstrap", stream).numpy
    found, missed = np.split(rng.multinomial(int(cells.sum()), cells / cells.sum(), DRAWS).astype(float), 2, axis=1)
    images = found + missed
    recalls = np.divide(found, images, out=np.full_like(found, np.nan), where=images > 0)  # a class may not be drawn
    return {"accuracy": found.sum(1) / images.sum(1), "balanced_accuracy": np.nanmean(recalls, axis=1)}


def drawn(confusions: Sequence[Confusion], metric: str, stream: int) -> "Array":
    """Draw seeds, and the images of one of them, again and again. Return the mean of a metric in each draw.

    Which seeds are drawn does not depend on the stream, so that two models are compared in the same seeds.
    """
    import numpy as np

    from fewlabel.core.rng import Rng

    number, rng = len(confusions), Rng("bootstrap").numpy
    times = rng.multinomial(number, [1 / number] * number, DRAWS)  # how often each seed is drawn
    one = rng.integers(number, size=DRAWS)  # the seed whose images are drawn
    exact = np.array([measured(counts)[metric] for counts in confusions])
    off = np.array([resampled(counts, metric, stream) - measured(counts)[metric] for counts in confusions])
    found: Array = times @ exact / number + off[one, np.arange(DRAWS)]
    return found


def ends(drawn: "Array") -> Interval:
    import numpy as np

    low, high = np.percentile(drawn, TAILS)
    return float(low), float(high)


def widened(interval: Interval, confusions: Sequence[Confusion]) -> Interval:
    """Widen an interval if all images are right, or all wrong: then all draws are alike, but that is no certainty."""
    images = sum(sum(map(sum, confusion)) for confusion in confusions)
    right = sum(row[n] for confusion in confusions for n, row in enumerate(confusion))
    unseen = min(1.0, NONE_SEEN / images)
    return (1 - unseen, 1.0) if right == images else (0.0, unseen) if right == 0 else interval


def in_words(interval: Interval) -> str:
    return f"{percent(interval[0])}–{percent(interval[1])}"


def bracket(metric: str, confusion: Confusion | None) -> str:
    """Write the interval of a metric behind it, from the counts of one model. Nothing if it has none."""
    return f" ({in_words(of([confusion])[metric])})" if confusion and metric in METRICS else ""


def about(seeds: int) -> str:
    """Explain the intervals of a table whose rows have so many seeds at most."""
    over = "test images" if seeds == 1 else "seeds and test images"
    few = f" From fewer than {ENOUGH} seeds they are too narrow." if 1 < seeds < ENOUGH else ""
    return (
        f"In brackets: 95 % intervals by bootstrap over {over}.{few} Other metrics have none, because a run keeps "
        "counts of its predictions, not their scores."
    )
