"""Read your own images as a data set: labels become numbers, and what would spoil a run is refused."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.data import pictures
from fewlabel.data.npz import npz_images
from fewlabel.data.own.listing import Item, Listing, counted, refuse_loose
from fewlabel.data.pictures import Unreadable
from fewlabel.data.raw import CHUNK, Part, Raw, Scale
from fewlabel.data.reading import digest_of


def read_images(listing: Listing, skip: bool = False, drawn: bool = False, conflicting: str = "leave-out") -> Raw:
    """Return the listed images as a data set.

    `skip` leaves out images that cannot be read. `drawn` says that its own splits are not used, because new ones are
    drawn that keep each patient's images together. `conflicting` is what to do about an image with different labels:
    leave-out, fatal or keep.
    """
    refuse_loose(listing)
    if len(listing.classes) < 2:
        names = ", ".join(listing.classes) or "none"
        raise BadInput(f"a run needs two classes or more; the labels in {listing.path} name {names}")
    if listing.splits and not {"train", "test"} <= set(listing.splits):
        raise BadInput(
            f"{listing.path} has {' and '.join(listing.splits)} images, but a run needs train and test; "
            "without any splits they are drawn"
        )
    blind = [item.name for item in listing.items if item.split in ("validation", "test") and not item.label]
    if blind:
        raise BadInput(
            f"{len(blind)} images to validate or test on have no label, such as {blind[0]}; "
            "give them one, or put them among those to train on"
        )
    parts, notes = read_parts(listing, skip, drawn, conflicting)
    return Raw(listing.classes, parts, notes)


def read_parts(
    listing: Listing, skip: bool = False, drawn: bool = False, conflicting: str = "leave-out"
) -> tuple[dict[str, Part], tuple[str, ...]]:
    """Return the images of each split, or all of them as one part, and sentences about what was odd.

    A label that is not known is -1.
    """
    items, colour, scale = (list(listing.items), False, Scale()) if listing.kind == "npz" else readable(listing, skip)
    digests = digests_of(listing, items)
    several = different("label", items, digests)
    if several and conflicting == "fatal":
        raise refuse(listing, "label", several, "image", "give each one label, or set data.conflicting = 'leave-out'")
    kept = np.array([conflicting == "keep" or digest not in several for digest in digests])
    if not drawn:
        refuse_shared(listing, list(compress(items, kept)), list(compress(digests, kept)))
    notes = [about_conflicts(listing, several, int((~kept).sum()))] if several else []
    if left_out := len(listing.items) - len(items):
        notes.append(f"{left_out} of {len(listing.items)} images cannot be read and are left out")
    group, parts = groups_of(items, digests), {}
    for split in listing.splits or [""]:
        rows = np.array([row for row, item in enumerate(items) if item.split == split])
        there = kept[rows]
        if len(rows) and not there.any():
            where = f" of {split}" if split else ""
            raise BadInput(f"every image{where} has a copy with another label, so none is left; give each one label")
        some = [items[row] for row in rows[there]]
        clients = np.array([item.client for item in some])
        in_files = partial(pixels, listing, some, colour, scale)
        parts[split or "all"] = Part(
            label_numbers(listing, some),
            partial(rows_of_npz, listing.path, array_of(items[rows[0]]), there) if listing.kind == "npz" else in_files,
            groups=group[rows[there]],
            clients=clients if clients.astype(bool).any() else None,
            scale=scale,
            names=np.array([item.name if listing.kind == "npz" else os.path.abspath(item.file) for item in some]),
        )
    return parts, tuple(notes)


def label_numbers(listing: Listing, items: Iterable[Item]) -> np.ndarray:
    number = {label: n for n, label in enumerate(listing.classes)} | {"": -1}
    return np.array([number[item.label] for item in items], np.int64)


def digests_of(listing: Listing, items: Iterable[Item]) -> list[str]:
    """Return a text for each image, the same for the same images."""
    if listing.kind != "npz":
        return [digest_of(item.file) for item in items]
    return list(map(digest_of_pixels, images_of_npz(listing)))


def digest_of_pixels(image: np.ndarray) -> str:
    return hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()


def images_of_npz(listing: Listing) -> Iterator[np.ndarray]:
    """Return the images of an npz, in the order of its items."""
    for name in dict.fromkeys(map(array_of, listing.items)):
        for some in npz_images(listing.path, name, 0):
            yield from some


def rows_of_npz(path: Path, name: str, kept: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Read the kept images of an array in an npz, a few at a time."""
    start = 0
    for some in npz_images(path, name, size):
        there = kept[start : start + len(some)]
        start += len(some)
        if there.any():
            yield some if there.all() else some[there]


def array_of(item: Item) -> str:
    return item.name.partition("[")[0]


Several = dict[str, list[tuple[str, Item]]]  # by image or patient: its different values, each with one item of it


def different(attribute: str, items: Iterable[Item], keys: Iterable[str]) -> Several:
    """Return the images or patients, by their keys, whose items differ in an attribute. An empty value is none."""
    found = defaultdict[str, dict[str, Item]](dict)
    for item, key in zip(items, keys, strict=True):
        if key and (value := getattr(item, attribute)):
            found[key][value] = item
    return {key: list(values.items()) for key, values in found.items() if len(values) > 1}


def refuse_shared(listing: Listing, items: Sequence[Item], digests: Sequence[str]) -> None:
    """Refuse what makes results worthless: an image or a patient in two splits."""
    mend = "leave each in one, or draw splits anew by data.split = '70-10-20'"
    for what, keys in (("image", digests), ("patient", [item.patient for item in items])):
        if several := different("split", items, keys):
            raise refuse(listing, "split", several, what, mend)


def refuse(listing: Listing, attribute: str, several: Several, what: str, mend: str) -> BadInput:
    """Return an error that names the first of these images or patients."""
    whose = f" of {next(iter(several))}" if what == "patient" else ""
    return BadInput(
        f"different {attribute}s for {counted(len(several), what)}, such as {example(several)}{whose}; "
        f"see all by `{listing.command}`, and {mend}"
    )


def example(several: Several) -> str:
    (one, first), (other, second), *_ = next(iter(several.values()))
    return f"{first.name} ({one}) and {second.name} ({other})"


def about_conflicts(listing: Listing, several: Several, left_out: int) -> str:
    """Tell which images have different labels, and what became of them."""
    done = f"the {left_out:,} copies are left out" if left_out else "all copies are kept, each with its own label"
    return (
        f"different labels for {counted(len(several), 'image')}, such as {example(several)}: {done} "
        f"(data.conflicting); see all by `{listing.command}`"
    )


def groups_of(items: Sequence[Item], digests: Sequence[str]) -> np.ndarray:
    """Return a number for each image, the same for all images of a patient and for all copies of these images."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first: dict[tuple[str, str], int] = {}
    links = [
        (row, first.setdefault(key, row))
        for row, (item, digest) in enumerate(zip(items, digests, strict=True))
        for key in (("digest", digest), ("patient", item.patient))
        if key[1]
    ]
    rows, firsts = np.array(links).T
    graph = coo_array((np.ones(len(links)), (rows, firsts)), shape=(len(items), len(items)))
    number: np.ndarray = connected_components(graph, directed=False)[1]
    return number


def readable(listing: Listing, skip: bool) -> tuple[list[Item], bool, Scale]:
    """Return the images that can be read, whether any has colours, and how more than eight bits become eight.

    To skip unreadable images, each is decoded once to find out; otherwise only headers are read.
    """
    items, headers, failed = [], [], []
    for item in listing.items:
        try:
            headers.append(header := pictures.header(item.file))
            if skip:
                pictures.read(item.file, header.colour)
            items.append(replace(item, patient=item.patient or header.patient))
        except Unreadable as error:
            del headers[len(items) :]
            failed.append((item, error))
    if failed and not skip:
        raise refusal(listing, *failed[0], count=len(failed))
    if not items:
        raise BadInput(
            f"none of the {len(failed)} images in {listing.path} can be read; {failed[0][0].name}: {failed[0][1]}"
        )
    wide = any(header.values for header in headers)
    scale = {"values": pictures.span(headers)} if wide else {}
    if listing.scale is not None:
        if wide and "values" not in listing.scale:
            raise BadInput(
                f"{listing.path} has images of more than eight bits, and the federation's terms do not say what is "
                f"black and what is white; give them `values`, of which this site's need {list(scale['values'])}"
            )
        scale = listing.scale
    return items, any(header.colour for header in headers), scale


def refusal(listing: Listing, item: Item, error: Unreadable, count: int = 1) -> BadInput:
    return BadInput(
        f"at least {count} of {len(listing.items)} images cannot be read, such as {item.name} ({error}); "
        f"see all by `{listing.command}`, and leave them out by data.unreadable = 'skip'"
    )


def pixels(listing: Listing, items: Sequence[Item], colour: bool, scale: Scale, size: int) -> Iterator[np.ndarray]:
    """Read images a few at a time. Each is resized before the next is opened."""
    step = max(1, CHUNK // ((3 if colour else 1) * size * size))
    for start in range(0, len(items), step):
        some = []
        for item in items[start : start + step]:
            try:
                some.append(pictures.read(item.file, colour, size=size, **scale))
            except Unreadable as error:
                raise refusal(listing, item, error) from None
        yield np.stack(some)
