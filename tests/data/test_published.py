"""Published sets must be read byte for byte as their authors publish them, whole, undamaged, and split as stated."""

import gzip
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.io import savemat

from fewlabel.core.errors import BadInput
from fewlabel.data import datasets
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.reader import read_images
from fewlabel.data.published import arrays, catalogue, files, medical
from fewlabel.data.published.medmnist import MEDMNIST
from fewlabel.data.published.pickled import unpickle
from fewlabel.data.raw import Part, Raw
from fewlabel.data.splits import sides
from fewlabel.experiment import read
from tests.data.test_datasets import mapped
from tests.data.test_own import dicom

Split = tuple[np.ndarray, np.ndarray]


def drawn(count: int, classes: int, shape: tuple[int, ...], seed: int = 0) -> Split:
    """Noise, and labels in which each class occurs."""
    draw = np.random.Generator(np.random.PCG64(seed))
    return draw.integers(0, 256, (count, *shape), dtype=np.uint8), draw.permutation(np.arange(count) % classes)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for data, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEWLABEL_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Path]]:
    """Takes the files of a set that lie there now for the published ones."""

    def publish(name: str) -> list[Path]:
        source = catalogue.PUBLISHED[name]
        edition, paths = files.find(name, source)
        sums = [
            replace(file, members=tuple((name, files.md5_of(path / name)) for name, _ in file.members))
            if path.is_dir() and file.members
            else replace(file, md5=(files.md5_of(path),))
            if file.md5
            else file
            for file, path in zip(edition.files, paths, strict=True)
        ]
        editions = tuple(replace(edition, files=tuple(sums)) if one is edition else one for one in source.editions)
        monkeypatch.setitem(datasets.DATASETS, name, replace(source, editions=editions))
        return paths

    return publish


def same(found: datasets.Split, images: np.ndarray, labels: np.ndarray) -> None:
    assert np.array_equal(found.images.pixels.numpy(), images)
    assert found.labels.tolist() == labels.tolist()


# Files as their authors make them


def idx_labels(count: int, labels: bytes = b"") -> bytes:
    return gzip.compress(struct.pack(">2I", 0x801, count) + (labels or bytes(count)), 1)


def make_fashion(folder: Path, train: int = 50, test: int = 20) -> dict[str, Split]:
    splits = {"train": drawn(train, 10, (1, 28, 28)), "test": drawn(test, 10, (1, 28, 28), 1)}
    for prefix, (images, labels) in zip(("train", "t10k"), splits.values(), strict=True):
        header = struct.pack(">4I", 0x803, len(images), 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes(), 1))
        content = idx_labels(len(labels), labels.astype("u1").tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(content)
    return splits


def tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in sorted(members.items(), reverse=True):  # the published ones are in no order either
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


NAMES = tuple(f"class_{number}" for number in range(100))  # of CIFAR's classes


def cifar(classes: int) -> dict[str, Split]:
    return {"train": drawn(400, classes, (3, 32, 32)), "test": drawn(100, classes, (3, 32, 32), 1)}


def rows(images: np.ndarray, *labels: np.ndarray) -> bytes:
    columns = [label[:, None].astype(np.uint8) for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), -1)], axis=1).tobytes()


def batches(split: Split) -> dict[str, Split]:
    """CIFAR-10's training images come in five files."""
    return {f"data_batch_{i + 1}": (split[0][80 * i : 80 * i + 80], split[1][80 * i : 80 * i + 80]) for i in range(5)}


def make_cifar10(folder: Path, python: bool = False) -> dict[str, Split]:
    splits = cifar(10)
    each = batches(splits["train"]) | {"test_batch": splits["test"]}
    if python:
        inside = {f"cifar-10-batches-py/{name}": pickled_batch(*split, "labels") for name, split in each.items()}
        meta = {"cifar-10-batches-py/batches.meta": protocol0(NAMES[:10]), "cifar-10-batches-py/readme.html": b"<p>"}
        tar(folder / "cifar-10-python.tar.gz", inside | meta)
    else:
        inside = {f"cifar-10-batches-bin/{name}.bin": rows(images, y) for name, (images, y) in each.items()}
        inside["cifar-10-batches-bin/batches.meta.txt"] = "\n".join([*NAMES[:10], "\n"]).encode()
        tar(folder / "cifar-10-binary.tar.gz", inside)
    return splits


def make_cifar100(folder: Path, python: bool = False) -> dict[str, Split]:
    splits = cifar(100)
    if python:
        inside = {f"cifar-100-python/{name}": pickled_batch(*split, "fine_labels") for name, split in splits.items()}
        meta = {b"fine_label_names": [name.encode() for name in NAMES], b"coarse_label_names": [b"fish"]}
        tar(folder / "cifar-100-python.tar.gz", inside | {"cifar-100-python/meta": b"\x80\x02" + python2(meta) + b"."})
    else:
        inside = {f"cifar-100-binary/{name}.bin": rows(images, y // 5, y) for name, (images, y) in splits.items()}
        inside["cifar-100-binary/fine_label_names.txt"] = "\n".join([*NAMES, ""]).encode()
        tar(folder / "cifar-100-binary.tar.gz", inside)
    return splits


def python2(value: object) -> bytes:
    """What cPickle of Python 2, which CIFAR was written with, makes of a value in protocol 2, without its memo."""
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, np.ndarray):
        blank = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + python2((0,)) + python2(b"b") + b"\x87R"
        kind = (
            b"cnumpy\ndtype\n" + python2((b"u1", 0, 1)) + b"R" + python2((3, b"|", None, None, None, -1, -1, 0)) + b"b"
        )
        rest = b"".join(map(python2, (False, value.tobytes())))
        return blank + b"(" + python2(1) + python2(value.shape) + kind + rest + b"tb"
    assert isinstance(value, list | tuple | dict)
    items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
    return b"(" + b"".join(map(python2, items)) + {list: b"l", tuple: b"t", dict: b"d"}[type(value)]


def pickled_batch(images: np.ndarray, labels: np.ndarray, key: str) -> bytes:
    names = [f"image_{number}.png".encode() for number in range(len(labels))]
    table = {b"batch_label": b"batch 1", key.encode(): labels.tolist(), b"filenames": names}
    return b"\x80\x02" + python2(table | {b"data": images.reshape(len(images), -1)}) + b"."


def protocol0(names: Sequence[str]) -> bytes:
    """CIFAR-10's batches.meta, which is of protocol 0."""
    items = "".join(f"S'{name}'\np{number + 4}\na" for number, name in enumerate(names))
    return f"(dp1\nS'label_names'\np2\n(lp3\n{items}sS'num_vis'\np90\nI3072\ns.".encode()


def make_svhn(folder: Path) -> dict[str, Split]:
    splits = {"train": drawn(700, 10, (3, 32, 32)), "test": drawn(30, 10, (3, 32, 32), 1)}
    for name, (images, labels) in splits.items():
        y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        content = {"X": images.transpose(2, 3, 1, 0), "y": y}
        savemat(folder / f"{name}_32x32.mat", content, do_compression=True)
    return splits


def make_medmnist(folder: Path, name: str, counts: tuple[int, int, int] = (60, 11, 22)) -> dict[str, Split]:
    _, _, _, channels, classes = MEDMNIST[name]
    shape = (channels, 28, 28)
    splits = {
        split: drawn(count, len(classes), shape, seed)
        for seed, (split, count) in enumerate(zip(("train", "val", "test"), counts, strict=True))
    }
    arrays = {f"{split}_labels": y[:, None].astype(np.uint8) for split, (_, y) in splits.items()}
    for split, (images, _) in splits.items():
        arrays[f"{split}_images"] = images[:, 0] if channels == 1 else images.transpose(0, 2, 3, 1)
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return {"train": splits["train"], "validation": splits["val"], "test": splits["test"]}


LESIONS = 60  # of two images each


def lesion_rows() -> list[tuple[str, str, str]]:
    """Image, lesion and class: 120 images, not in the order of their ids."""
    numbers = np.random.Generator(np.random.PCG64(0)).permutation(2 * LESIONS).tolist()
    return [(f"ISIC_{24306 + i:07}", f"HAM_{i % LESIONS:07}", medical.LESIONS[i % LESIONS % 7]) for i in numbers]


def jpeg(image: str) -> bytes:
    """A grey that tells the image, and that JPEG keeps; twice as wide as high."""
    number, file = int(image[5:]) - 24306, io.BytesIO()
    Image.new("RGB", (80, 40), (2 * number,) * 3).save(file, "JPEG", quality=100)
    return file.getvalue()


def make_zip(path: Path, inside: dict[str, bytes | str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in inside.items():
            archive.writestr(name, content)


TASK3 = "ISIC2018_Task3_Training"


def make_isic(folder: Path, form: str) -> None:
    columns = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    truth = [f"image,{','.join(columns)}"]
    truth += [",".join([i, *("1.0" if c == dx.upper() else "0.0" for c in columns)]) for i, _, dx in lesion_rows()]
    groupings = ["image,lesion_id,diagnosis_confirm_type", *(f"{i},{lesion},histo" for i, lesion, _ in lesion_rows())]
    metadata = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    metadata += [f"{lesion},{image},{dx},histo,80.0,male,scalp" for image, lesion, dx in lesion_rows()]
    images: dict[str, bytes | str] = {f"{image}.jpg": jpeg(image) for image, _, _ in lesion_rows()}
    if form.startswith("ham"):
        (folder / "HAM10000_metadata.csv").write_text("\n".join(metadata) + "\n")
    else:
        (folder / f"{TASK3}_LesionGroupings.csv").write_text("\n".join(groupings) + "\n")
    if form == "ham-zip":
        make_zip(folder / "images.zip", images)
    elif form == "ham-folder":
        (folder / "images" / "deeper").mkdir(parents=True)
        for name, content in images.items():
            (folder / "images" / "deeper" / name).write_bytes(bytes(content))
    elif form == "ham-parts":
        some = dict(list(images.items())[:50])
        make_zip(folder / "HAM10000_images_part_1.zip", some)
        make_zip(folder / "HAM10000_images_part_2.zip", {k: v for k, v in images.items() if k not in some})
    elif form == "isic-zip":
        extra: dict[str, bytes | str] = {f"{TASK3}_Input/LICENSE.txt": "CC"}
        make_zip(folder / f"{TASK3}_Input.zip", {f"{TASK3}_Input/{k}": v for k, v in images.items()} | extra)
        inside = f"{TASK3}_GroundTruth/{TASK3}_GroundTruth.csv"
        make_zip(folder / f"{TASK3}_GroundTruth.zip", {inside: "\n".join(truth)})
    elif form == "isic-folder":
        (folder / f"{TASK3}_Input").mkdir()
        for name, content in images.items():
            (folder / f"{TASK3}_Input" / name).write_bytes(bytes(content))
        (folder / f"{TASK3}_GroundTruth.csv").write_text("\n".join(truth))


SLICES = 140  # of seven kinds: one of five subtypes, none, or two at once
CORRUPT = "ID_6431af929"


def slice_id(number: int) -> str:
    return f"ID_{number * 2654435761 % 2**36:09x}"  # not in the order of their numbers


def make_rsna(folder: Path, stage: str = "stage_2_train", inside: str = "stage_2_train") -> Path:
    """Slices of 35 patients, four each, whose two halves tell their number in Hounsfield units; some rows twice."""
    table = []
    for number in range(SLICES):
        wide = np.array([[number % 70, number // 70]] * 2, np.int64).repeat(2, 1).repeat(2, 0) + 1024
        wide[0, 0] = 0 if number % 2 else -2000  # outside of what the scanner sees
        about = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": [30, 600], "WindowWidth": [80, 2800]}
        about |= {"PatientID": f"ID_{number // 4:08x}"} | ({"BitsStored": 12, "HighBit": 11} if number % 2 else {})
        dicom(folder / inside / f"{slice_id(number)}.dcm", wide.astype(np.uint16 if number % 2 else np.int16), **about)
        table.append([slice_id(number), *haemorrhage(number % 7)])
    shutil.copy(folder / inside / f"{slice_id(0)}.dcm", folder / inside / f"{CORRUPT}.dcm")
    cut_short(folder / inside / f"{CORRUPT}.dcm")
    table += [[CORRUPT, *haemorrhage(0)], *table[3:6]]
    rows = [f"{name}_{kind},{label}" for name, *labels in table for kind, label in zip(KINDS, labels, strict=True)]
    (folder / f"{stage}.csv").write_text("\n".join(["ID,Label", *rows]) + "\n")
    return folder / inside


KINDS = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")


def haemorrhage(kind: int) -> str:
    return ["100001", "010001", "001001", "000101", "000011", "000000", "100011"][kind]


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


MAKERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "fashion-mnist": ("fashion-mnist", partial(make_fashion, train=1000)),  # more than are read at a time
    "cifar10": ("cifar10", make_cifar10),
    "cifar10-python": ("cifar10", partial(make_cifar10, python=True)),
    "cifar100": ("cifar100", make_cifar100),
    "cifar100-python": ("cifar100", partial(make_cifar100, python=True)),
    "svhn": ("svhn", make_svhn),
    **{name: (name, partial(make_medmnist, name=name)) for name in MEDMNIST},
    "isic2018": ("isic2018", partial(make_isic, form="isic-zip")),
    "ham10000": ("isic2018", partial(make_isic, form="ham-zip")),
}


# Each set


@pytest.mark.parametrize("which", [name for name in MAKERS if name not in ("isic2018", "ham10000")])
def test_arrays_are_read_as_published(data, publish, which):
    name, make = MAKERS[which]
    splits = make(data)
    publish(name)
    found = datasets.load(name, len(splits["train"][0][0, 0]))
    assert found.channels == splits["train"][0].shape[1]
    assert list(found.splits) == list(splits)
    for split, expected in splits.items():
        same(found.splits[split], *expected)
    assert found.splits["train"].groups is None
    assert not list((data.parent / "cache" / "fewlabel").glob(".unpacked-*"))
    if name in MEDMNIST:
        assert found.classes == MEDMNIST[name][4]
    else:
        assert found.classes[:2] == {"fashion-mnist": ("T-shirt/top", "Trouser"), "svhn": ("0", "1")}.get(
            name, NAMES[:2]
        )
        assert len(found.classes) == (100 if name == "cifar100" else 10)


# As torchvision leaves them: unpacked


def leave_cifar(folder: Path, name: str) -> dict[str, Split]:
    """The unpacked archive, without the archive itself."""
    splits = (make_cifar10 if name == "cifar10" else make_cifar100)(folder, python=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()
    return splits


def leave_fashion(folder: Path, packed: bool = False) -> dict[str, Split]:
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    splits = make_fashion(raw)
    for file in list(raw.glob("*.gz")):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        if not packed:
            file.unlink()
    return splits


def leave_svhn(folder: Path) -> dict[str, Split]:
    (folder / "SVHN").mkdir()
    return make_svhn(folder / "SVHN")


LEFT: dict[str, tuple[str, Callable[[Path], dict[str, Split]]]] = {
    "cifar10": ("cifar10", partial(leave_cifar, name="cifar10")),
    "cifar100": ("cifar100", partial(leave_cifar, name="cifar100")),
    "fashion-mnist": ("fashion-mnist", leave_fashion),
    "fashion-mnist, packed, too": ("fashion-mnist", partial(leave_fashion, packed=True)),
    "svhn": ("svhn", leave_svhn),
}


@pytest.mark.parametrize("which", LEFT)
def test_folders_that_torchvision_leaves_are_read_and_stay(data, publish, monkeypatch, which):
    name, leave = LEFT[which]
    splits = leave(data)
    left = sorted(data.rglob("*"))
    publish(name)
    found = datasets.load(name, len(splits["train"][0][0, 0]))
    for split, expected in splits.items():
        same(found.splits[split], *expected)
    assert sorted(data.rglob("*")) == left
    monkeypatch.setattr(files, "md5_of", lambda path: pytest.fail("nothing was touched"))
    assert datasets.load(name, len(splits["train"][0][0, 0])).digest == found.digest


@pytest.mark.parametrize("below", ["", "cifar10", "cifar-10-batches-py"])
def test_such_a_folder_may_be_in_a_folder_of_the_set_or_be_named_itself(data, publish, monkeypatch, below):
    leave_cifar(data, "cifar10")
    if below == "cifar10":
        (data / "cifar10").mkdir()
        shutil.move(data / "cifar-10-batches-py", data / "cifar10")
    elif below:
        monkeypatch.setenv("FEWLABEL_DATA", str(data / below))
    publish("cifar10")
    assert len(datasets.load("cifar10", 8).splits["train"]) == 400


def test_a_file_in_such_a_folder_that_is_damaged_or_missing_is_named(data, publish):
    leave_cifar(data, "cifar10")
    with pytest.raises(BadInput, match=r"batches.meta is damaged .* published is 5ff9c542aee3614f3951f8cda6e48888"):
        datasets.load("cifar10", 8)
    publish("cifar10")
    datasets.load("cifar10", 8)
    third = data / "cifar-10-batches-py" / "data_batch_3"
    third.write_bytes(third.read_bytes()[:-1] + b"!")
    with pytest.raises(BadInput, match=r"data_batch_3 is damaged or another file: its md5 is"):
        datasets.load("cifar10", 8)
    third.unlink()
    with pytest.raises(BadInput, match=r"cifar-10-batches-py has no data_batch_3; unpack cifar-10-python.tar.gz again"):
        datasets.load("cifar10", 8)


def test_the_checksums_of_unpacked_files_are_torchvisions():
    torchvision = pytest.importorskip("torchvision").datasets
    for name, published in (("cifar10", torchvision.CIFAR10), ("cifar100", torchvision.CIFAR100)):
        (file,) = catalogue.CIFAR[name][1].files
        theirs = dict(published.train_list + published.test_list)
        assert dict(file.members) == theirs | {published.meta["filename"]: published.meta["md5"]}
        assert file.instead == (published.base_folder,)
    fashion = catalogue.PUBLISHED["fashion-mnist"].editions[0].files
    assert [(file.name, file.md5[0]) for file in fashion] == torchvision.FashionMNIST.resources
    svhn = [(file.name, *file.md5) for file in catalogue.PUBLISHED["svhn"].editions[0].files]
    assert svhn == [tuple(torchvision.SVHN.split_list[split][1:]) for split in ("train", "test")]


@pytest.mark.parametrize("form", ["isic-zip", "isic-folder", "ham-zip", "ham-folder", "ham-parts"])
def test_isic_is_the_same_in_all_forms_and_its_images_have_their_own_labels(data, form):
    make_isic(data, form)
    found = datasets.load("isic2018", 16)
    assert found.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    assert (found.channels, list(found.splits)) == (3, ["train", "validation", "test"])
    seen = []
    for split in found.splits.values():
        assert split.groups is not None
        number = (split.images.pixels[:, 0].float().mean((1, 2)) / 2).round().long()
        assert number.tolist() == sorted(number.tolist())
        assert split.labels.tolist() == [i % LESIONS % 7 for i in number.tolist()]
        assert split.groups.tolist() == [i % LESIONS for i in number.tolist()]
        assert split.images.pixels.shape[1:] == (3, 16, 16)
        seen += number.tolist()
    assert sorted(seen) == list(range(2 * LESIONS))


def test_large_jpegs_are_shrunk_like_small_ones_and_keep_their_colours(tmp_path):
    ramp = np.linspace(0, 255, 600).astype(np.uint8)[None].repeat(450, 0)
    image, file = np.stack([ramp, ramp[:, ::-1], np.full_like(ramp, 90)]), io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=95)
    make_zip(tmp_path / "a.zip", {"x.jpg": file.getvalue()})
    small = medical.JpegFiles(tmp_path / "a.zip").image("x", 32)
    plain = datasets.resize(image[None], 32)[0]
    assert small.shape == plain.shape
    assert np.abs(small.astype(int) - plain.astype(int)).max() <= 6


@pytest.mark.parametrize(
    ("below", "stage", "inside"),
    [
        ("rsna-ich", "stage_2_train", "stage_2_train"),
        ("rsna-intracranial-hemorrhage-detection", "stage_1_train", "stage_1_train_images"),
    ],
)
def test_rsna_ich_is_the_slices_of_one_subtype_in_the_brain_window_split_by_patient(data, below, stage, inside):
    make_rsna(data / below, stage, inside)
    found = datasets.load("rsna-ich", 4)
    assert found.classes == ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
    assert (found.channels, list(found.splits)) == (1, ["train", "validation", "test"])
    seen, patients = [], []
    for name, split in found.splits.items():
        pixels = split.images.pixels
        assert mapped(pixels).name == f"{name}-images.npy"
        assert pixels[:, 0, 0, 0].tolist() == [0] * len(split)
        units = pixels[:, 0, 3].long() * 79 / 255  # from 0 to 79, for the window is 80 wide around 40
        number = (units[:, 0].round() + 70 * units[:, 3].round()).long()
        assert split.labels.tolist() == [n % 7 for n in number.tolist()]
        assert [slice_id(n) for n in number.tolist()] == sorted(slice_id(n) for n in number.tolist())
        seen += number.tolist()
        patients.append({n // 4 for n in number.tolist()})
    assert sorted(seen) == [n for n in range(SLICES) if n % 7 < 5]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 35
    assert [len(split) for split in found.splits.values()] == pytest.approx([70, 10, 20], abs=4)


def test_slices_are_decoded_a_few_at_a_time(data):
    """A hundred slices of 300 kB, read at 64 x 64."""
    rows = [f"{slice_id(n)}_{kind},{label}" for n in range(100) for kind, label in zip(KINDS, "100001", strict=True)]
    (data / "s.csv").write_text("\n".join(["ID,Label", *rows]))
    for number in range(100):
        dicom(data / "s" / f"{slice_id(number)}.dcm", np.zeros((384, 400), np.int16), PatientID="P")
    part = medical.rsna_ich(data / "s", data / "s.csv").parts["all"]
    tracemalloc.start()
    try:
        assert sum(map(len, part.read(64))) == 100
        assert tracemalloc.get_traced_memory()[1] < 100 * 384 * 400 * 2 / 4
    finally:
        tracemalloc.stop()


# Checksums


@pytest.mark.parametrize("which", [name for name in MAKERS if name == "bloodmnist" or name not in MEDMNIST])
def test_a_flipped_byte_in_any_file_is_found_and_the_file_is_named(data, publish, which):
    name, make = MAKERS[which]
    make(data)
    paths = publish(name)
    before = datasets.load(name, 8)
    for path in paths:
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(
                BadInput, match=f"{re.escape(str(path))} (is damaged or another file|was changed): its md5"
            ):
                datasets.load(name, 8)
        path.write_bytes(whole)
    assert datasets.load(name, 8).digest == before.digest


@pytest.mark.parametrize(
    ("name", "make", "file"),
    [
        ("isic2018", partial(make_isic, form="ham-folder"), "images/deeper/ISIC_0024310.jpg"),
        ("rsna-ich", make_rsna, f"stage_2_train/{slice_id(8)}.dcm"),
        ("rsna-ich", make_rsna, "stage_2_train.csv"),
    ],
    ids=["jpeg", "slice", "table"],
)
def test_a_flipped_byte_in_one_of_many_files_is_found_and_may_be_meant(data, name, make, file):
    make(data)
    before, path = datasets.load(name, 8).digest, data / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
    with pytest.raises(BadInput, match=rf"{path.name} was changed: .* delete .*{name}.json if the change was meant"):
        datasets.load(name, 8)
    path.write_bytes(whole)
    assert datasets.load(name, 8).digest == before


def test_a_jpeg_is_decoded_at_no_less_than_the_size_that_is_wanted(tmp_path):
    board = np.indices((16, 16)).sum(0) % 2 * 255  # black and white fields of 4x4, of which a half-sized one has greys
    image = Image.fromarray(board.astype(np.uint8).repeat(4, 0).repeat(4, 1))
    image.save(tmp_path / "board.jpg", quality=95)
    seen = medical.JpegFiles(tmp_path).image("board", 16)
    assert abs(seen.astype(int) - board).max() < 110


def test_of_slices_only_those_that_are_kept_and_their_table_are_recorded_and_compared(data, monkeypatch):
    slices = make_rsna(data)
    before = datasets.load("rsna-ich", 4)
    recorded = {Path(path).stem for path in json.loads(files.record("rsna-ich").read_text())["files"]}
    kept = {slice_id(number) for number in range(SLICES) if number % 7 < 5}  # the other kinds are of none, and of two
    assert recorded == {"stage_2_train", *kept}
    (slices / f"{slice_id(5)}.dcm").write_bytes(b"whatever")
    (slices / "more.dcm").touch()
    monkeypatch.setattr(files, "md5_of", lambda path: pytest.fail(f"{path} is hashed"))
    assert datasets.load("rsna-ich", 4).digest == before.digest


def test_a_set_that_was_changed_on_purpose_is_read_once_its_record_is_deleted(data):
    make_isic(data, "ham-zip")
    before, path = datasets.load("isic2018", 8).digest, data / "HAM10000_metadata.csv"
    path.write_text(path.read_text().replace(",nv,", ",mel,"))
    with pytest.raises(BadInput, match=r"HAM10000_metadata.csv was changed: .* restore it, or delete .*isic2018.json"):
        datasets.load("isic2018", 8)
    files.record("isic2018").unlink()
    assert datasets.load("isic2018", 8).digest != before


def test_a_set_without_a_published_checksum_is_recorded_with_its_counts_once_it_was_read_whole(data):
    make_isic(data, "ham-zip")
    whole = (data / "HAM10000_metadata.csv").read_text()
    (data / "HAM10000_metadata.csv").write_text(whole + "HAM_1,ISIC_9999999,nv,histo,80.0,male,scalp\n")
    with pytest.raises(
        BadInput, match=r"1 of 121 images that .*metadata.csv lists are not in .*images.zip: ISIC_9999999"
    ):
        datasets.load("isic2018", 8)
    assert not files.record("isic2018").exists()
    (data / "HAM10000_metadata.csv").write_text(whole)
    found = datasets.load("isic2018", 8)
    record = json.loads(files.record("isic2018").read_text())
    assert {Path(path).name for path in record["files"]} == {"images.zip", "HAM10000_metadata.csv"}
    counts = {name: split.labels.bincount(minlength=7).tolist() for name, split in found.splits.items()}
    assert record["counts"] == counts


def test_the_same_bytes_elsewhere_are_neither_damaged_nor_decoded_again(data, publish, monkeypatch):
    make_fashion(data)
    publish("fashion-mnist")
    before = datasets.load("fashion-mnist", 8)
    moved = data.parent / "elsewhere"
    shutil.copytree(data, moved)
    monkeypatch.setenv("FEWLABEL_DATA", str(moved))
    monkeypatch.setattr(datasets, "decode", None)
    assert datasets.load("fashion-mnist", 8).digest == before.digest


def test_files_are_hashed_again_only_when_they_were_touched(data, publish, monkeypatch):
    make_fashion(data)
    first, *_ = publish("fashion-mnist")
    datasets.load("fashion-mnist", 8)
    hashed: list[Path] = []
    md5_of = files.md5_of
    monkeypatch.setattr(files, "md5_of", lambda path: hashed.append(path) or md5_of(path))
    datasets.load("fashion-mnist", 8)
    assert hashed == []
    os.utime(first, ns=(1, 1))
    datasets.load("fashion-mnist", 8)
    assert len(hashed) == 4


def test_another_release_under_the_same_name_is_decoded_anew(data, publish):
    make_medmnist(data, "organamnist", (60, 11, 22))
    publish("organamnist")
    first = datasets.load("organamnist", 8)
    splits = make_medmnist(data, "organamnist", (50, 11, 22))
    publish("organamnist")
    second = datasets.load("organamnist", 8)
    assert second.digest != first.digest
    assert [len(split) for split in second.splits.values()] == [50, 11, 22]
    assert second.splits["train"].labels.tolist() == splits["train"][1].tolist()


def test_the_published_checksums_are_complete():
    for name, source in catalogue.PUBLISHED.items():
        for file in (file for edition in source.editions for file in edition.files):
            assert all(re.fullmatch("[0-9a-f]{32}", md5) for md5 in file.md5)
            assert file.md5 or name in ("isic2018", "rsna-ich")
        assert source.page or all(file.url.startswith("http") for file in source.editions[0].files)


# Files of another form


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("t10k-labels-idx1-ubyte.gz", idx_labels(19), "there are more test images than their 19 labels"),
        ("t10k-labels-idx1-ubyte.gz", idx_labels(21), "there are 20 test images, but 21 labels"),
        ("t10k-images-idx3-ubyte.gz", idx_labels(20), "t10k-images-idx3-ubyte.gz cannot be read: .* 3 dimensions"),
        ("train-images-idx3-ubyte.gz", b"no archive", "train-images-idx3-ubyte.gz cannot be read: Not a gzipped"),
    ],
    ids=["fewer labels", "more labels", "labels for images", "no archive"],
)
def test_what_is_inside_a_file_is_checked_too(data, publish, file, content, sentence):
    make_fashion(data)
    (data / file).write_bytes(content)
    publish("fashion-mnist")
    with pytest.raises(BadInput, match=sentence):
        datasets.load("fashion-mnist", 8)


def test_an_archive_without_its_members_says_which(data, publish):
    tar(data / "cifar-10-binary.tar.gz", {"cifar-10-batches-bin/data_batch_1.bin": b""})
    publish("cifar10")
    with pytest.raises(
        BadInput, match=r"cifar-10-binary.tar.gz .*: cifar-10-batches-bin/data_batch_2.bin, .* is not in it"
    ):
        datasets.load("cifar10", 8)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"val_labels": np.array([[{}]] * 3, dtype=object)}, "breastmnist.npz cannot be read: Object arrays"),
        (
            {"test_images": np.zeros((3, 28, 28))},
            r"test_images in .*: expected uint8 images, found float64 \[3, 28, 28\]",
        ),
    ],
    ids=["objects", "floats"],
)
def test_an_npz_with_objects_or_floats_is_refused(data, publish, wrong, sentence):
    arrays = {f"{split}_images": np.zeros((3, 28, 28), np.uint8) for split in ("train", "val", "test")}
    arrays |= {f"{split}_labels": np.zeros((3, 1), np.uint8) for split in ("train", "val", "test")}
    np.savez(data / "breastmnist.npz", **arrays | wrong)
    publish("breastmnist")
    with pytest.raises(BadInput, match=sentence):
        datasets.load("breastmnist", 8)


SLICE = slice_id(8)


@pytest.mark.parametrize(
    ("form", "table", "old", "new", "sentence"),
    [
        ("ham-zip", "HAM10000_metadata.csv", "dx,", "kind,", "'dx'"),
        ("ham-zip", "HAM10000_metadata.csv", ",nv,", ",naevus,", ".*tuple.index"),
        ("isic-folder", f"{TASK3}_GroundTruth.csv", "1.0", "0.0", ".* has 0 classes"),
        ("rsna", "stage_2_train.csv", "ID,Label\n", f"ID,Label\n{SLICE}_any,0\n", f"{SLICE}_any is both 0 and 1"),
        ("rsna", "stage_2_train.csv", f"{SLICE}_epidural,0\n", "", f"{SLICE} does not have a 0 or 1"),
        ("rsna", "stage_2_train.csv", f"{SLICE}_any,1", f"{SLICE}_any,2", f"{SLICE} does not have a 0 or 1"),
        ("rsna", "stage_2_train.csv", "Label", "Probability", "'Label'"),
    ],
)
def test_a_table_of_another_form_or_that_contradicts_itself_is_named(data, form, table, old, new, sentence):
    make_rsna(data) if form == "rsna" else make_isic(data, form)
    path = data / table
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BadInput, match=f"{table} cannot be read: {sentence}"):
        datasets.load("rsna-ich" if form == "rsna" else "isic2018", 8)


def test_an_image_that_cannot_be_decoded_is_named(data):
    make_isic(data, "ham-folder")
    (data / "images" / "deeper" / "ISIC_0024310.jpg").write_bytes(b"no image")
    with pytest.raises(BadInput, match=r"ISIC_0024310.jpg in .*images cannot be read: cannot identify"):
        datasets.load("isic2018", 8)
    assert list(datasets.cache_folder().iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (cut_short, "pixel data"),
        (Path.unlink, "there is no such file"),
        (lambda path: dicom(path, np.zeros((4, 4), np.int16)), "it has no PatientID"),
    ],
)
def test_a_slice_that_cannot_be_used_is_named(data, spoil, sentence):
    path = make_rsna(data) / f"{slice_id(8)}.dcm"
    spoil(path)
    with pytest.raises(BadInput, match=rf"{path} cannot be read: .*{sentence}") as told:
        datasets.load("rsna-ich", 4)
    assert "\n" not in str(told.value)
    assert not files.record("rsna-ich").exists()


# Pickles


class Calls:
    """Whoever unpickles it calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


EVIL = Calls(os.mkdir, f"/tmp/evil-{os.getpid()}")


def unpickled(data: bytes) -> dict[object, object]:
    return unpickle(io.BytesIO(data))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [EVIL, Calls(np.array, [1]), np.array([{}]), 1j])
def test_a_pickle_that_names_anything_but_plain_data_is_refused(value, protocol):
    for held in (value, {"data": value}):
        with pytest.raises(ValueError, match="the pickle "):
            unpickled(pickle.dumps(held, protocol))
    assert not Path(EVIL.call[1][0]).exists()


OBJECTS = python2({b"data": np.zeros(1, np.uint8)}).replace(python2(b"u1"), python2(b"O")) + b"."


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x80\x02cnumpy\nndarray\n)R.", "the pickle cannot be read: 'NoneType' object is not callable"),
        (b"\x80\x02cnumpy\ndtype\nN}X\x04\x00\x00\x00nameK\x00s\x86b.", "the pickle cannot be read: .*__setstate__"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
            "should hold a dictionary, but holds a Array",
        ),
        (OBJECTS, "the pickle has an array of O, not of numbers"),
        (pickle.dumps([1], 2), "should hold a dictionary, but holds a list"),
        (b"", "the pickle cannot be read: Ran out of input"),
    ],
    ids=["calls an array", "changes a stand-in", "is an array", "objects", "list", "empty"],
)
def test_a_pickle_that_is_more_or_less_than_a_dictionary_of_plain_data_is_refused(data, sentence):
    with pytest.raises(ValueError, match=sentence):
        unpickled(data)


def test_the_pickle_of_cifar_with_the_right_checksum_is_still_read_without_trust(data, publish):
    members = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
    tar(data / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{m}": pickle.dumps(EVIL, 2) for m in members})
    publish("cifar10")
    with pytest.raises(
        BadInput, match=r"batches.meta in .*10-python.tar.gz cannot be read: .* names '(posix|nt).mkdir'"
    ):
        datasets.load("cifar10", 8)
    assert not Path(EVIL.call[1][0]).exists()


def test_a_pickled_cifar_is_not_opened_before_its_checksum_matched(data, monkeypatch):
    make_cifar10(data, python=True)
    monkeypatch.setattr(arrays, "unpickle", lambda _: pytest.fail("it was opened"))
    with pytest.raises(BadInput, match=r"md5 is .*, published is c58f30108f718f92721af3b95e74349a"):
        datasets.load("cifar10", 8)


def test_the_pickles_of_these_tests_are_what_python_takes_them_for():
    images, labels = drawn(30, 10, (3, 32, 32))
    batch = pickled_batch(images, labels, "labels")
    for table in (pickle.loads(batch, encoding="bytes"), unpickled(batch)):
        assert table[b"labels"] == labels.tolist()
        assert np.array_equal(table[b"data"], images.reshape(30, -1))
        assert table[b"filenames"][29] == b"image_29.png"
    meta = protocol0(["cat", "dog"])
    for table in (pickle.loads(meta, encoding="bytes"), unpickled(meta)):
        assert table == {b"label_names": [b"cat", b"dog"], b"num_vis": 3072}


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(plain)
def test_plain_values_come_back_as_they_were(value):
    assert unpickled(pickle.dumps({"value": value}, 2)) == {"value": value}


def test_a_pickle_that_is_cut_short_anywhere_is_a_value_error():
    whole = pickled_batch(*drawn(2, 2, (3, 4, 4)), "labels")
    for end in range(len(whole) - 1):
        with pytest.raises(ValueError, match="the pickle "):
            unpickled(whole[:end])


# Where files are looked for


def test_a_set_that_is_not_there_says_which_files_and_how_to_get_them(data):
    with pytest.raises(BadInput) as error:
        datasets.load("fashion-mnist", 8)
    assert str(error.value) == (
        "the data set 'fashion-mnist' is not here: put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, "
        f"t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz into {data}/fashion-mnist, "
        "or name another folder by FEWLABEL_DATA, or run `fewlabel data get fashion-mnist`"
    )
    with pytest.raises(BadInput, match=r"put cifar-10-binary.tar.gz \(or cifar-10-python.tar.gz\) into"):
        datasets.load("cifar10", 8)
    with pytest.raises(BadInput) as error:
        datasets.load("rsna-ich", 8)
    assert str(error.value) == (
        "the data set 'rsna-ich' is not here: put stage_2_train and stage_2_train.csv (or stage_1_train and "
        "stage_1_train.csv) from https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection into "
        f"{data}/rsna-ich, or name another folder by FEWLABEL_DATA"
    )


def test_of_a_set_that_is_there_in_part_only_the_rest_is_asked_for(data):
    make_fashion(data)
    (data / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match=f"put t10k-labels-idx1-ubyte.gz into {re.escape(str(data))}, or"):
        datasets.load("fashion-mnist", 8)


@pytest.mark.parametrize("below", ["", "breastmnist", "medmnist"])
def test_files_may_lie_in_the_folder_or_one_of_the_sets_name_or_medmnist(data, publish, below):
    (data / below).mkdir(exist_ok=True)
    make_medmnist(data / below, "breastmnist")
    assert publish("breastmnist") == [data / below / "breastmnist.npz"]
    assert len(datasets.load("breastmnist", 8).splits["train"]) == 60


def test_folders_are_searched_in_the_order_they_are_named_and_the_cache_last(tmp_path, monkeypatch):
    places = [tmp_path / "one", tmp_path / "two", tmp_path / "cache" / "fewlabel" / "data"]
    monkeypatch.setenv("FEWLABEL_DATA", f"{places[0]}{os.pathsep}{places[1]}")
    for place in reversed(places):
        place.mkdir(parents=True)
        make_medmnist(place, "breastmnist")
        assert files.find("breastmnist", datasets.DATASETS["breastmnist"])[1] == [place / "breastmnist.npz"]
    assert files.home("breastmnist") == places[0] / "breastmnist"
    monkeypatch.delenv("FEWLABEL_DATA")
    assert files.find("breastmnist", datasets.DATASETS["breastmnist"])[1] == [places[2] / "breastmnist.npz"]


def test_a_set_with_many_labels_per_image_is_refused():
    with pytest.raises(BadInput, match="'chestmnist' cannot be used: its images have any number of 14 labels"):
        datasets.load("chestmnist", 28)


# Splits


def numbered(data: Path, count: int = 200) -> None:
    """A Fashion-MNIST whose images tell their number."""
    make_fashion(data, train=count - 40, test=40)
    for prefix, start, stop in (("train", 0, count - 40), ("t10k", count - 40, count)):
        images = np.arange(start, stop, dtype=np.uint8).reshape(-1, 1).repeat(784, 1)
        content = struct.pack(">4I", 0x803, stop - start, 28, 28) + images.tobytes()
        (data / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))


def numbers(found: datasets.Dataset) -> dict[str, list[int]]:
    return {name: split.images.pixels[:, 0, 0, 0].tolist() for name, split in found.splits.items()}


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        ("published", {"train": 160, "test": 40}),
        ("80-20", {"train": 160, "test": 40}),
        ("70-10-20", {"train": 140, "validation": 20, "test": 40}),
        ("fedmatch", {"train": 180, "validation": 10, "test": 10}),
    ],
)
def test_a_split_by_name_has_its_sizes_and_every_image_once(data, publish, split, sizes):
    numbered(data)
    publish("fashion-mnist")
    found = numbers(datasets.load("fashion-mnist", 28, split=split))
    assert {name: len(images) for name, images in found.items()} == sizes
    assert sorted(number for side in found.values() for number in side) == list(range(200))
    mixed = any(number >= 160 for number in found["train"])
    assert mixed == (split != "published")


def test_a_split_depends_on_its_name_and_seed_alone(data, publish):
    numbered(data)
    publish("fashion-mnist")
    base = numbers(datasets.load("fashion-mnist", 28, split="80-20"))
    assert numbers(datasets.load("fashion-mnist", 28, split="80-20", channels=3)) == base
    assert numbers(datasets.load("fashion-mnist", 16, split="80-20")) == base
    assert numbers(datasets.load("fashion-mnist", 28, split="80-20", split_seed=1)) != base
    assert numbers(datasets.load("fashion-mnist", 28, split="80-20")) == base


def parts(*sizes: int) -> dict[str, Part]:
    return {str(number): Part(np.zeros(size), lambda _: iter(())) for number, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("sizes", "expected"), [((60000, 10000), (63000, 3500, 3500)), ((50000, 10000), (54000, 3000, 3000))]
)
def test_the_fedmatch_splits_are_those_of_the_paper(sizes, expected):
    side = np.concatenate(list(sides(parts(*sizes), "fedmatch", 0).values()))
    assert tuple(int((side == name).sum()) for name in ("train", "validation", "test")) == expected


@given(
    st.lists(st.integers(1, 9), min_size=20, max_size=60), st.integers(0, 5), st.sampled_from(["published", "80-20"])
)
def test_no_group_is_on_two_sides_and_the_sides_have_about_their_sizes(sizes, seed, split):
    group = np.random.Generator(np.random.PCG64(seed)).permutation(np.repeat(np.arange(len(sizes)), sizes))
    side = sides({"all": Part(np.zeros(len(group)), lambda _: iter(()), group)}, split, seed)["all"]
    assert all(len(set(side[group == number])) == 1 for number in range(len(sizes)))
    shares = {"train": 0.8, "test": 0.2} if split == "80-20" else {"train": 0.7, "validation": 0.1, "test": 0.2}
    for name, share in shares.items():
        assert abs((side == name).sum() - share * len(group)) <= 10  # a group of nine may lie across a border


def test_validation_of_published_training_images_leaves_the_test_as_it_is():
    published = dict(zip(("train", "test"), parts(6000, 30).values(), strict=True))
    side = sides(published, "validation-5000", 0)
    assert {name: int((side["train"] == name).sum()) for name in ("train", "validation")} == {
        "train": 1000, "validation": 5000,
    }  # fmt: skip
    assert set(side["test"]) == {"test"}
    assert np.array_equal(side["train"], sides(published, "validation-5000", 0)["train"])
    assert not np.array_equal(side["train"], sides(published, "validation-5000", 1)["train"])
    for sizes in ((5000, 30), (6000, 30, 30)):
        given = dict(zip(("train", "test", "validation"), parts(*sizes).values(), strict=False))
        with pytest.raises(
            BadInput, match=r"needs published splits for training and test, no other, and more than 5,0"
        ):
            sides(given, "validation-5000", 0)


def test_a_split_that_is_not_there_or_leaves_nothing_is_refused(data, publish):
    make_medmnist(data, "breastmnist")
    publish("breastmnist")
    with pytest.raises(BadInput, match="there is no split '90-10'; there are published, 80-20, 70-10-20, fedmatch"):
        datasets.load("breastmnist", 8, split="90-10")
    raw = Raw(("a", "b"), {"all": Part(np.zeros(1, int), lambda _: iter(()))})
    with pytest.raises(BadInput, match=r"1 images are too few for this data\.split"):
        datasets.write_labels(raw, sides(raw.parts, "80-20", 0), data)


def test_the_settings_are_checked_when_the_experiment_is_read():
    found = read({}, ["data.channels=3", "data.split=fedmatch", "data.split_seed=2"]).data
    assert (found.channels, found.split, found.split_seed) == (3, "fedmatch", 2)
    for wrong in ("data.channels=2", "data.split=fedmach", "data.split_seed=-1"):
        with pytest.raises(BadInput, match=wrong.partition("=")[0]):
            read({}, [wrong])


# Channels


def test_grey_images_may_be_given_three_channels_and_colours_be_made_grey(data, publish):
    make_medmnist(data, "breastmnist")
    publish("breastmnist")
    grey, three = (datasets.load("breastmnist", 28, channels=c).splits["train"].images for c in (1, 3))
    assert torch.equal(three.pixels, grey.pixels.expand(-1, 3, -1, -1))
    assert three.mean == pytest.approx(grey.mean * 3)
    splits = make_medmnist(data, "bloodmnist")
    publish("bloodmnist")
    luma = datasets.load("bloodmnist", 28, channels=1).splits["test"].images.pixels
    red, green, blue = splits["test"][0].astype(float).swapaxes(0, 1)
    assert np.abs(luma[:, 0].numpy() - (0.299 * red + 0.587 * green + 0.114 * blue)).max() <= 0.501
    with pytest.raises(BadInput, match=r"images of 2 channels cannot be given 3; data.channels is 1 or 3"):
        datasets.recolour(np.zeros((1, 2, 4, 4), np.uint8), 3)


# The real ones

REAL = next(
    (
        Path(folder)
        for folder in (os.environ.get("FEWLABEL_DATA"), Path(__file__).parents[3] / "shared" / "data")
        if folder and Path(folder).is_dir()
    ),
    None,
)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., datasets.Dataset]:
    def load(name: str, *sizes: int, **more: object) -> datasets.Dataset:
        if REAL is None:
            pytest.skip("no real data: neither FEWLABEL_DATA nor ../shared/data is there")
        monkeypatch.setenv("FEWLABEL_DATA", str(REAL))
        try:
            files.find(name, datasets.DATASETS[name])
        except BadInput as error:
            pytest.skip(f"no real data: {error}")
        return datasets.load(name, *sizes, **more)  # type: ignore[arg-type]

    return load


def histogram(split: datasets.Split) -> list[int]:
    return split.labels.bincount().tolist()


def test_the_real_fashion_mnist_unpacked_is_the_same(real, tmp_path, monkeypatch):
    packed = real("fashion-mnist", 8)
    raw = tmp_path / "unpacked" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in (REAL / "fashion-mnist").glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    monkeypatch.setenv("FEWLABEL_DATA", str(tmp_path / "unpacked"))
    assert datasets.load("fashion-mnist", 8).digest == packed.digest


def test_the_real_fashion_mnist(real):
    found = real("fashion-mnist", 28)
    assert {name: histogram(split) for name, split in found.splits.items()} == {
        "train": [6000] * 10,
        "test": [1000] * 10,
    }
    images = found.splits["train"].images
    assert (found.channels, images.pixels.shape) == (1, (60000, 1, 28, 28))
    # What CBAFed normalises with, of all training pixels.
    assert (images.mean[0], images.std[0]) == (pytest.approx(0.2860402, abs=1e-6), pytest.approx(0.3530239, abs=1e-6))
    assert found.splits["train"].labels[:5].tolist() == [9, 0, 0, 3, 0]
    drawn = real("fashion-mnist", 28, split="fedmatch", channels=3)
    assert {name: len(split) for name, split in drawn.splits.items()} == {
        "train": 63000, "validation": 3500, "test": 3500,
    }  # fmt: skip
    assert np.sum([np.bincount(split.labels) for split in drawn.splits.values()], axis=0).tolist() == [7000] * 10
    assert drawn.channels == 3


def test_the_real_pneumoniamnist(real):
    found = real("pneumoniamnist", 28)
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 4708, "validation": 524, "test": 624}
    assert histogram(found.splits["test"]) == [234, 390]
    assert (found.channels, found.classes) == (1, ("normal", "pneumonia"))


def test_the_real_ham10000_has_its_classes_and_no_lesion_on_two_sides(real):
    found = real("isic2018", 32)
    assert found.splits["train"].images.pixels.shape[1:] == (3, 32, 32)
    total = dict(zip(found.classes, np.sum([histogram(split) for split in found.splits.values()], axis=0), strict=True))
    assert total == {"nv": 6705, "mel": 1113, "bkl": 1099, "bcc": 514, "akiec": 327, "vasc": 142, "df": 115}
    lesions = [set(split.groups.tolist()) for split in found.splits.values() if split.groups is not None]
    assert len(lesions) == 3
    assert sum(map(len, lesions)) == len(set.union(*lesions)) == 7470
    sizes = [len(split) / 10015 for split in found.splits.values()]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.001)
    # RSCFed normalises with these, of its own training split.
    assert found.splits["train"].images.mean == pytest.approx((0.7630332, 0.5456457, 0.57004654), abs=0.003)


MEASURE = """
import sys
from fewlabel.data import datasets
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
datasets.load("digits", 12)  # whatever libraries take for themselves
open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
before = status("VmRSS")
found = datasets.load("fashion-mnist", int(sys.argv[1]))
print(status("VmHWM") - before, sum(split.images.pixels.numel() for split in found.splits.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured on Linux")
@pytest.mark.parametrize("size", [28, 32])
def test_decoding_takes_less_than_twice_the_memory_of_what_is_decoded(real, size):
    real("pneumoniamnist", 8)
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, str(size)], capture_output=True, text=True, timeout=300, check=True
    )
    peak, decoded = map(int, found.stdout.split())
    assert decoded == 70000 * size * size
    assert peak < 2 * decoded


PBC = (REAL or Path()) / "pbc" / "pbc32.npz"


@pytest.mark.skipif(not PBC.exists(), reason="no pbc/pbc32.npz: neither FEWLABEL_DATA nor ../shared/data has it")
def test_a_blood_cell_in_two_classes_stops_nobody(tmp_path: Path) -> None:
    """The 100th cell to train on is once more there, in the next class; the published set has one such cell."""
    arrays = dict(np.load(PBC))
    arrays["train_images"] = np.concatenate([arrays["train_images"], arrays["train_images"][99:100]])
    arrays["train_labels"] = np.append(arrays["train_labels"], (arrays["train_labels"].ravel()[99] + 1) % 8)
    np.savez(tmp_path / "pbc.npz", **arrays)
    raw = read_images(list_images("npz", tmp_path / "pbc.npz"))
    assert len(raw.parts["train"]) == 11952 - 1
    assert "different labels for 1 image, such as train_images[99]" in raw.notes[0]
