"""The data sets of the papers, read exactly as their authors publish them.

A reader gets the paths of a set's files, whose checksums have been compared by then, and gives labels at once and
images a few at a time.
"""

import csv
import gzip
import io
import mmap
import shutil
import struct
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data import pictures
from fewlabel.data.published.files import File, Form, Source, cache
from fewlabel.data.published.medmnist import MEDMNIST, URL
from fewlabel.data.published.pickled import unpickle
from fewlabel.data.raw import CHUNK, Part, Raw

FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
LESIONS = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
HAEMORRHAGES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
KINDS = (*HAEMORRHAGES, "any")
BRAIN = (40.0, 80.0)  # centre and width of the window, in Hounsfield units
MALFORMED = (
    ValueError, KeyError, IndexError, TypeError, EOFError, zlib.error, zipfile.BadZipFile,
    tarfile.TarError, csv.Error, struct.error, AttributeError, NotImplementedError, pictures.Unreadable,
)  # fmt: skip


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turns whatever a file of another form makes our readers raise into a sentence that names it."""
    named = f"{what} in {path}" if what else str(path)
    try:
        yield
    except (*MALFORMED, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the machine's, not the file's: Pillow's and gzip's have none
            raise StorageError(f"{named} cannot be read: {error.strerror}") from None
        raise BadInput(f"{named} cannot be read in its published form: {error}") from None


# Fashion-MNIST: idx


def fashion_mnist(*paths: Path) -> Raw:
    return Raw(FASHION, {"train": idx(*paths[:2]), "test": idx(*paths[2:])})


def idx(images: Path, labels: Path) -> Part:
    with reading(labels), gzip.open(labels) as file:
        (count,) = idx_shape(file, 1)
        label = np.frombuffer(file.read(), np.uint8).reshape(count)

    def read(_: int) -> Iterator[np.ndarray]:
        with reading(images), gzip.open(images) as file:
            _, height, width = idx_shape(file, 3)
            yield from (rows.reshape(-1, 1, height, width) for rows in records(file, height * width))

    return Part(label, read)


def idx_shape(file: IO[bytes] | gzip.GzipFile, dimensions: int) -> tuple[int, ...]:
    if file.read(4) != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"it does not begin as an idx file of bytes in {dimensions} dimensions")
    return tuple(np.frombuffer(file.read(4 * dimensions), ">u4").tolist())


def records(file: IO[bytes] | gzip.GzipFile, size: int) -> Iterator[np.ndarray]:
    """Bytes [n, size] of a file of records."""
    while block := file.read(max(1, CHUNK // size) * size):
        yield np.frombuffer(block, np.uint8).reshape(-1, size)


# CIFAR: rows of label bytes and 3x32x32 pixels, or the same in pickles


def cifar_binary(path: Path, *, folder: str, train: Sequence[str], test: str, names: str, coarse: int) -> Raw:
    """Rows of a label, which in CIFAR-100 (`coarse` = 1) a coarser label precedes, and an image."""
    unpacked = Unpacked(path, folder, [*train, test, names])

    def rows(members: Sequence[str]) -> Iterator[np.ndarray]:
        for member in members:
            with reading(path, member), unpacked.open(member) as file:
                yield from records(file, coarse + 1 + 3 * 32 * 32)

    def part(members: Sequence[str]) -> Part:
        label = np.concatenate([some[:, coarse] for some in rows(members)])
        return Part(label, lambda _: (some[:, coarse + 1 :].reshape(-1, 3, 32, 32) for some in rows(members)))

    with unpacked.open(names) as file:
        classes = tuple(file.read().decode().split())
    return Raw(classes, {"train": part(train), "test": part([test])})


def cifar_python(path: Path, *, folder: str, train: Sequence[str], test: str, meta: str, fine: str) -> Raw:
    unpacked = Unpacked(path, folder, [*train, test, meta])

    def content(member: str) -> dict[bytes, Any]:
        with reading(path, member), unpacked.open(member) as file:
            found = unpickle(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
            if not isinstance(found, dict):
                raise ValueError("it is no dictionary")
            return found

    def pixels(members: Sequence[str]) -> Iterator[np.ndarray]:
        for member in members:
            with reading(path, member):
                images = content(member)[b"data"].reshape(-1, 3, 32, 32)
                yield from (some for some in np.array_split(images, images.nbytes // CHUNK + 1) if len(some))

    def part(members: Sequence[str]) -> Part:
        with reading(path):
            label = np.concatenate([np.array(content(member)[f"{fine}labels".encode()]) for member in members])
        return Part(label, lambda _: pixels(members))

    with reading(path, meta):
        classes = tuple(name.decode() for name in content(meta)[f"{fine}label_names".encode()])
    return Raw(classes, {"train": part(train), "test": part([test])})


def cifar_file(name: str, md5: str) -> File:
    return File(name, f"https://www.cs.toronto.edu/~kriz/{name}", (md5,))


class Unpacked:
    """Some members of an archive as files, because its own order is not theirs; deleted when nobody reads them."""

    def __init__(self, path: Path, folder: str, members: Sequence[str]) -> None:
        with reading(path):
            cache().mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(dir=cache(), prefix=".unpacked-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            wanted = {f"{folder}/{member}": self._folder / member for member in members}
            with tarfile.open(path, "r|*") as tar:
                for entry in tar:
                    if entry.name in wanted and (packed := tar.extractfile(entry)):
                        with wanted.pop(entry.name).open("wb") as file:
                            shutil.copyfileobj(packed, file, CHUNK)
            if wanted:
                raise ValueError(f"{', '.join(wanted)} is not in it")

    def open(self, member: str) -> IO[bytes]:
        return (self._folder / member).open("rb")


CIFAR10 = [f"data_batch_{number}" for number in range(1, 6)]
CIFAR = {
    "cifar10": (
        Form(
            (cifar_file("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            partial(
                cifar_binary,
                folder="cifar-10-batches-bin",
                train=[f"{batch}.bin" for batch in CIFAR10],
                test="test_batch.bin",
                names="batches.meta.txt",
                coarse=0,
            ),
        ),
        Form(
            (cifar_file("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
            partial(
                cifar_python,
                folder="cifar-10-batches-py",
                train=CIFAR10,
                test="test_batch",
                meta="batches.meta",
                fine="",
            ),
        ),
    ),
    "cifar100": (
        Form(
            (cifar_file("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            partial(
                cifar_binary,
                folder="cifar-100-binary",
                train=["train.bin"],
                test="test.bin",
                names="fine_label_names.txt",
                coarse=1,
            ),
        ),
        Form(
            (cifar_file("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
            partial(cifar_python, folder="cifar-100-python", train=["train"], test="test", meta="meta", fine="fine_"),
        ),
    ),
}


# SVHN: MATLAB arrays of 32x32x3xN


def svhn(train: Path, test: Path) -> Raw:
    """The cropped digits; the digit 0 is published with the label 10."""
    return Raw(tuple("0123456789"), {"train": svhn_part(train), "test": svhn_part(test)})


def svhn_part(path: Path) -> Part:
    from scipy.io import loadmat

    with reading(path):
        label = loadmat(path, variable_names=["y"])["y"].ravel() % 10

    def read(_: int) -> Iterator[np.ndarray]:
        with reading(path):
            images = loadmat(path, variable_names=["X"])["X"]
            step = max(1, CHUNK // images[..., 0].nbytes)
            for start in range(0, images.shape[3], step):
                yield images[..., start : start + step].transpose(3, 2, 0, 1)

    return Part(label, read)


# MedMNIST: npz with train, val and test


def medmnist(path: Path, *, classes: tuple[str, ...]) -> Raw:
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        labels = {split: arrays[f"{split}_labels"].reshape(-1) for split in ("train", "val", "test")}
    names = {"train": "train", "validation": "val", "test": "test"}
    parts = {name: Part(labels[split], partial(npz_images, path, f"{split}_images")) for name, split in names.items()}
    return Raw(classes, parts)


@contextmanager
def npz_array(path: Path, key: str) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """A file of the pixels of an npz's array, and its shape [N, H, W, C]."""
    with reading(path, key), zipfile.ZipFile(path) as arrays, arrays.open(f"{key}.npy") as file:
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = header[np.lib.format.read_magic(file)](file)
        known = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
        if dtype != np.uint8 or fortran or not known or 0 in shape[1:]:
            raise BadInput(
                f"{key} in {path}: expected uint8 images, found {dtype} {list(shape)}{' in Fortran order' * fortran}; "
                "FewLabel reads [N, H, W], [N, H, W, 1] or [N, H, W, 3]"
            )
        yield file, (*shape, 1)[:4]


def npz_shape(path: Path, key: str) -> tuple[int, ...]:
    with npz_array(path, key) as (_, shape):
        return shape


def npz_images(path: Path, key: str, _: int) -> Iterator[np.ndarray]:
    """Images of an npz a few at a time; NumPy itself would read all of them."""
    with npz_array(path, key) as (file, (_n, height, width, channels)):
        for rows in records(file, height * width * channels):
            yield rows.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)


# ISIC 2018 task 3 and HAM10000: JPEG files by image id, and a table


def isic2018(images: Path, truth: Path, lesions: Path) -> Raw:
    """As published for task 3: a column of zeros and ones for each class, and the lesion of each image in a file."""
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
    """As published at Harvard Dataverse: images in one archive or more, and last the metadata."""
    *images, metadata = paths
    with reading(metadata):
        found = {row["image_id"]: (row["dx"], row["lesion_id"]) for row in table(metadata)}
    return dermoscopy(images, found, metadata)


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, which may lie in an archive or a folder of its own."""
    with reading(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(f"{path.stem}.csv"))
                text = archive.read(name).decode("utf-8-sig")
        else:
            text = (path / f"{path.name}.csv" if path.is_dir() else path).read_text("utf-8-sig")
        return list(csv.DictReader(text.splitlines()))


def dermoscopy(sources: Sequence[Path], found: dict[str, tuple[str, str]], truth: Path) -> Raw:
    """Images in the order of their ids, the same whatever form they came in."""
    names = sorted(found)
    with reading(truth):
        label = np.array([LESIONS.index(found[name][0]) for name in names])
    lesion = np.array([found[name][1] for name in names])
    stores = [Store(source) for source in sources]
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


class Store:
    """JPEG files by their name without its ending, in an archive or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._archive = None if path.is_dir() else zipfile.ZipFile(path)
            inside = self._archive.namelist() if self._archive else [str(p.relative_to(path)) for p in path.rglob("*")]
        self.names = {Path(name).stem: name for name in inside if name.lower().endswith((".jpg", ".jpeg"))}

    def image(self, name: str, size: int) -> np.ndarray:
        """Resized while it is decoded: JPEG can leave out what a smaller image does not need."""
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
    """All slices with just one of the five subtypes, of which FedIRM drew 25,000 that it does not name.

    ID_6431af929 is left out: its pixels are cut short as they are published.
    """
    told = haemorrhages(truth)
    names = single(told)
    files = [slices / f"{name}.dcm" for name in names]

    def read(size: int) -> Iterator[np.ndarray]:
        step = max(1, CHUNK // (size * size))
        for start in range(0, len(files), step):
            yield np.stack([ct_slice(file, size) for file in files[start : start + step]])

    label = np.array([told[name].index(1) for name in names])
    patients = np.array([patient(file) for file in files])
    return Raw(HAEMORRHAGES, {"all": Part(label, read, patients, scale={"window": BRAIN})})


def single(told: dict[str, bytearray]) -> list[str]:
    return sorted(name for name, said in told.items() if said[:5].count(1) == 1 and name != "ID_6431af929")


def kept_slices(slices: Path, truth: Path) -> list[Path]:
    """What `rsna_ich` reads: an eighth of some 750,000 files."""
    return [slices / f"{name}.dcm" for name in single(haemorrhages(truth))]


def haemorrhages(truth: Path) -> dict[str, bytearray]:
    """Zeros and ones of each slice, for its subtypes and for any; some of its six rows are published twice."""
    told: dict[str, bytearray] = {}
    with reading(truth), truth.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            name, kind = row["ID"].rsplit("_", 1)
            said, place, label = told.setdefault(name, bytearray(b"??????")), KINDS.index(kind), int(row["Label"])
            if said[place] not in (ord("?"), label):
                raise ValueError(f"{row['ID']} is both {said[place]} and {label}")
            said[place] = label
        for name, said in told.items():
            if max(said) > 1:
                raise ValueError(f"{name} does not have a 0 or 1 for each of {', '.join(KINDS)}")
    return told


def patient(file: Path) -> str:
    with reading(file):
        found = pictures.header(file).patient
        if not found:
            raise ValueError("it has no PatientID")
        return found


def ct_slice(file: Path, size: int) -> np.ndarray:
    with reading(file):
        return pictures.read(file, colour=False, size=size, window=BRAIN)


# All of them

S3 = "https://isic-challenge-data.s3.amazonaws.com/2018/"
TASK3 = "ISIC2018_Task3_Training"
METADATA = File("HAM10000_metadata.csv", instead=("HAM10000_metadata",))


def fashion_file(name: str, md5: str) -> File:
    return File(name, f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{name}", (md5,))


def svhn_file(name: str, md5: str) -> File:
    return File(name, f"http://ufldl.stanford.edu/housenumbers/{name}", (md5,))


def medmnist_source(name: str) -> Source:
    md5, what, (train, validation, test), channels, classes = MEDMNIST[name]
    file = File(f"{name}.npz", URL.format(name=name), md5)
    colour = "colour" if channels == 3 else "grey"
    about = f"MedMNIST: {what}, {train:,} + {validation:,} + {test:,} {colour} 28x28, {len(classes)} classes"
    return Source((Form((file,), partial(medmnist, classes=classes)),), about, ("medmnist",))


PUBLISHED: dict[str, Source] = {
    "fashion-mnist": Source(
        (
            Form(
                (
                    fashion_file("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                    fashion_file("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
                    fashion_file("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
                    fashion_file("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
                ),
                fashion_mnist,
            ),
        ),
        "clothes, 60,000 + 10,000 grey 28x28, 10 classes",
    ),
    "cifar10": Source(CIFAR["cifar10"], "photographs, 50,000 + 10,000 colour 32x32, 10 classes"),
    "cifar100": Source(CIFAR["cifar100"], "photographs, 50,000 + 10,000 colour 32x32, 100 classes"),
    "svhn": Source(
        (
            Form(
                (
                    svhn_file("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
                    svhn_file("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
                ),
                svhn,
            ),
        ),
        "house numbers, 73,257 + 26,032 colour 32x32, 10 classes",
    ),
    "isic2018": Source(
        (
            Form(
                (
                    File(f"{TASK3}_Input.zip", f"{S3}{TASK3}_Input.zip", instead=(f"{TASK3}_Input",)),
                    File(
                        f"{TASK3}_GroundTruth.zip",
                        f"{S3}{TASK3}_GroundTruth.zip",
                        instead=(f"{TASK3}_GroundTruth.csv", f"{TASK3}_GroundTruth"),
                    ),
                    File(f"{TASK3}_LesionGroupings.csv", f"{S3}{TASK3}_LesionGroupings.csv"),
                ),
                isic2018,
            ),
            Form((File("images.zip", instead=("images",)), METADATA), ham10000),
            Form(
                (
                    File("HAM10000_images_part_1.zip", instead=("HAM10000_images_part_1",)),
                    File("HAM10000_images_part_2.zip", instead=("HAM10000_images_part_2",)),
                    METADATA,
                ),
                ham10000,
            ),
        ),
        "skin lesions (HAM10000), 10,015 colour images, 7 classes; by default split 70-10-20 by lesion",
        ("ham10000",),
    ),
    "rsna-ich": Source(
        tuple(
            Form((File(stage, instead=(f"{stage}_images",)), File(f"{stage}.csv")), rsna_ich, kept_slices)
            for stage in ("stage_2_train", "stage_1_train")
        ),
        "brain haemorrhages (RSNA 2019, by hand from Kaggle), grey CT, 5 classes; by default split 70-10-20 by patient",
        ("rsna-intracranial-hemorrhage-detection",),
        "https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection",
    ),
    **{name: medmnist_source(name) for name in MEDMNIST},
}

REFUSED = {"chestmnist": "its images have any number of 14 labels, and every method here needs just one of each image"}
