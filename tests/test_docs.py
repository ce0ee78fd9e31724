"""The manual shows what really happens, its pictures and file lists are up to date, and it builds without a warning."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from fewlabel import METHODS, Data, Train, experiment
from fewlabel.data import partition
from fewlabel.engine import conformance
from fewlabel.engine.world import dataset_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import bloodcells  # noqa: E402
import conf  # noqa: E402
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
    "name",
    ["tutorial", "coming-from-flower", *(pytest.param(n, marks=pytest.mark.slow) for n in ("own-data", "own-method"))],
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
    settings = "--set rounds=2 --set data.image_size=16 --set clients.count=3 --set method.local.epochs=1 --workers 1"
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


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_a_page_is_whole_on_github(page):
    """What GitHub cannot show is a mark with nothing below it, or a command for Sphinx."""
    source = page.read_text()
    assert source.count("<!-- generated: ") == len(generated.MARK.findall(source))
    for mark in generated.MARK.finditer(source):
        assert mark[0].splitlines()[1:-1] != [""], mark[1]
    assert re.findall(r"^(?:```|:::)\{.*", source, re.M) == []


@pytest.mark.parametrize("page", generated.PAGES, ids=lambda page: page.stem)
def test_what_a_page_has_from_the_code_and_the_results_is_up_to_date(page):
    """If not: python docs/generated.py."""
    assert generated.written(page.read_text()) == page.read_text()


def anchors(page):
    """Return the headings of a page as links name them on GitHub."""
    seen = re.sub(r"<!--.*?-->|^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", seen, re.M)
    }


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_into_a_page_lead_to_a_heading_that_is_there(page):
    """Headings of tables come with their first line, so nothing may link to one that waits for it."""
    for file, heading in re.findall(r"\]\(([^):\s#]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / file if file else page
        if target.suffix == ".md":
            assert heading in anchors(target), (file, heading)


def prose(source):
    """Return a page without its blocks of code and without what stands in `backticks`, unless $ is around them."""
    return re.sub(r"(?<!\$)`[^`\n]+`(?!\$)", "", re.sub(r"^```.*?^```$", "", source, flags=re.M | re.S))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_formulas_are_written_so_that_markdown_leaves_them_alone(page):
    """Between single $ GitHub reads \\, and \\{ and _ as Markdown; between $` and `$, and in a block, it does not."""
    source = prose(page.read_text())
    assert "$$" not in source
    plain = re.findall(r"\$([^$`]+)\$", re.sub(r"\$`[^`]+`\$", "", source))
    assert [formula for formula in plain if re.search(r"\\[^a-zA-Z\s]|[_*<]", formula)] == []


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_formulas_become_mathml_without_rest(page):
    source = page.read_text()
    blocks = re.findall(r"^```math\n(.*?)^```$", source, re.M | re.S)
    for formula in [*blocks, *re.findall(r"\$`([^`]+)`\$", source), *re.findall(r"\$([^$`]+)\$", prose(source))]:
        drawn = conf.mathml(formula)
        assert drawn.startswith("<math")
        assert "\\" not in drawn, formula


def test_blood_cells_are_the_same_in_the_file_and_on_the_page_of_the_recipe():
    page = (DOCS / "recipe.md").read_text()
    columns = {"printed": 4, "fewlabel": 5}
    for bar in bloodcells.bars():
        (row,) = re.findall(rf"^\| `{bar.method}` \|.*$", page, re.M)
        assert re.findall(r"\d+\.\d", row.split("|")[columns[bar.recipe]]) == [f"{value:.1f}" for value in bar.values]


def test_what_is_said_of_blood_cells_follows_from_the_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr(bloodcells, "RESULTS", tmp_path)
    (tmp_path / "blood-cells.csv").write_text(
        "method,seed,balanced_accuracy\nlabels-only,0,30\nlabels-only,1,32\nfedirm,0,12.5\n"
    )

    def tell(**rows: tuple[int, ...]) -> str:
        lines = [
            f"blood,{row.replace('_', '-')},{seed},{value / 100}"
            for row, values in {"labels_only": (80, 82), **rows}.items()
            for seed, value in enumerate(values)
        ]
        text = "\n".join(["cell,row,seed,last_balanced_accuracy", *lines, "ham,labels-only,0,0.1"])
        (tmp_path / "o-box.csv").write_text(text + "\n")
        return bloodcells.reason()

    said = tell(fedirm=(79, 80), isofed=(90,))  # one seed is no rank
    assert [bar.name for bar in bloodcells.bars()] == ["labels alone, as printed", "labels alone", "FedIRM", "IsoFed"]
    assert "give 31.0 % balanced accuracy by the training that papers print, and 81.0 % by FewLabel's" in said
    assert "(means of 2 seeds)" in said


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
    told = (DOCS / "cli.md").read_text()
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
    assert "| `fl.Checkpoint` | settings: `rounds`, `seconds` |" in generated.python()
    assert "| `fl.run` | Run an experiment in a directory of its own" in generated.python()
    assert ".. autoclass:: fewlabel.Result\n   :members:\n" in generated.reference()
    assert ".. autofunction:: fewlabel.run\n\n" in generated.reference()
    assert ".. autoclass:: fewlabel.core.images.Unlabeled\n   :members:\n" in generated.reference()
    assert ".. automodule:: fewlabel.learn.loop\n   :members:\n" in generated.reference()


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


def test_the_readme_fits_a_screen_and_its_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 50
    links = re.findall(r"\]\(([^):\s#]+)", readme)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_the_three_commands_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compare, check, split = re.findall(r"^\| an? \w+ \| `(fewlabel .*?)` \|", (ROOT / "README.md").read_text(), re.M)
    assert "rehearsal/client-0" in console.printed(split)
    assert "without label" in console.printed(check.replace("my/images", "rehearsal/client-1"))
    quick = "--set rounds=2 --set data.image_size=16 --set clients.count=3 --set methods.cbafed.warmup_epochs=1"
    assert "isofed" in console.printed(f"{compare} {quick}")


def test_the_page_to_choose_a_method_names_methods_that_take_labels_there():
    page = (DOCS / "which-method.md").read_text()
    rows = re.findall(r'^\| .* \| `labels.at = "([\w-]+)"` \| (.*) \|$', page, re.M)
    assert [place for place, _ in rows] == ["some-clients", "every-client", "server"]
    for place, methods in rows:
        for name in re.findall(r"`(.*?)`", methods):
            assert place in METHODS[name].label_places, (name, place)


def test_a_division_by_others_is_dealt_out_as_they_did(tmp_path, monkeypatch):
    """The page on the authors' code, on digits: a file as RSCFed's code saves it, then the page's settings."""
    monkeypatch.chdir(tmp_path)
    images = torch.randperm(1197, generator=torch.Generator().manual_seed(0)).tolist()
    theirs = {0: images[:100], 1: images[100:600], 2: images[600:]}
    torch.save({"data_partition": theirs}, "theirs.pth")
    script = ROOT / "examples" / "their_split.py"
    done = subprocess.run(
        [sys.executable, script, "digits", "theirs.pth", "theirs.json"], capture_output=True, text=True
    )
    assert done.stdout == "theirs.json: 3 clients with 1,197 of 1,197 images\n", done.stderr
    console.write_files(DOCS / "coming-from-authors-code.md")
    found = replace(experiment.load(Path("theirs.toml")), data=Data("digits"))
    found = replace(found, clients=replace(found.clients, count=3))
    dealt = partition.of(dataset_of(found), found)
    assert [sorted(share.images) for share in dealt.shares] == [sorted(theirs[client]) for client in range(3)]
    assert [len(share.labeled) for share in dealt.shares] == [100, 0, 0]
    assert (found.recipe, found.method.warmup, found.method.labeled_times) == (Train(), 7, 6)


def test_the_settings_of_the_page_on_pretrained_networks_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console.write_files(DOCS / "pretrained.md")
    found = experiment.load(Path("pretrained.toml"))
    assert (found.model.name, found.model.pretrained, found.method.local.lr) == ("resnet18", True, 0.003)


@pytest.mark.slow
def test_the_settings_of_the_page_on_pretrained_networks_run_with_fresh_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    console.write_files(DOCS / "pretrained.md")
    settings = "--set data.image_size=16 --set clients.count=1 --set labels.at=every-client --set labels.fraction=0.3"
    console.printed(f"fewlabel data split digits --to my {settings}")
    fresh = "--set model.pretrained=false --set rounds=3 --set data.image_size=32"
    assert "balanced accuracy" in console.printed(f"fewlabel run pretrained.toml {fresh}")


@pytest.mark.slow
def test_the_manual_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", DOCS, tmp_path], check=True
    )
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text())
        assert not loaded, page
    assert "<math" in (tmp_path / "methods" / "rscfed.html").read_text()
    assert "rscfed" in (tmp_path / "searchindex.js").read_text()  # the page `search.html` finds words in it
