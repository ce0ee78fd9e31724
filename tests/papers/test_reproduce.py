"""The papers' rows must be the papers' experiments, hold each number just once, and stand beside ours as they are."""

import csv
import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.data import datasets, partition
from fewlabel.data.published import files
from fewlabel.engine.sweep import place
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment, load
from fewlabel.methods import METHODS
from fewlabel.methods.fedavg import FedAvg
from fewlabel.papers import reproduce, tables
from fewlabel.papers.beside import Reproduction
from fewlabel.papers.reproduce import plan
from fewlabel.papers.tables import select
from tests.conftest import Command

SHARED = Path(__file__).parents[3] / "shared"
REAL = os.environ.get("FEWLABEL_DATA")  # as it is outside of the tests
ROWS = [row for table in tables.tables().values() for row in table.rows]
DIGITS = ["--set", "data=digits", "--set", "data.image_size=16", "--set", "model=simple-cnn", "--workers", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FEWLABEL_DATA", str(tmp_path / "no data"))


def experiment(name: str) -> Experiment:
    [row] = select(name)
    return row.experiment()


# What the files say


def test_every_table_and_figure_of_the_papers_is_there():
    assert set(tables.tables()) == {
        *(f"rscfed-table{n}" for n in range(1, 8)),
        "rscfed-fig2",
        "rscfed-share",
        *(f"cbafed-table{n}" for n in range(1, 5)),
        *(f"cbafed-fig{n}" for n in (2, 3, 4)),
        "cbafed-partial",
        "fedirm-table1",
        "fedirm-fig2a",
        "fedirm-fig2b",
        "fedirm-fig2c",
        "fedmatch-table1",
        "fedmatch-table2",
        *(f"fedmatch-fig{n}" for n in ("5a", "5b", "5c", "6", "7", "8")),
        "isofed-table1",
        "isofed-table2",
    }


@pytest.mark.parametrize("path", sorted(tables.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_a_file_holds_what_the_reader_knows_and_uses_all_of_its_groups(path: Path):
    content = tomllib.loads(path.read_text())
    assert content.keys() <= {"paper", "title", "note", "experiment", "groups", "rows"}
    used = {group for row in content["rows"].values() for group in row.get("use", ())}
    assert used == content.get("groups", {}).keys()


@pytest.mark.parametrize("table", tables.tables().values(), ids=lambda table: table.name)
def test_every_row_is_a_valid_experiment_of_its_own(table: tables.PaperTable):
    found = [row.experiment() for row in table.rows]
    assert all(one.rounds == row.rounds and one.seed == 0 for one, row in zip(found, table.rows, strict=True))
    assert all(key in tables.METRIC_NAMES for row in table.rows for key in row.paper)
    same = [one for number, one in enumerate(found) if one in found[:number]]
    # Of figure 4 each axis has a point with the defaults.
    assert len(same) == (2 if table.name == "cbafed-fig4" else 0)


def test_the_same_experiment_in_several_tables_is_run_once():
    names = ("table1/svhn-rscfed", "table2/svhn-rscfed", "table4/10-rscfed", "table6/rscfed-cost-15")
    names = (*names, "table7/rscfed-3x5", "fig2/rscfed")
    assert len({place(experiment(f"rscfed-{name}"), Path("runs")) for name in names}) == 1


# How rows are related


@pytest.mark.parametrize("data", ["svhn", "cifar100", "isic"])
def test_rscfeds_rows_differ_only_in_what_they_are_about(data: str):
    upper, lower, fedirm, consist, rscfed = (row.experiment() for row in select(f"rscfed-table1/{data}-*"))
    assert upper.method == lower.method
    for e in (upper, lower, fedirm, consist):
        assert (e.data, e.model, e.clients, e.views) == (rscfed.data, rscfed.model, rscfed.clients, rscfed.views)
        ours, theirs = e.method.local, rscfed.method.local
        assert (ours.lr, ours.batch_size, ours.optimizer, ours.clip) == (theirs.lr, theirs.batch_size, "sgd", 5.0)


def test_rows_of_ablations_are_rows_of_the_main_tables():
    for ablation, main in {
        "rscfed-table2/svhn-basic": "rscfed-table1/svhn-fed-consist",
        "rscfed-table2/isic-rscfed": "rscfed-table1/isic-rscfed",
        **{
            f"cbafed-table4/{data}-cbafed": f"cbafed-table1/{data}-cbafed"
            for data in ("cifar10", "cifar100", "fashion")
        },
    }.items():
        assert experiment(ablation).method == experiment(main).method


def test_rows_with_a_methods_defaults_are_that_method():
    for name, method in {
        "fedirm-table1/ich-fedirm": "fedirm",
        "fedmatch-table1/standard-fedmatch-dense": "fedmatch",
        "fedmatch-table1/disjoint-fedmatch-sparse": "fedmatch-sparse",
    }.items():
        assert experiment(name).method == METHODS[method]


def test_the_search_of_the_labeled_share_is_fed_consist_with_nothing_else_changed():
    shares = [row.experiment() for row in select("rscfed-share")]
    assert [e.method.labeled_share for e in shares] == [0.2, 0.3, 0.5, 0.7]
    chosen = experiment("rscfed-table1/svhn-fed-consist")
    assert shares[2] == chosen
    assert {replace(e, method=chosen.method) == chosen for e in shares} == {True}


def test_partial_labels_of_cbafed_are_rscfeds_tenth_for_methods_that_can_use_both_kinds_of_images():
    rows = {row.name: row.experiment() for row in select("cbafed-partial")}
    theirs = experiment("rscfed-table5/rscfed")
    for name, e in rows.items():
        assert (e.data, e.clients) == (theirs.data, theirs.clients), name
        assert e.labels == (theirs.labels if name != "fedavg-upper" else replace(theirs.labels, fraction=1.0)), name
    assert rows["cbafed"].method == experiment("cbafed-table1/svhn-cbafed").method
    assert rows["rscfed"].method.labeled_share is rows["fed-consist"].method.labeled_share is None


def test_fedirms_matrices_are_of_its_second_task_with_and_without_matching():
    matched, consistency = (row.experiment() for row in select("fedirm-fig2a"))
    assert matched == experiment("fedirm-table1/isic-fedirm")
    assert consistency == experiment("fedirm-table1/isic-fed-consistency")
    assert (matched.method.relation_weight, consistency.method.relation_weight) == (1.0, 0.0)


def test_what_a_papers_rows_have_in_common():
    def shared(tables: str, pick):
        return {pick(row.experiment()) for row in select(tables)}

    assert shared("fedirm-*", lambda e: (e.model.name, e.data.split, e.rounds)) == {("densenet121", "70-10-20", 100)}
    assert shared("isofed-*", lambda e: (e.model.name, e.clients.count, e.rounds)) == {("simple-cnn", 4, 1000)}
    assert shared("fedmatch-*", lambda e: (e.model.name, e.data.split)) == {("fedmatch-net", "fedmatch")}
    assert shared("cbafed-table3", lambda e: e.labels.clients) == {2}


def test_fedmatchs_curves_are_rows_of_its_tables():
    rows = {
        "fig5a/": "table2/f010-",
        "fig6/a-": "table2/f005-",
        "fig6/b-": "table1/standard-",
        "fig6/c-": "table1/disjoint-",
    }
    for row in (*select("fedmatch-fig5a"), *select("fedmatch-fig6")):
        [(figure, table)] = [pair for pair in rows.items() if row.id.startswith(f"fedmatch-{pair[0]}")]
        assert row.experiment() == experiment(row.id.replace(figure, table))
        assert not row.paper


def test_forgetting_is_of_a_single_model_with_50_labels_and_1000_images():
    for row in select("fedmatch-fig5c"):
        e = row.experiment()
        assert (e.clients.count, e.labels.at, e.labels.per_class, e.data.name) == (1, "every-client", 5, "cifar10")
        shown = min(e.rounds // e.stream.rounds, e.stream.steps)  # steps of the 54,000 training images
        assert shown * 54_000 / e.stream.steps == 1000


def test_fedmatchs_figures():
    whole = experiment("fedmatch-table2/f005-fedmatch-dense")
    for figure in ("5b", "7", "8"):
        assert replace(experiment(f"fedmatch-fig{figure}/fedmatch"), evaluate=whole.evaluate) == whole
    assert experiment("fedmatch-fig5b/fedmatch-without-helpers").method == replace(whole.method, helpers=0)
    _, sigma, psi, *_ = (row.experiment().method for row in select("fedmatch-fig7"))
    assert sigma == replace(whole.method, use_sigma=False)
    assert psi == replace(whole.method, use_psi=False, psi_start=0.0)
    methods = [row.experiment().method for row in select("fedmatch-fig8/fedmatch*")]
    assert [(m.weight_l1, m.zero_below) for m in methods] == [(0, 0), (1e-4, 1e-5), (1e-3, 1e-5), (1e-2, 1e-5)]


# Every number of the papers

PAPERS = SHARED / "paper-tables.csv"
DATA = {
    "SVHN": "svhn", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Fashion-MNIST": "fashion-mnist",
    "ISIC2018": "isic2018", "RSNA-ICH": "rsna-ich", "BloodMNIST": "bloodmnist", "PathMNIST": "pathmnist",
    "PneumoniaMNIST": "pneumoniamnist", "OrganAMNIST": "organamnist",
}  # fmt: skip
SHORT = {"fashion-mnist": "fashion", "isic2018": "isic", "rsna-ich": "ich"}
NETS = {
    "SimpleCNN": "simple-cnn",
    "ResNet-18": "resnet18-cifar",
    "ResNet18 (torchvision)": "resnet18",
    "ViT-Tiny": "vit-tiny",
    "DenseNet-121 (ImageNet)": "densenet121",
    "AlexNet-like": "fedmatch-net",
}
NAMES = {
    "FedAvg (upper-bound)": "fedavg-upper", "FedAvg (lower-bound)": "fedavg-lower", "FedAvg+": "fedavg-plus",
    "FedIRM": "fedirm", "Fed-Consist": "fed-consist", "Fed-Consist+": "fed-consist-plus", "RSCFed": "rscfed",
    "CBAFed": "cbafed", "Fed-SelfTraining": "fed-selftraining", "Fed-Consistency": "fed-consistency",
    "Basic": "basic", "Basic + SSO": "basic-sso", "RSCFed (SSO+DMA)": "rscfed",
    "Fixed PL": "fixed", "Fixed PL + CBA": "fixed-cba", "Fixed PL + CBA + DD": "fixed-cba-dd",
    "CBAFed (Fixed PL + CBA + DD + Res-Weight)": "cbafed",
    "wFed-Avg (upper-bound)": "upper", "MT+wFed-Avg": "mt", "IsoFed": "isofed", "IsoFed w/o PT": "isofed-without-pt",
}  # fmt: skip
METRICS = {
    "binary_accuracy_mean": "binary_accuracy",
    "sensitivity": "binary_sensitivity",
    "specificity": "binary_specificity",
    "f1": "binary_f1",
    "global_accuracy": "accuracy",
    "c2s_cost_percent": "sent",
}


def where(line: dict[str, str]) -> str:
    """The row that a line of the file of all numbers belongs to."""
    table = f"{line['paper'].lower()}-{line['table'].lower().replace(' ', '')}"
    method = NAMES.get(line["method"], line["method"].lower())
    setting, labeled = line["setting"], line["labeled_clients"]
    data = SHORT.get(DATA[line["dataset"]], DATA[line["dataset"]].removesuffix("mnist"))
    match table:
        case "rscfed-table3" if method == "fedirm":
            return f"{table}/fedirm-{'original' if 'original' in setting else 'adjusted'}"
        case "rscfed-table4":
            return f"{table}/{setting.split()[0]}-{method}"
        case "rscfed-table6" if method == "rscfed":
            return f"{table}/rscfed-cost-{setting[10:13].replace('.', '')}"
        case "rscfed-table7":
            return f"{table}/rscfed-{setting[2]}x{setting[6]}"
        case "rscfed-table3" | "rscfed-table5" | "rscfed-table6" | "cbafed-table2" | "cbafed-table3":
            return f"{table}/{method}"
        case "fedmatch-table1":
            return f"{table}/{setting.split()[0]}-{method}"
        case "fedmatch-table2":
            return f"{table}/{'f010' if 'F=0.10' in setting else 'f005'}-{method}"
        case "fedirm-sec3.3text":
            return f"fedirm-fig2b/{labeled}-{method}"
        case "isofed-table1" | "isofed-table2":
            ratio = "" if method == "upper" else f"-l{labeled}u{line['unlabeled_clients']}"
            return f"{table}/{data}-{method}{ratio}-g{line['gamma'].replace('.', '')}"
    return f"{table}/{data}-{method}"


@pytest.fixture(scope="module")
def lines() -> list[dict[str, str]]:
    if not PAPERS.exists():
        pytest.skip("the papers' numbers are not there: ../shared/paper-tables.csv lies beside the repository")
    with PAPERS.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_number_of_the_papers_is_in_its_row_and_no_other_number_is(lines: list[dict[str, str]]):
    theirs = {
        (where(line), METRICS.get(line["metric"], line["metric"])): (
            float(line["value"]),
            float(line["std"]) if line["std"] else None,
        )
        for line in lines
    }
    assert len(theirs) == len(lines)
    assert theirs == {(row.id, key): (n.mean, n.std) for row in ROWS for key, n in row.paper.items()}


def test_a_number_stands_in_a_row_of_its_data_network_clients_and_labels(lines: list[dict[str, str]]):
    for line in {where(line): line for line in lines}.values():
        e = experiment(where(line))
        labeled, unlabeled = int(line["labeled_clients"]), int(line["unlabeled_clients"])
        assert e.data.name == DATA[line["dataset"]]
        assert e.model.name == NETS[line["backbone"]]
        if line["paper"] == "FedMatch":
            assert e.clients.partition == {"iid": "iid-per-class"}.get(line["gamma"], "fedmatch")
            assert (labeled, unlabeled) == ((0, 10) if "server" in e.labels.at else (e.clients.count, 0))
            full = (e.labels.fraction, e.labels.per_class) == (1.0, None)
            assert full == ("full labels" in line["setting"]) == line["method"].endswith("-SL")
            continue
        assert e.clients.partition == "iid" if line["gamma"] == "iid" else e.clients.alpha == float(line["gamma"])
        if e.labels.at == "every-client":
            assert (labeled, unlabeled) == (e.clients.count, 0)
        elif unlabeled:
            assert (labeled, unlabeled) == (e.labels.clients, e.clients.count - e.labels.clients)
        else:  # the lower bounds, in which the others take no part
            assert labeled == e.labels.clients
            assert isinstance(e.method, FedAvg) or e.method.labeling == "none"


# The command


def test_the_list_names_every_table_and_the_data_that_are_missing(fewlabel: Command):
    found = fewlabel("reproduce", "--list")
    assert (found.code, found.err) == (0, "")
    assert [name for name in tables.tables() if name not in found.out] == []
    assert "svhn*" in found.out
    assert found.out.endswith("`fewlabel reproduce NAME --list` lists a table's rows.\n")
    told = {one["name"]: one for one in json.loads(fewlabel("reproduce", "--list", "--format", "json").out)}
    assert told["rscfed-table1"]["data"] == {"svhn": False, "cifar100": False, "isic2018": False}
    assert len(told["rscfed-table1"]["rows"]) == 15


def test_the_list_of_a_name_is_what_it_stands_for(fewlabel: Command):
    [found] = json.loads(fewlabel("reproduce", "rscfed-table1/svhn-*", "--list", "--format", "json").out)
    assert (found["name"], found["data"]) == ("rscfed-table1", {"svhn": False})
    assert len(found["rows"]) == 5
    lines = fewlabel("reproduce", "rscfed-table1/svhn-*", "--list").out.splitlines()
    assert lines[-5:] == [f"rscfed-table1/{row}" for row in found["rows"]]
    assert not [line for line in lines if "fedirm-table1" in line]
    assert "no table or figure 'rscfed-tabel1'" in fewlabel("reproduce", "rscfed-tabel1", "--list").err


@pytest.mark.parametrize(
    "name", ["rscfed-table1/svhn-rscfed", "fedirm-table1/ich-fedavg-upper", "isofed-table1/blood-upper-g05"]
)
def test_a_printed_row_is_a_file_that_reads_as_that_row(name: str, fewlabel: Command, tmp_path: Path):
    found = fewlabel("reproduce", name, "--print")
    (tmp_path / "row.toml").write_text(found.out)
    assert (found.code, found.err) == (0, "")
    assert load(tmp_path / "row.toml") == experiment(name)
    changed = fewlabel("reproduce", name, "--print", "--rounds", "7", "--seeds", "3", "--set", "clients.alpha=0.1")
    (tmp_path / "row.toml").write_text(changed.out)
    again = load(tmp_path / "row.toml")
    assert (again.rounds, again.seed, again.clients.alpha) == (7, 3, 0.1)
    assert (
        json.loads(fewlabel("reproduce", name, "--print", "--format", "json").out)["rounds"] == experiment(name).rounds
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["rscfed-tabel1"], "there is no table or figure 'rscfed-tabel1'; did you mean 'rscfed-table1'?"),
        (
            ["rscfed-table1/svhn-rsfed"],
            "there is no row in rscfed-table1 named 'svhn-rsfed'; did you mean 'svhn-rscfed'?",
        ),
        (["rscfed-table7", "--print"], "--print prints one row with one seed, and these are 4"),
        (["rscfed-table7", "--set", "rounds=3", "--rounds", "4"], "rounds is given twice"),
        (["rscfed-table7", "--set", "seed=3", "--seeds", "4"], "seed is given twice"),
        (["rscfed-table7", "--seeds", "a"], "--seeds takes whole numbers"),
        (
            ["rscfed-table7/rscfed-3x5", "--set", "method.bta=1"],
            "rscfed-table7/rscfed-3x5: unknown setting 'method.bta'",
        ),
        (["rscfed-table7"], "the data set 'svhn' is not here"),
        (["rscfed-table7"], "run `fewlabel data get svhn`"),
        (
            ["cbafed-table1/svhn-cbafed", "--rounds", "1"],
            "cbafed-table1/svhn-cbafed needs more rounds than 1, because its warm-up alone takes 1",
        ),
        (["rscfed-table1/svhn-rscfed", "--set", "method=rscfed-authors", "--rounds", "6"], "its warm-up alone takes 7"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(argv: list[str], sentence: str, fewlabel: Command):
    found = fewlabel("reproduce", *argv)
    assert (found.code, found.out) == (2, "")
    assert sentence in found.err
    assert found.err.count("\n") == 1


def test_a_short_reproduction_from_end_to_end(fewlabel: Command, tmp_path: Path):
    words = ["isofed-table2/pneumonia-isofed-l1u3-*", *DIGITS, "--rounds", "2", "--seeds", "0,1", "--out", "here"]
    found = fewlabel("reproduce", *words)
    assert found.code == 0, found.err
    assert found.out.count("2 of 1000") == 2
    assert "Seeds 0, 1, mean ± std" in found.out
    assert "SHORT" in found.out
    assert "CHANGED: this is not the paper's experiment, but one with data=digits" in " ".join(found.out.split())
    assert [number for number in ("85", "91.68", "77.12") if f" {number} " not in found.out] == []
    assert len([path for path in (tmp_path / "here").iterdir() if path.is_dir()]) == 4
    assert found.out.endswith("here/isofed-table2.html\n")
    assert "pneumonia-isofed-l1u3-g05" in (tmp_path / "here" / "isofed-table2.html").read_text()
    again = fewlabel("reproduce", *words, "--format", "json")
    assert "4 of 4 runs are done already" in again.err
    first, second = json.loads(again.out)["rows"]
    assert (first["table"], first["row"]) == ("isofed-table2", "pneumonia-isofed-l1u3-g08")
    assert (first["rounds"], first["rounds_of_paper"], first["short"], first["seeds"]) == (2, 1000, True, [0, 1])
    assert first["paper"]["accuracy"] == {"mean": 85.0, "std": None}
    runs = [json.loads((Path(folder) / "summary.json").read_text()) for folder in first["directories"]]
    mean = 100 * sum(run["last"]["test"]["accuracy"] for run in runs) / 2
    assert first["ours"]["accuracy"]["mean"] == pytest.approx(mean)
    assert second["ours"]["accuracy"]["std"] is not None


def test_before_it_runs_a_person_reads_what_it_takes_and_what_counts(fewlabel: Command, tmp_path: Path):
    words = ["fedirm-table1/ich-fed*", *DIGITS, "--rounds", "30", "--seeds", "0,1", "--out", "here"]
    assert "Cannot run: ich-fedavg-upper" in (bad := fewlabel("reproduce", *words, "--dry-run").out)
    assert "no pretrained weights" in " ".join(bad.split())
    words += ["--set", "model.pretrained=false"]
    found = fewlabel("reproduce", *words, "--dry-run")
    assert (found.code, found.err) == (0, "")
    text = " ".join(found.out.split())
    assert "What will run of fedirm-table1" in text
    assert "±" in text
    assert "within two standard deviations" in text
    assert "in all with 1 worker, by a few training steps" in text
    assert "The data are on this machine: digits." in text
    assert not (tmp_path / "here").exists()  # nothing was laid out


def test_a_forecast_counts_the_images_that_a_run_trains_on(fewlabel: Command, tmp_path: Path):
    words = ["rscfed-table1/svhn-fedavg-*", *DIGITS, "--rounds", "2", "--out", "here", "--format", "json"]
    told = {row["row"]: row for row in json.loads(fewlabel("reproduce", *words, "--dry-run").out)["rows"]}
    assert told["svhn-fedavg-upper"]["tolerance"]["accuracy"] is None  # the paper prints no spread
    assert all((row["runs"], row["rounds"]) == (1, 2) and row["seconds"] > 0 for row in told.values())
    found = fewlabel("reproduce", *words)
    assert "What will run of rscfed-table1" in found.err
    for row in json.loads(found.out)["rows"]:
        lines = [json.loads(line) for line in (Path(row["directories"][0]) / "rounds.jsonl").read_text().splitlines()]
        trained = sum(line["images_labeled"] + line["images_unlabeled"] for line in lines)
        assert told[row["row"]]["images"] == trained  # one epoch a round, so this is exact
    again = fewlabel("reproduce", *words)
    assert "What will run" not in again.err  # nothing will


def test_an_image_without_a_label_counts_where_its_client_is_asked(fewlabel: Command):
    words = [*DIGITS, "--rounds", "3", "--set", "method.warmup_epochs=2", "--dry-run", "--format", "json"]
    [row] = json.loads(fewlabel("reproduce", "cbafed-table1/svhn-cbafed", *words).out)["rows"]
    e = select("cbafed-table1/svhn-cbafed")[0].experiment([word for word in words if "=" in word])
    dealt = partition.of(dataset_of(e), e)
    labeled = sum(len(share.labeled) for share in dealt.shares)
    unlabeled = sum(len(share.unlabeled) for share in dealt.shares)
    # One round of warm-up with two epochs; then two rounds with 11 epochs on labels and at most one on the others.
    assert row["images"] == 2 * labeled + 2 * (11 * labeled + unlabeled)


def test_a_dry_run_names_rows_whose_data_are_missing(fewlabel: Command):
    found = fewlabel("reproduce", "rscfed-table7", "--dry-run")
    assert found.code == 0
    assert "Cannot run: rscfed-3x5" in " ".join(found.out.split())
    assert "fewlabel data get svhn" in " ".join(found.out.split())


def test_what_clients_sent_and_their_own_accuracy_stand_beside_fedmatchs(fewlabel: Command):
    words = [*DIGITS, "--rounds", "2", "--set", "clients.count=4", "--set", "stream.steps=2", "--format", "json"]
    rows = json.loads(fewlabel("reproduce", "fedmatch-table1/*-fedmatch-dense", *words).out)["rows"]
    rows += json.loads(fewlabel("reproduce", "fedmatch-table1/standard-*-fixmatch", *words).out)["rows"]
    ours = {row["row"]: {key: value and value["mean"] for key, value in row["ours"].items()} for row in rows}
    both, psi = ours["standard-fedmatch-dense"], ours["disjoint-fedmatch-dense"]
    assert 100 < both["sent"] < 200  # of sigma what has no gradient stays as it was, and is not sent
    assert both["sent"] < both["bytes_sent"] < both["sent"] + 4  # and a bitmap of a thirty-second
    assert psi["sent"] == pytest.approx(100)
    assert 99 < psi["bytes_sent"] < 100  # the names of a model's entries are saved
    assert ours["standard-fedavg-fixmatch"]["sent"] == ours["standard-fedavg-fixmatch"]["bytes_sent"] == 100
    assert all(0 < row["local_accuracy"] < 100 for row in ours.values())
    assert ours["standard-local-fixmatch"].keys() == {"local_accuracy"}
    assert rows[0]["paper"]["sent"] == {"mean": 177.0, "std": None}


def test_rows_that_cannot_run_do_not_hide_the_others(fewlabel: Command):
    found = fewlabel("reproduce", "cbafed-table1/svhn-fed*", *DIGITS, "--rounds", "1", "--format", "json")
    rows = {row["row"]: row for row in json.loads(found.out)["rows"]}
    assert found.code == 0, found.err
    assert [name for name, row in rows.items() if "ours" in row] == [
        "svhn-fedavg-upper",
        "svhn-fedavg-lower",
        "svhn-fedavg-plus",
        "svhn-fedirm",
    ]
    assert "warm-up" in rows["svhn-fed-consist"]["not_run"]


def test_a_run_that_is_not_at_its_end_is_marked(tmp_path: Path):
    changes = [word for word in DIGITS if "=" in word]
    found = Reproduction(plan(select("rscfed-fig2/rscfed"), tmp_path, changes, rounds=3), changes)
    text = str(found.table())
    assert "rscfed*" in text
    assert "* rscfed, seed 0: unfinished, round 0 of 3." in text
    assert found.to_json()["rows"][0]["unfinished"] == {"0": "unfinished, round 0 of 3"}


def test_what_is_finished_is_shown_without_its_data(fewlabel: Command, monkeypatch: pytest.MonkeyPatch):
    words = ["rscfed-table7/rscfed-5x3", *DIGITS, "--rounds", "1"]
    assert fewlabel("reproduce", *words).code == 0
    monkeypatch.setattr(reproduce, "missing_data", lambda data: "it is not here")
    found = fewlabel("reproduce", *words)
    assert (found.code, "70.28" in found.out) == (0, True)


@pytest.fixture
def _pneumonia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEWLABEL_DATA", str(REAL or SHARED / "data"))
    try:
        files.find("pneumoniamnist", datasets.DATASETS["pneumoniamnist"])
    except BadInput as error:
        pytest.skip(f"no real data: {error}")


@pytest.mark.usefixtures("_pneumonia")
def test_a_real_row_runs_beside_one_whose_data_are_missing(fewlabel: Command):
    found = fewlabel("reproduce", "isofed-table2/*-upper-g08", "--rounds", "1", "--workers", "1", "--format", "json")
    there, missing = json.loads(found.out)["rows"]
    assert found.code == 0, found.err
    assert 0 < there["ours"]["accuracy"]["mean"] < 100
    assert "fewlabel data get organamnist" in missing["not_run"]


OWN = """
paper = "ours"
title = "a table of one's own"

[experiment]
rounds = 2
data = { name = "digits", image_size = 16 }
method.local.epochs = 1

[rows]
floor = { method.name = "labels-only" }
prox = { method.name = "fedprox", paper = { accuracy = 12.5 } }
"""


def test_a_table_of_ones_own_is_a_file_of_the_same_form(fewlabel: Command, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(tables.tables(), "own", None)  # or it would stay for other tests
    (tmp_path / "own.toml").write_text(OWN)
    found = fewlabel("reproduce", "own.toml", "--workers", "1", "--format", "json")
    floor, prox = json.loads(found.out)["rows"]
    assert found.code == 0
    assert [(row["table"], row["row"]) for row in (floor, prox)] == [("own", "floor"), ("own", "prox")]
    assert [row.name for row in select("own.toml/p*")] == ["prox"]


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), ("rows =", "Invalid value"), ("", "'experiment'")]
)
def test_a_file_that_is_no_table_is_refused_in_one_sentence(fewlabel: Command, tmp_path: Path, content, says):
    if content is not None:
        (tmp_path / "own.toml").write_text(content)
    found = fewlabel("reproduce", "own.toml")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert says in found.err


def test_a_metric_that_there_is_not_is_refused_before_anything_runs(fewlabel: Command, tmp_path: Path):
    (tmp_path / "own.toml").write_text(OWN.replace("accuracy", "acuracy"))
    found = fewlabel("reproduce", "own.toml")
    assert (found.code, found.out) == (2, "")
    assert "did you mean 'accuracy'?" in found.err
    assert not (tmp_path / "runs").exists()


def test_every_row_of_our_own_streams_is_a_valid_experiment():
    path = Path(__file__).parents[2] / "experiments" / "results" / "k-streaming.toml"
    rows = {row.name: row.experiment() for row in tables.read_table(path).rows}
    assert rows["standard/local-uda"].method.local.lr == rows["standard/fedavg-uda"].method.local.lr  # tuned as that
