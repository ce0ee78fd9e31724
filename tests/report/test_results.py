"""Results as people see them: every number as the run's directory has it, and nothing on the page from elsewhere."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.plots import ClassMatrix
from fewlabel.engine.run import execute, prepare
from fewlabel.experiment import Clients, Evaluate, Experiment, Labels, dumps
from fewlabel.report.comparison import Comparison, open_results
from fewlabel.report.groups import short_labels
from fewlabel.report.matrices import class_matrix
from fewlabel.report.page import PLOTLY, script
from fewlabel.report.results import Result
from fewlabel.report.runs import METRICS, Row
from fewlabel.report.tables import Spread, Table
from tests.report.layout import lay_out, metrics

EXPERIMENT = Experiment(method="fedprox", rounds=2, clients=Clients(count=8))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Two methods, two seeds, two rounds."""
    root = tmp_path_factory.mktemp("runs")
    found = []
    for method in ("fedprox", "labels-only"):
        for seed in (0, 1):
            directory = root / f"{method}-{seed}"
            prepare(replace(EXPERIMENT, method=method, name="", seed=seed), directory)
            execute(directory, workers=1)
            found.append(Result(directory))
    return found


def line(number: int, test: float | None, validation: float | None = None, **more: Any) -> dict[str, Any]:
    """A line of rounds.jsonl; all metrics of a split have one value, and each class half of it as its recall."""
    found: dict[str, Any] = {"round": number, "seconds": 2.0, "bytes_up": 1_000_000, "bytes_down": 500_000}
    found |= {"model_bytes": 3_000_000, "asked": 4, "replies": 3, "images_labeled": 0, "images_unlabeled": 0, **more}
    for split, value in {"test": test, "validation": validation}.items():
        if value is not None:
            found[split] = metrics(value, recall_per_class=[value / 2] * 2, confusion=[[3, 1], [0, 4]])
    return found


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Lays out a run whose numbers are known."""

    def make(
        experiment: Experiment,
        lines: list[dict[str, Any]],
        finished: bool = True,
        classes: tuple[str, ...] = ("a", "b"),
    ) -> Result:
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        return lay_out(directory, experiment, lines, finished, {"classes": classes})

    return make


def column(table: Table, number: int) -> dict[str, str]:
    return {row[0]: row[number] for row in table.rows}


def cell(comparison: Comparison, row: str, heading: str) -> str:
    table = comparison.table()
    return column(table, table.columns.index(heading))[row]


# one run


def test_a_real_run_is_read_as_its_summary_has_it(real: list[Result]) -> None:
    for result in real:
        assert result.finished
        assert result.summary is not None
        assert result.last == result.summary["last"]
        assert result.chosen == result.summary["chosen_on_validation"]
        spent = result.spent()
        assert {key: spent[key] for key in ("bytes_up", "bytes_down", "bytes_of_fedavg", "seconds")} == pytest.approx(
            {key: result.summary[key] for key in ("bytes_up", "bytes_down", "bytes_of_fedavg", "seconds")}
        )


def test_the_table_of_a_run_tells_how_much_privacy_was_spent(made: Any) -> None:
    private = made(EXPERIMENT, [line(1, 0.5, epsilon=3.0), line(2, 0.6, epsilon=7.988)]).table().notes
    assert "Differential privacy of each image: a site spent epsilon 7.99 at most." in private
    assert not [note for note in made(EXPERIMENT, [line(1, 0.5)]).table().notes if "privacy" in note]


def test_the_table_of_a_real_run_shows_the_numbers_of_its_summary(real: list[Result]) -> None:
    result = real[0]
    assert result.summary is not None
    last = column(result.table(), 1)
    test = result.summary["last"]["test"]
    for key, words in METRICS.items():
        assert last[words] == f"{100 * test[key]:.1f}"
    assert last["recall of 3"] == f"{100 * test['recall_per_class'][3]:.1f}"
    assert last["sent by clients, MB"] == f"{result.summary['bytes_up'] / 1e6:.3g}"
    assert result.table().columns[1] == "last round (2)"


def test_metrics_are_of_the_last_and_of_the_chosen_round_and_costs_up_to_it(made: Any) -> None:
    lines = [line(1, 0.5, 0.6), line(2, 0.7, 0.6), line(3, 0.4, 0.1, pseudo_labels={"coverage": 0.25, "precision": 1})]
    table = made(replace(EXPERIMENT, rounds=3), lines).table()
    assert table.columns == ("", "last round (3)", "chosen on validation (1)")  # the first of two equals
    assert dict(zip(table.columns, next(row for row in table.rows if row[0] == "AUC"), strict=True)) == {
        "": "AUC",
        "last round (3)": "40.0",
        "chosen on validation (1)": "50.0",
    }
    assert table.rows[-11:] == (
        ("recall of a", "20.0", "25.0"),
        ("recall of b", "20.0", "25.0"),
        ("pseudo-labels: coverage", "25.0", "–"),
        ("pseudo-labels: precision", "100.0", "–"),
        ("sent by clients, MB", "3", "1"),
        ("sent to clients, MB", "1.5", "0.5"),
        ("a reply, % of FedAvg's", "50", "50"),
        ("replies", "9 of 12", "3 of 4"),
        ("images trained on, labeled", "0", "0"),
        ("images trained on, unlabeled", "0", "0"),
        ("seconds", "6.0", "2.0"),
    )


def test_a_choice_by_few_validation_images_is_said_to_be_partly_luck(made: Any) -> None:
    def luck(images: int) -> list[str]:
        lines = [line(number, 0.5, 0.6) for number in (1, 2)]
        for one in lines:
            one["validation"]["images"] = images
        return [note for note in made(EXPERIMENT, lines).table().notes if "luck" in note]

    assert luck(100) == []
    assert luck(99) == ["Only 99 images chose the round on validation, so luck has a say: trust the last round more."]


def test_recalls_of_many_classes_are_left_out(made: Any) -> None:
    result = made(EXPERIMENT, [line(1, 0.5), line(2, 0.5)], classes=tuple(map(str, range(13))))
    assert not [row for row in result.table().rows if row[0].startswith("recall of")]


def test_without_validation_no_round_is_chosen(made: Any) -> None:
    result = made(EXPERIMENT, [line(1, 0.6), line(2, 0.6)])
    assert result.table().columns == ("", "last round (2)")
    assert cell(Comparison([result]), "fedprox", "chosen round: accuracy") == "–"


def test_a_run_without_a_shared_model_still_shows_its_costs(made: Any) -> None:
    rows = made(EXPERIMENT, [line(1, None), line(2, None)]).table().rows
    assert rows[0][0] == "sent by clients, MB"


@pytest.mark.parametrize("done", [0, 1])
def test_an_unfinished_run_shows_what_it_has(made: Any, done: int, tmp_path: Path) -> None:
    result = made(EXPERIMENT, [line(1, 0.6, 0.6)][:done], finished=False)
    assert not result.finished
    assert result.status == f"unfinished, round {done} of 2"
    assert f"Unfinished, round {done} of 2." in str(result)
    assert len(result.plot().axes[0].lines) == (5 if done else 0)
    assert "No run is finished yet" in result.report().read_text()
    comparison = Comparison([result])
    assert comparison.table().rows[0][:2] == ("fedprox*", "60.0 ± 19" if done else "–")
    assert f"* fedprox, seed 0: unfinished, round {done} of 2." in comparison.table().notes
    assert comparison.to_json()[0]["unfinished"] == {"0": f"unfinished, round {done} of 2"}
    comparison.report(tmp_path / "page.html")


def test_a_directory_without_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run: it has no experiment"):
        Result(tmp_path)
    with pytest.raises(BadInput, match="nothing to compare"):
        Comparison([])


# several runs


def test_spread_is_the_mean_and_the_deviation_of_the_sample() -> None:
    """0.6 and 0.7: mean 0.65, each 0.05 from it, so sqrt(2 * 0.05^2 / 1) = 0.0707."""
    spread = Spread.of([0.6, None, 0.7])
    assert spread is not None
    assert (spread.mean, spread.std) == pytest.approx((0.65, 0.05 * 2**0.5))
    assert str(spread) == "65.0 ± 7.1"
    assert str(Spread.of([0.6])) == "60.0"
    assert str(Spread(0.6, 0.123)) == "60.0 ± 12"
    assert Spread.of([None]) is None


def test_the_comparison_of_real_runs_is_that_of_their_summaries(real: list[Result]) -> None:
    comparison = Comparison(real)
    assert [row.label for row in comparison.rows] == ["labels-only", "fedprox"]
    first, second = (json.loads((r.directory / "summary.json").read_text()) for r in real[:2])
    a, b = first["last"]["test"]["auc"], second["last"]["test"]["auc"]
    row = comparison.to_json()[1]
    assert row["seeds"] == [0, 1]
    assert row["last"]["auc"] == pytest.approx({"mean": (a + b) / 2, "std": abs(a - b) / 2**0.5})
    a, b = (each["chosen_on_validation"]["test"]["accuracy"] for each in (first, second))
    assert row["chosen_on_validation"]["accuracy"]["mean"] == pytest.approx((a + b) / 2)
    assert row["bytes_up"] == (first["bytes_up"] + second["bytes_up"]) / 2
    assert json.loads(json.dumps(comparison.to_json())) == comparison.to_json()


def test_a_row_of_the_comparison_by_hand(made: Any) -> None:
    results = [
        made(replace(EXPERIMENT, seed=seed), [line(1, 0.8, 0.9), line(2, value, 0.1)])
        for seed, value in enumerate((0.6, 0.7))
    ]
    table = Comparison(results).table()
    # 2 rounds of 1.5 MB where FedAvg sends 3 MB.
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "method": "fedprox",
        "accuracy": "65.0 ± 7.1",
        "balanced acc.": "65.0 ± 7.1",
        "AUC": "65.0 ± 7.1",
        "chosen round: accuracy": "80.0 ± 0.0",
        "images, thousands": "0 + 0",
        "sent, MB (of FedAvg)": "3 (50%)",
        "sec.": "4.0",
    }
    assert table.notes[0].startswith("Mean ± standard deviation of seeds 0, 1; 2 rounds. Metrics are of the last round")
    assert table.title == "Test results on digits, in percent"


def test_one_seed_has_no_deviation(made: Any) -> None:
    comparison = Comparison([made(EXPERIMENT, [line(1, 0.5), line(2, 0.6)])])
    assert "standard deviation" not in str(comparison)
    assert comparison.to_json()[0]["last"]["accuracy"] == {"mean": 0.6, "std": None}
    assert not comparison.plot().axes[0].collections


def test_floor_first_ceiling_last_others_as_they_came(made: Any) -> None:
    names = ("all-labels", "fedprox", "labels-only", "fedavg")
    results = [made(Experiment(method=name, rounds=1), [line(1, 0.5)]) for name in names]
    assert [row.name for row in Comparison(results).rows] == ["labels-only", "fedprox", "fedavg", "all-labels"]


def test_a_run_made_twice_counts_once(made: Any) -> None:
    half = made(EXPERIMENT, [line(1, 0.1)], finished=False)
    whole = made(EXPERIMENT, [line(1, 0.1), line(2, 0.6)])
    for results in ([half, whole], [whole, half]):
        (row,) = Comparison(results).rows
        assert row.results == (whole,)


def test_labels_tell_rows_of_one_name_apart() -> None:
    a = Experiment(method="fedprox")
    b = replace(a, clients=Clients(alpha=0.1, dropout=0.5))
    c = replace(b, model=replace(a.model, dropout=0.2))
    other = Experiment(method="fedavg", clients=Clients(alpha=3.0))
    assert short_labels([a, b, other]) == ["fedprox alpha=0.8 dropout=0.0", "fedprox alpha=0.1 dropout=0.5", "fedavg"]
    assert short_labels([a, b, c])[2] == "fedprox alpha=0.1 clients.dropout=0.5 model.dropout=0.2"
    assert short_labels([a, b, c])[0] == "fedprox alpha=0.8 clients.dropout=0.0 model.dropout=none"


def test_a_comparison_of_unlike_with_unlike_says_so(made: Any) -> None:
    one = made(Experiment(method="fedprox", rounds=1), [line(1, 0.5)])
    like = made(Experiment(method="fedavg", rounds=1), [line(1, 0.5)])
    unlike = made(Experiment(method="fedavg", rounds=1, clients=Clients(alpha=0.1)), [line(1, 0.5)])
    ceiling = made(Experiment(method="all-labels", rounds=1), [line(1, 0.5)])
    assert "more than their method" not in str(Comparison([one, like, ceiling]))
    often = made(Experiment(method="fedavg", rounds=1, evaluate=Evaluate(every=2)), [line(1, 0.5)])
    assert "Rows differ in more than their method: evaluate.every." in Comparison([one, often]).table().notes
    assert "more than their method" not in str(Comparison([like, unlike]))  # two groups


# how it looks


class Page(HTMLParser):
    """Reads a page and refuses one whose elements do not close."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_points_nowhere(real: list[Result], tmp_path: Path) -> None:
    paths = [Comparison(real).report(tmp_path / "new" / "page.html"), real[0].report()]
    assert paths[1] == real[0].directory / "report.html"
    for path in paths:
        text = path.read_text()
        page = Page(text)
        tags = [tag for tag, _ in page.seen]
        assert {"table", "svg", "details", "style", "script"} <= set(tags)
        assert not {"link", "iframe"} & set(tags)
        assert "http" not in text.replace(script(PLOTLY), "")  # it names addresses, which nobody asks for
        charts = [attributes for tag, attributes in page.seen if tag == "script" and attributes]
        assert all(attributes == {"type": "application/json"} for attributes in charts)
        assert sum(tag == "svg" for tag in tags) == text.count('role="img" aria-label=') == len(charts) > 5
        assert "@import" not in text
        for _, attributes in page.seen:
            for name in ("href", "xlink:href", "src"):
                assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
        assert len(text) < 2_500_000
        assert "prefers-color-scheme: dark" in text
        assert "#000000" not in text.replace(script(PLOTLY), "")  # ink that would not be seen on a dark page
        assert f"torch {real[0].summary['versions']['torch']}" in page.text  # type: ignore[index]
        assert dumps(replace(real[0].experiment, seed=0)) in page.text
    assert "fewlabel run experiment.toml --seeds 0,1" in Page(paths[0].read_text()).text
    assert "fewlabel run experiment.toml --seed 0" in Page(paths[1].read_text()).text


def test_the_same_runs_give_the_same_page(real: list[Result], tmp_path: Path) -> None:
    one, two = (Comparison(real).report(tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert one == two


def test_names_are_escaped(made: Any, tmp_path: Path) -> None:
    experiment = replace(EXPERIMENT, name="<script>alert('&')</script>")
    result = made(experiment, [line(1, 0.5, 0.5), line(2, 0.5, 0.5)], classes=("<b>", "&amp;"))
    for text in (
        result.report().read_text(),
        Comparison([result]).report(tmp_path / "page.html").read_text(),
        f"{result._repr_html_()}{Comparison([result])._repr_html_()}",
    ):
        assert "<script>alert" not in text
        assert set(re.findall("<script[^>]*>", text)) <= {"<script>", '<script type="application/json">'}
        assert text.count("<script>") in (0, 2)  # plotly.js, and ours
        assert "<script>alert('&')</script>" in Page(text).text
    assert "recall of &amp;" in Page(result._repr_html_()).text


@pytest.mark.filterwarnings("error")
def test_names_may_have_letters_of_any_language(made: Any) -> None:
    result = made(EXPERIMENT, [line(1, 0.5), line(2, 0.5)], classes=("黑色素瘤", "痣"))
    assert "黑色素瘤</text>" in result.report().read_text()


def test_dollars_in_names_are_no_formulas(made: Any, tmp_path: Path) -> None:
    result = made(replace(EXPERIMENT, name="$\\frac{x$"), [line(1, 0.5), line(2, 0.5)])
    assert Comparison([result]).report(tmp_path / "page.html").exists()


def test_curves_have_a_line_for_each_row_and_a_band_over_seeds(real: list[Result], tmp_path: Path) -> None:
    figure = Comparison(real).plot(tmp_path / "curves.png")
    axes = figure.axes[0]
    assert [each.get_label() for each in axes.lines] == ["labels-only", "fedprox"]
    assert len(axes.collections) == 2
    assert axes.lines[0].is_dashed()
    assert not axes.lines[1].is_dashed()
    means = [50 * sum(result.rounds[n]["test"]["accuracy"] for result in real[:2]) for n in (0, 1)]
    assert axes.lines[1].get_xdata().tolist() == [1, 2]
    assert axes.lines[1].get_ydata().tolist() == pytest.approx(means)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_curves_of_a_run_are_accuracy_and_auc_on_test_and_validation(real: list[Result], tmp_path: Path) -> None:
    axes = real[0].plot(tmp_path / "curves.svg").axes[0]
    words = ["test accuracy", "validation accuracy", "test AUC", "validation AUC", "chosen on validation"]
    assert [each.get_label() for each in axes.lines] == words
    expected = [100 * each["validation"]["auc"] for each in real[0].rounds]
    assert axes.lines[3].get_ydata().tolist() == pytest.approx(expected)


def test_a_plot_or_page_that_cannot_be_saved_says_why(real: list[Result], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="its ending must be one of"):
        real[0].plot(tmp_path / "curves.doc")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        real[0].report(tmp_path / "file" / "page.html")


def test_the_labels_of_an_experiment_may_lie_anywhere(made: Any) -> None:
    server = Experiment(method="labels-only", rounds=1, labels=Labels(at="server", per_class=5))
    nothing_sent = line(1, 0.6, bytes_up=0, bytes_down=0, model_bytes=0, asked=0, replies=0)
    assert cell(Comparison([made(server, [nothing_sent])]), "labels-only", "sent, MB (of FedAvg)") == "0 (0%)"


def test_drawing_leaves_pyplot_and_importing_leaves_torch_alone() -> None:
    code = "import sys, fewlabel.report.style; print([m for m in ('torch', 'matplotlib', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = "import sys; from fewlabel.report.style import empty_plot, svg; svg(empty_plot('')[0]);"
    code += "print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_directory_of_runs_is_shown_side_by_side_and_that_of_one_run_alone(real: list[Result]) -> None:
    assert isinstance(open_results(real[0].directory), Result)
    together = open_results(real[0].directory.parent)
    assert isinstance(together, Comparison)
    assert {result.directory for row in together.rows for result in row.results} <= set(
        real[0].directory.parent.iterdir()
    )


def test_the_images_trained_on_are_counted(real: list[Result]) -> None:
    for result in real:
        spent = result.spent()
        assert spent["images_labeled"] == sum(line["images_labeled"] for line in result.rounds) > 0
        assert f"{spent['images_labeled']:,}" in str(result.table())
    seen = sum(result.spent()["images_labeled"] for result in real[:2]) / 2e3
    assert cell(Comparison(real), "fedprox", "images, thousands") == f"{seen:.1f} + 0"


def test_a_matrix_that_a_method_logs_is_drawn_where_there_is_one(real: list[Result], tmp_path: Path) -> None:
    plot = ClassMatrix("Relations", "why", "relation")
    assert not list(class_matrix(Row("a", (real[0],)), plot))
    line = {"round": 3, "relation": [[0.9, 0.1], [None, None]], "shown": {"relation": [[0.6, 0.4], [0.2, 0.8]]}}
    run = Result(real[0].directory)
    run.rounds = [*run.rounds[:-1], run.rounds[-1] | line]
    shown = [drawing.figure.axes[0].images[0].get_array() for drawing in class_matrix(Row("a", (run,)), plot)]
    assert shown[2][0].tolist() == pytest.approx([0.3, 0.3])
    assert shown[2].mask[1].all() or np.isnan(shown[2][1]).all()


def test_class_matrices_are_drawn_for_the_first_a_middle_and_the_last_round(real: list[Result]) -> None:
    def line(number: int, sure: float) -> dict[str, object]:
        labeled, unlabeled = [[sure, 1 - sure], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]
        return {"round": number, "shown": {"relation": unlabeled, "labeled_relation": labeled}}  # nothing is logged

    run = Result(real[0].directory)
    run.rounds = [line(number, 0.5 + number / 20) for number in range(1, 6)]
    drawings = list(class_matrix(Row("a", (run,)), ClassMatrix("Relations", "why", "relation")))
    assert [drawing.caption for drawing in drawings[2::3]] == [f"a, round {n}: absolute difference" for n in (1, 3, 5)]
    differences = [drawing.figure.axes[0].images[0].get_array()[0][0] for drawing in drawings[2::3]]
    assert differences == pytest.approx([0.05, 0.15, 0.25])
