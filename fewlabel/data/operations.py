"""Image operations as Pillow defines them, on a whole batch at once, with an amount for each image.

A batch is uint8 [N, C, H, W], an amount float64 [N]. There are three kinds of operations, and each kind handles many
images with different operations at once. A `Move` moves pixels: it is an affine map, and all maps are one gather. A
`Tone` changes each value by itself: it is a table of 256 values, and all tables are one lookup. A `Filter` is anything
else. The result for an image does not depend on other images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
import torch.nn.functional as functional
from torch import Tensor


@dataclass(frozen=True)
class Move:
    """Move pixels. `maps` turns amounts, height and width into affine maps [N, 3, 3] to where a pixel is taken from."""

    maps: Callable[[Tensor, int, int], Tensor]
    fill: int = 0  # value of pixels that come in from outside

    def __call__(self, images: Tensor, amount: Tensor) -> Tensor:
        return self.together([(self, images, amount)])

    @staticmethod
    def together(work: "Sequence[tuple[Move, Tensor, Tensor]]") -> Tensor:
        maps = torch.cat([move.maps(amount, *images.shape[2:]) for move, images, amount in work])
        return warp(torch.cat([functional.pad(images, FRAME, value=move.fill) for move, images, _ in work]), maps)


@dataclass(frozen=True)
class Tone:
    """Change each value by itself. `table` turns images and amounts into tables [N, C or 1, 256]."""

    table: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, images: Tensor, amount: Tensor) -> Tensor:
        return self.together([(self, images, amount)])

    @staticmethod
    def together(work: "Sequence[tuple[Tone, Tensor, Tensor]]") -> Tensor:
        channels = work[0][1].shape[1]
        tables = torch.cat([tone.table(images, amount).expand(-1, channels, -1) for tone, images, amount in work])
        return look_up(torch.cat([images for _, images, _ in work]), tables)


@dataclass(frozen=True)
class Filter:
    """Do anything else."""

    act: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, images: Tensor, amount: Tensor) -> Tensor:
        return self.act(images, amount)

    @staticmethod
    def together(work: "Sequence[tuple[Filter, Tensor, Tensor]]") -> Tensor:
        return torch.cat([one(images, amount) for one, images, amount in work])


Operation = Move | Tone | Filter


def each(operations: Sequence[Operation], images: Tensor, which: Tensor, amount: Tensor) -> Tensor:
    """Apply to each image the operation whose number it has. Neighbours of one kind in the list are done together."""
    order = which.argsort(stable=True)
    counts = which.bincount(minlength=len(operations)).tolist()
    in_order = (torch.split(rows.index_select(0, order), counts) for rows in (images, amount))
    wanted = [part for part in zip(operations, *in_order, strict=True) if len(part[1])]
    done = [kind.together(list(work)) for kind, work in groupby(wanted, lambda part: type(part[0]))]
    return torch.cat(done).index_select(0, order.argsort())


# Moves


FRAME = 1, 1, 1, 1


def warp(framed: Tensor, maps: Tensor) -> Tensor:
    """Move the pixels of each image by its map, to the nearest pixel, in Pillow's 16-bit fixed point.

    Each image comes with a frame, a pixel wide, of the value that comes in from outside. The result has no frame.
    """
    count, channels, height, width = *framed.shape[:2], framed.shape[2] - 2, framed.shape[3] - 2
    centre = maps[:, :2, 2] + maps[:, :2, :2].sum(2) / 2
    fixed = torch.cat([maps[:, :2, :2], centre.unsqueeze(2)], 2).mul(65536).add(0.5).floor().to(torch.int32)
    by_column, by_row, start = fixed.unsqueeze(3).unbind(2)
    along = by_column * torch.arange(width, dtype=torch.int32, device=maps.device)
    down = by_row * torch.arange(height, dtype=torch.int32, device=maps.device) + start
    source = (down.unsqueeze(3) + along.unsqueeze(2)).bitwise_right_shift_(16)
    x, y = source[:, 0].clamp_(-1, width), source[:, 1].clamp_(-1, height)
    pixel = y.mul_(width + 2).add_(x).add_(width + 3).view(count, 1, -1).long()
    return framed.flatten(2).gather(2, pixel.expand(-1, channels, -1)).view(count, channels, height, width)


@cache
def identity(device: torch.device) -> Tensor:
    return torch.eye(3, dtype=torch.float64, device=device)


def unmoved(amount: Tensor) -> Tensor:
    """Return a map for each amount that moves nothing yet."""
    return identity(amount.device).expand(len(amount), 3, 3).clone()


def translation(x: Tensor, y: Tensor) -> Tensor:
    """Return maps by which each pixel is taken from `x` to its right and `y` below it."""
    maps = unmoved(x)
    maps[:, 0, 2], maps[:, 1, 2] = x, y
    return maps


def rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Return maps that turn images counter-clockwise around their middle."""
    angle = degrees.deg2rad()
    turn = unmoved(degrees)
    turn[:, 0, 0] = turn[:, 1, 1] = angle.cos()
    turn[:, 1, 0] = angle.sin()
    turn[:, 0, 1] = -turn[:, 1, 0]
    x, y = torch.full_like(degrees, width / 2), torch.full_like(degrees, height / 2)
    return translation(x, y) @ turn @ translation(-x, -y)


def mirror(yes: Tensor, width: int) -> Tensor:
    """Return maps that exchange left and right where `yes` is 1, but not where it is 0."""
    maps = unmoved(yes)
    maps[:, 0, 0], maps[:, 0, 2] = 1 - 2 * yes, width * yes
    return maps


def shear_x(amount: Tensor, height: int, width: int) -> Tensor:
    maps = unmoved(amount)
    maps[:, 0, 1] = amount
    return maps


def shear_y(amount: Tensor, height: int, width: int) -> Tensor:
    maps = unmoved(amount)
    maps[:, 1, 0] = amount
    return maps


def translate_x(share: Tensor, height: int, width: int) -> Tensor:
    return translation(share * width, torch.zeros_like(share))


def translate_y(share: Tensor, height: int, width: int) -> Tensor:
    return translation(torch.zeros_like(share), share * height)


def pad(images: Tensor, by: int, reflect: bool = False) -> Tensor:
    """Add pixels on each side: black ones, or the image's own as in a mirror."""
    if not reflect:
        return functional.pad(images, (by, by, by, by))
    for axis in (2, 3):
        last = images.shape[axis] - 1
        images = images.index_select(
            axis, last - (last - torch.arange(-by, last + 1 + by, device=images.device).abs()).abs()
        )
    return images


def enlarge(images: Tensor, scale: float) -> Tensor:
    """Enlarge bilinearly, as Pillow does, four channels at a time, which PyTorch does fastest.

    Only on a CPU it computes in whole numbers; elsewhere a value may be one off.
    """
    height, width = (round(size * scale) for size in images.shape[2:])
    planes = images.flatten(0, 1)
    fours = functional.pad(planes, (0, 0, 0, 0, 0, -len(planes) % 4)).view(-1, 4, *images.shape[2:])
    given = fours if fours.is_cpu else fours.float()
    wide = functional.interpolate(given, (height, width), mode="bilinear", antialias=True)
    wide = wide if fours.is_cpu else wide.round_().to(torch.uint8)
    return wide.flatten(0, 1)[: len(planes)].view(*images.shape[:2], height, width)


def crop(images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor, height: int, width: int) -> Tensor:
    """Cut a window out of each image at its own place, perhaps mirrored, in one gather."""
    count, channels, _, stride = images.shape
    column = torch.arange(width, device=images.device)
    column = right.view(-1, 1, 1) + torch.where(mirrored.view(-1, 1, 1), width - 1 - column, column)
    row = down.view(-1, 1, 1) + torch.arange(height, device=images.device).view(-1, 1)
    pixel = (row * stride + column).view(count, 1, -1).expand(-1, channels, -1)
    return images.flatten(2).gather(2, pixel).view(count, channels, height, width)


# Tones


@cache
def ramp(device: torch.device) -> Tensor:
    """Return all values of a pixel."""
    return torch.arange(256.0, device=device)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    return tables.gather(2, images.flatten(2).long()).view_as(images)


def blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Go from `base` (factor 0) to the images (factor 1) and beyond."""
    factor = factor.float().view(-1, *[1] * (images.dim() - 1))
    return (base + factor * (images - base)).clamp_(0, 255).to(torch.uint8)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return blend(factor.new_zeros(1, dtype=torch.float32), ramp(factor.device).view(1, 1, 256), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Return tables that spread values around the image's mean grey."""
    mean = grey(images).flatten(1).double().mean(1).add(0.5).floor()
    return blend(mean.float().view(-1, 1, 1), ramp(images.device).view(1, 1, 256), factor)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    dropped = (8 - bits.floor().long()).view(-1, 1, 1)
    return (ramp(bits.device).long() >> dropped << dropped).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    values = ramp(threshold.device)
    return torch.where(threshold.view(-1, 1, 1) > values, values, 255 - values).to(torch.uint8)


def autocontrast(images: Tensor, amount: Tensor) -> Tensor:
    """Return tables that stretch each channel to 0..255."""
    low, high = (bound.double().unsqueeze(2) for bound in torch.aminmax(images.flatten(2), dim=2))
    values = ramp(images.device)
    scale = values[255] / (high - low)  # a number divided by a tensor would be rounded differently
    stretched = (values * scale - low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, values.double()).to(torch.uint8)


def equalize(images: Tensor, amount: Tensor) -> Tensor:
    """Return tables that spread each channel's values, so that all occur equally often, if there are enough pixels."""
    count, channels = images.shape[:2]
    values = images.flatten(2).long()
    own = values + 256 * torch.arange(count * channels, device=images.device).view(count, channels, 1)
    occurs = own.flatten().bincount(minlength=256 * count * channels).view(count, channels, 256)
    highest = occurs.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - highest) // 255
    spread = (step // 2 + occurs.cumsum(2) - occurs) // step.clamp(min=1)
    return torch.where(step > 0, spread.clamp_(max=255), ramp(images.device)).to(torch.uint8)


# Filters


def grey(images: Tensor) -> Tensor:
    """Return the grey of three channels as Pillow weighs them, or the mean of any other number."""
    channels = images.shape[1]
    weights = [19595, 38470, 7471] if channels == 3 else [65536 // channels] * channels
    weighed = images.int() * torch.tensor(weights, dtype=torch.int32).view(-1, 1, 1).to(images.device)
    return (weighed.sum(1, keepdim=True) + 32768) >> 16


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return images if images.shape[1] == 1 else blend(grey(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image, whose border is left as it is."""
    wide = images.to(torch.int16)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = wide.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * (box + 4 * wide[:, :, 1:-1, 1:-1]) + 13) // 26  # (box + 4 middle) / 13, rounded
    return blend(smooth, wide, factor)


def noise(images: Tensor, values: Tensor) -> Tensor:
    """Add a value to each pixel, from `values` [N, C, H, W]."""
    return (images + values).round_().clamp_(0, 255).to(torch.uint8)


def cutout(images: Tensor, centre: Tensor, side: int, value: int) -> Tensor:
    """Paint over a square around `centre` [N, 2], as much of it as is in the image."""
    row, column = (centre[:, i, None] - side // 2 for i in (0, 1))
    y, x = (torch.arange(size, device=images.device) for size in images.shape[2:])
    inside_y, inside_x = (row <= y) & (y < row + side), (column <= x) & (x < column + side)
    return images.masked_fill((inside_y.unsqueeze(2) & inside_x.unsqueeze(1)).unsqueeze(1), value)


def same(images: Tensor, amount: Tensor) -> Tensor:
    return images
