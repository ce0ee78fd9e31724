"""The terms by which a site reads its images: those that it was given, and a mean and std that never change again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewlabel.core import schema, storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.site_files import TERMS, Terms
from fewlabel.deploy.messages import Refused


def load_terms(folder: Path) -> Terms:
    """Read a federation's terms, as `fewlabel data split` or a person wrote them."""
    return schema.read(Terms, read_json(folder / TERMS))


def own_terms(given: str, state: Path, asked: Terms) -> Terms:
    """Return the terms that hold at a site, without mean and std as long as it was not given any nor pinned them."""
    own = load_terms(Path(given)) if given else replace(asked, mean=None, std=None)
    if own.mean is None and (state / TERMS).exists():
        pinned = load_terms(state)
        own = replace(own, mean=pinned.mean, std=pinned.std)
    return own


def check_terms(given: str, state: Path, asked: Terms) -> None:
    """Refuse terms that were not agreed on: a server that may choose how images are read could learn what they show."""
    own = own_terms(given, state, asked)
    if replace(asked, mean=None, std=None) != replace(own, mean=None, std=None):
        raise Refused("its terms are not those that this site was given")
    if own.mean is not None and asked.mean is not None and (asked.mean, asked.std) != (own.mean, own.std):
        raise Refused("its terms are not those that this site was given: mean and std were fixed when it joined")
    if own.mean is None and asked.mean is not None:
        check_plausible(asked)


def check_plausible(terms: Terms) -> None:
    """Refuse a mean and std that pixels in 0..1 cannot have."""
    if not all(0 <= mean <= 1 for mean in terms.mean or ()) or not all(1e-6 <= std <= 0.5 for std in terms.std or ()):
        raise Refused("pixels in 0..1 have a mean from 0 to 1, and a std from 1e-6 to 0.5")


def pin(given: str, state: Path, asked: Terms) -> None:
    """Keep the mean and std of the first order that has them. From then on no other is accepted."""
    if asked.mean is None or (given and load_terms(Path(given)).mean is not None) or (state / TERMS).exists():
        return
    storage.make_folder(state)
    storage.write(state / TERMS, json.dumps(vars(asked), indent=1).encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None
    return found
