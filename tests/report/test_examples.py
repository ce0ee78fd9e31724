"""Examples are what the run's model says about its test images, and a federation's report shows none."""

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewlabel.core import metrics
from fewlabel.engine import record
from fewlabel.engine.run import execute
from fewlabel.engine.world import World
from fewlabel.report.examples import LARGEST, MOST_SHOWN, PER_CLASS, Examples, asked, examples_of, picture
from fewlabel.report.page import render_run
from fewlabel.report.results import Result


@pytest.fixture(scope="module")
def run(small_run: Callable[..., Path]) -> Result:
    directory = small_run("method=fedavg", "labels.at=every-client", "labels.fraction=1", "rounds=4")
    execute(directory, workers=1)
    return Result(directory)


@pytest.fixture(scope="module")
def shown(run: Result) -> Examples:
    found = examples_of(run, "fedavg")
    assert found
    return found


def test_the_model_is_the_one_that_was_measured(run: Result) -> None:
    """Asked again, it gives the counts that the last round has."""
    world = World.open(run.directory)
    found = asked(run, world)
    assert found
    index, scores = found
    assert index.tolist() == list(range(len(world.dataset.splits["test"])))
    assert run.last
    assert (
        metrics.count(scores, world.dataset.splits["test"].labels).confusion.tolist() == run.last["test"]["confusion"]
    )


def test_each_class_shows_its_first_images_whether_they_are_right_or_not(run: Result, shown: Examples) -> None:
    assert [{one.truth for one in some} for some in shown.per_class] == [{name} for name in run.classes]
    assert {len(some) for some in shown.per_class} == {PER_CLASS}
    test = World.open(run.directory).dataset.splits["test"]
    first = int((test.labels == 3).nonzero()[0])
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(shown.per_class[3][0].picture.partition(",")[2]))))
    assert (pixels == test.images.pixels[first, 0].numpy()).all()


def test_mistakes_come_surest_first_and_the_others_with_the_smallest_margin_first(shown: Examples) -> None:
    sure = [one.probability for one in shown.mistakes]
    assert sure == sorted(sure, reverse=True)
    assert not any(one.right for one in shown.mistakes)
    margins = [one.probability - one.second_probability for one in shown.unsure]
    assert margins == sorted(margins)
    assert len(shown.unsure) == MOST_SHOWN
    assert margins[0] < 0.1
    assert all(one.said != one.second for one in shown.unsure)


def test_a_page_shows_them_and_says_that_it_holds_them(run: Result) -> None:
    page = render_run(run)
    assert page.count('<img src="data:image/png;base64,') == 10 * PER_CLASS + 2 * MOST_SHOWN
    assert "whoever gets the page gets them" in page
    assert "It was asked about" not in page  # of 300 images, about all


def test_a_federation_shows_none_nor_does_a_run_whose_model_or_data_are_gone(run: Result, tmp_path: Path) -> None:
    """What a federation's server has of its sites' images is their number."""
    copies = [Result(shutil.copytree(run.directory, tmp_path / str(n))) for n in range(4)]
    federation, without, moved, unreadable = (copy.directory for copy in copies)
    (federation / record.FEDERATION).write_text(json.dumps({"terms": {"classes": run.classes}}))
    (without / record.MODEL).unlink()
    other = json.loads((moved / record.PARTITION).read_text()) | {"data": "other"}
    (moved / record.PARTITION).write_text(json.dumps(other))
    (unreadable / record.MODEL).write_bytes(b"nothing")
    assert [examples_of(Result(copy.directory), "fedavg") for copy in copies] == [None] * 4
    page = render_run(Result(federation))
    assert "<img" not in page
    assert "fedavg: " in page


def test_large_pictures_become_small_ones() -> None:
    def opened(pixels: torch.Tensor) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(picture(pixels).partition(",")[2])))

    large = opened(torch.zeros(3, 224, 224, dtype=torch.uint8))
    assert (large.size, large.format, large.mode) == ((LARGEST, LARGEST), "JPEG", "RGB")
    small = opened(torch.full((1, 8, 8), 7, dtype=torch.uint8))
    assert (small.size, small.format, small.mode, small.getpixel((0, 0))) == ((8, 8), "PNG", "L", 7)
