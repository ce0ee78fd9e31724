"""Views: each paper's augmentation by name, made for a batch at once, with random parameters for each image.

A recipe is a tuple of steps. A step first draws one row of parameters for each image and then applies them. So the
result for an image depends on its own row, and on nothing else in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.data import operations as ops
from fewlabel.data.operations import Filter, Move, Operation, Tone


class Step(Protocol):
    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        """Draw parameters for images of this shape: a row for each."""

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        """Change uint8 images [N, C, H, W] by these parameters."""


Recipe = tuple[Step, ...]


def draw(recipe: Recipe, shape: Sequence[int], rng: torch.Generator) -> list[Tensor]:
    return [step.draw(shape, rng) for step in recipe]


def apply(recipe: Recipe, images: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    for step, rows in zip(recipe, parameters, strict=True):
        images = step.apply(images, rows)
    return images


def make_views(names: Sequence[str], images: Tensor, rng: torch.Generator) -> list[Tensor]:
    """Make each of these views of a batch. Work that several of them begin with is done once."""
    prepared: dict[Step, Tensor] = {}
    views = []
    for name in names:
        recipe = recipe_of(name)
        parameters = [rows.to(images.device) for rows in draw(recipe, images.shape, rng)]
        if recipe and isinstance(crop := recipe[0], Crop):
            if crop not in prepared:
                prepared[crop] = crop.prepare(images)
            cropped = crop.cut(prepared[crop], parameters[0], *images.shape[2:])
            views.append(apply(recipe[1:], cropped, parameters[1:]))
        else:
            views.append(apply(recipe, images, parameters))
    return views


def recipe_of(name: str) -> Recipe:
    if name not in VIEWS:
        near = get_close_matches(name, VIEWS, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(VIEWS)}"
        raise BadInput(f"there is no recipe for views named '{name}'; {hint}")
    return VIEWS[name].recipe


def between(low: float, high: float, count: int, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, dtype=torch.float64, generator=rng)


# Steps


@dataclass(frozen=True)
class Crop:
    """Enlarge and pad square images, then cut them back to their size at a random place; mirror some of them."""

    scale: float = 1.0
    pad: float = 0.0  # part of the size, on each side; at least a pixel
    reflect: bool = False  # pad with the image's own pixels, not with black
    flip: float = 0.0  # chance to be mirrored

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        places = round(shape[3] * self.scale) - shape[3] + 2 * self.margin(shape[3]) + 1
        corner = torch.randint(0, places, (2, shape[0]), generator=rng)
        flip = torch.rand(shape[0], generator=rng) < self.flip if self.flip else torch.zeros(shape[0])
        return torch.stack([*corner, flip.long()], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return self.cut(self.prepare(images), parameters, *images.shape[2:])

    def prepare(self, images: Tensor) -> Tensor:
        """Do the part of the work that is not random."""
        width = images.shape[3]
        if self.scale != 1:
            images = ops.enlarge(images, self.scale)
        return ops.pad(images, self.margin(width), self.reflect) if self.pad else images

    def cut(self, images: Tensor, parameters: Tensor, height: int, width: int) -> Tensor:
        down, right, flip = parameters.unbind(1)
        return ops.crop(images, down, right, flip > 0, height, width)

    def margin(self, size: int) -> int:
        return max(1, int(size * self.pad)) if self.pad else 0


@dataclass(frozen=True)
class Affine:
    """Turn around the middle, shift by whole pixels and perhaps mirror, in one gather of nearest pixels."""

    degrees: float  # at most, either way
    translate: float  # part of the size, at most, any way
    flip: float = 0.0  # chance to be mirrored

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        count, _, height, width = shape
        degrees = between(-self.degrees, self.degrees, count, rng)
        right, down = (between(-self.translate, self.translate, count, rng) * size for size in (width, height))
        flip = between(0, 1, count, rng) < self.flip
        return torch.stack([degrees, right.round(), down.round(), flip.double()], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        height, width = images.shape[2:]
        degrees, right, down, flip = parameters.unbind(1)
        turned, shifted = ops.rotation(degrees, height, width), ops.translation(-right, -down)
        framed = functional.pad(images, ops.FRAME)
        return ops.warp(framed, turned @ shifted @ ops.mirror(flip, width))


@dataclass(frozen=True)
class Jitter:
    """Change brightness, contrast and saturation, in this order, each by a factor of at most `reach` from 1."""

    reach: float

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        return between(1 - self.reach, 1 + self.reach, 3 * shape[0], rng).view(-1, 3)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        steps: tuple[Operation, ...] = BRIGHTNESS, CONTRAST, SATURATION
        for operation, factor in zip(steps, parameters.unbind(1), strict=True):
            images = operation(images, factor)
        return images


@dataclass(frozen=True)
class Noise:
    """Add Gaussian noise to each pixel and channel."""

    std: float  # for pixels in 0..1

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=rng).mul_(255 * self.std)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return ops.noise(images, parameters)


@dataclass(frozen=True)
class Cutout:
    """Paint a grey square around any pixel, as much of it as is in the image."""

    side: float = 0.5  # part of the size
    value: int = 127

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        return torch.stack([torch.randint(0, size, (shape[0],), generator=rng) for size in shape[2:]], 1)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        return ops.cutout(images, parameters, int(self.side * images.shape[3]), self.value)


@dataclass(frozen=True)
class Choice:
    """An operation that RandAugment may choose. With a level in 0..1 its amount is start + span * level."""

    operation: Operation
    start: float = 0.0
    span: float = 0.0
    signed: bool = False  # half of the time it is start - span * level


def any_level(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=rng)


def low_level(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Draw levels as FedMatch's authors do: one of the lowest M of ten, with M from 2 to 5 for each image."""
    lowest = torch.randint(2, 6, (shape[0], 1), generator=rng)
    return (any_level(shape, rng) * lowest).floor() / 9


@dataclass(frozen=True)
class RandAugment:
    """Apply some operations one after another, each drawn from all `choices`, with a random level."""

    choices: tuple[Choice, ...]
    count: int
    level: Callable[[tuple[int, int], torch.Generator], Tensor] = any_level
    chance: float = 1.0  # that an operation is applied at all
    shared: bool = False  # one draw of operations for the whole batch

    @cached_property
    def operations(self) -> list[Operation]:
        return [*(choice.operation for choice in self.choices), Filter(ops.same)]  # the last if none is applied

    @cached_property
    def spans(self) -> Tensor:
        rows = [(choice.start, choice.span, choice.signed) for choice in (*self.choices, Choice(Filter(ops.same)))]
        return torch.tensor(rows, dtype=torch.float64)

    def draw(self, shape: Sequence[int], rng: torch.Generator) -> Tensor:
        rows = shape[0], self.count
        which = torch.randint(len(self.choices), (1 if self.shared else rows[0], self.count), generator=rng)
        which = which.expand(rows)
        level, sign = self.level(rows, rng), torch.randint(0, 2, rows, generator=rng) * 2 - 1
        if self.chance < 1:
            which = which.where(torch.rand(rows, generator=rng) < self.chance, len(self.choices))
        start, span, signed = self.spans[which].unbind(2)
        return torch.stack([which, start + span * level * sign.where(signed > 0, 1)], 2)

    def apply(self, images: Tensor, parameters: Tensor) -> Tensor:
        for which, amount in zip(*parameters.permute(2, 1, 0), strict=True):
            images = ops.each(self.operations, images, which.long(), amount)
        return images


# Recipes

BRIGHTNESS, CONTRAST, POSTERIZE = Tone(ops.brightness), Tone(ops.contrast), Tone(ops.posterize)
SOLARIZE, AUTOCONTRAST, EQUALIZE = Tone(ops.solarize), Tone(ops.autocontrast), Tone(ops.equalize)
SATURATION, SHARPNESS, SAME = Filter(ops.saturation), Filter(ops.sharpness), Filter(ops.same)

FIXMATCH = (  # the operations and ranges of the paper's appendix; neighbours of one kind are done together
    Choice(Move(ops.rotation), 0, 30, signed=True),
    Choice(Move(ops.shear_x), 0, 0.3, signed=True),
    Choice(Move(ops.shear_y), 0, 0.3, signed=True),
    Choice(Move(ops.translate_x), 0, 0.3, signed=True),
    Choice(Move(ops.translate_y), 0, 0.3, signed=True),
    Choice(BRIGHTNESS, 0.05, 0.9),
    Choice(CONTRAST, 0.05, 0.9),
    Choice(POSTERIZE, 4, 5),  # 4 to 8 bits; 9 is never reached
    Choice(SOLARIZE, 0, 256),
    Choice(AUTOCONTRAST),
    Choice(EQUALIZE),
    Choice(SATURATION, 0.05, 0.9),
    Choice(SHARPNESS, 0.05, 0.9),
    Choice(SAME),
)

FEDMATCH = (  # the authors' code, except for the bicubic interpolation of its shears
    Choice(Move(ops.rotation, fill=128), 0, 360),
    Choice(Move(ops.shear_x), 0, 0.3, signed=True),
    Choice(Move(ops.shear_y), 0, 0.3, signed=True),
    Choice(Move(ops.translate_x), 0, 0.2, signed=True),
    Choice(Move(ops.translate_y), 0, 0.2, signed=True),
    Choice(BRIGHTNESS, 1, 0.3, signed=True),
    Choice(CONTRAST, 1, 0.5, signed=True),
    Choice(POSTERIZE, 8.5, -4),  # bits round to the nearest
    Choice(SOLARIZE, 256, -25),
    Choice(AUTOCONTRAST),
    Choice(SATURATION, 1, 0.9, signed=True),
    Choice(SHARPNESS, 1, 0.9, signed=True),
    Choice(SAME),  # called equalize there
)


@dataclass(frozen=True)
class View:
    recipe: Recipe
    about: str


CROP, MIRRORED_SHIFT = Crop(scale=1.25, flip=0.5), Crop(pad=0.125, reflect=True, flip=0.5)

VIEWS: dict[str, View] = {
    "none": View((), "the image as it is"),
    "shift": View((Crop(pad=0.125),), "shifted by up to an eighth of its size, never mirrored: right for digits"),
    "flip-shift": View((Crop(pad=0.125, flip=0.5),), "mirrored half the time, and shifted by up to an eighth"),
    "rscfed": View(
        (CROP,), "RSCFed, for both views: enlarged by 1.25 (32 to 40), cropped back, mirrored half the time"
    ),
    "cbafed": View((CROP,), "CBAFed: as RSCFed"),
    "cbafed-fashion": View((Crop(scale=1.125, flip=0.5),), "CBAFed on Fashion-MNIST: enlarged by 1.125 (32 to 36)"),
    "isic": View((Crop(scale=240 / 224, flip=0.5),), "RSCFed and CBAFed on ISIC: enlarged from 224 to 240"),
    "fedirm": View((Affine(10, 0.02, flip=0.5),), "FedIRM: turned by up to 10 degrees, shifted by 2 %, mirrored"),
    "fixmatch-weak": View((MIRRORED_SHIFT,), "FixMatch: as flip-shift, but padded with the image's own pixels"),
    "fixmatch-strong": View(
        (MIRRORED_SHIFT, RandAugment(FIXMATCH, 2, chance=0.5), Cutout()),
        "FixMatch, its authors' code: its weak view, RandAugment with each operation half the time, then cutout",
    ),
    "randaugment": View(
        (RandAugment(FIXMATCH, 2), Cutout()),
        "RandAugment as in FixMatch: 2 of 14 operations by any amount, cutout",
    ),
    "fedmatch": View(
        (RandAugment(FEDMATCH, 6, level=low_level),), "FedMatch, its authors' code: 6 of 13 operations by small amounts"
    ),
    "kornia-like": View(
        (RandAugment(FIXMATCH, 2, shared=True),),
        "RandAugment whose operations are drawn once for a whole batch, as Kornia does",
    ),
    "jitter": View((CROP, Jitter(0.4)), "as rscfed, then brightness, contrast and saturation by 0.6 to 1.4"),
    "noise": View((Crop(pad=0.125), Noise(0.1)), "shifted as weak views are, then Gaussian noise of 0.1"),
}
