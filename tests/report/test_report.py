"""The report in a real browser: everything is drawn, in light and in dark, on a desk, on a telephone and on paper."""

import html
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from fewlabel.cli.main import main
from fewlabel.engine.run import execute, prepare
from fewlabel.experiment import Experiment, read
from fewlabel.report.charts import PERCENT, Cells
from fewlabel.report.comparison import Comparison
from fewlabel.report.curves import MOST_POINTS
from fewlabel.report.plots import ABOUT, FIRST, SEVERAL_SEEDS, about_sections, left_out, sections
from fewlabel.report.results import Result
from fewlabel.report.runs import Row
from fewlabel.report.static import cells, limit_to_percent
from fewlabel.report.style import contrast, empty_plot, in_lines
from tests.browser import Browser, browsed, started
from tests.conftest import SMALL
from tests.report.layout import lay_out, metrics

METHODS = {
    "rscfed": {"Pseudo-labels", "Weights in the average"},
    "isofed": {"Pseudo-labels", "Weights in the average"},
    "cbafed": {"Thresholds"},
    "fedirm": {"Relations among classes"},
    "fedmatch": {"Weights in the average"},
}
ALWAYS = {"Over the rounds", "Recall by class", "Confusion", "Who holds what", "Costs"}
DRAWN = "document.documentElement?.dataset.plots"
PLOTS = """[...document.querySelectorAll("figure[role=group]")].map(figure => {
  const box = e => e.getBoundingClientRect(), all = (e, s) => [...e.querySelectorAll(s)]
  const live = figure.querySelector(".live"), inside = box(live), svg = figure.querySelector(":scope > svg")
  const names = all(live, ".xtick text, .ytick text"), titles = all(live, ".g-xtitle text, .g-ytitle text")
  const beyond = e => box(e).left < inside.left - 2 || box(e).right > inside.right + 2
    || box(e).top < inside.top - 2 || box(e).bottom > inside.bottom + 2
  return { name: figure.getAttribute("aria-label"), width: inside.width, height: inside.height,
    marks: all(live, ".mlayer path, .mlayer image").filter(e => box(e).width + box(e).height > 4).length,
    smallest: Math.min(...names.map(e => parseFloat(getComputedStyle(e).fontSize))),
    outside: [...names, ...titles].filter(beyond).map(e => e.textContent),
    still: { width: box(svg).width, marks: all(svg, "path, image").filter(e => box(e).width > 1).length,
      broken: all(svg, "use").filter(e => !document.getElementById(e.getAttribute("href").slice(1))).length } }
})"""
# Places on what a plot shows: bars and dots, or all over the plot, because cells may be blank.
PLACES = """(n => {
  const live = document.querySelectorAll("figure[role=group] .live")[n]
  live.scrollIntoView({ block: "center" })
  const found = [...live.querySelectorAll(".bars path, .points path")].map(e => e.getBoundingClientRect())
  const solid = found.filter(b => b.width > 3 && b.height > 3).slice(0, 3), all = []
  const box = live.querySelector(".nsewdrag").getBoundingClientRect(), parts = [.5, .1, .3, .7, .9]
  parts.forEach(x => parts.forEach(y => all.push([box.x + x * box.width, box.y + y * box.height])))
  return solid.length ? solid.map(b => [b.x + b.width / 2, b.y + b.height / 2]) : all
})"""


def hover(browser: Browser, number: int) -> list[str]:
    """Move the mouse over a plot until it shows values, and return them."""
    shown = f"[...document.querySelectorAll('figure[role=group] .live')[{number}].querySelectorAll('.hoverlayer text')]"
    for place in browser.ask(f"{PLACES}({number})"):
        browser.point(*place)
        for _ in range(20):
            if words := browser.ask(f"{shown}.map(e => e.textContent)"):
                return list(words)
            time.sleep(0.02)
    return []


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def headings(path: Path) -> set[str]:
    return set(re.findall(r"<h2>(.*?)</h2>", path.read_text()))


def test_each_method_shows_what_it_logs(pages: dict[str, Path], real: dict[str, list[Result]]) -> None:
    special = set().union(*METHODS.values())
    for method, own in METHODS.items():
        assert headings(pages[method]) & (special | ALWAYS) - {"Pseudo-labels"} == ALWAYS | own - {"Pseudo-labels"}
    assert headings(pages["all"]) >= ALWAYS | special
    page = html.unescape(pages["all"].read_text())
    seeds = {FIRST: ABOUT[FIRST] + SEVERAL_SEEDS}  # of cbafed
    assert about_sections([Row("isofed", tuple(real["isofed"]))])[FIRST] == ABOUT[FIRST]
    for heading, words in (ABOUT | seeds).items():
        assert f"<h2>{heading}</h2>\n<p>{words}</p>" in page


@browsed
@pytest.mark.parametrize("name", [*METHODS, "all"])
def test_every_plot_is_drawn_and_nothing_is_fetched_or_complained_of(
    pages: dict[str, Path], browser: Browser, name: str
) -> None:
    browser.look()
    browser.open(pages[name], DRAWN)
    plots = browser.ask(PLOTS)
    assert browser.said == []
    assert browser.fetched == [pages[name].as_uri()]
    assert browser.ask(DRAWN) == str(len(plots))
    assert len(plots) == pages[name].read_text().count("<figure role") >= 6
    for plot in plots:
        assert plot["name"]
        assert plot["width"] > 300, plot
        assert plot["height"] > 120, plot
        assert plot["marks"] > 0, plot
        assert plot["outside"] == [], plot
        assert plot["still"]["width"] == 0, plot  # what is for paper is not on the screen
    assert pages[name].stat().st_size < 3e6


@browsed
@pytest.mark.parametrize("name", ["fedirm", "all"])
def test_hovering_over_a_plot_shows_its_values(pages: dict[str, Path], browser: Browser, name: str) -> None:
    """Over every plot of the page, with a real mouse."""
    browser.look()
    browser.open(pages[name], DRAWN)
    for number, plot in enumerate(browser.ask(PLOTS)):
        words = " ".join(hover(browser, number))
        assert re.search(r"\d", words), (plot["name"], words)
    assert browser.said == []


@browsed
def test_a_curve_says_the_value_of_each_row_at_the_round_below_the_mouse(
    pages: dict[str, Path], browser: Browser, real: dict[str, list[Result]]
) -> None:
    """The middle of three rounds is the second."""
    browser.look()
    browser.open(pages["all"], DRAWN)
    words = hover(browser, 1)
    assert words[0] == "round 2"
    value = 100 * real["fedirm"][0].rounds[1]["test"]["balanced_accuracy"]
    assert f"fedirm : {value:.1f}" in words
    assert any(re.fullmatch(r"cbafed : [\d.]+ ± [\d.]+", each) for each in words)  # of two seeds


@browsed
def test_a_click_on_the_legend_hides_a_row_in_all_plots_and_another_shows_it_again(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.look()
    browser.open(pages["all"], DRAWN)
    with_row = """[...document.querySelectorAll(".live")].filter(e => e.data.some(t => t.name === "fedirm")).length"""
    marks = """document.querySelector(".live").data.at(-1).y.length"""  # of the picture at the top
    before = browser.ask(with_row)
    assert before >= 4  # balanced accuracy, accuracy, AUC; coverage of pseudo-labels
    assert browser.ask(marks) == 5
    button = """(() => { const e = document.querySelector(".legend [data-row=fedirm]"), b = (e.scrollIntoView({ block:
      "center" }), e.getBoundingClientRect()); return [b.x + b.width / 2, b.y + b.height / 2] })()"""
    pressed = """[...document.querySelectorAll(".legend [data-row=fedirm]")].map(e => e.getAttribute("aria-pressed"))"""
    browser.point(*browser.ask(button), click=True)
    browser.wait(f"{with_row} === 0")
    assert browser.ask(marks) == 4
    assert set(browser.ask(pressed)) == {"false"}
    browser.point(*browser.ask(button), click=True)
    browser.wait(f"{with_row} === {before}")
    assert set(browser.ask(pressed)) == {"true"}
    assert browser.said == []


@browsed
def test_a_telephone_shows_it_without_scrolling_sideways_and_large_enough(
    pages: dict[str, Path], browser: Browser
) -> None:
    browser.look(width=390)
    browser.open(pages["all"], DRAWN)
    assert browser.ask("innerWidth") == 390
    assert browser.ask("document.documentElement.scrollWidth") <= 390
    for plot in browser.ask(PLOTS):
        assert 300 < plot["width"] <= 390, plot
        assert plot["smallest"] > 8, plot
        assert plot["outside"] == [], plot


@browsed
def test_dark_is_light_ink_on_dark_paper_and_light_the_other_way_round(
    pages: dict[str, Path], browser: Browser
) -> None:
    """Also in plots, and if someone changes it while the page is open."""

    def brightness(color: str) -> int:
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    browser.look()
    browser.open(pages["rscfed"], DRAWN)
    found = []
    for dark in (False, True):
        browser.look(dark=dark)
        browser.wait(f"matchMedia('(prefers-color-scheme: dark)').matches === {str(dark).lower()}")
        style = "getComputedStyle(document.body)"
        words = "getComputedStyle(document.querySelector('.live .xtick text')).fill"
        browser.wait(f"{words} === {style}.color")
        found.append(tuple(map(brightness, browser.ask(f"[{style}.color, {style}.backgroundColor]"))))
    (light_ink, light_paper), (dark_ink, dark_paper) = found
    assert light_paper > 700 > 100 > light_ink
    assert dark_ink > 600 > 100 > dark_paper


@browsed
def test_paper_and_browsers_without_scripts_get_plots_that_stand_still(
    pages: dict[str, Path], browser: Browser, tmp_path: Path
) -> None:
    browser.look(width=760, media="print")
    browser.open(pages["all"], DRAWN)
    for plot in browser.ask(PLOTS):
        assert plot["width"] == 0, plot
        assert plot["still"]["width"] > 300, plot
        assert plot["still"]["marks"] > 0, plot
        assert plot["still"]["broken"] == 0, plot
    assert browser.paper(tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.look()
        browser.call("Page.navigate", url=pages["rscfed"].as_uri())
        still = "[...document.querySelectorAll('figure > svg')].map(e => e.getBoundingClientRect().width)"
        browser.wait(f"document.title.startsWith('rscfed') && {still}.length >= 6")
        assert min(browser.ask(still)) > 300
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


@browsed
def test_names_are_text_in_a_browser_too(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><b>&amp;"
    confusion = {"recall_per_class": [0.75, 1.0], "confusion": [[3, 1], [0, 4]]}
    costs = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
    lines = [{"round": n, "test": metrics(0.5, **confusion), **costs} for n in (1, 2)]
    experiment = replace(Experiment(rounds=2), name=evil)
    result = lay_out(tmp_path / "run", experiment, lines, partition={"classes": [evil, "b"], "clients": []})
    browser.look()
    for path in (result.report(), Comparison([result]).report(tmp_path / "page.html")):
        browser.open(path, DRAWN)
        assert browser.said == []
        assert browser.ask("document.querySelectorAll('img').length") == 0
        ticks = browser.ask("[...document.querySelectorAll('.ytick text')].map(e => e.textContent)")
        assert "".join(in_lines(evil)) in ticks


@browsed
def test_long_names_that_begin_alike_are_told_apart_on_a_telephone(browser: Browser, tmp_path: Path) -> None:
    names = [f"our own method with lr=0.0{n}" for n in (1, 2)]
    costs = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
    lines = [{"round": 1, "test": metrics(0.5, recall_per_class=[0.75, 1.0], confusion=[[3, 1], [0, 4]]), **costs}]
    rows = [lay_out(tmp_path / name, replace(Experiment(rounds=1), name=name), lines) for name in names]
    browser.look(width=390)
    browser.open(Comparison(rows).report(tmp_path / "page.html"), DRAWN)
    for plot in browser.ask(PLOTS):
        assert plot["outside"] == [], plot
    ticks = "[...document.querySelectorAll('figure[role=group]:first-of-type .ytick text')].map(e => e.textContent)"
    assert browser.ask(ticks)[:2] == ["our own methodwith lr=0.01", "our own methodwith lr=0.02"]  # in two lines
    caption = "document.querySelector('caption').getBoundingClientRect()"
    assert browser.ask(f"{caption}.right") <= 390


def test_a_name_is_broken_into_lines_and_cut_only_if_there_is_no_place_for_it() -> None:
    assert in_lines("cbafed") == ["cbafed"]
    assert in_lines("our own method with lr=0.01") == ["our own method", "with lr=0.01"]
    assert in_lines("methods.fedprox.proximal=0.1") == ["methods.fedprox.", "proximal=0.1"]
    assert in_lines("x" * 19) == ["x" * 17 + "…"]
    assert in_lines("one two three four five six seven eight nine ten eleven") == [
        "one two three four", "five six seven", "eight nine ten el…",
    ]  # fmt: skip


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
    right, wrong = (image.get_array() for image in confusion.figure.axes[0].images)
    assert (right.filled(0) + wrong.filled(0)).sum(1).tolist() == pytest.approx([100.0] * 10)
    assert not (right.filled(0) * wrong.filled(0)).any()  # the diagonal, and all else


def test_contrast_is_that_of_wcag() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)) == 1
    assert contrast((1, 0, 0), (1, 1, 1)) == pytest.approx(1.05 / (0.2126 + 0.05))  # red has 0.2126 of white's light


@pytest.mark.parametrize("diagonal", [False, True])
def test_numbers_in_cells_of_all_shades_have_enough_contrast(diagonal: bool) -> None:
    """On white paper. WCAG asks for 4.5."""
    for value in np.arange(0.0, 101.0):
        chart = Cells(np.full((2, 2), value), ["a", "b"], ["a", "b"], "", "", PERCENT, diagonal=diagonal)
        axes = cells(chart).axes[0]
        for text in axes.texts:
            x, y = map(int, text.get_position())
            [shade] = [
                i.to_rgba(i.get_array())[y, x] for i in axes.images if not np.ma.getmaskarray(i.get_array())[y, x]
            ]
            on_paper = [1 + shade[3] * (part - 1) for part in shade[:3]]
            assert contrast(to_rgb(text.get_color()), on_paper) >= 4.5, (value, x, y)


@browsed
@pytest.mark.parametrize(("dark", "paper"), [(False, "#fff"), (True, "#16181c")])
def test_numbers_in_cells_have_enough_contrast_in_light_and_dark(
    dark: bool, paper: str, browser: Browser, tmp_path: Path
) -> None:
    """Twelve classes, whose shares on the diagonal fall from 100 to 12, and beside it rise from 0 to 88."""
    counts = (np.diag(range(100, 4, -8)) + np.roll(np.diag(range(0, 96, 8)), 1, axis=1)).tolist()
    test = metrics(0.5, recall_per_class=[0.5] * 12, confusion=counts)
    lines = [{"round": 1, "test": test, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}]
    classes = {"classes": [f"c{n}" for n in range(12)], "clients": []}
    browser.look(dark=dark)
    browser.open(lay_out(tmp_path / "run", Experiment(rounds=1), lines, partition=classes).report(), DRAWN)
    layers = browser.ask(
        """[...document.querySelectorAll(".live")].flatMap(e => e.data).filter(one => one.type === "heatmap")
        .map(one => ({ z: one.z.flat().filter(value => value !== null), top: one.zmax, scale: one.colorscale,
                       ink: one.textfont.color }))"""
    )
    assert {(layer["ink"], layer["scale"][0][1]) for layer in layers} == {("#000", paper), ("#fff", paper)}
    for layer in layers:
        pale, strong = (to_rgb(color) for _, color in layer["scale"])
        for value in layer["z"]:
            share = min(1, value / layer["top"])
            shade = [low + share * (high - low) for low, high in zip(pale, strong, strict=True)]
            assert contrast(to_rgb(layer["ink"]), shade) >= 4.5, (layer, value)


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
    names = ["benign keratosis", "melanocytic nevus"]
    figure = cells(Cells(np.zeros((2, len(rounds))), names, rounds, "pseudo-label", "round"))
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
    assert page.stat().st_size < 2.5e6  # of which plotly.js has 1.5
    curve = Comparison(results).plot().axes[0].lines[0].get_xdata()
    assert len(curve) <= MOST_POINTS
    assert curve[-1] == 600
