"""The one training loop of every method, at clients and at the server."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from typing import TypeVar

import torch
from torch import Tensor, nn

from fewlabel.core.images import Labeled, Unlabeled, count_step, cut
from fewlabel.learn import private
from fewlabel.learn.optim import Optimizer

B = TypeVar("B")


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[B],
    loss: Callable[[B], Tensor | None],
    clip: float | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Make one step for each batch, count its images, and call `after`. A batch whose loss is None is skipped.

    Where a site's images are private (`learn.private`), the gradient of each image is clipped by itself instead.
    """
    if (guard := private.guard()) is not None:
        return guard.fit(model, optimizer, batches, loss, after)
    for batch in batches:
        if not model.training:
            model.train()
        value = loss(batch)
        if value is None:
            continue
        for parameter in optimizer.parameters:
            parameter.grad = None
        value.backward()  # type: ignore[no-untyped-call]
        count_step(batch)
        if clip is not None:
            shorten([gradient for parameter in optimizer.parameters if (gradient := parameter.grad) is not None], clip)
        optimizer.step()
        after()
    return None


@torch.no_grad()
def shorten(gradients: list[Tensor], longest: float) -> None:
    """Clip gradients as `nn.utils.clip_grad_norm_` does, to the bit, in a third of its time for a small network."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))


def paired(
    labeled: Labeled | None,
    unlabeled: Unlabeled | None,
    views: tuple[str, ...],
    size: int,
    size_unlabeled: int | None = None,
    counted: int = 1,
) -> Iterator[tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]]:
    """Pass once over a site's images, in pairs of a labeled and an unlabeled batch. A kind it lacks is None.

    If a site has both kinds, the one with fewer batches starts again until the other is through.
    """
    other = size_unlabeled or size
    first = _again(lambda: labeled.batches("weak", size)) if labeled else repeat(None)
    second = _again(lambda: unlabeled.batches(views, other, counted=counted)) if unlabeled else repeat(None)
    yield from islice(zip(first, second, strict=False), steps(labeled, unlabeled, size, other))


def paired_views(
    labeled: Labeled | None, unlabeled: Unlabeled | None, views: tuple[str, ...], size: int, counted: tuple[int, int]
) -> Iterator[tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]]:
    """Pass once over a site's images like `paired`. Labeled images come in the same views, followed by their labels.

    `counted` is the number of views, labeled and unlabeled, that go through a backward pass.
    """
    first = _again(lambda: labeled.views(views, size, counted=counted[0])) if labeled else repeat(None)
    second = _again(lambda: unlabeled.batches(views, size, counted=counted[1])) if unlabeled else repeat(None)
    yield from islice(zip(first, second, strict=False), steps(labeled, unlabeled, size, size))


def steps(labeled: Labeled | None, unlabeled: Unlabeled | None, size: int, size_unlabeled: int) -> int:
    """Return how many pairs `paired` yields."""
    sets = ((labeled, labeled.batch_size(size) if labeled else size), (unlabeled, size_unlabeled))
    return max(len(cut(torch.arange(len(some)), number)) if some else 0 for some, number in sets)


def _again(start: Callable[[], Iterator[B]]) -> Iterator[B]:
    while True:
        yield from start()
