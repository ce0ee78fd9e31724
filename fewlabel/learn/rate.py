"""A learning rate that falls when the validation loss does not."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rate:
    lr: float
    best: float | None = None  # the lowest validation loss so far
    worse: int = 0  # rounds since then

    def after(self, loss: float, patience: int, factor: float) -> "Rate":
        """The rate after a round with this validation loss: divided once `patience` rounds in a row were no better."""
        if self.best is None or loss < self.best:
            return Rate(self.lr, loss)
        if self.worse + 1 < patience:
            return replace(self, worse=self.worse + 1)
        return Rate(self.lr / factor, self.best)
