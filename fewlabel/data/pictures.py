"""Read one image file of any common kind, DICOM included, as eight bits of grey or colour."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewlabel.core.errors import BadInput, install

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".webp")
DICOM = (".dcm", ".dicom")
GREY = ("1", "L", "LA", "La")
WIDE = ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")  # Pillow's modes of more than eight bits

EMPTY = "it is empty"


class Unreadable(Exception):
    """A file that cannot be read as an image. The text follows the file's name in messages."""


@dataclass(frozen=True)
class Header:
    """What must be known about all files before the first is read."""

    colour: bool
    values: tuple[float, float] | None = None  # the least and the greatest, if there are more than eight bits
    patient: str = ""


@dataclass(frozen=True)
class Values:
    """An image as it is, before it has eight bits: grey [H, W] with any values, or eight bits of colour [H, W, 3]."""

    values: np.ndarray
    low: float = 0.0  # the value that is shown as black
    high: float = 255.0  # and as white
    inverted: bool = False  # the other way round

    def shown(self, low: float | None = None, high: float | None = None) -> np.ndarray:
        """Return eight bits for a screen, with this contrast or the usual one."""
        pixels = eight_bits(self.values, self.low if low is None else low, self.high if high is None else high)
        return 255 - pixels if self.inverted else pixels


def look(path: Path) -> Values:
    """Read an image for a person to look at: upright, in its own size and depth, over black where it is transparent."""
    from PIL import Image, ImageOps

    with opening(path), path.open("rb") as file:
        if is_dicom(path):
            return dicom_values(path)
        upright = ImageOps.exif_transpose(Image.open(file))
        if upright.mode in WIDE:
            values = np.nan_to_num(np.asarray(upright).astype(np.float32))
            low, high = np.percentile(values, (0.5, 99.5)).tolist()  # a few odd pixels must not hide all others
            return Values(values, low, high if high > low else low + 1)
        colour = is_colour(upright)
        if upright.has_transparency_data:
            clear = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
        return Values(np.asarray(upright.convert("RGB" if colour else "L")))


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Raise Unreadable, with a reason in a few words, for whatever goes wrong while a file is opened."""
    try:
        if not path.stat().st_size:
            raise Unreadable(EMPTY)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata; what matters is raised
            yield
    except (Unreadable, BadInput):
        raise
    except FileNotFoundError:
        raise Unreadable("there is no such file") from None
    except Exception as error:  # broken bytes make decoders raise anything
        unknown = type(error).__name__ == "UnidentifiedImageError"
        reason = "it is not an image of a known format" if unknown else getattr(error, "strerror", None) or str(error)
        raise Unreadable(" ".join(reason.split()) or type(error).__name__) from None


def is_dicom(path: Path) -> bool:
    """Return True for a DICOM file, by its suffix, or without one, as scanners write them, by the mark inside."""
    if path.suffix and not path.suffix[1:].isdigit():  # 1.2.840.113619 has no suffix either
        return path.suffix.lower() in DICOM
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def header(path: Path) -> Header:
    """Read a file's header. With more than eight bits, its values are read, too."""
    from PIL import Image

    with opening(path):
        if is_dicom(path):
            about = pydicom().dcmread(path, stop_before_pixels=True)
            coloured = int(about.get("SamplesPerPixel", 1)) > 1 or about.get("PhotometricInterpretation") == PALETTE
            return Header(coloured, patient=str(about.get("PatientID", "") or ""))
        with Image.open(path) as image:
            if image.format == "TIFF" and (pages := getattr(image, "n_frames", 1)) > 1:
                raise Unreadable(f"it has {pages} pages, and an image must have one")
            if image.mode in WIDE:
                values = np.nan_to_num(np.asarray(image))
                return Header(False, (float(values.min()), float(values.max())))
            return Header(is_colour(image))


def is_colour(image: "Image") -> bool:
    if image.mode == "P":  # a palette, which may hold only greys
        red, green, blue = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3).T
        return bool((red != green).any() or (green != blue).any())
    return image.mode not in (*GREY, *WIDE)


def span(headers: list[Header]) -> tuple[float, float]:
    """Return the values that become 0 and 255: one scale for all images, so that a dark image stays dark.

    Whole numbers get as many bits as the greatest needs: most detectors write twelve bits into sixteen.
    """
    given = [header.values for header in headers if header.values]
    low, high = min([0.0, *(low for low, _ in given)]), max([1.0, *(high for _, high in given)])
    whole = all(float(value).is_integer() for values in given for value in values)
    return low, float(2 ** max(8, int(high).bit_length()) - 1) if whole and high > 1 else high


def read(
    path: Path,
    colour: bool,
    values: tuple[float, float] = (0, 65535),
    size: int | None = None,
    window: tuple[float, float] | None = None,
) -> np.ndarray:
    """Read an image as uint8 [C, H, W], upright, over black where it is transparent.

    With a `size` it is squeezed into a square. `values` become 0 and 255 in images of more than eight bits. For DICOM,
    `window` is the centre and width of what is shown, in its rescaled values.
    """
    from PIL import Image, ImageOps

    # With a path instead of a file, Pillow 13 swaps width and height of an uncompressed TIFF that is to be turned.
    with opening(path), path.open("rb") as file:
        if is_dicom(path):
            image = Image.fromarray(dicom(path, window))
        else:
            Image.open(file).verify()  # the checksums of a PNG, which decoding does not read
            file.seek(0)
            image = Image.open(file)
            if size:
                image.draft(None, (2 * size, 2 * size))  # JPEG can leave out what a smaller image does not need
        upright = ImageOps.exif_transpose(image)
        if upright.mode in WIDE:
            upright = Image.fromarray(eight_bits(np.asarray(upright), *values))
        if upright.has_transparency_data:
            clear = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", clear.size, (0, 0, 0, 255)), clear)
        flat = upright.convert("RGB" if colour else "L")
        if size and flat.size != (size, size):
            flat = flat.resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.asarray(flat)
        return pixels.transpose(2, 0, 1) if colour else pixels[None]


def eight_bits(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scaled = (np.nan_to_num(values.astype(np.float32)) - low) * (255 / max(high - low, 1e-12))
    grey: np.ndarray = np.rint(scaled.clip(0, 255)).astype(np.uint8)
    return grey


# DICOM

PALETTE = "PALETTE COLOR"


def pydicom() -> Any:
    try:
        import pydicom
    except ImportError:
        raise BadInput(f"DICOM files need pydicom, which is not installed: {install('dicom')}") from None
    return pydicom


def dicom(path: Path, window: tuple[float, float] | None = None) -> np.ndarray:
    """Read pixels as a viewer shows them: rescaled, in this window or the file's own, or from least to greatest."""
    found = dicom_values(path, window)
    if found.values.ndim == 3:
        return found.values
    grey = eight_bits(found.values, found.low, found.high)
    return 255 - grey if found.inverted else grey


def dicom_values(path: Path, window: tuple[float, float] | None = None) -> Values:
    """Read the values of a DICOM file, rescaled, and which of them a viewer shows as black and as white."""
    about, decoders = pydicom().dcmread(path), import_module("pydicom.pixels")
    frames, kind = int(about.get("NumberOfFrames", 1) or 1), about.get("PhotometricInterpretation", "")
    if frames > 1:
        raise Unreadable(f"it has {frames} frames, and an image must have one")
    pixels: np.ndarray = decoders.pixel_array(about)
    if kind == PALETTE:
        pixels = decoders.apply_color_lut(pixels, about)
    if pixels.ndim == 3:
        bits = 8 * pixels.itemsize if kind == PALETTE else int(about.BitsStored)
        return Values(pixels if pixels.dtype == np.uint8 else eight_bits(pixels, 0, 2**bits - 1))
    values = pixels * float(about.get("RescaleSlope", 1) or 1) + float(about.get("RescaleIntercept", 0) or 0)
    centre, width = window or (first(about.get("WindowCenter")), first(about.get("WindowWidth")))
    low, high = float(values.min()), float(values.max())
    if centre is not None and width is not None and width > 1:  # PS3.3, C.11.2.1.2.1
        low, high = centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2
    return Values(values, low, high, kind == "MONOCHROME1")


def first(value: Any) -> float | None:
    """Return the first number: a file may offer several windows."""
    if value is None or value == "":
        return None
    return float(value if isinstance(value, str | int | float) else next(iter(value)))
