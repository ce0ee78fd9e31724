"""The study behind docs/RESULTS.md: what it runs next, the lines that runs leave, and the pages made from them."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import beside, findings, lines, partitions, plan, plots, render, study
from fewlabel.papers.reproduce import missing_data
from fewlabel.report.runs import CEILING, FLOOR

ROWS = """
[rates]
shares = [0.01, 0.1, 1.0, 10.0]

[rows.labels-only]
[rows.rscfed]
tune = { setting = "method.labeled_share", values = [0.3, 0.5, 0.7], why = "the weight of labels" }
[rows.rscfed-authors]
family = "rscfed"
method = { warmup = 0 }
tune = { setting = "method.labeled_times", values = [2.0, 6.0, 18.0], why = "the weight of labels" }
[rows.tutor]
own = true
method = { tutors = 2, views = 0 }
[rows.all-labels]
ceiling = true
tuned = "labels-only"
"""

TABLE = """
title = "(a) tiny"
[experiment]
recipe = "fewlabel"
rounds = 2
data = { name = "digits", image_size = 16 }
clients = { count = 3 }
labels = { clients = 1, which = "rule" }
"""

PARTS = """
of = "a-blood"
title = "(g) parts"
seeds = [0]
[parts.rscfed]
without-groups = ["method.sub_sampling=false"]
"""

FEWER = """
of = "a-blood"
title = "(i) fewer"
best = 1
[cells.n20]
fewer = 20
"""

PRINTED = """
of = "a-blood"
title = "(h) printed"
versions = true
only = ["labels-only", "rscfed", "rscfed-authors"]
[cells.fewlabel]
[cells.printed]
recipe = "printed"
as_printed = true
"""

BOX = """
title = "(o) nothing tuned"
only = ["labels-only", "rscfed"]
[cells.tiny]
of = "a-blood"
"""

DIGITS = """
title = "(r) digits"
seeds = [0]
[cells.one]
title = "one"
"""

NETWORKS = """
title = "(q) networks"
only = ["labels-only", "tutor"]
[cells."blood small"]
of = "a-blood"
[cells."blood large"]
title = "more"
of = "a-blood"
model.name = "small-resnet"
"""

FILES = {
    "rows": ROWS,
    "o-box": BOX,
    "q-network": NETWORKS,
    "r-digits": DIGITS,
    "a-blood": TABLE,
    "g-parts": PARTS,
    "i-labels": FEWER,
    "h-printed": PRINTED,
}


def forget() -> None:
    for cached in (plan.content, plan.rows, plan.shares, plan.rates, plan.given):
        cached.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    forget()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "TABLES", tmp_path)
    monkeypatch.setattr(plan, "SEEDS", (0, 1))
    monkeypatch.setattr(plan, "MAIN", ("a-blood",))
    monkeypatch.setattr(render, "MAIN", ("a-blood",))
    for module in (plan, study, render):
        monkeypatch.setattr(module, "EVERY", ("o-box", "a-blood", "h-printed", "g-parts", "i-labels"))
    monkeypatch.setattr(lines, "DOCS", tmp_path)
    for name, text in FILES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    yield tmp_path
    forget()


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(*words: str) -> int:
    return study.main(["run", *words, "--workers", "2", "--runs", "runs"])


# What is tried next.


@pytest.mark.parametrize(
    ("scores", "missing", "best"),
    [
        ({}, [2, 1, 3], None),  # the middle three
        ({2: 0.5, 1: 0.4}, [3], None),
        ({2: 0.5, 1: 0.4, 3: 0.3}, [], 2),
        ({2: 0.5, 1: 0.4, 3: 0.6}, [4], None),  # at the edge: the next one
        ({2: 0.5, 1: 0.4, 3: 0.6, 4: 0.5}, [], 3),
        ({2: 0.5, 1: 0.6, 3: 0.4}, [0], None),
        ({2: 0.5, 1: 0.6, 3: 0.4, 0: 0.7}, [], 0),  # there is no further one
        ({2: 0.5, 1: 0.5, 3: 0.5}, [], 2),  # of equals, the middle
    ],
)
def test_a_search_goes_on_while_the_best_is_at_the_edge(scores: dict[int, float], missing: list[int], best: int | None):
    assert plan.search(5, scores.get) == (missing, best)


def test_a_search_goes_on_without_what_failed():
    assert plan.search(5, {2: 0.5, 1: 0.4}.get, lambda place: place == 3) == ([], 2)
    assert plan.search(3, {}.get, lambda place: True) == ([], None)


def told(trial: plan.Trial, score: float) -> dict[str, str]:
    settings = " ".join(trial.settings)
    line = {"table": trial.table, "cell": trial.cell, "row": trial.row, "seed": str(trial.seed), "settings": settings}
    return line | {plan.SCORE: str(score)}


def played(score: Any, without: tuple[str, ...] = ()) -> list[plan.Trial]:
    """The whole study in its order, with scores instead of runs."""
    done: list[plan.Trial] = []
    known: list[dict[str, str]] = []
    while trial := next(plan.plan(plan.EVERY, known, (), without), None):
        done.append(trial)
        known.append(told(trial, score(trial)))
    return done


def test_the_whole_study_in_its_order():
    """With the files that are committed: every trial is an experiment, and what comes first comes first."""
    forget()
    done = played(lambda trial: len(trial.row) / 100 + ("lr=0.03 " in " ".join(trial.settings)) / 10)
    assert len(done) == len({trial.key for trial in done})
    for trial in done:
        assert trial.experiment(["data.path=x.npz"] if trial.given["data"]["name"] == "npz" else []).seed == trial.seed
        assert (trial.seed == plan.TUNED_ON) == trial.tunes
    tables = list(dict.fromkeys(trial.table for trial in done))
    assert tables == [*plan.UNTUNED, "tuning-a", "tuning-b", *plan.EVERY[len(plan.UNTUNED) :]]
    for table in tables:  # of each stage, our own comes last
        cells = plan.content(table).get("cells", {}) if table in plan.EVERY[1:] else {}
        stage = [trial for trial in done if trial.table == table and trial.cell not in cells]
        stage = [trial for trial in stage if trial.cell != "twice the rounds" and "all-labels" not in trial.row]
        own = [trial.row.startswith("tutor") for trial in stage]
        assert own == sorted(own), table
    box = [trial for trial in done if trial.table == plan.BOX]
    assert not [trial for trial in box if trial.settings]  # nothing is tuned, and data and rows are those of (a) to (d)
    assert {(trial.cell, trial.row, trial.seed) for trial in box} == {
        (cell, row, seed)
        for cell in ("blood", "fashion", "ham", "pneumonia")
        for row in plan.content(plan.BOX)["only"]
        for seed in plan.SEEDS
    }
    assert next(trial for trial in box if trial.cell == "ham").given == plan.given("c-ham", FLOOR)
    main = [trial for trial in done if trial.table in plan.MAIN]
    ceilings = [trial.row.startswith("all-labels") for trial in main]
    assert ceilings == sorted(ceilings)
    for table in plan.MAIN:
        rows = {(trial.row, trial.seed) for trial in main if trial.table == table}
        wanted = [row for row in plan.rows() if "family" not in plan.rows()[row]]
        wanted = [row for row in wanted if row not in plan.content(table).get("leave_out", ())]
        assert rows == {(row, seed) for row in wanted for seed in plan.SEEDS}
    for trial in main:  # sites with labels train for five epochs a round in every row, and warm-ups are the recipe's
        method = trial.experiment(["data.path=x.npz"] if trial.table == "a-blood" else []).method
        assert method.local.epochs == 5
        assert getattr(method, "warmup", 0) == 0
    versions = {trial.row: dict(trial.given)["method"]["name"] for trial in main if trial.table == "a-blood"}
    assert versions["rscfed"] == "rscfed-authors"  # the longer name has the better score here
    assert [trial.row for trial in done if trial.cell == "twice the rounds"][:2] == [FLOOR, "fedavg-fixmatch"]


def test_what_depends_on_a_run_that_died_waits_and_what_failed_does_not_count():
    forget()
    every = [trial for trial in plan.plan(["a-blood"], []) if trial.row == FLOOR]
    assert len(every) == 3
    known = [told(trial, 0.5) for trial in every[:2]]

    def next_of(**lost: list[tuple[str, ...]]) -> set[tuple[str, int]]:
        trials = plan.plan(["a-blood"], known, **lost)
        return {(trial.row, trial.seed) for trial in trials if trial.row in (FLOOR, CEILING)}

    assert next_of() == {(FLOOR, plan.TUNED_ON)}
    assert next_of(later=[every[2].key]) == set()
    assert next_of(failed=[every[2].key]) == {(row, seed) for row in (FLOOR, CEILING) for seed in plan.SEEDS}


def test_rows_can_be_left_out_with_their_versions():
    forget()
    done = played(lambda trial: 0.5, ("tutor", "fedmatch", "all-labels"))
    assert {trial.table for trial in done} >= set(plan.EVERY)  # also those of the best rows
    assert next(trial.row for trial in done if trial.cell == "twice the rounds") == FLOOR
    assert not [trial for trial in done if trial.row.startswith(("tutor", "fedmatch", "all-labels"))]
    assert [trial for trial in done if trial.row == "labels-only"]


def test_only_the_better_version_is_tuned_and_the_other_takes_over_its_share_of_the_usual_rate():
    forget()
    usual, low = "method.local.lr=0.03 method.local.lr_unlabeled=0.02", "method.local.lr=0.01"

    def score(trial: plan.Trial) -> float:  # fedirm is the better one at the usual rate, and better still below it
        said = " ".join(trial.settings)
        return 0.9 if said.startswith(low) else 0.8 if trial.row == "fedirm" else 0.7

    done = [trial for trial in played(score) if "fedirm" in trial.row]
    tried = [trial for trial in done if trial.table == "tuning-a"]
    assert [" ".join(trial.settings) for trial in tried if trial.row == "fedirm-authors"] == [usual]
    assert len([trial for trial in tried if trial.row == "fedirm"]) == 6  # four rates, as the best is low, two values
    printed = {trial.row: trial for trial in done if trial.table == "h-printed" and trial.cell == "fewlabel"}
    assert printed["fedirm-authors"].settings == printed["fedirm"].settings == (low, "method.local.lr_unlabeled=0.0067")


def test_every_method_is_tuned_by_as_many_values():
    forget()
    for name, row in plan.rows().items():
        if "tuned" in row or name == FLOOR:
            continue
        values = row["tune"]["values"]
        assert len(values) == 5
        assert values == sorted(values)
        setting = row["tune"]["setting"].removeprefix("method.")
        usual = plan.read(plan.given("a-blood", name), ["data.path=x.npz"]).method
        if not (name == "rscfed-authors" or setting == "epochs_unlabeled"):
            assert getattr(usual, setting) == values[2], name  # the usual one is in the middle


def test_settings_of_a_letter_are_for_its_table_and_those_that_build_on_it():
    forget()
    changes = ["a.data.path=x", "b.rounds=3", "rounds=2"]

    def of(table: str) -> list[str]:
        return study.changes_for(plan.Trial(table, "", "labels-only", 0, {}), changes)

    assert of("a-blood") == of("tuning-a") == of("h-printed") == ["data.path=x", "rounds=2"]
    assert of("tuning-b") == ["rounds=3", "rounds=2"]
    assert of("c-ham") == ["rounds=2"]
    assert study.changes_for(plan.Trial("o-box", "blood", FLOOR, 0, {}), changes) == of("a-blood")
    assert study.changes_for(plan.Trial("o-box", "fashion", FLOOR, 0, {}), changes) == of("tuning-b")


# Runs.


def test_a_study_from_its_tables_to_its_pages(tiny: Path, capsys: pytest.CaptureFixture[str]):
    (tiny / "RESULTS.md").write_text(
        "# Page\n<!-- contents -->\n<!-- end -->\n<!-- coming -->\n<!-- end -->\n"
        "<!-- a-blood\n## (a) Tiny\n\nWords.\n-->\nold\n<!-- end -->\nbetween\n"
        "<!-- e-sites\n## (e) Sites\n-->\n## (e) Sites\nold\n<!-- end -->\n"
    )
    assert run("o", "a", "g", "i", "h") == 0
    out = capsys.readouterr().out
    # Tuning: the version, its rates, its setting; nothing of the test set.
    tried = read_csv(tiny / "results" / "tuning-a.csv")
    assert {line["seed"] for line in tried} == {"100"}
    assert not [key for key in tried[0] if "recall" in key or key in ("last_accuracy", "last_balanced_accuracy")]
    assert not list((tiny / "runs" / "tuning-a").rglob("rounds.jsonl"))  # nobody shall look
    # A line for each run, which says what the run says, and no number of the test set on the terminal.
    found = read_csv(tiny / "results" / "a-blood.csv")
    assert {(line["row"], line["seed"]) for line in found} == {
        (row, seed) for row in (FLOOR, "rscfed", "tutor", CEILING) for seed in ("0", "1")
    }
    for line in found:
        where = f"{line['row']}-seed{line['seed']}"
        copied = f"a-blood {line['row']} seed {line['seed']}: as in another table" in out
        summary = json.loads(
            (tiny / "runs" / ("o-box/tiny" if copied else "a-blood") / where / "summary.json").read_text()
        )
        test = summary["last"]["test"]
        assert float(line["last_balanced_accuracy"]) == pytest.approx(test["balanced_accuracy"], abs=1e-5)
        assert line["partition"] == summary["partition"]
        assert [float(one) for one in line["last_recall_per_class"].split()] == pytest.approx(
            test["recall_per_class"], abs=1e-4
        )
        assert line["images_per_class"].split() == [str(sum(true)) for true in test["confusion"]]
        right = sum(true[n] for n, true in enumerate(test["confusion"]))
        (counts,) = beside.confusions([line])
        assert sum(counts[n][n] for n in range(len(counts))) == right
        assert sum(map(sum, counts)) == test["images"]
        table = "o-box tiny" if copied else "a-blood"
        own = next(said for said in out.splitlines() if f" {table} {line['row']} seed {line['seed']}:" in said)
        assert f"validation {100 * float(line[plan.SCORE]):.1f}," in own
    # What nothing is tuned for is there, too, and counts for the tuned table where tuning confirms it.
    untuned = read_csv(tiny / "results" / "o-box.csv")
    assert {(line["cell"], line["row"], line["settings"]) for line in untuned} == {
        ("tiny", FLOOR, ""),
        ("tiny", "rscfed", ""),
    }
    assert {line["experiment"] for line in found if line["row"] == FLOOR} == {
        line["experiment"] for line in untuned if line["row"] == FLOOR
    }
    assert out.count("a-blood labels-only seed 0: as in another table") == 1
    # Equal experiments are one run; parts are of the chosen version; fewer labels are fewer.
    parts = {line["row"]: line for line in read_csv(tiny / "results" / "g-parts.csv")}
    assert list(parts) == [FLOOR, "rscfed", "rscfed-without-groups"]
    assert "g-parts rscfed seed 0: as in another table" in out
    assert parts["rscfed"]["experiment"] == next(
        line["experiment"] for line in found if (line["row"], line["seed"]) == ("rscfed", "0")
    )
    fewer = read_csv(tiny / "results" / "i-labels.csv")
    assert len(fewer) == 4  # labels alone and the best other, two seeds
    assert {line["images_labeled"] for line in fewer if line["row"] == FLOOR} == {str(2 * 5 * 20)}
    versions = read_csv(tiny / "results" / "h-printed.csv")
    assert {(line["cell"], line["recipe"]) for line in versions} == {("fewlabel", "fewlabel"), ("printed", "printed")}
    assert {line["method"] for line in versions} == {FLOOR, "rscfed", "rscfed-authors"}
    # The page: what is outside of the marks stays, and what is not run is said so.
    render.render()
    page = (tiny / "RESULTS.md").read_text()
    assert "Words.\n-->\n## (a) Tiny\n\nWords.\n\n**Labels alone have" in page
    assert "**(a) tiny**" in page
    assert "between\n<!-- e-sites\n## (e) Sites\n-->\n<!-- end -->\n" in page
    assert "<!-- contents -->\n- [(a) Tiny](#a-tiny)\n<!-- end -->" in page
    assert "Still to come, by [the protocol](PROTOCOL.md#tables): (e) Sites." in page
    assert widest(page) <= 8
    assert (tiny / "results" / "a-blood.png").stat().st_size > 1000
    render.render()
    assert (tiny / "RESULTS.md").read_text() == page
    # Done again, nothing is left to do, though no run is there any more.
    study.shutil.rmtree(tiny / "runs")
    assert run() == 0
    assert not capsys.readouterr().out


def widest(page: str) -> int:
    """Return how many columns the widest table of a page has, but for those of each class."""
    heads = re.findall(r"^(\|.*)\n\| ?---", page, re.MULTILINE)
    return max(head.count("|") - 1 for head in heads if "class 0" not in head)


RECALLS = {FLOOR: (0.7, 0.7), "rscfed": (0.6, 0.78), "tutor": (0.74, 0.72), CEILING: (0.9, 0.9)}


def tell(row: str, seed: int, table: str = "o-box") -> None:
    """Add a line of two classes of 1,000 images: what each row gains over labels alone follows from RECALLS."""
    own = {"table": table, "cell": "tiny" if table == "o-box" else "", "row": row, "seed": seed, "method": row}
    own |= {"settings": "", "rounds": 2, "images_per_class": "1000 1000", "bytes_up": 2e6, "bytes_down": 3e6}
    told = " ".join(f"{one + seed / 500}" for one in RECALLS[row])
    scores = {f"last_{key}_per_class": told for key in ("recall", "auc")}
    lines.add({**own, **scores, "last_balanced_accuracy": sum(RECALLS[row]) / 2 + seed / 500})


def test_pages_say_what_our_own_method_gains_beside_the_others(tiny: Path):
    page = tiny / "which-method.md"
    page.write_text("<!-- why -->\n<!-- end -->\n<!-- choice -->\n<!-- end -->\n<!-- gains -->\n<!-- end -->\n")
    tell(FLOOR, 0)
    before = page.read_text()
    render.render()
    assert page.read_text() == before  # one seed says nothing
    for row in RECALLS:
        for seed in plan.SEEDS:
            tell(row, seed)
    render.render()
    text = " ".join(page.read_text().split())
    assert (
        "One of two methods is above labels alone by more than chance: `tutor` on blood cells; none is below by more "
        "than chance. On blood cells, `tutor`, FewLabel's own, is first with +3.0 points, by more than chance on blood "
        "cells; next is `rscfed` with -1.0. Train labels alone first;" in text
    )
    assert "| 70.1 ± 0.1 | 90.1 ± 0.1 | tutor +3.0 *, rscfed -1.0 | 1 of 2 | rscfed -1.0 |" in text
    assert (tiny / "results" / "gains.png").stat().st_size > 1000


def test_a_table_that_is_partly_filled_has_no_empty_lines_and_names_what_is_missing(tiny: Path):
    for row, seeds in {FLOOR: (0, 1), "tutor": (0,)}.items():
        for seed in seeds:
            tell(row, seed, "a-blood")
    page = render.section("a-blood")
    rows = [line for line in page.splitlines() if line.startswith("| tutor")]
    # MB sent are 2 + 3. Nobody has a gap or an AUC, so no column is there.
    assert rows[0].startswith("| tutor (1 of 2 seeds) | 73.0 | +3.0 (")
    assert rows[0].endswith(" | 5 | 0 |")
    first = next(line for line in page.splitlines() if line.startswith("| row"))
    assert first == "| row | balanced accuracy, % | above labels-only (95 % interval) | MB sent | images, thousands |"
    assert "\nStill to run: rscfed, all-labels, 1 seed of tutor.\n" in page
    assert "No method has all seeds yet." in page
    assert not [line for line in page.splitlines() if line.startswith(("| rscfed", "| all-labels"))]
    for seed in plan.SEEDS:  # with a method that has all seeds, a conclusion waits for our own
        tell("rscfed", seed, "a-blood")
    glance = render.section("overall")  # no star and no mean before all seeds are there, and no conclusion
    assert "| tutor | +3.0 (1 of 2 seeds) |" in glance
    assert "Which method" not in glance


def test_other_tables_that_are_partly_filled_claim_no_more_than_they_have(tiny: Path):
    def put(table: str, cell_name: str, row: str, *seeds: int) -> None:
        for seed in seeds:
            tell(row, seed, table)
            (one,) = (
                one for one in lines.read_lines(table) if (one["row"], one["seed"], one["cell"]) == (row, str(seed), "")
            )
            kept = [line for line in lines.read_lines(table) if line != one]
            lines.write_csv(lines.DOCS / "results" / f"{table}.csv", [*kept, {**one, "cell": cell_name}])

    put("h-printed", "printed", FLOOR, 0)
    put("h-printed", "fewlabel", FLOOR, 0, 1)
    put("h-printed", "fewlabel", "rscfed", 0, 1)
    page = render.section("h-printed")  # one seed beside two is no gain, so there is no column of gains
    assert "| labels-only | 70.0 (1 of 2 seeds) | 70.1 ± 0.1 |" in page
    assert "gain" not in page
    assert "Still to run: rscfed as printed, rscfed-authors." in page
    put("h-printed", "printed", FLOOR, 1)
    assert "The recipe brings labels-only +0.0 points." in render.section("h-printed")
    put("i-labels", "n20", FLOOR, 0, 1)
    put("i-labels", "n20", "rscfed", 0, 1)
    assert "n20: no method is above labels-only; rscfed is nearest, -1.0 (" in render.section("i-labels")


def test_a_table_without_lines_has_no_heading_and_is_named_as_still_to_come(tiny: Path):
    page = "<!-- coming -->\n<!-- end -->\n\n<!-- NAME\n## (X) Words\n\nMore.\n-->\n## (X) Words\nold\n<!-- end -->\n"
    page = "".join(page.replace("NAME", name).replace("X", name[0]) for name in ("i-labels", "g-parts"))
    empty = render.filled(page)
    assert [heading for _, heading in render.headings(empty)] == []
    assert "Still to come, by [the protocol](PROTOCOL.md#tables): (i) Words; (g) Words." in empty
    assert "old" not in empty
    tell(FLOOR, 0, "g-parts")
    assert [heading for _, heading in render.headings(render.filled(empty))] == ["(g) Words"]
    assert "Still to run: rscfed." in render.filled(empty)
    assert render.filled(render.filled(empty)) == render.filled(empty)


def test_contents_are_the_headings_that_are_there():
    page = "# Title\n## (a) One's own\n### Inner\n### Other\n<!-- x\n## Hidden\n-->\n```\n## code\n```\n## Two\n"
    assert render.contents(page) == ("- [(a) One's own](#a-ones-own): [Inner](#inner), [Other](#other)\n- [Two](#two)")


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_go_on(tiny: Path, capsys: pytest.CaptureFixture[str]):
    table = TABLE + "[rows.rscfed-authors]\nmethod.local.batch_size = 1\nmodel.name = 'resnet18'\n"
    (tiny / "a-blood.toml").write_text(table.replace("rounds = 2", "rounds = 1"))
    forget()
    assert run("a") == 1
    out = capsys.readouterr().out
    assert (
        "tuning-a rscfed-authors seed 100 method.local.lr=0.03 method.local.lr_unlabeled=0.02: FAILED: method." in out
    )
    done = read_csv(tiny / "results" / "a-blood.csv")
    assert {line["row"] for line in done} == {FLOOR, "rscfed", "tutor", CEILING}
    assert {line["method"] for line in done if line["row"] == "rscfed"} == {"rscfed"}


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on(tiny: Path):
    code = (
        "from pathlib import Path; from experiments import lines, plan, study\n"
        "plan.TABLES = lines.DOCS = Path.cwd(); plan.MAIN = ('a-blood',); plan.SEEDS = (0,)\n"
        "plan.EVERY = study.EVERY = ('a-blood',)\n"
        "raise SystemExit(study.main(['run', '--workers', '2', '--runs', 'runs', '--without', 'tutor']))"
    )
    root = Path(__file__).parents[1]

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, cwd=tiny)

    path = tiny / "results" / "tuning-a.csv"
    first = begin()
    while not path.exists() and first.poll() is None:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = read_csv(path)  # whole lines
    assert begin().wait() == 0
    after = read_csv(path)
    assert after[: len(before)] == before
    assert len(after) == len({plan.key_of(line) for line in after})
    assert {line["row"] for line in read_csv(tiny / "results" / "a-blood.csv")} == {FLOOR, "rscfed", CEILING}


# Lines.


def line(table: str, row: str, seed: int = 0, **more: str) -> dict[str, str]:
    return {"table": table, "cell": "", "row": row, "seed": str(seed), "settings": "", **more}


def test_a_line_is_added_at_once_and_replaces_only_its_own(tiny: Path):
    for seed, value in ((0, "1"), (1, "2"), (0, "3")):
        lines.add(line("a-blood", "rscfed", seed, seconds=value))
    lines.add(line("a-blood", "rscfed", 2, seconds="4", new="x"))  # a column that older lines lack
    found = lines.read_lines("a-blood")
    assert [(one["seed"], one["seconds"], one["new"]) for one in found] == [
        ("1", "2", ""),
        ("0", "3", ""),
        ("2", "4", "x"),
    ]


def test_a_table_that_cannot_be_written_is_left_as_it_was(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    lines.add(line("a-blood", "rscfed"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(study.FewLabelError):
        lines.add(line("a-blood", "rscfed", 1))
    assert [one["seed"] for one in lines.read_lines("a-blood")] == ["0"]


def test_where_files_lie_does_not_change_the_hash_of_a_run():
    forget()
    trial = plan.Trial("a-blood", "", FLOOR, 0, plan.given("a-blood", FLOOR))
    one, other, third = (trial.experiment([f"data.path={path}"]) for path in ("/a/pbc.npz", "/b/pbc.npz", "/a/x.npz"))
    assert lines.hash_of(one) == lines.hash_of(other)
    assert lines.hash_of(one) != lines.hash_of(third)


@pytest.mark.parametrize("table", plan.MAIN)
def test_the_published_partitions_are_those_of_the_lines(table: str):
    forget()
    with np.load(partitions.path_of(table), allow_pickle=False) as file:
        found = dict(file)
    assert partitions.path_of(table).stat().st_size < 100_000
    for seed in plan.SEEDS:
        told = partitions.restored(found, seed)
        assert told.checksum == found[f"checksum-{seed}"]
        assert found[f"classes-{seed}"].sum(1).tolist() == [len(share) for share in told.shares]
        for one in lines.read_lines(table):
            if one["seed"] == str(seed) and not one["row"].startswith(CEILING):
                assert one["partition"] == told.checksum


@pytest.mark.parametrize("table", plan.MAIN)
def test_the_published_partitions_are_what_the_code_deals(table: str, monkeypatch: pytest.MonkeyPatch):
    forget()
    folder = Path(os.environ.get("FEWLABEL_DATA") or Path(__file__).parents[2] / "shared" / "data")
    monkeypatch.setenv("FEWLABEL_DATA", str(folder))
    blood = folder / "pbc" / "pbc32.npz"
    name = plan.content(table)["experiment"]["data"]["name"]
    if not (blood.exists() if name == "npz" else not missing_data(name)):
        pytest.skip(f"no data of {name}: neither FEWLABEL_DATA nor ../shared/data has them")
    made = partitions.arrays(table, [f"a.data.path={blood}"])
    with np.load(partitions.path_of(table), allow_pickle=False) as file:
        assert set(made) == set(file)
        assert all(np.array_equal(made[key], file[key]) for key in made)


# Pages.


def run_line(row: str, seed: int, recalls: str, images: str = "100 100", **more: str) -> dict[str, str]:
    right = [float(recall) for recall in recalls.split()]
    told = {"last_recall_per_class": recalls, "images_per_class": images, "method": row, "rounds": "2"}
    told |= {"last_balanced_accuracy": str(sum(right) / len(right)), "last_auc_per_class": recalls}
    return {**line("a-blood", row, seed), **told, **more}


def cell(**recalls: list[str]) -> dict[str, list[dict[str, str]]]:
    return {
        row.replace("_", "-"): [run_line(row.replace("_", "-"), seed, one) for seed, one in enumerate(seeds)]
        for row, seeds in recalls.items()
    }


def test_a_row_is_above_the_floor_only_if_every_seed_and_the_interval_say_so(monkeypatch: pytest.MonkeyPatch):
    forget()
    monkeypatch.setattr(plan, "SEEDS", (0, 1))
    rows = cell(
        labels_only=["0.5 0.5", "0.5 0.5"],
        rscfed=["0.9 0.9", "0.8 0.8"],  # far above in both
        fedirm=["0.52 0.5", "0.52 0.5"],  # above in both, but by less than 200 images can tell
        isofed=["0.1 0.1", "0.2 0.2"],
        fedmatch=["0.9 0.9"],  # one seed of two: nothing is said of it
        all_labels=["1 1", "0.9 0.9"],
    )
    assert beside.above(rows, "rscfed").mean == pytest.approx(0.35)
    assert beside.above(rows, FLOOR) is None
    assert beside.above({"rscfed": rows["rscfed"]}, "rscfed") is None
    assert render.verdict(rows) == (
        "**Labels alone have 50.0 ± 0.0 %. 1 of 3 methods is above them by more than chance: rscfed (+35.0).** "
        "1 of 3 methods is below them by more than chance: isofed (-35.0). May be chance: fedirm (+1.0). "
        "All labels have 95.0 ± 7.1 %.\n"
    )
    assert render.still_to_run(rows, [*rows, "semifl"]) == "Still to run: semifl, 1 seed of fedmatch.\n"
    less = {**rows, FLOOR: rows[FLOOR][:1]}  # without all seeds of the floor, nothing is said of anybody
    assert render.verdict(less).startswith("**Labels alone have 50.0 %. No method has all seeds yet.**")
    assert beside.closed(rows, "rscfed") == "78"  # 35 of 45 points
    assert beside.closed(rows, FLOOR) == beside.closed({FLOOR: rows[FLOOR]}, "rscfed") == "–"
    assert render.verdict({"rscfed": rows["rscfed"]}).startswith("labels-only has no run yet")


def two_seeds(**recalls: str) -> dict[str, list[dict[str, str]]]:
    """Rows that have the same recalls in both seeds, of two classes of 100 images."""
    return cell(**{row: [one, one] for row, one in recalls.items()})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        pytest.param(
            {  # +2 and +4 points, which 200 images cannot tell from none
                "blood cells": two_seeds(labels_only="0.5 0.5", tutor="0.52 0.52", fedirm="0.5 0.51"),
                "HAM10000": two_seeds(labels_only="0.5 0.5", tutor="0.54 0.54", fedirm="0.2 0.2"),
            },
            (
                "none of two methods is above labels alone by more than chance on any of two data sets; one is below "
                "by more than chance on at least one.",
                "in the mean, `tutor`, FewLabel's own, is first with +3.0 points (+2.0 to +4.0), though on no data set "
                "by more than chance; next is `fedirm` with -14.8.",
                "train labels alone first; if that is not good enough, compare `tutor` with labels alone on your own "
                "data.",
            ),
            id="our own is ahead",
        ),
        pytest.param(
            {  # labels everywhere bring 40 points
                "blood cells": two_seeds(
                    labels_only="0.5 0.5", tutor="0.49 0.5", fedirm="0.1 0.1", all_labels="0.9 0.9"
                ),
            },
            (
                "none of two methods is above labels alone by more than chance on blood cells; one is below by more "
                "than chance.",
                "on blood cells, none of these methods is above labels alone; `tutor` is nearest with -0.5 points.",
                "train labels alone, label more images if you can (labels at all sites bring +40.0 points on blood "
                "cells), and use another method only if it is better on your own data.",
            ),
            id="nobody is ahead",
        ),
        pytest.param(
            {
                "blood cells": two_seeds(labels_only="0.5 0.5", fedirm="0.9 0.9", isofed="0.8 0.8"),
                "HAM10000": two_seeds(labels_only="0.5 0.5", fedirm="0.51 0.5", isofed="0.1 0.1"),
            },
            (
                "two of two methods are above labels alone by more than chance: `fedirm` on blood cells and `isofed` "
                "on blood cells; one is below by more than chance on at least one.",
                "in the mean, `fedirm` is first with +20.2 points (+0.5 to +40.0), by more than chance on blood cells; "
                "next is `isofed` with -5.0.",
                "train labels alone first; if that is not good enough, compare `fedirm` with labels alone on your own "
                "data.",
            ),
            id="some are above by more than chance",
        ),
        pytest.param(
            {
                "blood cells": two_seeds(labels_only="0.5 0.5", tutor="0.9 0.9"),
                "HAM10000": two_seeds(labels_only="0.5 0.5", tutor="0.3 0.3"),
            },
            (
                "one of one method is above labels alone by more than chance: `tutor` on blood cells; one is below by "
                "more than chance on at least one.",
                "in the mean, `tutor`, FewLabel's own, is first with +10.0 points (-20.0 to +40.0), by more than "
                "chance on blood cells; it is below by more than chance on HAM10000.",
                "train labels alone, and use another method only if it is better on your own data.",
            ),
            id="the first one is below somewhere",
        ),
    ],
)
def test_three_sentences_say_what_the_numbers_carry(
    tables: dict[str, Any], said: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
):
    forget()
    monkeypatch.setattr(plan, "SEEDS", (0, 1))
    found = findings.findings(tables)
    assert found is not None
    assert findings.sentences(found) == said


def test_methods_are_ranked_by_data_sets_that_they_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A method with one easy data set is not first, and one without all seeds is nowhere."""
    forget()
    monkeypatch.setattr(plan, "SEEDS", (0, 1))
    easy = two_seeds(labels_only="0.5 0.5", tutor="0.6 0.6", fedirm="0.7 0.7", isofed="0.9 0.9")
    hard = two_seeds(labels_only="0.5 0.5", tutor="0.5 0.5", fedirm="0.45 0.45", semifl="0.9 0.9")
    hard["semifl"] = hard["semifl"][:1]
    found = findings.findings({"blood cells": easy, "HAM10000": hard})
    assert found is not None
    assert found.means == pytest.approx({"fedirm": 7.5, "tutor": 5.0})
    assert "semifl" not in found.gains
    plots.draw_gains(found, tmp_path / "gains.png")
    assert findings.findings({"HAM10000": {FLOOR: hard[FLOOR]}}) is None


def test_seeds_that_are_missing_are_shown_as_missing():
    assert beside.seeds_of([{"table": "o-box"}] * 2) == " (2 of 3 seeds)"
    assert beside.seeds_of([{"table": "o-box"}] * 3) == ""
    assert beside.seeds_of([{"table": "r-digits"}] * 3) == " (3 of 5 seeds)"  # the table's own number
    assert beside.seeds_of([{"table": "privacy"}] * 3) == ""  # which is no table of the plan


def test_what_a_larger_network_brings_our_own_is_told_where_all_seeds_are_there(tiny: Path):
    def add(cell_name: str, row: str, seed: int, recalls: str) -> None:
        lines.add({**run_line(row, seed, recalls), "table": "q-network", "cell": cell_name})

    for seed in (0, 1):
        add("blood small", FLOOR, seed, "0.5 0.5")
        add("blood small", "tutor", seed, "0.6 0.6")
        add("blood large", FLOOR, seed, "0.6 0.6")
    add("blood large", "tutor", 0, "0.9 0.9")
    assert render.section("network") == ""
    add("blood large", "tutor", 1, "0.9 0.9")
    assert re.sub(r"\(\+\d+.\d to \+\d+.\d\)", "(…)", render.section("network")) == (
        "**With a larger network**, `large`, which has GroupNorm, `tutor` has these points more than labels alone: "
        "+30.0 (…) on blood cells, by more than chance (labels alone have 60.0 ± 0.0 %). Two seeds, nothing tuned."
    )
    for seed in (0, 1):
        add("blood large", "tutor", seed, "0.61 0.6")
    assert "on blood cells, which may be chance" in render.section("network")


def test_a_cell_adds_its_settings_to_the_table_it_builds_on(tiny: Path):
    made = plan.given("q-network", FLOOR, "blood large")
    assert made == {**plan.given("a-blood", FLOOR), "model": {"name": "small-resnet"}}


@pytest.mark.parametrize("page", ["RESULTS.md", "which-method.md", "methods/tutor.md"])
def test_no_table_of_the_pages_is_wide_and_no_section_is_empty(page: str):
    text = (lines.DOCS / page).read_text()
    assert widest(text) <= 8
    assert "not run yet" not in text.lower()


def test_whether_rounds_are_enough_is_told_by_validation(tiny: Path):
    for settings, cell_name, score in (("lr=1", "", 0.5), ("lr=1 rounds=4", "twice the rounds", 0.509)):
        told_ = {"settings": settings, "cell": cell_name, plan.SCORE: str(score)}
        lines.add({**line("tuning-a", FLOOR, 100), **told_})
    assert "+0.9" in render.rounds_enough()
    assert "Rounds are enough" in render.rounds_enough()
    lines.add(
        {**line("tuning-a", FLOOR, 100), "settings": "lr=1 rounds=4", "cell": "twice the rounds", plan.SCORE: "0.51"}
    )
    assert "Not enough for labels-only on blood cells" in render.rounds_enough()
