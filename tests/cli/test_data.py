"""The commands `fewlabel data ...`: what they find, draw and write, and that no label is written which nobody has."""

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewlabel import experiment as experiments
from fewlabel.data import datasets, partition
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.reader import read_parts
from fewlabel.data.published.files import DatasetSource, Edition, PublishedFile
from fewlabel.data.splits import sides
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import read
from tests.cli.test_main import QUICK
from tests.conftest import Command
from tests.data.test_own import conflicting_npz, grey, save, spoil, write_csv

COMMANDS = ["check", "info", "get", "partition", "split"]
MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"]
SUFFIX = {"CMYK": "jpg", "I;16": "tif", "RGB": "jpg"}


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_and_fits_the_screen(name: str, fewlabel: Command) -> None:
    found = fewlabel("data", name, "--help")
    assert found.code == 0
    assert f"  fewlabel data {name} " in found.out
    assert "--format" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


def test_the_commands_are_listed(fewlabel: Command) -> None:
    assert [name for name in COMMANDS if f" {name} " not in fewlabel("data").out] == []
    assert fewlabel("data", "chek").err == "fewlabel: No such command 'chek'. Did you mean 'check'?\n"


# A folder as hospitals hand it over


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 images of many sizes and modes, of which 10 are corrupted, 5 empty, and 3 copies of others."""
    folder, draw = tmp_path_factory.mktemp("mixed"), np.random.Generator(np.random.PCG64(0))
    for number in range(1997):
        mode, label = MODES[number % len(MODES)], "abc"[number % 3] if number % 10 else "unlabeled"
        width, height = 8 + number % 7, 8 + number % 11
        noise = draw.integers(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 16)
        save(folder / label / f"{number % 4}" / f"{number:04d}.{SUFFIX.get(mode, 'png')}", image)
    files = sorted(folder.rglob("*.*"))
    for number, file in enumerate(files[100:1100:100]):
        spoil(file, ("cut", "overwritten", "text")[number % 3])
    for file in files[50:550:100]:
        file.write_bytes(b"")
    for number, file in enumerate(files[1:4]):
        (file.parent / f"copy{number}{file.suffix}").write_bytes(file.read_bytes())
    return folder


def names(folder: Path, files: list[Path]) -> set[str]:
    return {str(file.relative_to(folder)) for file in files}


def test_every_corrupted_empty_and_duplicated_file_is_named(mixed: Path, fewlabel: Command) -> None:
    files = sorted(file for file in mixed.rglob("*.*") if not file.name.startswith("copy"))
    broken, empty = names(mixed, files[100:1100:100]), names(mixed, files[50:550:100])
    found = fewlabel("data", "check", mixed, "--format", "json")
    told = json.loads(found.out)
    assert found.code == 2
    assert found.err == (
        "fewlabel: this would spoil a run: 15 files cannot be read (data.unreadable = 'skip' leaves them out)\n"
    )
    assert told["unreadable"].keys() == broken
    assert all(told["unreadable"].values())
    assert set(told["empty"]) == empty
    assert len(told["duplicates"]) == 3
    assert {name for same in told["duplicates"] for name in same if "copy" in name} == names(
        mixed, list(mixed.rglob("copy*"))
    )
    assert told["images"] == 2000 - 15
    assert told["unlabeled"] == told["splits"]["all"]["unlabeled"]
    text = fewlabel("data", "check", mixed, "--skip-unreadable")
    assert text.code == 0
    assert [name for name in (*broken, *empty) if name not in text.out] == []
    assert text.out.count(" = ") == 3
    assert "1,985 images, colour" in text.out


def test_images_with_two_labels_are_named_and_a_run_goes_on_without_them(fewlabel: Command, tmp_path: Path) -> None:
    path = conflicting_npz(tmp_path / "a.npz")
    found = fewlabel("data", "check", path)
    assert found.code == 0
    assert "the same image with different labels, left out of a run by default (2):" in found.out
    assert "  train_images[2] (0) = train_images[7] (1)\n" in found.out
    few = sets("data.name=npz", f"data.path={path}", "clients.count=1", "clients.min_size=1", "rounds=1")
    found = fewlabel("run", *few, "--out", "run", "--workers", "1")
    assert found.code == 0
    assert "fewlabel: different labels for 2 images, such as train_images[1] (0) and test_images[3] (1)" in found.err
    assert json.loads((tmp_path / "run" / "notes.json").read_text())["sentences"][0].startswith("different labels")
    assert "left out: 4 images with different labels, or" in fewlabel("data", "info", "npz", *few).out
    found = fewlabel("run", *few, *sets("data.conflicting=fatal"), "--out", "refused")
    assert found.code == 2
    assert "set data.conflicting = 'leave-out'" in found.err


def test_a_check_fails_if_every_image_has_two_labels(fewlabel: Command, tmp_path: Path) -> None:
    for label in "ab":
        grey(tmp_path / "images" / label / "1.png", 1)
    found = fewlabel("data", "check", tmp_path / "images")
    assert found.code == 2
    assert "this would spoil a run: every labeled image has a copy with another label, so a run has none" in found.err


def test_a_run_on_the_rest_works(mixed: Path, fewlabel: Command, tmp_path: Path) -> None:
    argv = ["run", *QUICK, "--data", "folder", "--set", f"data.path={mixed}", "--set", "rounds=1", "--workers", "1"]
    found = fewlabel(*argv)
    assert found.code == 2
    assert "data.unreadable = 'skip'" in found.err
    found = fewlabel(*argv, "--set", "data.unreadable=skip", "--out", "run", "--format", "json")
    assert found.code == 0
    dealt = json.loads((tmp_path / "run" / "partition.json").read_text())
    dataset = dataset_of(
        read({}, ["data.name=folder", f"data.path={mixed}", "data.unreadable=skip", "data.image_size=16"])
    )
    labels = dataset.splits["train"].labels
    unlabeled = {int(i) for i in (labels < 0).nonzero()}
    assert len(unlabeled) > 190  # every tenth of 1,985
    assert unlabeled <= {i for client in dealt["clients"] for i in client["unlabeled"]}
    assert [len(unlabeled & set(client["unlabeled"])) for client in dealt["clients"]] == pytest.approx(
        [len(unlabeled) / 5] * 5, abs=1
    )  # to everybody alike
    assert (dataset.splits["test"].labels >= 0).all()


def test_reading_takes_less_memory_than_the_images(mixed: Path) -> None:
    found = list_images("folder", mixed)
    some = replace(found, items=found.items[:400])
    part = read_parts(some, skip=True)[0]["all"]
    tracemalloc.start()
    try:
        decoded = sum(some.nbytes for some in part.read(128))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert decoded == len(part) * 3 * 128 * 128
    assert peak < decoded / 2


# Splits and columns


def hospital(folder: Path) -> Path:
    """A table of 240 images of 60 patients at three sites; a fifth has no label."""
    rows = []
    for number in range(240):
        grey(folder / f"{number}.png", number)
        label = "" if number % 5 == 0 else "ab"[number % 2]
        rows.append(f"{number}.png,{label},{'xyz'[number // 4 % 3]},p{number // 4}")
    return write_csv(folder / "table.csv", "image,label,hospital,patient", rows)


def test_no_patient_is_on_two_sides_and_what_has_no_label_is_trained_on(tmp_path: Path) -> None:
    """48 of 240 have no label; those of patients who are tested on are left out."""
    found = list_images("csv", hospital(tmp_path))
    parts, _ = read_parts(found)
    side = sides(parts, "published", 0)["all"]
    patients = {
        name: {item.patient for item, s in zip(found.items, side, strict=True) if s == name} for name in set(side)
    }
    assert patients["train"].isdisjoint(patients["test"] | patients["validation"])
    assert patients["test"].isdisjoint(patients["validation"])
    unlabeled = Counter(side[parts["all"].labels < 0])
    assert unlabeled.keys() == {"train", ""}
    assert patients[""] <= patients["test"] | patients["validation"]
    assert Counter(side[parts["all"].labels >= 0])["test"] == pytest.approx(0.2 * 192, abs=4)
    assert np.array_equal(side, sides(parts, "published", 0)["all"])
    assert not np.array_equal(side, sides(parts, "published", 1)["all"])


def test_copies_of_an_image_stay_on_one_side(tmp_path: Path) -> None:
    for number in range(120):
        grey(tmp_path / "ab"[number % 2] / f"{number}.png", number // 4 * 2 + number % 2)  # each twice
    listing = list_images("folder", tmp_path)
    side = sides(read_parts(listing)[0], "published", 0)["all"]
    where: dict[bytes, set[str]] = {}
    for item, which in zip(listing.items, side, strict=True):
        where.setdefault(item.file.read_bytes(), set()).add(which)
    assert len(where) == 60
    assert {len(splits) for splits in where.values()} == {1}


def test_a_column_of_clients_deals_out_the_images(tmp_path: Path, fewlabel: Command) -> None:
    settings = ["data.name=csv", f"data.path={hospital(tmp_path)}", "clients.partition=by-column", "clients.count=3"]
    argv = sets(*settings)
    experiment = read({}, [*settings, "data.image_size=16"])
    dataset = dataset_of(experiment)
    assert dataset.splits["train"].clients is not None
    shares = partition.of(dataset, experiment).shares
    held = [set(dataset.splits["train"].clients[share.images]) for share in shares]
    assert held == [{"x"}, {"y"}, {"z"}]
    found = fewlabel("data", "partition", *argv, "--format", "json")
    told = json.loads(found.out)
    assert [row["images"] for row in told["shares"]] == [len(share) for share in shares]
    assert fewlabel("run", *QUICK, *argv, "--set", "rounds=1", "--workers", "1").code == 0


def test_what_is_left_out_is_told_and_clients_have_their_names(tmp_path: Path, fewlabel: Command) -> None:
    path = hospital(tmp_path)
    path.write_text(path.read_text().replace(",z,", ",,"))
    argv = sets("data.path=table.csv", "clients.partition=by-column", "clients.count=2", "data.image_size=16")
    found = fewlabel("data", "info", "csv", *argv)
    why = "without a label, of patients or copies of images in other splits"
    side = sides(read_parts(list_images("csv", path))[0], "published", 0)["all"]
    gone = int((side == "").sum())
    assert gone > 0
    assert found.out.splitlines()[-1] == f"left out: {gone} images {why}"
    assert json.loads(fewlabel("data", "info", "csv", *argv, "--format", "json").out)["left_out"] == {why: gone}
    nobodys = int(((side == "train") & (np.arange(240) // 4 % 3 == 2)).sum())
    lines = fewlabel("data", "partition", "csv", *argv).out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["client", "0:", "x"], ["client", "1:", "y"]]
    assert lines[-1] == f"left out: {nobodys} images without a client in their column"
    told = json.loads(fewlabel("data", "partition", "csv", *argv, "--png", "p.png", "--format", "json").out)
    assert [row["name"] for row in told["shares"]] == ["client 0: x", "client 1: y"]
    assert told["left_out"] == {"without a client in their column": nobodys}
    assert [sum(row["labeled"] + row["unlabeled"]) + row["unknown"] == row["images"] for row in told["shares"]] == [
        True,
        True,
    ]


def test_your_own_labels_that_are_known_and_hidden_are_counted(tmp_path: Path, fewlabel: Command) -> None:
    """Hospital x has no labels, y and z have: with one labeled client those of y are used."""
    path = hospital(tmp_path)
    path.write_text(path.read_text().replace("a,x,", ",x,").replace("b,x,", ",x,"))
    settings = sets(f"data.path={path}", "clients.partition=by-column", "clients.count=3", "data.image_size=16")
    everything = ["data", "partition", "csv", *settings]
    argv = [*everything, *sets("labels.clients=1")]
    x, y, z = json.loads(fewlabel(*argv, "--format", "json").out)["shares"]
    assert (sum(x["labeled"]), sum(x["unlabeled"]), sum(z["labeled"])) == (0, 0, 0)
    assert sum(y["labeled"]) > 0 < sum(z["unlabeled"])
    told = f"hidden: {sum(z['unlabeled'])} labels that are known; labels.at=every-client and labels.fraction=1 use "
    assert fewlabel(*argv).out.splitlines()[-1] == told + "them all"
    assert "hidden" not in fewlabel(*everything).out
    assert "hidden" not in fewlabel("data", "partition", "digits").out
    found = fewlabel(*argv, "--set", "labels.clients=3")
    assert found.code == 2
    assert "labels.clients = 3, but only 2 of 3 clients have labels: 1, 2" in found.err


def test_paths_are_absolute_and_those_in_a_file_are_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fewlabel: Command
) -> None:
    """Or a run could be resumed only from where it was begun."""
    hospital(tmp_path / "project")
    toml = tmp_path / "project" / "my.toml"
    data = "[data]\nname = 'csv'\npath = 'table.csv'\n"
    toml.write_text(f"{data}[clients]\npartition = 'file'\nfile = 'p.json'\n")
    (tmp_path / "p.json").touch()
    experiment = experiments.load(toml)
    assert experiment.data.path == str(tmp_path / "project" / "table.csv")
    assert experiment.clients.file == str(tmp_path / "p.json")
    assert experiments.read({}, ["data.path=~/x"]).data.path == str(Path.home() / "x")
    toml.write_text(data)
    assert fewlabel("data", "partition", "project/my.toml").code == 0
    monkeypatch.chdir(tmp_path / "project")
    argv = ["--data", "csv", "--set", "data.path=table.csv", "--set", "rounds=1", "--workers", "1", "--out", "run"]
    assert fewlabel("run", *QUICK, *argv).code == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project" / "run" / "summary.json").unlink()
    assert fewlabel("run", "--resume", "project/run", "--workers", "1").code == 0


def test_changed_images_are_decoded_anew(tmp_path: Path) -> None:
    path = hospital(tmp_path)
    experiment = read({}, ["data.name=csv", f"data.path={path}", "data.image_size=16"])
    first = dataset_of(experiment).digest
    assert dataset_of(experiment).digest == first
    grey(tmp_path / "7.png", 200)
    second = dataset_of(experiment).digest
    assert second != first
    path.write_text(path.read_text().replace("7.png,b,", "7.png,a,"))
    assert dataset_of(experiment).digest not in (first, second)


def test_a_folder_that_is_there_already_split_and_an_npz_run(tmp_path: Path, fewlabel: Command) -> None:
    draw = np.random.Generator(np.random.PCG64(0))
    arrays = {}
    for split, count in (("train", 80), ("test", 20)):
        arrays[f"{split}_images"] = images = draw.integers(0, 256, (count, 12, 12), np.uint8)
        arrays[f"{split}_labels"] = labels = np.arange(count)[:, None] % 2
        for number in range(count):
            save(tmp_path / "f" / split / str(labels[number, 0]) / f"{number:02d}.png", Image.fromarray(images[number]))
    np.savez(tmp_path / "a.npz", **arrays)
    digests = []
    for kind, path in (("folder", "f"), ("npz", "a.npz")):
        found = fewlabel("data", "info", kind, "--set", f"data.path={path}", "--format", "json")
        told = json.loads(found.out)
        digests.append(told["digest"])
        assert told["splits"]["train"] == {"images": 80, "classes": [40, 40], "unlabeled": 0}
        assert told["files"] == [str(tmp_path / path)]
        argv = ["--data", kind, "--set", f"data.path={path}", "--set", "rounds=1", "--workers", "1"]
        assert fewlabel("run", *QUICK, *argv).code == 0
    assert fewlabel("data", "check", "a.npz").code == 0


# Published sets


def test_info_counts_each_split_and_class(fewlabel: Command) -> None:
    found = fewlabel("data", "info", "digits", "--format", "json")
    told = json.loads(found.out)
    assert {split: some["images"] for split, some in told["splits"].items()} == {
        "train": 1197,
        "validation": 300,
        "test": 300,
    }
    assert (told["channels"], told["image_size"], told["files"]) == (1, 32, [])
    lines = fewlabel("data", "info", "digits").out.splitlines()
    assert lines[-1].split() == ["all", "1,197", "300", "300", "1,797"]
    assert lines[2].split() == ["class", "train", "validation", "test", "all"]


def test_get_downloads_what_is_not_here(
    fewlabel: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "set.npz").write_bytes(b"content")
    (tmp_path / "home").mkdir()
    edition = Edition((PublishedFile("set.npz", (tmp_path / "source" / "set.npz").as_uri()),), print)
    monkeypatch.setitem(datasets.DATASETS, "some", DatasetSource((edition,), "something"))
    found = fewlabel("data", "get", "some", "--data-dir", "home", "--format", "json")
    assert json.loads(found.out) == {"name": "some", "files": ["home/some/set.npz"]}
    assert (tmp_path / "home" / "some" / "set.npz").read_bytes() == b"content"
    (tmp_path / "source" / "set.npz").unlink()
    assert fewlabel("data", "get", "some", "--data-dir", "home") == (0, "home/some/set.npz\n", "")
    assert "nothing to download" in fewlabel("data", "get", "digits").out


def test_get_says_what_people_must_get_themselves(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    found = fewlabel("data", "get", "rsna-ich", "--data-dir", "home")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert "put stage_2_train and stage_2_train.csv (or stage_1_train and stage_1_train.csv)" in found.err
    assert "from https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection into home/rsna-ich" in found.err
    assert list((tmp_path / "home").iterdir()) == []


# Partitions


def test_a_partition_is_drawn_before_anyone_trains(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[clients]\ncount = 4\n")
    found = fewlabel("data", "partition", "my.toml", "--set", "clients.partition=iid", "--png", "p.png")
    assert found.code == 0
    assert [line.split()[:3] for line in found.out.splitlines()[1:5]] == [
        ["client", "0", "300"],
        ["client", "1", "299"],
        ["client", "2", "299"],
        ["client", "3", "299"],
    ]
    assert Image.open(tmp_path / "p.png").format == "PNG"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.toml", "p.png"]


# Sites

SITES = sets("clients.count=4", "data.image_size=8", "labels.clients=2")


def rows(pixels: np.ndarray, labels: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(pixels, labels, strict=True))


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_a_site_reads_back_its_own_pixels_and_labels_and_no_others(
    kind: str,
    fewlabel: Command,
    tmp_path: Path,
) -> None:
    found = fewlabel("data", "split", "digits", *SITES, "--to", "sites", "--as", kind, "--format", "json")
    written = json.loads(found.out)
    assert [Path(site["path"]).stem for site in written] == [*(f"client-{n}" for n in range(4)), "validation", "test"]
    experiment = read({}, SITES[1::2])
    dataset = dataset_of(experiment)
    train = dataset.splits["train"]
    for site, share in zip(written, partition.of(dataset, experiment).shares, strict=False):
        listed = list_images(kind, site["path"])
        (part,) = read_parts(listed)[0].values()
        labels = np.append(train.labels[share.labeled], [-1] * len(share.unlabeled))
        assert listed.classes == dataset.classes
        assert rows(np.concatenate(list(part.read(8))), part.labels) == rows(
            train.images.pixels[share.images].numpy(), labels
        )
        assert (site["labeled"], site["unlabeled"]) == (len(share.labeled), len(share.unlabeled))
    assert [site["labeled"] == 0 for site in written[:4]] == [False, False, True, True]


def test_nothing_that_is_written_for_an_unlabeled_client_tells_a_label(
    fewlabel: Command,
    tmp_path: Path,
) -> None:
    """A set in the order of its classes: neither names nor the order of files may tell where one ends."""
    for label in "ab":
        for number in range(100):
            grey(tmp_path / "mine" / label / f"{label}{number}.png", number + 100 * (label == "b"))
    argv = sets("data.path=mine", "clients.count=2", "data.image_size=4", "clients.partition=iid", "labels.clients=1")
    for kind in ("folder", "npz"):
        assert fewlabel("data", "split", "folder", *argv, "--to", kind, "--as", kind).code == 0
    site = tmp_path / "folder" / "client-1"
    assert sorted(path.name for path in site.iterdir()) == ["classes.txt", "unlabeled"]
    assert (site / "classes.txt").read_text() == "a\nb\n"
    seen = [np.asarray(Image.open(path))[0, 0] >= 100 for path in sorted(site.glob("unlabeled/*.png"))]
    with np.load(tmp_path / "npz" / "client-1.npz") as arrays:
        assert set(arrays["train_labels"].tolist()) == {-1}
        orders = [seen, (arrays["train_images"][:, 0, 0] >= 100).tolist()]
    for order in orders:
        changes = sum(a != b for a, b in pairwise(order))
        assert changes > len(order) / 5  # about half of all neighbours differ; in order of class a single pair would


def test_the_servers_share_is_written_and_names_with_slashes_are_possible(
    fewlabel: Command,
    tmp_path: Path,
) -> None:
    for number in range(60):
        grey(tmp_path / "mine" / f"{number}.png", number)
    write_csv(tmp_path / "mine" / "t.csv", "image,label", [f"{n}.png,{'x/y' if n % 2 else 'test'}" for n in range(60)])
    argv = sets(
        "data.path=mine/t.csv", "clients.count=2", "labels.at=server", "labels.per_class=3", "data.image_size=4"
    )
    assert fewlabel("data", "split", "csv", *argv, "--to", "out").code == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "client-0",
        "client-1",
        "server",
        "terms.json",
        "test",
        "validation",
    ]
    found = list_images("folder", tmp_path / "out" / "server")
    assert found.classes == ("test", "x/y")
    assert Counter(item.label for item in found.items) == {"test": 3, "x/y": 3}


@pytest.mark.parametrize("kind", ["folder", "npz"])
def test_a_site_knows_its_patients_by_numbers_that_tell_nothing(kind: str, fewlabel: Command, tmp_path: Path) -> None:
    hospital(tmp_path / "mine")
    argv = sets("data.path=mine/table.csv", "clients.count=2", "clients.partition=iid", "data.image_size=4")
    found = fewlabel("data", "split", "csv", *argv, "--to", "out", "--as", kind)
    assert found.out.splitlines()[-1].startswith("images are written at 4x4, as the network sees them")
    listed = list_images(kind, tmp_path / "out" / ("client-1.npz" if kind == "npz" else "client-1"))
    (part,) = read_parts(listed)[0].values()
    value = np.concatenate(list(part.read(4)))[:, 0, 0, 0]  # which is the number of the image, four of each patient
    patients: dict[int, set[str]] = {}
    for item, number in zip(listed.items, value.tolist(), strict=True):
        patients.setdefault(number // 4, set()).add(item.patient)
    assert {len(numbers) for numbers in patients.values()} == {1}
    assert len(set.union(*patients.values())) == len(patients) > 20
    order = [int(min(numbers)) for _, numbers in sorted(patients.items())]
    assert order != sorted(order)
    assert fewlabel("data", "check", listed.path).code == 0


def test_sites_given_whole_are_refused(fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel("data", "split", "digits", *SITES, "--to", "sites").code == 0
    assert "give one site's folder, such as sites/client-0" in fewlabel("data", "check", "sites").err
    assert fewlabel("data", "check", "sites/client-0").code == 0


def test_the_package_is_the_command_too() -> None:
    found = subprocess.run([sys.executable, "-m", "fewlabel", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"{version('fewlabel')}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("split digits", "data split needs --to"),
        ("split digits --to full", "full is not empty"),
        ("split digits --to full/x", "full/x is a file; --to needs a directory"),
        ("info ham10000", "did you mean 'isic2018'?"),
        ("info full", "for your own images: --data folder --set data.path=full"),
        ("check t.csv", "of which --column image=… may name one"),
        ("split digitz --to new", "did you mean 'digits'?"),
        ("partition no.toml", "there is no file no.toml"),
        ("partition --png p.xyz", "its ending must be one of"),
        ("info digits --set data.path=full", "data.path is for folder, csv, npz, dicom"),
        ("info folder", "needs data.path"),
        ("info pathmnist", "put pathmnist.npz into"),
        ("get folder", "nothing to download"),
        ("check nowhere", "there is no file or folder nowhere"),
        ("check no", "there are no images in no"),
        ("check no --column label", "--column takes a=b"),
    ],
)
def test_mistakes_are_one_sentence(words: str, sentence: str, fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "no" / "a").mkdir(parents=True)
    (tmp_path / "t.csv").write_text("bild,label\n")
    found = fewlabel("data", *words.split())
    assert (found.code, found.out) == (2, "")
    assert sentence in found.err
    assert found.err.count("\n") == 1
