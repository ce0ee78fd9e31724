"""Views must be what the papers and Pillow say, drawn for each image on its own, and leave its neighbours out of it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.data import operations as ops
from fewlabel.data.images import Images
from fewlabel.data.operations import Filter, Move, Operation, Tone
from fewlabel.data.views import (
    FEDMATCH,
    FIXMATCH,
    VIEWS,
    Affine,
    Crop,
    Cutout,
    Jitter,
    RandAugment,
    apply,
    draw,
    low_level,
    make_views,
)
from fewlabel.engine import run
from fewlabel.engine.world import World
from fewlabel.experiment import Experiment, Views, dumps, read

SHAPES = [(1, 8), (3, 8), (1, 28), (3, 32), (3, 33), (1, 64)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def see(name: str, images: Tensor, rng: torch.Generator) -> Tensor:
    (view,) = make_views([name], images, rng)
    return view


def photos(count: int = 6, channels: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    """Blots with grain, not noise alone: their channels differ in range, and no value is missing for long."""
    rng = generator(seed)
    coarse = torch.rand(count, channels, 4, 4, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic")
    grain = torch.rand(count, channels, size, size, generator=rng) * 0.2
    return ((smooth + grain).clamp(0, 1) * torch.rand(count, channels, 1, 1, generator=rng) * 255).to(torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])


def from_pillow(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array.unsqueeze(0) if array.ndim == 2 else array.permute(2, 0, 1)


def affine(image: Image.Image, *six: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, six)


def parameters_of(name: str, shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    return draw(VIEWS[name].recipe, shape, generator(seed))


# Operations, one image at a time, in Pillow

Pillow = Callable[[Image.Image, float], Image.Image]
SIGNED, FACTORS = (-0.3, -0.171, -0.02, 0.0, 0.13, 0.3), (0.0, 0.05, 0.31, 0.95, 1.0, 1.7)

CASES: dict[str, tuple[Operation, Pillow, tuple[float, ...]]] = {
    "rotation": (Move(ops.rotation), lambda i, v: i.rotate(v), (-30.0, -7.3, 0.0, 12.1, 29.99, 90.0)),
    "shear_x": (Move(ops.shear_x), lambda i, v: affine(i, 1, v, 0, 0, 1, 0), SIGNED),
    "shear_y": (Move(ops.shear_y), lambda i, v: affine(i, 1, 0, 0, v, 1, 0), SIGNED),
    "translate_x": (Move(ops.translate_x), lambda i, v: affine(i, 1, 0, v * i.width, 0, 1, 0), SIGNED),
    "translate_y": (Move(ops.translate_y), lambda i, v: affine(i, 1, 0, 0, 0, 1, v * i.height), SIGNED),
    "brightness": (Tone(ops.brightness), lambda i, v: ImageEnhance.Brightness(i).enhance(v), FACTORS),
    "contrast": (Tone(ops.contrast), lambda i, v: ImageEnhance.Contrast(i).enhance(v), FACTORS),
    "posterize": (Tone(ops.posterize), lambda i, v: ImageOps.posterize(i, int(v)), (1, 2, 4, 5, 7.9, 8)),
    "solarize": (Tone(ops.solarize), lambda i, v: ImageOps.solarize(i, v), (0, 1, 77.5, 128, 255, 256)),
    "autocontrast": (Tone(ops.autocontrast), lambda i, v: ImageOps.autocontrast(i), (0,) * 6),
    "equalize": (Tone(ops.equalize), lambda i, v: ImageOps.equalize(i), (0,) * 6),
    "saturation": (Filter(ops.saturation), lambda i, v: ImageEnhance.Color(i).enhance(v), FACTORS),
    "sharpness": (Filter(ops.sharpness), lambda i, v: ImageEnhance.Sharpness(i).enhance(v), FACTORS),
}


@pytest.mark.parametrize(("channels", "size"), SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_an_operation_gives_the_very_pixels_of_pillow(name, channels, size):
    operation, pillow, amounts = CASES[name]
    images = photos(len(amounts), channels, size)
    found = operation(images, torch.tensor(amounts, dtype=torch.float64))
    expected = torch.stack([from_pillow(pillow(to_pillow(i), v)) for i, v in zip(images, amounts, strict=True)])
    assert found.dtype == torch.uint8
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["autocontrast", "equalize", "contrast"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_one_or_two_values_are_no_exception(name, channels):
    operation, pillow, _ = CASES[name]
    flat = torch.full((3, channels, 16, 16), 9, dtype=torch.uint8)
    flat[1], flat[2, :, :5] = 0, 250
    expected = torch.stack([from_pillow(pillow(to_pillow(image), 0.5)) for image in flat])
    assert torch.equal(operation(flat, torch.full((3,), 0.5, dtype=torch.float64)), expected)


def test_what_comes_in_from_outside_has_the_value_asked_for():
    images = torch.full((2, 3, 8, 8), 200, dtype=torch.uint8)
    moved = Move(ops.translate_x, fill=128)(images, torch.tensor([0.25, -0.5], dtype=torch.float64))
    assert moved[0, 0, 3].tolist() == [200] * 6 + [128] * 2
    assert moved[1, 2, 0].tolist() == [128] * 4 + [200] * 4


def test_an_enlarged_image_is_pillows():
    for channels, size, scale in [(3, 32, 1.25), (1, 28, 1.25), (3, 32, 1.125), (1, 8, 1.25)]:
        images, wide = photos(4, channels, size), round(size * scale)
        found = ops.enlarge(images, scale)
        expected = [from_pillow(to_pillow(i).resize((wide, wide), Image.Resampling.BILINEAR)) for i in images]
        assert found.shape == (4, channels, wide, wide)
        assert (found.int() - torch.stack(expected).int()).abs().max() <= 1


@pytest.mark.parametrize("reflect", [False, True])
def test_padding_is_numpys(reflect):
    images = photos(2, 3, 9)
    expected = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), "reflect" if reflect else "constant")
    assert torch.equal(ops.pad(images, 4, reflect), torch.from_numpy(expected))


def test_a_crop_is_a_window_perhaps_mirrored():
    images = photos(4, 3, 12)
    down, right = torch.tensor([0, 4, 2, 1]), torch.tensor([4, 0, 3, 1])
    found = ops.crop(images, down, right, torch.tensor([False, False, True, True]), 8, 7)
    for number, (image, d, r) in enumerate(zip(images, down, right, strict=True)):
        window = image[:, d : d + 8, r : r + 7]
        assert torch.equal(found[number], window.flip(2) if number > 1 else window)


def test_cutout_paints_a_square_as_far_as_it_is_in_the_image():
    images = photos(3, 3, 8)
    centres = [(0, 0), (4, 5), (7, 2)]
    found = ops.cutout(images, torch.tensor(centres), 4, 127)
    for image, view, (row, column) in zip(images, found, centres, strict=True):
        for y in range(8):
            for x in range(8):
                hidden = row - 2 <= y < row + 2 and column - 2 <= x < column + 2
                assert view[:, y, x].tolist() == ([127] * 3 if hidden else image[:, y, x].tolist())


def test_noise_is_added_rounded_and_kept_in_range():
    images = torch.tensor([0, 100, 250], dtype=torch.uint8).view(1, 1, 1, 3)
    assert ops.noise(images, torch.tensor([-3.0, 1.6, 7.0]).view(1, 1, 1, 3)).flatten().tolist() == [0, 102, 255]


def test_grey_of_one_channel_is_itself():
    assert torch.equal(ops.grey(photos(2, 1)), photos(2, 1).int())


def test_each_image_has_its_own_operation():
    table, images = [choice.operation for choice in FIXMATCH], photos(40)
    which = torch.randint(0, len(table), (40,), generator=generator())
    amount = torch.rand(40, dtype=torch.float64, generator=generator(1)) + 4  # a number that suits every operation
    found = ops.each(table, images, which, amount)
    for number, operation in enumerate(which.tolist()):
        alone = table[operation](images[number : number + 1], amount[number : number + 1])
        assert torch.equal(found[number], alone[0])


# Steps


def test_fedirms_view_is_torchvisions_affine_and_flip():
    """Turned clockwise there, against it here. Maps are composed before rounding, so a pixel in 200 may differ."""
    from torchvision.transforms import functional

    images = photos(6, 3, 64)
    rows = [(10.0, 1, 0, 0), (-10.0, -1, 1, 0), (3.3, 0, -1, 1), (0.0, 0, 0, 1), (0.0, 1, 1, 0), (-7.7, 1, -1, 1)]
    found = Affine(10, 0.02, flip=0.5).apply(images, torch.tensor(rows, dtype=torch.float64))
    for image, view, (degrees, right, down, flip) in zip(images, found, rows, strict=True):
        expected = functional.affine(to_pillow(image), -degrees, [right, down], 1.0, [0.0, 0.0])
        expected = from_pillow(functional.hflip(expected) if flip else expected)
        assert (view != expected).any(0).float().mean() <= 0.005


def test_rscfeds_view_is_pillows_resize_crop_and_flip():
    images = photos(20)
    (step,), (rows,) = VIEWS["rscfed"].recipe, parameters_of("rscfed", images.shape)
    for image, view, (down, right, flip) in zip(images, step.apply(images, rows), rows.tolist(), strict=True):
        expected = to_pillow(image).resize((40, 40), Image.Resampling.BILINEAR)
        expected = from_pillow(expected.crop((right, down, right + 32, down + 32)))
        expected = expected.flip(2) if flip else expected
        assert (view.int() - expected.int()).abs().max() <= 1


def test_randaugment_does_one_operation_after_another():
    images, (step, _) = photos(60), VIEWS["randaugment"].recipe
    assert isinstance(step, RandAugment)
    (rows, _) = parameters_of("randaugment", images.shape)
    pillow = {operation: act for operation, act, _ in CASES.values()}
    for image, view, choices in zip(images, step.apply(images, rows), rows.tolist(), strict=True):
        expected = to_pillow(image)
        for which, amount in choices:
            operation = FIXMATCH[int(which)].operation
            expected = pillow[operation](expected, amount) if operation in pillow else expected
        assert torch.equal(view, from_pillow(expected))


def test_jitter_is_brightness_then_contrast_then_saturation():
    image, step = photos(1), Jitter(0.4)
    seen = step.apply(image, torch.tensor([[0.7, 1.3, 0.6]], dtype=torch.float64))
    expected = ImageEnhance.Brightness(to_pillow(image[0])).enhance(0.7)
    expected = ImageEnhance.Color(ImageEnhance.Contrast(expected).enhance(1.3)).enhance(0.6)
    assert torch.equal(seen[0], from_pillow(expected))
    factors = step.draw((4000, 3, 8, 8), generator())
    assert 0.6 <= factors.min() < 0.61
    assert 1.39 < factors.max() <= 1.4


# Every recipe


@pytest.mark.parametrize(("channels", "size"), SHAPES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_shape_and_kind_of_its_images_and_leaves_them_alone(name, channels, size):
    images = photos(5, channels, size)
    before = images.clone()
    seen = see(name, images, generator())
    assert seen.shape == images.shape
    assert seen.dtype == torch.uint8
    assert torch.equal(images, before)
    assert see(name, images[:1], generator()).shape == (1, channels, size, size)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_becomes_of_an_image_does_not_depend_on_its_neighbours(name, channels):
    images, recipe = photos(33, channels, 16), VIEWS[name].recipe
    parameters = parameters_of(name, images.shape)
    together = apply(recipe, images, parameters)
    for some in (torch.tensor([7]), torch.tensor([30, 2, 11, 2]), torch.arange(20)):
        apart = apply(recipe, images[some], [rows[some] for rows in parameters])
        assert torch.equal(apart, together[some])


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "none"])
def test_equal_images_of_a_batch_differ_and_the_generator_alone_decides_how(name):
    images = photos(1).expand(16, -1, -1, -1)
    state = torch.get_rng_state()
    seen = see(name, images, generator(4))
    assert torch.equal(seen, see(name, images, generator(4)))
    assert not torch.equal(seen, see(name, images, generator(5)))
    assert torch.equal(torch.get_rng_state(), state)
    assert len({view.numpy().tobytes() for view in seen}) > (1 if name == "kornia-like" else 4)


def test_without_a_recipe_images_stay_as_they_are():
    images, rng = photos(), generator()
    before = rng.get_state()
    assert see("none", images, rng) is images
    assert torch.equal(rng.get_state(), before)


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """The plain way: image [C, H, W] moved by whole pixels, black coming in."""
    result, (_, height, width) = torch.zeros_like(image), image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                result[:, row, column] = image[:, row + down, column + right]
    return result


@pytest.mark.parametrize(("size", "reach"), [(16, 2), (8, 1), (4, 1)])
def test_the_default_weak_view_draws_its_shifts_of_up_to_an_eighth_and_nothing_else(size, reach):
    images = torch.randint(1, 256, (40, 3, size, size), dtype=torch.uint8, generator=generator())  # no pixel is black
    rng, alone = generator(1), generator(1)
    seen = see(Experiment().views.weak, images, rng)
    # The same draws in a plain loop: first all shifts down, then all to the right.
    down, right = torch.randint(0, 2 * reach + 1, (2, 40), generator=alone) - reach
    assert torch.equal(rng.get_state(), alone.get_state())
    for image, view, *move in zip(images, seen, down.tolist(), right.tolist(), strict=True):
        assert torch.equal(shifted(image, *move), view)


# Draws


def test_places_are_equally_likely_and_half_of_the_images_mirrored():
    (rows,) = parameters_of("rscfed", (8100, 3, 32, 32))
    for column in (0, 1):  # 9 places each, 900 expected, standard deviation 28
        counts = rows[:, column].bincount()
        assert len(counts) == 9
        assert (counts - 900).abs().max() < 130
    assert abs(rows[:, 2].float().mean() - 0.5) < 0.025
    assert abs(torch.corrcoef(rows.T.float())[0, 1]) < 0.05


@pytest.mark.parametrize(("name", "size", "reach"), [("rscfed", 32, 8), ("cbafed-fashion", 32, 4), ("isic", 224, 16)])
def test_crops_reach_over_all_of_the_enlarged_image(name, size, reach):
    (rows,) = parameters_of(name, (2000, 3, size, size))
    assert rows[:, :2].min() == 0
    assert rows[:, :2].max() == reach


def test_shifts_are_of_up_to_an_eighth():
    for name in ("shift", "flip-shift", "fixmatch-weak"):
        for size, reach in ((32, 4), (28, 3), (8, 1)):
            (rows,) = parameters_of(name, (1000, 1, size, size))
            assert (rows[:, :2] - reach).unique().tolist() == list(range(-reach, reach + 1))
            assert rows[:, 2].unique().tolist() == ([0] if name == "shift" else [0, 1])


def test_fedirm_turns_by_ten_degrees_and_shifts_by_two_percent():
    (rows,) = parameters_of("fedirm", (4000, 3, 224, 224))
    degrees, right, down, flip = rows.unbind(1)
    assert -10 <= degrees.min() < -9.9
    assert 9.9 < degrees.max() <= 10
    assert abs(degrees.std() - 20 / 12**0.5) < 0.15
    for shift in (right, down):
        assert shift.unique().tolist() == list(range(-4, 5))  # 2 % of 224 is 4.48
    assert abs(flip.mean() - 0.5) < 0.04


def test_randaugment_chooses_all_operations_equally_by_amounts_in_the_range_of_the_paper():
    rows, centres = parameters_of("randaugment", (7000, 3, 32, 32))
    which, amount = rows.unbind(2)
    assert which.shape == (7000, 2)
    counts = which.long().flatten().bincount()
    assert len(counts) == 14
    assert (counts - 1000).abs().max() < 150  # standard deviation 30
    ranges = [(-30, 30), *[(-0.3, 0.3)] * 4, *[(0.05, 0.95)] * 2, (4, 9), (0, 256), (0, 0), (0, 0)]
    ranges += [(0.05, 0.95)] * 2 + [(0, 0)]
    for number, (low, high) in enumerate(ranges):
        found, width = amount[which == number], high - low
        assert low <= found.min() <= low + 0.02 * width
        assert high - 0.02 * width <= found.max() <= high
        assert abs(found.mean() - (low + high) / 2) <= 0.05 * width
    assert (which[:, 0] == which[:, 1]).double().mean() < 0.1  # drawn apart: 1 / 14
    assert centres.unique().tolist() == list(range(32))


def test_fedmatchs_levels_are_the_lowest_two_to_five_of_ten():
    levels = (low_level((20000, 6), generator()) * 9).round().long()
    # A level k < M is drawn with chance 1 / M, M from 2 to 5: for k = 0 and 1 that is (1/2 + 1/3 + 1/4 + 1/5) / 4, ...
    shares = levels.flatten().bincount() / levels.numel()
    expected = [77 / 240, 77 / 240, 47 / 240, 27 / 240, 12 / 240]
    assert torch.allclose(shares.double(), torch.tensor(expected, dtype=torch.float64), atol=0.01)


def test_fedmatch_draws_six_of_thirteen_operations_with_the_authors_amounts():
    (rows,) = parameters_of("fedmatch", (6000, 3, 32, 32))
    which, amount = rows.unbind(2)
    assert which.shape == (6000, 6)
    assert which.unique().tolist() == list(range(13))

    def amounts(operation: Callable[..., Tensor]) -> list[float]:
        number = [getattr(c.operation, kind(c.operation)) for c in FEDMATCH].index(operation)
        return sorted({round(value, 3) for value in amount[which == number].tolist()})

    def kind(operation: Operation) -> str:
        return {Move: "maps", Tone: "table", Filter: "act"}[type(operation)]

    assert amounts(ops.rotation) == [0, 40, 80, 120, 160]
    assert amounts(ops.shear_x) == [-0.133, -0.1, -0.067, -0.033, 0, 0.033, 0.067, 0.1, 0.133]
    assert amounts(ops.translate_y)[-1] == round(0.2 * 4 / 9, 3)
    assert amounts(ops.brightness) == [0.867, 0.9, 0.933, 0.967, 1, 1.033, 1.067, 1.1, 1.133]
    assert amounts(ops.saturation) == [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4]
    assert [int(bits) for bits in amounts(ops.posterize)] == [6, 7, 7, 8, 8]
    assert amounts(ops.solarize)[0] == round(256 - 25 * 4 / 9, 3)


def test_kornias_operations_are_the_same_for_a_whole_batch_with_amounts_for_each_image():
    seen = [parameters_of("kornia-like", (50, 3, 32, 32), seed)[0] for seed in range(40)]
    assert all((rows[:, :, 0] == rows[0, :, 0]).all() for rows in seen)
    assert len({tuple(rows[0, :, 0].tolist()) for rows in seen}) > 20
    assert any(len(rows[:, 0, 1].unique()) == 50 for rows in seen)


def test_fixmatchs_operations_are_done_half_the_time():
    _, rows, _ = parameters_of("fixmatch-strong", (4000, 3, 32, 32))
    undone = Counter(rows[:, :, 0].flatten().tolist())[len(FIXMATCH)] / 8000
    assert abs(undone - 0.5) < 0.03


# Recipes


def test_recipes_are_the_papers():
    recipes = {name: view.recipe for name, view in VIEWS.items()}
    assert recipes["rscfed"] == recipes["cbafed"] == (Crop(scale=40 / 32, flip=0.5),)
    assert recipes["cbafed-fashion"] == (Crop(scale=36 / 32, flip=0.5),)
    assert recipes["isic"] == (Crop(scale=240 / 224, flip=0.5),)
    assert recipes["randaugment"] == (RandAugment(FIXMATCH, 2), Cutout(0.5, 127))
    assert recipes["fixmatch-strong"][1:] == (RandAugment(FIXMATCH, 2, chance=0.5), Cutout(0.5, 127))
    assert recipes["fedmatch"] == (RandAugment(FEDMATCH, 6, level=low_level),)


def test_the_noise_of_a_view_has_its_standard_deviation():
    _, values = parameters_of("noise", (64, 3, 32, 32))
    assert abs(values.std() - 25.5) < 0.2
    assert abs(values.mean()) < 0.2


def test_every_view_says_in_a_line_what_it_is():
    assert all(10 < len(view.about) < 120 and "\n" not in view.about for view in VIEWS.values())


# What a method gets


def test_a_strong_view_is_normalised_by_hand_values():
    pixels = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 8, 8).contiguous()
    images = Images(pixels, (0.5, 0.5, 0.1), (0.5, 0.25, 0.2), weak="rscfed", strong="fedirm")
    for name in ("plain", "weak", "strong"):
        seen = images.view(torch.tensor([1, 0]), name, generator())
        assert seen.shape == (2, 3, 8, 8)
        assert seen.dtype == torch.float32
        # In the middle, which no corner of the image reaches: (0 - 0.5) / 0.5, (1 - 0.5) / 0.25, (0.2 - 0.1) / 0.2
        torch.testing.assert_close(seen[:, :, 4, 4], torch.tensor([[-1.0, 2.0, 0.5]] * 2))


def test_weak_and_strong_are_what_the_images_were_told():
    images = Images(photos(8), (0.0,) * 3, (1 / 255,) * 3, weak="none", strong="fedmatch")
    index = torch.tensor([3, 1, 4])
    assert torch.equal(images.view(index, "weak", generator()).round().to(torch.uint8), photos(8)[index])
    strong = images.view(index, "strong", generator(2)).round().to(torch.uint8)
    assert torch.equal(strong, see("fedmatch", photos(8)[index], generator(2)))


def test_views_leave_the_stored_images_alone():
    images = Images(photos(6), (0.5,) * 3, (0.5,) * 3)
    for name in ("plain", "weak"):
        images.view(torch.arange(6), name, generator()).mul_(0)
    assert torch.equal(images.pixels, photos(6))
    with pytest.raises(BadInput, match="there is no view 'week'; there are plain, weak"):
        images.view(torch.arange(2), "week", generator())


def test_an_unknown_recipe_is_told_the_nearest():
    with pytest.raises(BadInput, match="there is no recipe for views named 'randaugmnt'; did you mean 'randaugment'"):
        see("randaugmnt", photos(), generator())
    with pytest.raises(BadInput, match=r"there is no views.weak 'rscfd'; did you mean 'rscfed'\?"):
        Experiment(views=Views(weak="rscfd"))
    with pytest.raises(BadInput, match=r"there is no views.strong 'xyz'; there are none, shift"):
        read({"views": {"strong": "xyz"}})
    with pytest.raises(BadInput, match=r"there is no views.weak 'None'; did you mean 'none'\?"):
        Experiment(views=Views(weak=None))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"unknown setting 'views.week'; did you mean 'views.weak'\?"):
        read({"views": {"week": "shift"}})


def test_a_run_shows_its_images_as_its_experiment_says(tmp_path: Path):
    assert Experiment().views == Views("shift", "randaugment")
    experiment = read({"rounds": 1, "views": {"strong": "fedirm"}}, ["views.weak=none"])
    assert 'weak = "none"' in dumps(experiment)
    images = World.open(run.prepare(experiment, tmp_path / "run")).dataset.splits["train"].images
    assert (images.weak, images.strong) == ("none", "fedirm")


@pytest.mark.parametrize("name", ["rscfed", "shift", "fixmatch-strong", "randaugment", "none"])
def test_views_asked_for_together_are_those_asked_for_one_after_another(name: str) -> None:
    images, one, other = photos(8), generator(3), generator(3)
    together = make_views([name, "rscfed", name], images, one)
    for seen, each in zip(together, (name, "rscfed", name), strict=True):
        assert torch.equal(seen, see(each, images, other))
