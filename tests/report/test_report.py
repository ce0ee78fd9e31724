"""The report in a real browser: everything is drawn, in light and in dark, on a desk and on a telephone, and alone.

What the page holds is measured by a few lines of script added to a copy of it; the page itself has none.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewlabel.cli.main import main
from fewlabel.engine.run import execute, prepare
from fewlabel.experiment import Experiment, read
from fewlabel.report.comparison import Comparison
from fewlabel.report.curves import MOST_POINTS, limit_to_percent
from fewlabel.report.matrices import matrix
from fewlabel.report.plots import ABOUT, left_out, sections
from fewlabel.report.results import Result
from fewlabel.report.runs import Row
from fewlabel.report.style import empty_plot
from tests.conftest import SMALL
from tests.report.layout import lay_out, metrics

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
METHODS = {
    "rscfed": {"Pseudo-labels", "Weights in the average"},
    "isofed": {"Pseudo-labels", "Weights in the average"},
    "cbafed": {"Thresholds"},
    "fedirm": {"Relations among classes"},
    "fedmatch": {"Weights in the average"},
}
ALWAYS = {"Over the rounds", "Recall by class", "Confusion", "Who holds what", "Costs"}
PROBE = """<script>addEventListener("load", () => {
const box = e => e.getBoundingClientRect(), all = (e, s) => [...e.querySelectorAll(s)]
const style = getComputedStyle(document.body)
parent.document.title = JSON.stringify({
  width: innerWidth, page: document.documentElement.scrollWidth, ink: style.color, paper: style.backgroundColor,
  plots: all(document, "svg").map(svg => ({
    name: svg.getAttribute("aria-label"), width: box(svg).width, height: box(svg).height,
    marks: all(svg, "path, image").filter(e => box(e).width > 1 && box(e).height + box(e).width > 20).length,
    smallest: Math.min(...all(svg, "text").map(e => box(e).height)),
    outside: all(svg, "text").filter(e => box(e).left < box(svg).left - 2 || box(e).right > box(svg).right + 2
      || box(e).top < box(svg).top - 2 || box(e).bottom > box(svg).bottom + 2).map(e => e.textContent),
    broken: all(svg, "use, image").map(e => e.getAttribute("href")).filter(h => h.startsWith("#")
      && !document.getElementById(h.slice(1))).length})),
  fetched: performance.getEntriesByType("resource").map(e => e.name)})})</script>"""
FRAME = """<!doctype html><title></title>
<iframe style="border: 0" width="WIDTH" height="900" srcdoc="PAGE"></iframe>"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Three rounds of each method, of one with two seeds."""
    root, found = tmp_path_factory.mktemp("runs"), dict[str, list[Result]]()
    for method in METHODS:
        quick = ["method.warmup_epochs=2"] if method == "cbafed" else []
        for seed in (0, 1) if method == "cbafed" else (0,):
            changes = [*SMALL, f"method.name={method}", "rounds=3", "evaluate.every=1", f"seed={seed}", *quick]
            directory = prepare(read({}, changes), root / f"{method}-{seed}")
            execute(directory, workers=1)
            found.setdefault(method, []).append(Result(directory))
    return found


@pytest.fixture(scope="module")
def pages(real: dict[str, list[Result]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    every = [result for results in real.values() for result in results]
    alone = {method: results[0].report(root / f"{method}.html") for method, results in real.items()}
    return alone | {"all": Comparison(every).report(root / "all.html")}


@dataclass(frozen=True)
class Seen:
    page: dict[str, Any]
    said: list[str]  # on the console


@pytest.fixture(scope="module")
def look(pages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seen]:
    profile = tmp_path_factory.mktemp("chromium")

    def look(path: Path, width: int = 1100, dark: bool = False) -> Seen:
        frame = path.with_suffix(f".{width}.frame.html")
        page = html.escape(path.read_text().replace("</body>", f"{PROBE}</body>"))
        frame.write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", page))
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        options += [
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            "--no-first-run",
            "--disable-dev-shm-usage",
        ]
        options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", frame.as_uri()]
        assert CHROMIUM is not None
        out, told = frame.with_suffix(".out"), frame.with_suffix(".err")
        with out.open("w") as stdout, told.open("w") as stderr:  # files: its children could keep a pipe open
            subprocess.run([CHROMIUM, *options], stdout=stdout, stderr=stderr, timeout=60, check=True)
        title = re.search(r"<title>(.*?)</title>", out.read_text(), re.DOTALL)
        assert title, told.read_text()
        return Seen(
            json.loads(html.unescape(title[1])), [line for line in told.read_text().splitlines() if "CONSOLE" in line]
        )

    return look


def headings(path: Path) -> set[str]:
    return set(re.findall(r"<h2>(.*?)</h2>", path.read_text()))


def test_each_method_shows_what_it_logs(pages: dict[str, Path]) -> None:
    special = set().union(*METHODS.values())
    for method, own in METHODS.items():
        assert headings(pages[method]) & (special | ALWAYS) - {"Pseudo-labels"} == ALWAYS | own - {"Pseudo-labels"}
    assert headings(pages["all"]) >= ALWAYS | special
    page = html.unescape(pages["all"].read_text())
    for heading, words in ABOUT.items():
        assert f"<h2>{heading}</h2>\n<p>{words}</p>" in page


@browsed
@pytest.mark.parametrize("name", [*METHODS, "all"])
def test_every_plot_is_drawn_and_nothing_is_fetched_or_complained_of(
    pages: dict[str, Path], look: Callable[..., Seen], name: str
) -> None:
    seen = look(pages[name])
    assert seen.said == []
    assert seen.page["fetched"] == []
    assert len(seen.page["plots"]) == pages[name].read_text().count("<figure>") >= 6
    for plot in seen.page["plots"]:
        assert plot["name"]
        assert min(plot["width"], plot["height"]) > 150, plot
        assert plot["marks"] > 0, plot
        assert plot["outside"] == [], plot
        assert plot["broken"] == 0, plot
    assert pages[name].stat().st_size < 3e6


@browsed
def test_a_telephone_shows_it_without_scrolling_sideways_and_large_enough(
    pages: dict[str, Path], look: Callable[..., Seen]
) -> None:
    seen = look(pages["all"], width=360).page
    assert seen["width"] == 360
    assert seen["page"] <= 360
    assert all(300 < plot["width"] <= 360 and plot["smallest"] > 8 for plot in seen["plots"])


@browsed
def test_dark_is_light_ink_on_dark_paper_and_light_the_other_way_round(
    pages: dict[str, Path], look: Callable[..., Seen]
) -> None:
    def brightness(color: str) -> int:
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    light, dark = (look(pages["rscfed"], dark=dark).page for dark in (False, True))
    assert brightness(light["paper"]) > 700 > 100 > brightness(light["ink"])
    assert brightness(dark["ink"]) > 600 > 100 > brightness(dark["paper"])


def test_a_page_that_was_lost_is_written_again(
    real: dict[str, list[Result]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by Ctrl-C after the last round; or elsewhere, or for runs side by side, as one likes."""
    run = shutil.copytree(real["fedirm"][0].directory, tmp_path / "runs" / "one")
    assert not (run / "report.html").exists()
    assert main(["run", "--resume", str(run)]) == 0
    assert capsys.readouterr().out.endswith(f"{run}/report.html\n")
    for directory in (run, tmp_path / "runs"):
        assert main(["show", str(directory), "--report", str(tmp_path / "page.html")]) == 0
        assert capsys.readouterr().out.endswith(f"{tmp_path}/page.html\n")
        assert {"Confusion", "Relations among classes"} <= headings(tmp_path / "page.html")


# what is drawn


def test_the_weights_of_clients_add_up(real: dict[str, list[Result]]) -> None:
    """RSCFed's in all groups together to 1; IsoFed's to 1 among unlabeled and to 1 among labeled clients.

    FedMatch's to 1 among those who moved sigma and to 1 among those who moved psi.
    """
    for method, total in {"rscfed": 1.0, "isofed": 2.0, "fedmatch": 2.0}.items():
        for line in real[method][0].rounds:
            shares = [value for key, value in line.items() if key.startswith("weight_")]
            assert sum(shares) == pytest.approx(total)


def test_a_client_counts_as_nothing_in_seeds_that_leave_it_out(real: dict[str, list[Result]], tmp_path: Path) -> None:
    """Of two seeds, one averages clients 1 and 2, the other client 1 alone; client 3 is in the second round."""
    results = []
    for number, shares in enumerate(({"weight_1": 0.4, "weight_2": 0.6}, {"weight_1": 1.0})):
        directory = shutil.copytree(real["rscfed"][0].directory, tmp_path / str(number))
        rounds = [{"round": 1, **shares}, {"round": 2, "weight_3": 1.0}, {"round": 3}]
        costs = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
        (directory / "rounds.jsonl").write_text("".join(json.dumps(line | costs) + "\n" for line in rounds))
        results.append(Result(directory))
    [weights] = sections({"": [Row("rscfed", tuple(results))]})["Weights in the average"]
    shown = weights.figure.axes[0].images[0].get_array()
    assert shown.filled(-1).tolist() == [[70, -1], [30, -1], [-1, 100]]  # -1: blank


@pytest.mark.parametrize(
    ("values", "low", "high"), [((0, 0), -0.15, 5.15), ((95, 135), 92.79, 100.21), ((20, 80), 15.02, 84.98)]
)
def test_shares_are_drawn_between_0_and_100_and_flat_curves_are_flat(
    values: tuple[int, int], low: int, high: int
) -> None:
    """Matplotlib has margins of 5%: from 93 in the second case, from 17 to 83 in the last; ours have 3% more."""
    _, axes = empty_plot("%")
    axes.plot([1, 2], values)
    limit_to_percent(axes)
    assert axes.get_ylim() == pytest.approx((low, high))


def test_fedmatch_has_a_plot_of_each_of_its_averages(real: dict[str, list[Result]]) -> None:
    """Client 0 has labels, the others have none."""
    sigma, psi = sections({"": [Row("fedmatch", tuple(real["fedmatch"]))]})["Weights in the average"]
    assert "average of sigma" in sigma.caption
    assert "average of psi" in psi.caption
    assert [text.get_text() for text in sigma.figure.axes[0].get_yticklabels()] == ["0 (labels)"]
    assert [text.get_text() for text in psi.figure.axes[0].get_yticklabels()] == ["1", "2", "3", "4"]
    lines = real["fedmatch"][0].rounds
    assert psi.figure.axes[0].images[0].get_array()[1, 2] == pytest.approx(100 * lines[2]["weight_psi_2"])


def test_seconds_are_drawn_by_phase_and_add_up(real: dict[str, list[Result]]) -> None:
    """What a round took beside its clients' work was the server's; evaluation comes after it."""
    result = real["rscfed"][0]
    for line in result.rounds:
        assert 0 < line["seconds_train"] <= line["seconds"]
        assert line["seconds_evaluate"] > 0
    alone = sections({"": [Row("rscfed", (result,))]})["Costs"][1].figure.axes[0]
    clients, server, evaluation = (drawn.get_ydata()[0] for drawn in alone.lines)
    first = result.rounds[0]
    assert clients + server == pytest.approx(first["seconds"])
    assert evaluation == first["seconds_evaluate"]
    many = sections({"": [Row("a", (result,)), Row("b", tuple(real["cbafed"]))]})["Costs"][1].figure.axes[0]
    long = [sum(bar[row].get_width() for bar in many.containers) for row in (0, 1)]
    spent = [[each.spent() for each in results] for results in ([result], real["cbafed"])]
    assert long == pytest.approx(
        [sum(s["seconds"] + s["seconds_evaluate"] for s in each) / len(each) for each in spent]
    )


def test_matrices_are_the_runs_numbers_in_the_mean_over_seeds(real: dict[str, list[Result]]) -> None:
    row = Row("cbafed", tuple(real["cbafed"]))
    drawn = sections({"": [row]})
    [bounds] = drawn["Thresholds"]
    shown = bounds.figure.axes[0].images[0].get_array()
    lines = [[line for line in result.rounds if "thresholds" in line] for result in real["cbafed"]]
    assert shown.shape == (10, len(lines[0]))
    assert shown[4, -1] == pytest.approx(sum(each[-1]["thresholds"][4] for each in lines) / 2)
    [recall] = drawn["Recall by class"]
    said = [result.last["test"]["recall_per_class"][3] for result in real["cbafed"] if result.last]
    assert recall.figure.axes[0].images[0].get_array()[0, 3] == pytest.approx(50 * sum(said))
    assert f"3 {50 * sum(said):.0f}" in recall.alt
    [confusion] = drawn["Confusion"]
    shares = confusion.figure.axes[0].images[0].get_array()
    assert shares.sum(1).tolist() == pytest.approx([100.0] * 10)


def test_bars_are_as_long_as_clients_have_images_and_labeled_ones_are_marked(real: dict[str, list[Result]]) -> None:
    result = real["rscfed"][0]
    [drawing] = sections({"": [Row("rscfed", (result,))]})["Who holds what"]
    axes = drawing.figure.axes[0]
    long = [0.0] * 5
    for bars in axes.containers:
        for number, bar in enumerate(bars):
            long[number] += bar.get_width()
    clients = result.partition["clients"]
    assert long == [len(client["labeled"]) + len(client["unlabeled"]) for client in clients]
    marked = ["●" in text.get_text() for text in axes.get_yticklabels()]
    assert marked == [bool(client["labeled"]) for client in clients]


@pytest.mark.parametrize(("first", "last"), [(1, 12), (1, 60), (880, 999)])
def test_numbers_of_rounds_do_not_run_into_each_other(first: int, last: int) -> None:
    """Beside the long names of classes, which leave them little room."""
    rounds = list(map(str, range(first, last + 1)))
    figure = matrix(
        np.zeros((2, len(rounds))), ["benign keratosis", "melanocytic nevus"], rounds, "pseudo-label", "round"
    )
    figure.draw_without_rendering()
    boxes = [tick.label1.get_window_extent() for tick in figure.axes[0].xaxis.get_major_ticks()]
    assert len(boxes) > 5
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


def test_a_page_says_what_it_does_not_plot(real: dict[str, list[Result]]) -> None:
    rows = [Row(str(n), (Result(real["fedirm"][0].directory),)) for n in range(11)]
    assert left_out({"": rows[:10]}) == ""
    assert left_out({"": rows}) == "Plots show by class and client, the first 10 of 11 rows."
    assert left_out({str(n): rows[:1] for n in range(7)}) == "Plots show the first 6 of 7 groups."


def test_long_runs_keep_the_page_small(tmp_path: Path) -> None:
    """Four rows of 600 rounds and two seeds, a hundred clients."""
    results = []
    for number in range(8):
        experiment = replace(Experiment(rounds=600, seed=number % 2), name=f"row {number // 2}")
        clients = [{"id": n, "labeled": [n], "unlabeled": [], "classes": [1] + [0] * 9} for n in range(100)]
        everyone = {"classes": list("abcdefghij"), "clients": clients, "server": {"labeled": [], "classes": []}}
        each = {"recall_per_class": [0.5] * 10, "confusion": [[1] * 10] * 10}
        pseudo = {"coverage": 0.5, "precision": 0.5, "precision_per_class": [0.5] * 10, "used_per_class": [7] * 10}
        more = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "pseudo_labels": pseudo, "weight_3": 0.5}
        lines = [
            {"round": at, "test": metrics((at * 7919 + number) % 1000 / 1000, **each), **more} for at in range(1, 601)
        ]
        results.append(lay_out(tmp_path / str(number), experiment, lines, finished=False, partition=everyone))
    page = Comparison(results).report(tmp_path / "page.html")
    assert page.stat().st_size < 1e6
    curve = Comparison(results).plot().axes[0].lines[0].get_xdata()
    assert len(curve) <= MOST_POINTS
    assert curve[-1] == 600
