"""Your own images: every format and mode is read, splits part no patient, and what is wrong is named."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewlabel.core.errors import BadInput
from fewlabel.core.rng import Rng
from fewlabel.data import partition, pictures
from fewlabel.data.own.check import check_images
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.listing import Listing, fingerprint, folder_names, guess_kind
from fewlabel.data.own.reader import read_images, read_parts
from fewlabel.data.pictures import Unreadable
from fewlabel.data.splits import sides, unlabeled_aside
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import read

GREY = np.array([[0, 50, 100], [150, 200, 250]], np.uint8)
COLOUR = np.stack([GREY, 255 - GREY, GREY // 2], axis=2)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def grey(path: Path, value: int, size: tuple[int, int] = (4, 4)) -> Path:
    return save(path, Image.new("L", size, value))


def write_csv(path: Path, head: str, rows: Iterable[str]) -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def whole(found: Listing, size: int = 4, split: str = "all", skip: bool = False) -> tuple[np.ndarray, np.ndarray]:
    part = read_parts(found, skip)[0][split]
    return np.concatenate(list(part.read(size))), part.labels


def refused(what: Callable[[], object]) -> str:
    with pytest.raises(BadInput) as caught:
        what()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# One file


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.bmp", "a.gif", "a.webp"])
def test_grey_and_colour_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    if name not in ("a.bmp", "a.gif"):
        path = save(tmp_path / name, Image.fromarray(COLOUR), **({"lossless": True} if name.endswith("webp") else {}))
        assert pictures.header(path).colour
        assert np.array_equal(pictures.read(path, colour=True), COLOUR.transpose(2, 0, 1))
    if name != "a.webp":  # which has no grey
        path = save(tmp_path / name, Image.fromarray(GREY))
        assert not pictures.header(path).colour
        assert pictures.read(path, colour=False).tolist() == [GREY.tolist()]
        assert pictures.read(path, colour=True).tolist() == [GREY.tolist()] * 3


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_is_nearly_what_it_was(mode: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", Image.new("RGB", (16, 16), (200, 200, 200)).convert(mode), quality=95)
    assert pictures.header(path).colour == (mode != "L")
    assert abs(pictures.read(path, colour=mode != "L").astype(int) - 200).max() <= 2


def test_a_palette_has_colours_only_if_its_entries_do(tmp_path: Path) -> None:
    coloured = save(tmp_path / "c.png", Image.fromarray(COLOUR).convert("P", palette=Image.Palette.ADAPTIVE))
    assert pictures.header(coloured).colour
    assert np.array_equal(pictures.read(coloured, colour=True), COLOUR.transpose(2, 0, 1))
    image = Image.fromarray(GREY)
    image = image.convert("P", palette=Image.Palette.ADAPTIVE)
    plain = save(tmp_path / "g.png", image)
    assert not pictures.header(plain).colour
    assert pictures.read(plain, colour=False).tolist() == [GREY.tolist()]


def test_what_is_transparent_is_black(tmp_path: Path) -> None:
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0] = [[255, 10, 20, 255], [255, 10, 20, 0], [200, 100, 50, 51]]
    path = save(tmp_path / "a.png", Image.fromarray(pixels, "RGBA"))
    # a fifth of 200, 100 and 50 for the last one
    assert pictures.read(path, colour=True)[:, 0].T.tolist() == [[255, 10, 20], [0, 0, 0], [40, 20, 10]]
    path = save(tmp_path / "b.png", Image.fromarray(np.array([[[90, 255], [90, 0]]], np.uint8), "LA"))
    assert not pictures.header(path).colour
    assert pictures.read(path, colour=False).tolist() == [[[90, 0]]]


def test_one_bit_is_black_and_white(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", Image.fromarray(GREY > 100).convert("1"))
    assert pictures.read(path, colour=False).tolist() == [[[0, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize("name", ["a.tif", "a.png"])
def test_an_image_is_turned_upright(name: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    path = save(tmp_path / name, Image.fromarray(GREY), exif=exif)
    assert pictures.read(path, colour=False)[0].tolist() == np.rot90(GREY, -1).tolist()


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_keep_one_scale_for_all(name: str, tmp_path: Path) -> None:
    """Values reach 4095, so 12 bits are used: 4095 becomes 255, and 2048 is 255 * 2048 / 4095 = 128."""
    for label, value in (("bright", 4095), ("dark", 2048)):
        save(tmp_path / label / name, Image.fromarray(np.full((4, 4), value, np.uint16)))
    images, labels = whole(list_images("folder", tmp_path))
    assert images[:, 0, 0, 0].tolist() == [255, 128]
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("a.png", np.array([[0, 257], [32896, 65535]], np.uint16), [[0, 1], [128, 255]]),
        ("a.tif", np.array([[0, 0.5], [0.2, 1]], np.float32), [[0, 128], [51, 255]]),
    ],
    ids=["sixteen bits", "floats"],
)
def test_all_values_reach_from_black_to_white(name: str, values: np.ndarray, expected: object, tmp_path: Path) -> None:
    save(tmp_path / "a" / name, Image.fromarray(values))
    assert whole(list_images("folder", tmp_path), 2)[0].tolist() == [[expected]]


def test_any_size_becomes_the_square_that_was_asked_for(tmp_path: Path) -> None:
    for number, size in enumerate([(3, 7), (100, 20), (8, 8), (1, 1)]):
        grey(tmp_path / "a" / f"{number}.png", 77, size)
    save(tmp_path / "a" / "large.jpg", Image.new("L", (300, 200), 77))
    images, _ = whole(list_images("folder", tmp_path), 8)
    assert images.shape == (5, 1, 8, 8)
    assert (images == 77).all()


def test_one_colour_image_makes_all_of_three_channels(tmp_path: Path) -> None:
    grey(tmp_path / "a" / "1.png", 9)
    save(tmp_path / "a" / "2.png", Image.new("RGB", (4, 4), (1, 2, 3)))
    images, _ = whole(list_images("folder", tmp_path))
    assert images[:, :, 0, 0].tolist() == [[9, 9, 9], [1, 2, 3]]


def spoil(path: Path, how: str) -> Path:
    """A file as disks, networks and people break them."""
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "overwritten":
        data[: len(data)] = b"\0" * len(data)
    elif how == "flipped":
        data[len(data) // 2] ^= 0xFF
    elif how == "text":
        data = bytearray(b"<html>not found</html>")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("how", ["cut", "overwritten", "flipped", "text"])
@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_a_broken_png_is_never_read_as_something_else(how: str, mode: str, tmp_path: Path) -> None:
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 255, (9, 9, 3), np.uint8)
    path = spoil(save(tmp_path / "a.png", Image.fromarray(noise).convert(mode)), how)
    with pytest.raises(Unreadable, match=r"\w+"):
        pictures.read(path, colour=True)


def test_reasons_are_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    told = []
    for name in ("empty.png", "text.png", "nowhere.png"):
        with pytest.raises(Unreadable) as caught:
            pictures.header(tmp_path / name)
        told.append(str(caught.value))
    assert told == ["it is empty", "it is not an image of a known format", "there is no such file"]


# DICOM


def dicom(path: Path, pixels: np.ndarray, **more: object) -> Path:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    about = pydicom.Dataset()
    about.file_meta = pydicom.dataset.FileMetaDataset()
    about.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    about.file_meta.MediaStorageSOPClassUID = about.SOPClassUID = CTImageStorage
    about.file_meta.MediaStorageSOPInstanceUID = about.SOPInstanceUID = generate_uid()
    about.Rows, about.Columns = pixels.shape[:2]
    about.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    about.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        about.PlanarConfiguration = 0
    about.BitsAllocated = about.BitsStored = 8 * pixels.itemsize
    about.HighBit = about.BitsStored - 1
    about.PixelRepresentation = int(pixels.dtype.kind == "i")
    about.PixelData = pixels.tobytes()
    for name, value in more.items():
        setattr(about, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    about.save_as(path, enforce_file_format=True)
    return path


def test_dicom_is_rescaled_and_windowed(tmp_path: Path) -> None:
    """Stored 1024 and 1064 are 0 and 40 HU; the window of 81 around 40 goes from -0.5 to 79.5."""
    stored = np.array([[0, 1024], [1064, 1104]], np.uint16)
    path = dicom(tmp_path / "a.dcm", stored, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=81)
    # (0 + 0.5) * 255 / 80 = 1.6, (40 + 0.5) * 255 / 80 = 129.1
    assert pictures.read(path, colour=False).tolist() == [[[0, 2], [129, 255]]]


@pytest.mark.parametrize("kind", [np.uint16, np.int16])
def test_dicom_may_be_seen_through_another_window_than_its_own(kind: type, tmp_path: Path) -> None:
    """A window of 80 around 40 goes from 0 to 79; stored 1024, 1064 and 1103 are 0, 40 and 79 HU."""
    stored = np.array([[0, 1024], [1064, 1103]], kind)
    path = dicom(tmp_path / "a.dcm", stored, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=600, WindowWidth=2800)
    # 40 * 255 / 79 = 129.1
    assert pictures.read(path, colour=False, window=(40, 80)).tolist() == [[[0, 0], [129, 255]]]
    path = dicom(tmp_path / "b.dcm", np.array([[-2000, 10]], np.int16), RescaleSlope=2, RescaleIntercept=0)
    # 20 * 255 / 79 = 64.6
    assert pictures.read(path, colour=False, window=(40, 80)).tolist() == [[[0, 65]]]


def test_dicom_without_a_window_goes_from_least_to_greatest(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", np.array([[-100, 0], [50, 100]], np.int16))
    assert pictures.read(path, colour=False).tolist() == [[[0, 128], [191, 255]]]
    inverted = dicom(tmp_path / "b.dcm", np.array([[0, 255]], np.uint8), PhotometricInterpretation="MONOCHROME1")
    assert pictures.read(inverted, colour=False).tolist() == [[[255, 0]]]


def test_dicom_has_colours_several_windows_and_patients(tmp_path: Path) -> None:
    path = dicom(tmp_path / "a.dcm", np.ascontiguousarray(COLOUR), PatientID="P7")
    assert pictures.header(path) == pictures.Header(True, patient="P7")
    assert np.array_equal(pictures.read(path, colour=True), COLOUR.transpose(2, 0, 1))
    stored = np.array([[0, 10, 99]], np.uint16)
    path = dicom(tmp_path / "b.dcm", stored, WindowCenter=[5.5, 50], WindowWidth=[11, 100])
    assert pictures.read(path, colour=False).tolist() == [[[0, 255, 255]]]


def test_a_folder_of_dicom_is_split_by_patient_and_scanners_leave_out_endings(tmp_path: Path) -> None:
    for number in range(20):
        place = tmp_path / "ab"[number % 2] / (f"1.2.840.{number}" if number % 3 else f"{number}.dcm")
        dicom(place, np.full((4, 4), number, np.uint8), PatientID=f"P{number // 4}", WindowCenter=128, WindowWidth=256)
    (tmp_path / "a" / "notes").write_text("x" * 200)
    found = list_images("dicom", tmp_path)
    assert len(found.items) == 20
    assert found.strays == ("a/notes",)
    groups = read_parts(found)[0]["all"].groups
    assert groups is not None
    assert sorted(Counter(groups.tolist()).values()) == [4] * 5


def test_a_table_may_name_dicom_without_endings(tmp_path: Path) -> None:
    dicom(tmp_path / "ID_1.dcm", GREY, WindowCenter=128, WindowWidth=256)
    found = list_images("dicom", write_csv(tmp_path / "t.csv", "image,label", ["ID_1,a"]))
    assert found.items[0].file == tmp_path / "ID_1.dcm"
    assert read_parts(found)[0]["all"].labels.tolist() == [0]


def test_frames_are_refused_and_without_pydicom_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dicom(tmp_path / "a" / "a.dcm", GREY, NumberOfFrames=2, PixelData=GREY.tobytes() * 2)
    with pytest.raises(Unreadable, match="2 frames"):
        pictures.read(path, colour=False)
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    assert "pip install '.[dicom]'" in refused(lambda: read_parts(list_images("dicom", tmp_path)))


# Folders


def test_a_folder_for_each_class_with_images_at_any_depth(tmp_path: Path) -> None:
    grey(tmp_path / "b" / "x.PNG", 1)
    grey(tmp_path / "a" / "deep" / "deeper" / "x.png", 2)
    grey(tmp_path / "unlabeled" / "any" / "x.png", 3)
    grey(tmp_path / ".trash" / "x.png", 4)
    (tmp_path / "a" / "notes.txt").write_text("note")
    found = list_images("folder", tmp_path)
    assert found.classes == ("a", "b")
    assert found.strays == ("a/notes.txt",)
    images, labels = whole(found)
    assert dict(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)) == {1: 1, 2: 0, 3: -1}


def test_folders_of_splits_lie_above_those_of_classes(tmp_path: Path) -> None:
    for number, place in enumerate(["train/a", "train/b", "train/unlabeled", "val/a", "test/b", "unlabeled"]):
        grey(tmp_path / place / "x.png", number)
    made, _ = read_parts(list_images("folder", tmp_path))
    assert {split: sorted(part.labels.tolist()) for split, part in made.items()} == {
        "train": [-1, -1, 0, 1],
        "validation": [0],
        "test": [1],
    }


def test_classes_that_are_numbers_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in ("10", "9", "-1"):
        grey(tmp_path / name / "x.png", 0)
    assert list_images("folder", tmp_path).classes == ("-1", "9", "10")


def test_classes_may_be_named_in_a_file_beside_them(tmp_path: Path) -> None:
    grey(tmp_path / "T-shirt-top" / "x.png", 0)
    (tmp_path / "classes.txt").write_text("bag\nT-shirt/top\n")
    found = list_images("folder", tmp_path)
    assert found.classes == ("bag", "T-shirt/top")
    assert read_parts(found)[0]["all"].labels.tolist() == [1]
    (tmp_path / "classes.txt").write_text("bag\nT-shirt/top\nbag\n")
    told = refused(lambda: list_images("folder", tmp_path))
    assert "classes.txt names the class 'bag' 2 times; name each once" in told
    (tmp_path / "classes.txt").write_text("bag\nT-shirt/top\n")
    grey(tmp_path / "shoe" / "x.png", 0)
    assert "'shoe', a class that" in refused(lambda: list_images("folder", tmp_path))


def test_names_of_folders_are_possible_and_distinct() -> None:
    assert list(folder_names(["a/b", "a:b", "Train", "..", "x"]).values()) == ["a-b", "a-b-", "Train-", "class", "x"]


@pytest.mark.parametrize("extra", ["notes", "empty"])
def test_a_folder_without_images_beside_splits_is_no_class(extra: str, tmp_path: Path) -> None:
    for number, place in enumerate(["Training/a", "Training/b", "test/a"]):
        grey(tmp_path / place / "x.png", number)
    (tmp_path / extra).mkdir()
    if extra == "notes":
        (tmp_path / "notes" / "readme.txt").write_text("by hand")
    found = list_images("folder", tmp_path)
    assert (found.classes, found.splits) == (("a", "b"), ["train", "test"])
    assert check_images(found).notes == [f"there are no images in the folder {extra}"]


def test_splits_beside_other_folders_are_refused(tmp_path: Path) -> None:
    for number, place in enumerate(["Train/a", "Train/b", "holdout/a"]):
        grey(tmp_path / place / "x.png", number)
    assert "has a folder holdout beside Train, which is the name of a split" in refused(
        lambda: list_images("folder", tmp_path)
    )


def test_sites_are_not_read_as_classes(tmp_path: Path) -> None:
    for number, place in enumerate(["client-0/a", "client-0/b", "client-1/a", "client-1/b", "test/a"]):
        grey(tmp_path / place / "x.png", number)
    for site in tmp_path.iterdir():
        (site / "classes.txt").write_text("a\nb\n")
    told = refused(lambda: list_images("folder", tmp_path))
    assert "holds sites, not classes, because client-0 has its own classes.txt; give one site's folder, such" in told
    for file in tmp_path.rglob("classes.txt"):
        file.unlink()
    (tmp_path / "test").rename(tmp_path / "client-2")
    grey(tmp_path / "client-2" / "b" / "x.png", 9)
    grey(tmp_path / "client-2" / "unlabeled" / "x.png", 10)
    assert "client-2/unlabeled lies below client-2, which would be a class" in refused(
        lambda: list_images("folder", tmp_path)
    )
    (tmp_path / "client-2" / "unlabeled" / "x.png").unlink()
    (note,) = check_images(list_images("folder", tmp_path)).notes
    assert note.startswith("all classes have the same folders, such as a: if these are the classes, give the folder")


def test_images_in_no_folder_are_all_named_by_a_check(tmp_path: Path) -> None:
    for place in ("a", "b", "."):
        for number in range(3):
            grey(tmp_path / place / f"{number}.png", 10 * ord(place[0]) % 200 + number)
    (tmp_path / "DICOMDIR").write_bytes(b"\0" * 128 + b"DICM")
    found = list_images("folder", tmp_path)
    assert found.strays == ("DICOMDIR",)
    report = check_images(found)
    assert report.to_json()["in_no_class"] == ["0.png", "1.png", "2.png"]
    assert report.problems() == ["3 images in no class's folder"]
    assert "0.png lies in no class's folder, as 2 more images" in refused(lambda: read_images(found))


def test_odd_labels_and_empty_folders_are_noted(tmp_path: Path) -> None:
    for number, label in enumerate(["a", "A", "nan"]):
        grey(tmp_path / label / "x.png", number)
    (tmp_path / "b").mkdir()
    assert check_images(list_images("folder", tmp_path)).notes == [
        "there are no images in the folder b",
        "'nan' is read as a class; leave the label empty where it is not known",
        "A and a are read as different classes",
    ]


def test_images_of_a_kind_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    grey(tmp_path / "a" / "x.png", 0)
    (tmp_path / "a" / "y.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    save(tmp_path / "a" / "z.tif", Image.new("L", (4, 4)), save_all=True, append_images=[Image.new("L", (4, 4))])
    assert check_images(list_images("folder", tmp_path)).unreadable == {
        "a/y.HEIC": "it is not an image of a known format",
        "a/z.tif": "it has 2 pages, and an image must have one",
    }


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    grey(tmp_path / "mine" / "a" / "x.png", 0)
    assert guess_kind(Path("~/mine")) == "folder"
    assert len(list_images("folder", "~/mine").items) == 1


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    grey(tmp_path / "elsewhere" / "x.png", 1)
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images" / "a" / "again").symlink_to(tmp_path / "images" / "a")
    assert [item.name for item in list_images("folder", tmp_path / "images").items] == ["a/more/x.png"]


# Tables


def test_a_table_says_what_is_known_of_each_image(tmp_path: Path) -> None:
    for number in range(4):
        grey(tmp_path / "images" / f"{number}.png", number)
    rows = ["images/0.png; nv ;north;p1;train", "images/1;mel;south;p2;val", "images/2.png;;north;p1;TRAIN"]
    found = list_images("csv", write_csv(tmp_path / "t.csv", "\ufeffFile;DX;Hospital;lesion_id;Split", [*rows, ""]))
    assert [item.label for item in found.items] == ["nv", "mel", ""]
    assert [item.split for item in found.items] == ["train", "validation", "train"]
    made = read_parts(found)[0]["train"]
    assert made.clients is not None
    assert made.clients.tolist() == ["north", "north"]
    assert made.labels.tolist() == [1, -1]


def test_columns_can_be_named(tmp_path: Path) -> None:
    grey(tmp_path / "0.png", 5)
    path = write_csv(tmp_path / "t.csv", "Bild,Befund,label", ["0.png,gut,x"])
    found = list_images("csv", path, {"image": "bild", "label": "Befund"})
    assert found.classes == ("gut",)
    assert found.command == f"fewlabel data check {path} --column image=bild --column label=Befund"
    told = refused(lambda: list_images("csv", path))
    assert "no column named image or path or file" in told
    assert "Bild, Befund, label, of which data.columns.image=… may name one" in told
    assert "of which --column image=… may name one" in refused(lambda: list_images("csv", path, by="--column "))
    assert "no column 'site' for the client" in refused(
        lambda: list_images("csv", path, {"image": "Bild", "client": "site"})
    )
    assert "no data.columns.lable" in refused(lambda: list_images("csv", path, {"image": "Bild", "lable": "Befund"}))


def test_clients_may_be_of_any_column_of_a_table(tmp_path: Path) -> None:
    rows = [f"{n}.png,{'ab'[n % 2]},{'pq'[n // 20]},h{n % 4},{'train' if n < 30 else 'test'}" for n in range(40)]
    for number in range(40):
        grey(tmp_path / f"{number}.png", number)
    path = write_csv(tmp_path / "t.csv", "image,label,client,Haus,split", rows)

    def dealt(*changes: str) -> list[list[int]]:
        told = [f"data.path={path}", "data=csv", "clients.partition=by-column", "clients.min_size=1", *changes]
        experiment = read({}, told)
        dataset = dataset_of(experiment)
        return [sorted(share.images.tolist()) for share in partition.of(dataset, experiment).shares]

    assert [len(share) for share in dealt("clients.count=2")] == [20, 10]
    assert dealt("clients.count=4", "clients.column=Haus") == [list(range(first, 30, 4)) for first in range(4)]
    assert "no column 'ward' for the client; there are image, label, client, Haus" in refused(
        lambda: dealt("clients.count=4", "clients.column=ward")
    )


def test_whole_numbers_of_more_than_eight_bits_become_white_at_all_bits_that_they_need() -> None:
    assert pictures.span([pictures.Header(False, (0.0, 3000.0)), pictures.Header(False)]) == (0.0, 4095.0)
    assert pictures.span([pictures.Header(False, (0.0, 4096.0))]) == (0.0, 8191.0)


def test_an_image_without_a_label_is_left_out_if_its_patient_is_not_trained_on() -> None:
    # Ten patients, each with an image that has a label and one that has none.
    group, known = np.arange(10).repeat(2), np.arange(20) % 2 == 0
    side = unlabeled_aside(group, known, (70, 10, 20), Rng(0))
    assert Counter(side[known]) == {"train": 7, "validation": 1, "test": 2}
    assert [str(name) for name in side[~known]] == ["train" if name == "train" else "" for name in side[known]]


@pytest.mark.parametrize(
    ("head", "rows", "sentence"),
    [
        ("image,label,split", ["a,b,dev"], "has the split 'dev'; it may be train, validation or test"),
        ("image,label,split", ["a,b,train", "c,d,"], "1 of 2 rows"),
        ("image,label", [], "there are no images"),
        ("image,label", ['a,"b'], "is not a table"),
        ("image,label", ["a,b", "c"], "line 3 of"),
        ("image,label", ["a,b", " ,x"], "line 3 of"),
        ("image,label", ["a,b,c"], "has 3 fields for 2 columns"),
        ("image,Label,label", ["a,b,c"], "has several columns 'Label'; rename all but one"),
        (
            "image,label",
            ["a,b", "c,d"],
            "none of the 2 files exist below FOLDER, such as a; paths are relative to the table",
        ),
    ],
)
def test_mistakes_in_tables_are_told(head: str, rows: list[str], sentence: str, tmp_path: Path) -> None:
    told = refused(lambda: list_images("csv", write_csv(tmp_path / "t.csv", head, rows)))
    assert sentence.replace("FOLDER", str(tmp_path)) in told


@pytest.mark.parametrize("how", ["latin-1", "utf-16", "utf-16-le"])
def test_a_table_that_is_not_utf_8_is_told(how: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("image,label\nü,a\n".encode(how))
    assert "save it as UTF-8" in refused(lambda: list_images("csv", tmp_path / "t.csv"))


def test_tables_of_windows_and_excel_and_with_quotes_are_read(tmp_path: Path) -> None:
    grey(tmp_path / "images" / "0.png", 0)
    grey(tmp_path / "images" / "1.png", 1)
    rows = ["image;label;;", "images\\0.png;a;;", "images\\1;Unlabeled;;"]
    found = list_images("csv", write_csv(tmp_path / "t.csv", "sep=;", rows))
    assert [item.file.name for item in found.items] == ["0.png", "1.png"]
    assert [item.label for item in found.items] == ["a", ""]
    grey(tmp_path / "a, b.png", 3)
    quoted = write_csv(tmp_path / "q.csv", "image,label", ['"a, b.png","the ""class""\nof one"'])
    assert list_images("csv", quoted).classes == ('the "class"\nof one',)


# Arrays


def test_npz_has_medmnists_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    train, test = np.split(np.arange(7 * 4 * 4, dtype=np.uint8).reshape(7, 4, 4), [5])
    labels = np.array([[0], [2], [-1], [1], [0]])
    np.savez(path, train_images=train, train_labels=labels, test_images=test, test_labels=np.array([0, 1]))
    found = list_images("npz", path)
    assert found.classes == ("0", "1", "2")
    images, label = whole(found, split="train")
    assert np.array_equal(images[:, 0], train)
    assert label.tolist() == [0, 2, -1, 1, 0]
    assert read_images(found).classes == ("0", "1", "2")
    colours = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    np.savez(path, train_images=colours, train_labels=[1, 0], classes=["x", "y", "z"])
    found = list_images("npz", path)
    assert found.classes == ("x", "y", "z")
    assert np.array_equal(whole(found)[0], colours.transpose(0, 3, 1, 2))


def test_npz_of_one_split_is_a_site_that_is_not_split(tmp_path: Path) -> None:
    images = np.arange(40 * 4 * 4, dtype=np.uint16).reshape(40, 4, 4).astype(np.uint8)
    images[:, 0, 0] = np.arange(40)
    labels, patients = np.arange(40) % 2, np.arange(40) // 4
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, train_patients=patients)
    found = list_images("npz", tmp_path / "a.npz")
    assert check_images(found).problems() == []
    part = read_images(found).parts["all"]
    assert part.groups is not None
    assert part.groups.tolist() == patients.tolist()
    assert set(sides({"all": part}, "published", 0)["all"]) == {"train", "validation", "test"}


def test_mistakes_in_npz_are_told(tmp_path: Path) -> None:
    image, path = np.zeros((2, 4, 4), np.uint8), tmp_path / "a.npz"

    def told(**arrays: object) -> str:
        np.savez(path, allow_pickle=True, **arrays)
        return refused(lambda: check_images(list_images("npz", path)))

    assert "has no train_images and train_labels; it has x, y" in told(x=image, y=[0, 1])
    assert "whole numbers, one for each image" in told(train_images=image, train_labels=[[0, 1], [1, 0]])
    assert "whole numbers" in told(train_images=image, train_labels=[0.5, 1])
    assert "label 3, but names only 2" in told(train_images=image, train_labels=[0, 3], classes=["a", "b"])
    assert "2 train images, but 3 labels" in told(train_images=image, train_labels=[0, 1, 0])
    assert "found float64" in told(train_images=image / 2, train_labels=[0, 1])
    first = np.zeros((2, 3, 28, 28), np.uint8)
    assert "found uint8 [2, 3, 28, 28]; FewLabel reads [N, H, W], [N, H, W, 1] or [N, H, W, 3]" in told(
        train_images=first, train_labels=[0, 1]
    )
    assert "in Fortran order" in told(train_images=np.asfortranarray(image), train_labels=[0, 1])
    assert "found uint8 [2, 0, 4]" in told(train_images=image[:, :0], train_labels=[0, 1])
    sides = {"train_images": image, "train_labels": [0, 1], "test_labels": [0, 1]}
    assert "differ in their channels: 1 in train_images, 3 in test_images" in told(
        **sides, test_images=np.zeros((2, 4, 4, 3), np.uint8)
    )
    assert "has no test_images and test_labels" in told(train_images=image, train_labels=[0, 1], test_images=image)
    assert "whole numbers" in told(train_images=image, train_labels=0)
    assert "label 20000000, but only 2 images" in told(train_images=image, train_labels=[0, 2 * 10**7])
    assert "names the class 'a' 2 times" in told(train_images=image, train_labels=[0, 1], classes=["a", "b", "a"])
    assert "2 train images, but 1 patients" in told(train_images=image, train_labels=[0, 1], train_patients=["p"])
    assert "cannot be read" in told(train_images=image, train_labels=np.array([{}, 1], object))


NO_NPZ = {b"nothing": "it is no zip archive", b"": "it is empty", b"\x93NUMPY\x01\x00": "it is a single array (npy)"}


@pytest.mark.parametrize("data", NO_NPZ)
def test_a_file_that_is_no_npz_is_told_in_our_words(data: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "a.npz").write_bytes(data)
    assert refused(lambda: list_images("npz", path)) == (
        f"{path} is not an npz file: {NO_NPZ[data]}; expected arrays as numpy.savez writes them, such as train_images "
        "and train_labels"
    )


# What all have in common


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert "needs data.path" in refused(lambda: list_images("folder", None))
    assert "there is no file or folder" in refused(lambda: list_images("csv", tmp_path / "no.csv"))
    assert "did you mean 'folder'?" in refused(lambda: list_images("csv", tmp_path))
    assert "there are no images" in refused(lambda: list_images("folder", tmp_path))
    grey(tmp_path / "x.png", 0)
    assert "lies in no class's folder" in refused(lambda: list_images("folder", tmp_path))
    assert "needs a folder" in refused(lambda: list_images("folder", tmp_path / "x.png"))


def test_what_cannot_be_a_run_is_told(tmp_path: Path) -> None:
    grey(tmp_path / "one" / "a" / "x.png", 0)
    assert "two classes or more; the labels in" in refused(lambda: read_images(list_images("folder", tmp_path / "one")))
    for place in ("train/a", "train/b", "test/unlabeled"):
        grey(tmp_path / "two" / place / "x.png", 0)
    assert "test on have no label, such as test/unlabeled/x.png" in refused(
        lambda: read_images(list_images("folder", tmp_path / "two"))
    )
    (tmp_path / "two" / "test").rename(tmp_path / "two" / "val")
    assert "a run needs train and test" in refused(lambda: read_images(list_images("folder", tmp_path / "two")))


def test_unreadable_images_are_fatal_or_skipped_as_asked(tmp_path: Path) -> None:
    for number in range(4):
        grey(tmp_path / "a" / f"{number}.png", number)
    spoil(tmp_path / "a" / "1.png", "cut")
    (tmp_path / "a" / "2.png").write_bytes(b"")
    found = list_images("folder", tmp_path)
    told = refused(lambda: whole(found))
    assert "data.unreadable = 'skip'" in told
    assert "at least 2 of 4 images cannot be read, such as" in told
    assert "fewlabel data check" in told
    images, labels = whole(found, skip=True)
    assert images[:, 0, 0, 0].tolist() == [0, 3]
    assert len(labels) == 2
    for number in (0, 3):
        spoil(tmp_path / "a" / f"{number}.png", "text")
    assert "none of the 4 images" in refused(lambda: whole(found, skip=True))


def test_the_fingerprint_changes_with_whatever_changes_the_data(tmp_path: Path) -> None:
    grey(tmp_path / "a" / "x.png", 0)
    grey(tmp_path / "b" / "x.png", 0)

    def now() -> str:
        return fingerprint(list_images("folder", tmp_path))

    seen = [now(), now()]
    assert seen[0] == seen[1]
    grey(tmp_path / "a" / "x.png", 0, (5, 5))
    seen.append(now())
    (tmp_path / "a" / "x.png").rename(tmp_path / "b" / "y.png")
    seen.append(now())
    (tmp_path / "classes.txt").write_text("b\na\n")
    seen.append(now())
    assert len(set(seen)) == 4


# What no result could be trusted with


def test_what_a_check_calls_spoiled_is_refused_by_a_run_too(tmp_path: Path) -> None:
    for number in (0, 1, 2, 3, 3, 5):
        grey(tmp_path / "my images" / f"{number}.png", number)
    (tmp_path / "my images" / "4.png").write_bytes((tmp_path / "my images" / "3.png").read_bytes())

    def told(*rows: str, drawn: bool = False) -> str:
        path = write_csv(tmp_path / "my images" / "t.csv", "image,label,split,patient", rows)
        return refused(lambda: read_images(list_images("csv", path), drawn=drawn, conflicting="fatal"))

    rows = ["0.png,a,train,", "1.png,b,train,", "2.png,a,test,", "3.png,b,test,"]
    labels = told(*rows, "4.png,a,test,")
    assert "different labels for 1 image, such as 3.png (b) and 4.png (a); see all by" in labels
    assert f"`fewlabel data check '{tmp_path}/my images/t.csv'`" in labels
    assert "different labels" in told(*rows, "4.png,a,test,", drawn=True)
    assert "different splits for 1 image, such as 3.png (test) and 4.png (train)" in told(*rows, "4.png,,train,")
    rows += ["5.png,a,train,p"]
    rows[2] += "p"
    assert "different splits for 1 patient, such as 2.png (test) and 5.png (train) of p; see" in told(*rows)
    found = list_images("csv", write_csv(tmp_path / "my images" / "t.csv", "image,label,split,patient", rows))
    assert read_images(found, drawn=True).parts.keys() == {"train", "test"}
    assert found.command == f"fewlabel data check '{tmp_path}/my images/t.csv'"


def test_copies_and_patients_are_one_group_through_each_other(tmp_path: Path) -> None:
    """0 and 1 are one image, 1 and 2 of one patient, 2 and 3 one image; 4 is of nobody."""
    for number, value in enumerate([7, 7, 8, 8, 9]):
        grey(tmp_path / f"{number}.png", value)
    rows = ["0.png,a,", "1.png,a,p", "2.png,b,p", "3.png,b,q", "4.png,a,"]
    part = read_parts(list_images("csv", write_csv(tmp_path / "t.csv", "image,label,patient", rows)))[0]["all"]
    assert part.groups is not None
    assert part.groups.tolist() == [0, 0, 0, 0, 1]


# Checks


def test_a_check_counts_and_compares(tmp_path: Path) -> None:
    grey(tmp_path / "train" / "a" / "1.png", 1)
    grey(tmp_path / "train" / "a" / "2.png", 2, (8, 6))
    grey(tmp_path / "train" / "b" / "3.png", 1)  # as 1.png, but another class
    grey(tmp_path / "train" / "unlabeled" / "4.png", 4)
    grey(tmp_path / "train" / "unlabeled" / "5.png", 4)
    grey(tmp_path / "test" / "a" / "6.png", 2, (8, 6))  # as 2.png, in another split
    report = check_images(list_images("folder", tmp_path))
    assert report.images == 6
    assert report.sizes == {(4, 4): 4, (8, 6): 2}
    assert report.classes == {"train": {"a": 2, "b": 1, "": 2}, "test": {"a": 1}}
    assert [[item.name for item in same] for same in report.conflicts] == [["train/a/1.png", "train/b/3.png"]]
    assert [[item.name for item in same] for same in report.leaks] == [["test/a/6.png", "train/a/2.png"]]
    assert len(report.duplicates) == 3
    assert report.problems() == ["several splits with 1 image in common"]


def test_mixed_bit_depths_are_told_by_class(tmp_path: Path) -> None:
    """Two of three a and no b have sixteen bits."""
    for number, (label, deep) in enumerate(
        [("a", True), ("a", True), ("a", False), ("b", False), ("unlabeled", False)]
    ):
        image = Image.fromarray(np.full((4, 4), number, np.uint16)) if deep else Image.new("L", (4, 4), number)
        save(tmp_path / label / f"{number}.png", image)
    (note,) = check_images(list_images("folder", tmp_path)).notes
    assert note.startswith(
        "some images have more than eight bits, others eight (2 of 3 a, 0 of 1 b, 0 of 1 without label): this alone"
    )
    (tmp_path / "a" / "2.png").unlink()
    (tmp_path / "b" / "3.png").unlink()
    (tmp_path / "unlabeled" / "4.png").unlink()
    assert not any("bits" in note for note in check_images(list_images("folder", tmp_path)).notes)


def test_a_patient_on_two_sides_is_named(tmp_path: Path) -> None:
    for number in range(6):
        grey(tmp_path / f"{number}.png", number)
    rows = ["0.png,a,p1,train", "1.png,b,p1,train", "2.png,a,p2,train", "3.png,b,p2,test", "4.png,a,p3,test"]
    report = check_images(list_images("csv", write_csv(tmp_path / "t.csv", "image,label,patient,split", rows)))
    assert report.straddling == {"p2": ("test", "train")}
    assert report.problems() == ["several splits with 1 patient in common"]


def test_a_check_of_arrays_finds_duplicates_too(tmp_path: Path) -> None:
    images = np.zeros((3, 4, 4), np.uint8)
    images[1] = 1
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=[0, 1, 1])
    report = check_images(list_images("npz", tmp_path / "a.npz"))
    assert [[item.name for item in same] for same in report.conflicts] == [["train_images[0]", "train_images[2]"]]
    assert "different labels for 1 image, such as train_images[0] (0) and train_images[2] (1)" in refused(
        lambda: read_images(report.listing, conflicting="fatal")
    )


def conflicting_npz(path: Path) -> Path:
    """Ten images to train on and four to test on. 2 = 7 and 1 = test 3, but not in label; 4 = 5 in label, too."""
    train = np.arange(10, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    train[7], train[5] = train[2], train[4]
    test = train[:4] + 100
    test[3] = train[1]
    labels = np.array([0, 0, 0, 1, 0, 0, 1, 1, 0, 1])
    np.savez(path, train_images=train, train_labels=labels, test_images=test, test_labels=[0, 1, 0, 1])
    return path


def test_images_with_two_labels_are_left_out_and_told(tmp_path: Path) -> None:
    listing = list_images("npz", conflicting_npz(tmp_path / "a.npz"))
    raw = read_images(listing)
    train = raw.parts["train"]
    assert train.labels.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert np.concatenate(list(train.read(4)))[:, 0, 0, 0].tolist() == [0, 3, 4, 4, 6, 8, 9]
    assert np.concatenate(list(raw.parts["test"].read(4)))[:, 0, 0, 0].tolist() == [100, 101, 102]
    assert train.groups is not None
    assert train.groups[2] == train.groups[3]
    (note,) = raw.notes
    assert note == (
        "different labels for 2 images, such as train_images[1] (0) and test_images[3] (1): the 4 copies are left out "
        f"(data.conflicting); see all by `{listing.command}`"
    )
    assert check_images(listing).problems() == []


def test_a_check_says_if_different_labels_leave_nothing(tmp_path: Path) -> None:
    """Of a and b there are two images, each in both classes; a third one, or one without a label, changes that."""
    for label in "ab":
        grey(tmp_path / label / "1.png", 1)
        grey(tmp_path / label / "2.png", 2)
    grey(tmp_path / "unlabeled" / "3.png", 3)
    assert check_images(list_images("folder", tmp_path)).problems() == [
        "every labeled image has a copy with another label, so a run has none left"
    ]
    grey(tmp_path / "a" / "4.png", 4)
    assert check_images(list_images("folder", tmp_path)).problems() == []


def test_a_check_says_which_split_is_left_with_nothing(tmp_path: Path) -> None:
    for split, label, value in (("train", "a", 1), ("train", "b", 2), ("test", "a", 3), ("test", "b", 3)):
        grey(tmp_path / split / label / f"{value}.png", value)
    assert check_images(list_images("folder", tmp_path)).problems() == [
        "every labeled image of test has a copy with another label, so a run has none left"
    ]
    assert refused(lambda: read_images(list_images("folder", tmp_path))) == (
        "every image of test has a copy with another label, so none is left; give each one label"
    )


def test_images_with_two_labels_can_be_kept_or_stop_a_run(tmp_path: Path) -> None:
    listing = list_images("npz", conflicting_npz(tmp_path / "a.npz"))
    assert "different labels for 2 images, such as train_images[1] (0) and test_images[3] (1); see all by" in refused(
        lambda: read_images(listing, conflicting="fatal")
    )
    raw = read_images(listing, drawn=True, conflicting="keep")
    assert [len(part) for part in raw.parts.values()] == [10, 4]
    assert "all copies are kept, each with its own label" in raw.notes[0]
    assert "different splits for 1 image" in refused(lambda: read_images(listing, conflicting="keep"))


def test_the_choice_about_two_labels_is_a_setting_and_the_note_outlives_the_decoding(tmp_path: Path) -> None:
    base = ["data.name=npz", f"data.path={conflicting_npz(tmp_path / 'a.npz')}", "data.image_size=4"]
    for _ in range(2):  # decoded, and then from the cache
        found = dataset_of(read({}, base))
        assert len(found.splits["train"]) == 7
        assert len(found.notes) == 1
    kept = dataset_of(read({}, [*base, "data.conflicting=keep", "data.split=70-10-20"]))
    assert sum(map(len, kept.splits.values())) == 14
    assert "different labels for 2 images" in refused(lambda: dataset_of(read({}, [*base, "data.conflicting=fatal"])))
