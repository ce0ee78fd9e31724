"""How frequent the classes are among images without labels, estimated from predictions."""

from torch import Tensor


def adapted(p: Tensor, steps: int = 3, smoothing: float = 0.02) -> tuple[Tensor, Tensor]:
    """Return the predictions `p` adapted to the classes of these images, and the estimated share of each class.

    This is EM (Saerens, Latinne and Decaestecker, Neural Computation 2002). A step estimates the shares from the
    predictions so far, `(1 - smoothing) * mean + smoothing / C`, and then weighs `p` by them. It takes for granted that
    the model was trained for equally frequent classes, as it is with a logit-adjusted loss.
    """
    classes = p.shape[1]
    adapted, prior = p, p.new_full((classes,), 1 / classes)
    for _ in range(steps if len(p) else 0):
        prior = (1 - smoothing) * adapted.mean(0) + smoothing / classes
        weighed = p * prior
        adapted = weighed / weighed.sum(1, keepdim=True)
    return adapted, prior
