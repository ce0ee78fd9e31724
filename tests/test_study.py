"""The study behind docs/RESULTS.md, from a table's file to the page, on runs as small as they can be."""

import csv
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments import render, study
from fewlabel.papers.reproduce import experiments_of
from fewlabel.papers.tables import read_table

TABLE = """
paper = "ours"
title = "tiny"
images = 4_000
tuned = "tuned-t.toml"

[experiment]
data = { name = "digits", image_size = 16 }
clients.count = 4
labels.at = "some-clients"
method.local = { epochs = 1, batch_size = 32 }

[rows]
labels-only = { passes = [1, 0], method.name = "labels-only" }
cbafed      = { passes = [1, 0.5], method = { name = "cbafed", warmup_epochs = 2 } }
all-labels  = { passes = [1, 0], method.name = "all-labels" }

[cells.l1]
labels.clients = 1
paper = { cbafed = { accuracy = 12.5 } }

[cells.l2]
labels.clients = 2
passes = { labels-only = [2, 0] }
"""

TUNING = """
cell = "l1"
seed = 7

[axes]
rate = [{ method.local.lr = 0.0001 }, { method.local.lr = 0.05 }]

[rows]
labels-only = ["rate"]
"""

PAGE = """# Page
<!-- t-tiny -->
old
<!-- end -->
between
<!-- tuning-t -->
<!-- end -->
<!-- t-other -->
<!-- end -->
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in {"TABLES": tmp_path, "DOCS": tmp_path, "SEEDS": (0, 1)}.items():
        monkeypatch.setattr(study, name, value)
    for name in ("TABLES", "DOCS"):
        monkeypatch.setattr(render, name, tmp_path)
    (tmp_path / "t-tiny.toml").write_text(TABLE)
    (tmp_path / "tuning-t.toml").write_text(TUNING)
    (tmp_path / "RESULTS.md").write_text(PAGE)
    return tmp_path


def lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_study_from_its_table_to_its_page(tiny: Path, capsys: pytest.CaptureFixture[str]):
    study.run(["t-tiny"])
    order = [line for line in capsys.readouterr().out.splitlines() if "t-tiny/" in line]
    assert len(order) == 12
    assert all("t-tiny/l1/" in line for line in order[:6])  # the first cell is first
    # Tuning: the higher rate learns, the other does not; it is chosen by validation, and written down.
    tried = lines(tiny / "results" / "tuning-t.csv")
    assert [line["settings"] for line in tried] == ["method.local.lr=0.0001", "method.local.lr=0.05"]
    assert [line["chosen"] for line in tried] == ["False", "True"]
    run = tiny / "runs/results/tuning-t/labels-only-rate2"
    assert json.loads((run / "summary.json").read_text())["seed"] == 7
    last = json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])
    assert float(tried[1]["validation_balanced_accuracy"]) == last["validation"]["balanced_accuracy"]
    rows = {row.name: row for row in read_table(tiny / "t-tiny.toml").rows}
    assert rows["l2/labels-only"].experiment().method.local.lr == 0.05
    assert rows["l2/cbafed"].experiment().method.local.lr == 0.03
    # A line per run says what the run says.
    found = lines(tiny / "results" / "t-tiny.csv")
    assert len(found) == 12
    for line in found:
        run = tiny / "runs/results/t-tiny" / line["cell"] / f"{line['row']}-seed{line['seed']}"
        summary = json.loads((run / "summary.json").read_text())
        assert float(line["last_accuracy"]) == pytest.approx(summary["last"]["test"]["accuracy"], abs=1e-5)
        assert line["partition"] == summary["partition"]
        if line["cell"] == "l1" and line["row"] != "cbafed":  # whose pseudo-labels are as many as they are
            images = int(line["images_labeled"]) + int(line["images_unlabeled"])
            assert images == pytest.approx(4_000, abs=600)  # half a round
    assert {line["pseudo_label_precision"] == "" for line in found if line["row"] != "cbafed"} == {True}
    for score, short in (("0.12", True), ("0.14", False)):  # of ten classes; who guesses has not converged
        one = {**found[0], "converged": "True", "last_balanced_accuracy": score}
        told = render.cell_table("t-tiny", "l1", {"labels-only": [one]}, {"labels-only": {}}, {}).rows[0][1]
        assert ("short" in told) is short
    # The page: what is outside of the marks stays.
    render.render()
    page = (tiny / "RESULTS.md").read_text()
    assert page.startswith("# Page\n<!-- t-tiny -->\n**t-tiny, l1**")
    assert "between" in page
    assert "old" not in page
    assert page.endswith("<!-- t-other -->\nNot run yet.\n<!-- end -->\n")
    heads, cbafed = (
        next(line for line in page.splitlines() if line.startswith(f"| {row}")) for row in ("row", "cbafed")
    )
    assert cbafed.split("|")[heads.split("|").index(" paper: accuracy ")] == " 12.5 "
    assert (tiny / "results" / "t-tiny-l1.png").stat().st_size > 1000
    render.render()
    assert (tiny / "RESULTS.md").read_text() == page
    # Done again, nothing is left to do.
    study.run(["t-tiny"])
    assert "t-tiny" not in capsys.readouterr().out


def test_a_run_begun_with_other_settings_is_not_gone_on_with(tiny: Path):
    trial = study.trials("t-tiny")[0]
    study.lay_out(trial, {})
    study.lay_out(trial, {})
    (tiny / "t-tiny.toml").write_text(TABLE.replace("batch_size = 32", "batch_size = 16"))
    with pytest.raises(study.BadInput, match="begun with other settings"):
        study.lay_out(study.trials("t-tiny")[0], {})


def test_equal_runs_of_two_tables_are_one(tiny: Path, capsys: pytest.CaptureFixture[str]):
    (tiny / "u-other.toml").write_text('of = "t-tiny.toml"\ntitle = "other"\n' + TABLE[TABLE.index("[rows]") :])
    study.run(["t-tiny"])
    capsys.readouterr()
    study.run(["u-other"])
    assert "done" not in capsys.readouterr().out
    ours, theirs = (lines(tiny / "results" / f"{table}.csv") for table in ("t-tiny", "u-other"))
    assert {line["table"] for line in theirs} == {"u-other"}
    assert [{**line, "table": ""} for line in ours] == [{**line, "table": ""} for line in theirs]
    assert (tiny / "runs/results/u-other/l2/cbafed-seed1").is_symlink()
    shutil.rmtree(tiny / "runs/results/t-tiny/l2/cbafed-seed1")  # as whoever wants it anew is told to
    study.run(["u-other"])
    assert (tiny / "runs/results/u-other/l2/cbafed-seed1/summary.json").exists()
    assert lines(tiny / "results" / "u-other.csv")[-3]["partition"] == theirs[-3]["partition"]


def test_what_is_written_down_stays_though_its_run_is_not_here(tiny: Path):
    study.run(["t-tiny"])
    table, curves = (tiny / "results" / f"t-tiny.{kind}" for kind in ("csv", "json"))
    found, drawn = table.read_text(), json.loads(curves.read_text())
    end = drawn["l2"]["all-labels"]["accuracy"][-1]
    assert end == pytest.approx(statistics.fmean(float(line["last_accuracy"]) for line in lines(table)[-2:]), abs=1e-4)
    shutil.rmtree(tiny / "runs/results/t-tiny/l1")
    shutil.rmtree(tiny / "runs/results/t-tiny/l2/cbafed-seed1")
    for cell, row in (("l1", "cbafed"), ("l2", "cbafed"), ("l2", "all-labels")):  # as another machine had it
        drawn[cell][row]["accuracy"][-1] = 0.5
    curves.write_text(json.dumps(drawn))
    study.write_csv(table, [{**line, "seconds": 7} for line in lines(table)])
    study.collect(["t-tiny"])
    at_hand = [line["seconds"] != "7" for line in lines(table)]
    assert at_hand == [False] * 6 + [True, True, True, False, True, True]
    drawn["l2"]["all-labels"]["accuracy"][-1] = end  # of the others not all seeds are here
    assert json.loads(curves.read_text()) == drawn
    study.write_csv(table, [{key: line[key] for key in line if key != "measured"} for line in lines(table)])
    study.collect(["t-tiny"])
    assert [line["measured"] != "" for line in lines(table)] == at_hand  # a column that older lines do not have
    (tiny / "t-tiny.toml").write_text(TABLE.replace("[cells.l1]", "[cells.l3]"))
    render.render()  # nor does it mind lines that the table no longer has
    assert "t-tiny, l1" not in (tiny / "RESULTS.md").read_text()
    study.collect(["t-tiny"])
    assert {line["cell"] for line in lines(table)} == {"l2"}
    assert found.splitlines()[0] == table.read_text().splitlines()[0]


def test_a_table_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study.write_csv(tmp_path / "t.csv", [{"row": "a"}])

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(os, "rename", full)
    with pytest.raises((OSError, study.FewLabelError)):
        study.write_csv(tmp_path / "t.csv", [{"row": "b"}])
    assert (tmp_path / "t.csv").read_text() == "row\na\n"


def test_a_row_that_names_a_seed_has_that_one(tiny: Path):
    (tiny / "t-tiny.toml").write_text(TABLE.replace("cbafed      = { ", "cbafed = { seed = 5, "))
    assert [trial.experiment.seed for trial in study.trials("t-tiny") if trial.row == "cbafed"] == [5, 5]


def test_rounds_follow_from_the_work_and_from_who_holds_what(tiny: Path):
    table = {row.name: row for row in read_table(tiny / "t-tiny.toml").rows}
    (floor,), (other,) = (experiments_of(table[name], seeds=[0]) for name in ("l1/labels-only", "l1/cbafed"))
    study.prepare(floor, tiny / "floor")
    clients = json.loads((tiny / "floor" / "partition.json").read_text())["clients"]
    labeled, unlabeled = (sum(len(client[kind]) for client in clients) for kind in ("labeled", "unlabeled"))
    assert floor.rounds == round(4_000 / labeled)
    assert other.rounds == 1 + round((4_000 - 2 * labeled) / (labeled + 0.5 * unlabeled))
    (half,) = experiments_of(table["l2/labels-only"], seeds=[0])
    study.prepare(half, tiny / "half")
    clients = json.loads((tiny / "half" / "partition.json").read_text())["clients"]
    assert half.rounds == round(4_000 / (2 * sum(len(client["labeled"]) for client in clients)))
    assert floor.evaluate.every == max(1, round(floor.rounds / 16))
    assert table["l1/cbafed"].paper["accuracy"].mean == 12.5
    assert not table["l2/cbafed"].paper
    assert table["l1/cbafed"].notes == ("Not tuned yet.",)
    (short,) = experiments_of(table["l1/labels-only"], rounds=3)
    assert short.rounds == 3


def test_curves_of_seeds_are_averaged_at_equal_work_and_end_where_tables_do():
    often = [{"images": 10 * n, "accuracy": n / 10, "precision": None} for n in (1, 2, 3, 4)]
    seldom = [{"images": 20, "accuracy": 0.4, "precision": 0.5}, {"images": 50, "accuracy": 0.6, "precision": None}]
    # At two fifths of the work the first is at 16 images and, on the line between 0.1 and 0.2, at 0.16.
    assert study.averaged([often, seldom]) == {
        "images": [18.0, 45.0], "accuracy": [0.28, 0.5], "precision": [0.5, None],
    }  # fmt: skip


def cell(**means: list[float]) -> dict[str, list[dict[str, str]]]:
    return {row: [{"last_balanced_accuracy": str(value)} for value in values] for row, values in means.items()}


def test_the_gap_closed_is_by_means_over_seeds():
    rows = cell(**{"labels-only": [0.5, 0.7], "all-labels": [0.8, 0.8], "rscfed": [0.75, 0.55], "isofed": [0.5, 0.5]})
    assert render.closed(rows, "rscfed") == "25"  # (0.65 - 0.6) / (0.8 - 0.6)
    assert render.closed(rows, "isofed") == "-50"
    assert render.closed(rows, "labels-only") == "–"
    assert render.closed(cell(**{"labels-only": [0.6], "fedavg-sl": [0.8], "fedmatch": [0.7]}), "fedmatch") == "50"
    assert render.closed(cell(**{"labels-only": [0.8], "all-labels": [0.8], "rscfed": [0.9]}), "rscfed") == "–"


def test_how_soon_a_row_comes_near_the_floor_is_by_the_mean_curve():
    rows = cell(**{"labels-only": [0.6, 0.8]})  # nine tenths of 0.7 are 0.63
    curve = {"images": [1_000, 20_000, 31_000, 40_000], "balanced_accuracy": [0.1, 0.62, 0.63, 0.5]}
    assert render.until(rows, curve) == "31"
    assert render.until(rows, {"images": [1_000], "balanced_accuracy": [0.62]}) == "–"
    assert render.until({}, curve) == render.until(rows, None) == "–"


def test_the_floor_after_as_many_labeled_images_is_on_the_line_between_its_measurements():
    floor = {"images": [10, 30], "balanced_accuracy": [0.4, 0.8]}
    one = {"row": "rscfed", "last_balanced_accuracy": "0.5", "images_labeled": "14"}
    found = [one, {**one, "images_labeled": "16"}]
    assert render.beside_floor(found, floor) == "50.0"  # a quarter of the way
    assert render.beside_floor([{**one, "images_labeled": "5"}], floor) == "up to 40.0"
    assert render.beside_floor([{**one, "images_labeled": "34"}], floor) == "–"  # the floor never had as many
    assert render.beside_floor([{**one, "last_balanced_accuracy": ""}], floor) == "–"  # no model of a server's
    for bound in ("labels-only", "all-labels", "fedavg-sl"):
        assert render.beside_floor([{**one, "row": bound}], floor) == "–"
    assert render.beside_floor(found, None) == "–"
    assert render.settled({"balanced_accuracy": [0.9, 0.1, 0.2, 0.3, 0.4]}) == "25.0"


def test_no_two_rows_of_a_plot_look_alike():
    rows = ["labels-only", *(f"rscfed-{n}" for n in range(6)), "isofed", "all-labels"]
    together = render.pictures(rows)
    assert list(together) == ["-rscfed", "-isofed"]
    assert together["-isofed"] == ["labels-only", "all-labels", "isofed"]
    assert render.pictures(rows[3:]) == {"": rows[3:]}  # four of a family have a style each
    assert [style["color"] == render.GREY for _, style in render.styles(together["-isofed"])] == [True, True, False]
    assert {style["linestyle"] for _, style in render.styles(["fed-consist", "fed-other"])} == {"-"}  # no family
    for drawn in (*together.values(), rows[3:]):
        looks = [(style["color"], style["linestyle"]) for _, style in render.styles(drawn)]
        assert len(set(looks)) == len(drawn)


def test_cells_that_are_points_of_an_axis_are_drawn_along_it(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    figures: list[Any] = []
    monkeypatch.setattr(render, "finish_plot", lambda figure, path: figures.append(figure))
    scores = {"g100": 0.9, "u9": 0.6, "u4": 0.5, "g01": 0.3}
    found = {name: cell(**{"labels-only": [score], "rscfed": [score - 0.1]}) for name, score in scores.items()}
    told = list(render.trends("t-tiny", found))
    assert [line.partition("](")[2].strip(")\n") for line in told] == [
        "results/t-tiny-by-unlabeled.png", "results/t-tiny-by-gamma.png",
    ]  # fmt: skip
    clients, gammas = (
        {line.get_label(): [*map(tuple, line.get_xydata().round(6))] for line in figure.axes[0].lines}
        for figure in figures
    )
    assert clients == {"labels-only": [(4, 50), (9, 60)], "rscfed": [(4, 40), (9, 50)]}
    assert gammas["labels-only"] == [(0.1, 30), (0.8, 60), (10, 90)]  # u9 is (b)'s, with 0.8
    assert not list(render.trends("t-tiny", {"u4": found["u4"], "l1": found["u4"]}))  # a point is no line


def test_what_becomes_of_each_row_over_all_cells(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(render, "COMPARED", {"t-one": "Digits"})
    scores = {
        ("l1", "labels-only"): (0.6, 0.7),
        ("l1", "rscfed"): (0.65, 0.71),  # 5 and 1 points above
        ("l1", "isofed"): (0.52, 0.5),  # 8 and 20 below, and guessing
        ("l1", "all-labels"): (0.8, 0.9),
        ("l2", "labels-only"): (0.7, 0.7),
        ("l2", "rscfed"): (0.72, 0.66),  # 2 above, 4 below
        ("l2", "isofed"): (0.75, 0.79),  # 5 and 9 above
        ("l2", "all-labels"): (0.9, 0.9),
    }
    empty = dict.fromkeys(("pseudo_label_precision", "pseudo_label_coverage"), "")
    empty |= {f"{key}_first": "" for key in empty} | {"classes": 2, "images_labeled": 10}
    found = [
        {"cell": cell, "row": row, "seed": seed, "last_balanced_accuracy": value, "last_auc": 1 - value, **empty}
        for (cell, row), values in scores.items()
        for seed, value in enumerate(values)
    ]
    study.write_csv(tiny / "results" / "t-one.csv", found)
    floor = {"images": [5, 15], "balanced_accuracy": [0.5, 0.6]}  # 0.55 after ten images
    (tiny / "results" / "t-one.json").write_text(json.dumps({cell: {"labels-only": floor} for cell in ("l1", "l2")}))
    cells = list(render.situations())
    assert render.overall(cells).columns[1] == "Digits, 2 cells"
    assert render.overall(cells).rows == (
        ("all-labels", "+20.0", "-20.0", "–", "2 of 2", "0 of 2", "0 of 4", "–", "–"),
        ("rscfed", "+1.0", "-1.0", "+13.5", "1 of 2", "0 of 2", "0 of 4", "–", "–"),  # (3 - 1) / 2
        ("isofed", "-3.5", "+3.5", "+9.0", "1 of 2", "1 of 2", "2 of 4", "–", "–"),  # (-14 + 7) / 2
    )
    other = [("Other, l1", cell(**{"labels-only": [0.5], "isofed": [0.9]}), {"labels-only": floor})]
    for rows in other[0][1].values():
        rows[0] |= {"seed": "0", "last_auc": "0.5", **{key: str(value) for key, value in empty.items()}}
    best, *_, last = render.overall([*cells, *other]).rows  # by the mean over data sets, of those that a row has
    assert (best[0], best[1:4]) == ("isofed", ("-3.5", "+40.0", "+2.3"))  # AUC: (14 - 7 + 0) / 3
    assert (last[0], last[1:3]) == ("rscfed", ("+1.0", "–"))
    told = render.numbers("rscfed", cells)
    assert told.columns == ("situation", "labels-only", "rscfed", "all-labels")
    assert [cell[:4] for cell in told.rows[0][1:]] == ["65.0", "68.0", "85.0"]
    assert [render.told(cell) for cell in ("l1u9", "l3u1-g05", "u4", "g100", "standard")] == [
        "1 labeled + 9 not", "3 labeled + 1 not, gamma 0.5", "1 labeled + 4 not", "gamma 10", "standard",
    ]  # fmt: skip
    one, two = render.which(cells).rows
    assert one[0] == "Digits, l1"
    assert one[1].startswith("rscfed 68.0")
    assert one[-2:] == ("15", "2 of 2")  # 3 of 20 points
    assert two[1].startswith("isofed 77.0")
    assert two[-2:] == ("35", "2 of 2")


class Curve:
    def __init__(self, *accuracies: float) -> None:
        self.rounds = [{"validation": {"accuracy": value}} for value in accuracies]


def test_a_run_has_converged_if_its_last_quarters_are_alike():
    assert study.converged(Curve(0.1, 0.2, 0.3, 0.4, 0.80, 0.82, 0.82, 0.82))  # 0.81 and 0.82
    assert not study.converged(Curve(0.1, 0.2, 0.3, 0.4, 0.80, 0.81, 0.82, 0.83))  # 0.805 and 0.825
    assert not study.converged(Curve(0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.7, 0.7))  # nor if they fall
    assert not study.converged(Curve(0.9, 0.9, 0.9))  # too few to tell


@pytest.mark.parametrize("table", study.COMPARED)
def test_every_row_of_a_table_is_tuned_by_as_many_configurations(table: str):
    content = study.tomllib.loads((study.TABLES / f"tuning-{table[0]}.toml").read_text())
    rows = [row for row in read_table(study.TABLES / f"{table}.toml").rows if row.name.startswith(content["cell"])]
    assert [row.name.rpartition("/")[2] for row in rows] == list(content["rows"])
    for row in rows:
        axes = [content["axes"][axis] for axis in content["rows"][row.name.rpartition("/")[2]]]
        assert [len(axis) for axis in axes] == [2, 2 if table == "a-pneumonia" else 1]
        for values in (values for axis in axes for values in axis):
            assert study.replace(row, settings=study.overlay(row.settings, values)).experiment()
    assert content["seed"] not in study.SEEDS
