"""The manual shows what really happens, its pictures and file lists are up to date, and it builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fewlabel.engine import conformance

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import console  # noqa: E402
import generated  # noqa: E402
import imports  # noqa: E402
import pictures  # noqa: E402

PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


def words(text: str) -> set[str]:
    """Return the words of an output. Numbers, and where columns are broken, differ between machines."""
    return set(re.findall(r"[^\W\d_]+", re.sub(r"[¹²]", "", text)))


# The notebooks do in `make test` what the slow ones do.
@pytest.mark.parametrize(
    "name", ["tutorial", *(pytest.param(n, marks=pytest.mark.slow) for n in ("own-data", "own-method"))]
)
def test_commands_print_what_a_page_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    page = DOCS / f"{name}.md"
    console.write_files(page)
    commands = list(console.shown(page.read_text()))
    assert commands
    for command, told in commands:
        assert words(console.printed(command)) == words(told), command


def test_the_second_method_of_the_page_on_own_methods_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console.write_files(DOCS / "own-method.md")
    settings = "--set rounds=2 --set data.image_size=16 --set clients.count=3 --workers 1"
    printed = console.printed(f"fewlabel run --method halving:Halving --set labels.at=every-client {settings}")
    assert "pseudo-labels: coverage" in printed
    (line, *_) = next(Path("runs").glob("*/rounds.jsonl")).read_text().splitlines()
    assert '"validation_loss"' in line


@pytest.mark.parametrize("name", ["follow:Follow", pytest.param("halving:Halving", marks=pytest.mark.slow)])
def test_methods_of_the_page_on_own_methods_keep_what_every_method_must(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console.write_files(DOCS / "own-method.md")
    promises = console.printed(f"fewlabel check-method {name}").splitlines()
    assert len(promises) > len(conformance.CHECKS)
    assert [line for line in promises if not line.startswith("ok  ")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_copies_of_files_are_up_to_date(page):
    assert console.with_copies(page) == page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_generated_is_there(page):
    whole = generated.expand(page.read_text())
    assert "<!-- generated" not in whole
    assert "<!-- end generated" not in whole
    assert "`make docs` builds" not in whole  # which is said in the source alone


@pytest.mark.parametrize("page", generated.PAGES, ids=lambda page: page.stem)
def test_pages_of_methods_agree_with_the_code_in_their_source(page):
    """If not: python docs/generated.py."""
    assert generated.written(page.read_text()) == page.read_text()


@pytest.mark.parametrize("name", ["cbafed", "fedirm", "fedmatch", "isofed", "rscfed"])
def test_a_methods_page_lists_every_decision_in_one_place_without_a_build(name):
    """By words that only the line of a decision has."""
    decisions = {
        "cbafed": ["Eq. 16", "`tail_scaled`", "Eq. 12", "Eq. 1:", "Eq. 21"],
        "fedirm": ["Eq. 1 is a mean", "Eq. 5", "Eq. 7", "is left out of the average", "warm-up"],
        "fedmatch": [
            "`psi_start`",
            "u of eq. 1 to 3",
            "same helpers",
            "becomes sparse",
            "holds the new values exactly",
        ],
        "isofed": [
            "number of images in a batch",
            "logarithms",
            "Adapting takes one epoch",
            "both start as the adapted",
        ],
        "rscfed": ["logarithms", "`labeled_share = 0.5`", "A teacher starts as", "Tables 4 and 6", "warm-up"],
    }[name]
    source = (DOCS / "methods" / f"{name}.md").read_text()
    listed = source.partition("## Where this differs from the paper")[2].partition("\n## ")[0]
    assert [decision for decision in decisions if decision not in listed] == []


def test_commands_and_settings_are_in_the_reference():
    told = generated.expand((DOCS / "cli.md").read_text())
    for part in ("## fewlabel\n", "### fewlabel run\n", "### fewlabel data check\n", "`--set A.B=C`"):
        assert part in told
    told = generated.settings("rscfed")
    assert "| `method.group_size` | `5` | K: clients in a group; a whole number at least 1 |" in told


def test_each_generated_part_is_the_one_that_was_asked_for():
    assert "| `digits` | 1,797 handwritten" in generated.names("datasets")
    assert "| `simple-cnn` | RSCFed's" in generated.names("models")
    (isofed,) = (line for line in generated.methods().splitlines() if line.startswith("| `isofed` |"))
    assert isofed.endswith("| some-clients |")
    assert generated.idea("isofed").startswith("A round has two phases.")
    assert generated.differs("isofed").startswith("Departures from the paper, and decisions where it is silent:")
    assert ".. autoclass:: fewlabel.Result\n   :members:\n" in generated.python()
    assert ".. autofunction:: fewlabel.run\n\n" in generated.python()
    assert ".. autoclass:: fewlabel.core.images.Unlabeled\n   :members:\n" in generated.python()
    assert ".. automodule:: fewlabel.learn.loop\n   :members:\n" in generated.python()


def test_what_leaves_a_site_is_read_from_annotations():
    assert "| `local_update` | `model`, `thresholds`, `tail`, `warm` | `model`, `used`, `counts` |" in generated.leaves(
        "cbafed"
    )


@pytest.mark.parametrize("draw", pictures.PICTURES, ids=lambda draw: draw.__name__)
def test_pictures_are_as_drawn(draw):
    assert (DOCS / "images" / f"{draw.__name__}.svg").read_text() == draw().svg()


def test_the_diagram_of_imports_and_the_list_of_files_are_up_to_date():
    """If not: python docs/imports.py."""
    assert imports.diagram().svg() == imports.DIAGRAM.read_text()
    assert imports.page() == imports.PAGE.read_text()


def test_arrows_that_follow_from_others_are_left_out():
    assert imports.arrows({("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")}) == {("a", "b"), ("b", "c"), ("d", "c")}


def test_imports_are_folded_by_folder_wherever_they_stand(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "PACKAGE", tmp_path / "fewlabel")
    for name, text in {
        "__init__.py": "from fewlabel.core import tree",
        "api.py": "def late():\n    import fewlabel.engine.run",
        "core/tree.py": "import torch\nfrom . import rng",
        "engine/run.py": "from fewlabel import experiment\nfrom fewlabel.core import tree\nfrom ..data.raw import Raw",
    }.items():
        path = tmp_path / "fewlabel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    expected = {("api", "engine"), ("engine", "experiment"), ("engine", "core"), ("engine", "data")}
    assert imports.edges() == expected


@pytest.mark.parametrize("page", [DOCS / "architecture.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])
def test_files_that_a_page_tells_to_touch_exist(page):
    named = re.findall(r"`((?:fewlabel|tests|docs)/[\w./-]*)`", page.read_text())
    assert named
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_citation_is_valid_and_of_the_version_in_the_changelog():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].startswith(f"{found['version']} ")


@pytest.mark.slow
def test_the_manual_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path], check=True
    )
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, page
    assert "<math" in (tmp_path / "methods" / "rscfed.html").read_text()
