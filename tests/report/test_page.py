"""A page can be made of a run that goes on, without what is for paper, and plotly.js is the one that was published."""

import hashlib
from pathlib import Path

import pytest

from fewlabel.experiment import Experiment
from fewlabel.report.comparison import Comparison
from fewlabel.report.page import PLOTLY, render_groups, render_run, script
from fewlabel.report.results import Result
from tests.browser import browsed, started
from tests.report.layout import lay_out, metrics


@pytest.fixture
def going_on(tmp_path: Path) -> Result:
    measured = metrics(0.875, recall_per_class=[0.75, 1.0], confusion=[[3, 1], [0, 4]])
    line = {"test": measured, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
    lines = [{"round": n, **line} for n in (1, 2)]
    everyone = {"classes": ["a", "b"], "clients": []}
    return lay_out(tmp_path / "run", Experiment(rounds=9), lines, finished=False, partition=everyone)


def test_a_run_that_goes_on_has_a_page_without_drawings_for_paper(going_on: Result) -> None:
    groups = Comparison([going_on]).groups
    for page, whole in ((render_run(going_on, static=False), render_run(going_on)),
                        (render_groups(groups, static=False), render_groups(groups))):  # fmt: skip
        assert "<svg role" not in page
        assert (
            page.count("<figure role") == page.count('<script type="application/json">') == whole.count("<svg role") > 3
        )
        assert "No run is finished yet." in page
    assert "<h1>After round 2 of 9: " in render_run(going_on, static=False)


@browsed
def test_such_a_page_is_drawn_in_a_browser(going_on: Result, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render_run(going_on, static=False))
    (tmp_path / "chromium").mkdir()
    with started(tmp_path / "chromium") as browser:
        browser.look()
        browser.open(path, "document.documentElement?.dataset.plots")
        assert browser.said == []
        plots = "[...document.querySelectorAll('figure[role=group]')]"
        marks = f"{plots}.map(e => e.querySelectorAll('.mlayer path, .mlayer image').length)"
        assert min(browser.ask(marks)) > 0
        browser.look(media="print")  # paper gets the plots of the screen, if there are no others
        assert min(browser.ask(f"{plots}.map(e => e.querySelector('.live').getBoundingClientRect().width)")) > 300


def test_plotly_is_the_file_that_its_makers_published_with_its_licence() -> None:
    """The checksum is that of plotly-cartesian.min.js in plotly.js-cartesian-dist-min 4.1.1, as npm has it."""
    found = hashlib.sha256(script(PLOTLY).encode()).hexdigest()
    assert found == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    assert script("vendor/plotly-LICENSE.txt").startswith("MIT License")
    assert "</script" not in script(PLOTLY)  # which would end the script in a page
