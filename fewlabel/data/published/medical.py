"""Read ISIC 2018, HAM10000 and RSNA's brain haemorrhages: JPEG or DICOM files, and tables with their labels."""

import csv
import io
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.data import pictures
from fewlabel.data.raw import CHUNK, Part, Raw
from fewlabel.data.reading import reading

LESIONS = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
HAEMORRHAGES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
KINDS = (*HAEMORRHAGES, "any")
BRAIN = (40.0, 80.0)  # centre and width of the window, in Hounsfield units

# ISIC 2018 task 3 and HAM10000: JPEG files by image id, and a table


def isic2018(images: Path, truth: Path, lesions: Path) -> Raw:
    """Read task 3 as published: a column of zeros and ones for each class, and the lesion of each image in a file."""
    lesion = {row["image"]: row["lesion_id"] for row in table(lesions)}
    found = {}
    with reading(truth):
        for row in table(truth):
            chosen = [name for name in LESIONS if float(row[name.upper()])]
            if len(chosen) != 1:
                raise ValueError(f"{row['image']} has {len(chosen)} classes")
            found[row["image"]] = chosen[0], lesion[row["image"]]
    return dermoscopy([images], found, truth)


def ham10000(*paths: Path) -> Raw:
    """Read what Harvard Dataverse publishes: one archive of images or more, and last the metadata."""
    *images, metadata = paths
    with reading(metadata):
        found = {row["image_id"]: (row["dx"], row["lesion_id"]) for row in table(metadata)}
    return dermoscopy(images, found, metadata)


def table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file, which may lie in an archive or a folder."""
    with reading(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(f"{path.stem}.csv"))
                text = archive.read(name).decode("utf-8-sig")
        else:
            text = (path / f"{path.name}.csv" if path.is_dir() else path).read_text("utf-8-sig")
        return list(csv.DictReader(text.splitlines()))


def dermoscopy(sources: Sequence[Path], found: dict[str, tuple[str, str]], truth: Path) -> Raw:
    """Read images in the order of their ids, which is the same in every edition."""
    names = sorted(found)
    with reading(truth):
        label = np.array([LESIONS.index(found[name][0]) for name in names])
    lesion = np.array([found[name][1] for name in names])
    stores = [JpegFiles(source) for source in sources]
    missing = [name for name in names if not any(name in store.names for store in stores)]
    if missing:
        where = " and ".join(map(str, sources))
        raise BadInput(f"{len(missing)} of {len(names)} images that {truth} lists are not in {where}: {missing[0]} ...")

    def read(size: int) -> Iterator[np.ndarray]:
        step = max(1, CHUNK // (3 * size * size))
        for start in range(0, len(names), step):
            some = names[start : start + step]
            yield np.stack([next(s for s in stores if name in s.names).image(name, size) for name in some])

    return Raw(LESIONS, {"all": Part(label, read, lesion)})


class JpegFiles:
    """JPEG files in an archive or a folder, by their names without suffix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._archive = None if path.is_dir() else zipfile.ZipFile(path)
            inside = self._archive.namelist() if self._archive else [str(p.relative_to(path)) for p in path.rglob("*")]
        self.names = {Path(name).stem: name for name in inside if name.lower().endswith((".jpg", ".jpeg"))}

    def image(self, name: str, size: int) -> np.ndarray:
        """Decode and resize an image. JPEG can leave out what a smaller image does not need."""
        from PIL import Image

        member = self.names[name]
        with reading(self.path, member):
            data = self._archive.read(member) if self._archive else (self.path / member).read_bytes()
            with Image.open(io.BytesIO(data)) as image:
                image.draft("RGB", (2 * size, 2 * size))
                small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(small).transpose(2, 0, 1)


# RSNA Intracranial Hemorrhage Detection: DICOM files by slice id, and a table


def rsna_ich(slices: Path, truth: Path) -> Raw:
    """Read all slices with exactly one of the five subtypes. FedIRM drew 25,000 of them, but does not say which.

    ID_6431af929 is left out, because its published file is cut short.
    """
    labels = haemorrhages(truth)
    names = single(labels)
    files = [slices / f"{name}.dcm" for name in names]

    def read(size: int) -> Iterator[np.ndarray]:
        step = max(1, CHUNK // (size * size))
        for start in range(0, len(files), step):
            yield np.stack([ct_slice(file, size) for file in files[start : start + step]])

    label = np.array([labels[name].index(1) for name in names])
    patients = np.array([patient(file) for file in files])
    return Raw(HAEMORRHAGES, {"all": Part(label, read, patients, scale={"window": BRAIN})})


def single(labels: dict[str, bytearray]) -> list[str]:
    """List the slices with exactly one subtype."""
    return sorted(name for name, label in labels.items() if label[:5].count(1) == 1 and name != "ID_6431af929")


def kept_slices(slices: Path, truth: Path) -> list[Path]:
    """List the files that `rsna_ich` reads: an eighth of some 750,000."""
    return [slices / f"{name}.dcm" for name in single(haemorrhages(truth))]


def haemorrhages(truth: Path) -> dict[str, bytearray]:
    """Read for each slice six zeros and ones: for its subtypes and for any. Some rows are published twice."""
    labels: dict[str, bytearray] = {}
    with reading(truth), truth.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            name, kind = row["ID"].rsplit("_", 1)
            label, place, value = labels.setdefault(name, bytearray(b"??????")), KINDS.index(kind), int(row["Label"])
            if label[place] not in (ord("?"), value):
                raise ValueError(f"{row['ID']} is both {label[place]} and {value}")
            label[place] = value
        for name, label in labels.items():
            if max(label) > 1:
                raise ValueError(f"{name} does not have a 0 or 1 for each of {', '.join(KINDS)}")
    return labels


def patient(file: Path) -> str:
    with reading(file):
        found = pictures.header(file).patient
        if not found:
            raise ValueError("it has no PatientID")
        return found


def ct_slice(file: Path, size: int) -> np.ndarray:
    with reading(file):
        return pictures.read(file, colour=False, size=size, window=BRAIN)
