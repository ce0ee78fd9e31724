"""The labels that people add at a site: which of them a run uses, and how many more the coordinator asks for.

The table of answers stays at the site. A run uses it as it was when the run began its work here, so that a run that is
resumed repeats to the bit. The coordinator may ask for more labels, and that is all: the people at the site decide.
"""

import shlex
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core import schema, storage
from fewlabel.core.errors import StorageError
from fewlabel.core.schema import Natural
from fewlabel.data.added import Added, matched, read_answers
from fewlabel.data.datasets import Split
from fewlabel.data.own.listing import counted
from fewlabel.data.site_files import Terms
from fewlabel.deploy.site_folder import SiteConfig

FILE, WANTED = "labels.csv", "wanted.toml"


def table_for(site: SiteConfig, run: str = "") -> Path | None:
    """Return the table of labels of a site, or the copy that a run uses, if it has begun its work."""
    kept = Path(site.state) / run / FILE
    if run and kept.exists():
        return kept
    own = Path(site.labels) if site.labels else None
    return own if own is not None and own.exists() else None


def keep(site: SiteConfig, run: str) -> None:
    """Copy the table for a run that begins its work here. Labels that are added later are for later runs."""
    kept = Path(site.state) / run / FILE
    if not site.labels or kept.exists():
        return
    try:
        content = Path(site.labels).read_bytes()
    except FileNotFoundError:
        content = b"path,label,who,when,seconds,note\n"
    except OSError as error:
        raise StorageError(f"{site.labels} cannot be read: {error.strerror or error}") from None
    storage.make_folder(kept.parent)
    storage.write(kept, content)


def added_to(split: Split, site: SiteConfig, terms: Terms, table: Path) -> Added:
    """Return the labels that a table adds to a site's images."""
    sure = (split.labels >= 0).nonzero().flatten().tolist()
    return matched(table, split, terms.classes, site.data, sure, Path(site.labels).parent)


@dataclass(frozen=True)
class Wanted:
    """How many more labels the coordinator asks for, and how many had been added when it first did."""

    labels: Natural
    before: Natural = 0


def note_wanted(site: SiteConfig, labels: int) -> None:
    """Remember what the coordinator asks for. It is forgotten when the coordinator no longer asks."""
    path, known = Path(site.state) / WANTED, wanted(site)
    if labels == (known.labels if known else 0):
        return
    if not labels:
        path.unlink(missing_ok=True)
        return
    storage.make_folder(path.parent)
    storage.write(path, f"labels = {labels}\nbefore = {count(site)}\n".encode())


def wanted(site: SiteConfig) -> Wanted | None:
    """Return what the coordinator asks for, if it does."""
    path = Path(site.state) / WANTED
    try:
        return schema.read(Wanted, tomllib.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; remove it") from None


def count(site: SiteConfig) -> int:
    """Return how many images people gave a label here that nobody contradicts."""
    table = table_for(site)
    return 0 if table is None else sum(len(labels) == 1 for labels in read_answers(table).values())


def sentence(folder: Path, site: SiteConfig) -> str:
    """Say how many labels were added here, and what the coordinator asks for. Nothing to say is an empty text."""
    asked, table = wanted(site), table_for(site)
    parts = []
    if table is not None:
        labels = Counter(len(labels) for labels in read_answers(table).values())
        parts.append(f"{counted(labels[1], 'label')} added in {table}")
        differing = sum(number for different, number in labels.items() if different > 1)
        parts += [f"people disagree about {counted(differing, 'image')}, which count as unlabeled"] * bool(differing)
    if asked is not None:
        more = max(0, asked.labels - (count(site) - asked.before))
        command = f"fewlabel label {shlex.quote(str(folder))} --run MODEL"
        what = f"the coordinator asks for {counted(asked.labels, 'more label')}"
        parts.append(f"{what}; if you agree: {command} --count {more}" if more else f"{what}, which are there")
    return "; ".join(parts)
