"""What must be right before a site joins: its data, disk, key and clock, and how it reaches the right server."""

import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members, reach
from fewlabel.deploy.site_folder import ENROLMENT, SiteConfig, SiteFile

LEAST = 10**9  # bytes on the disk for what methods keep between rounds


def checks(folder: Path, site: SiteFile) -> dict[str, Callable[[], str]]:
    """Return the checks of a site by name. Each returns a sentence, or raises an error that says what to mend."""
    from fewlabel.deploy import site_labels

    trust = Path(site.trust)
    added = {"labels": lambda: about} if (about := site_labels.sentence(folder, site.place)) else {}
    return {
        "data": lambda: check_data(site.place, trust),
        **added,
        "disk": lambda: check_disk(Path(site.place.state)),
        "key": lambda: check_key(folder, Path(site.key)),
        "certificate": lambda: check_certificate(trust),
        "proxy": lambda: check_proxy(trust),
        "connection": lambda: check_connection(trust),
        "clock": lambda: check_clock(trust),
        "versions": lambda: check_versions(trust),
    }


def check_data(config: SiteConfig, trust: Path) -> str:
    from fewlabel.deploy import policy
    from fewlabel.deploy.site import load_terms, site_world, testable
    from fewlabel.experiment import Experiment

    terms = load_terms(trust)
    world = site_world(config, Experiment(), terms)
    share, labels = world.partition.shares[config.client], world.dataset.splits["train"].labels
    if not len(share):
        raise BadInput(f"{config.data} has no image")
    seen = len(set(labels[labels >= 0].tolist()))
    counts = f"{len(share.labeled):,} images with a label and {len(share.unlabeled):,} without"
    least = policy.load(config.policy).evaluate.least
    counts += f", {len(world.dataset.splits['test']):,} to test on" if testable(world, least) else ""
    counts += "".join(f" ({note})" for note in world.dataset.notes)
    return f"{counts}, of {seen} of {len(terms.classes)} classes, read at {terms.image_size}x{terms.image_size}"


def check_disk(state: Path) -> str:
    from fewlabel.report.terminal import size

    if not state.is_dir() or not os.access(state, os.W_OK | os.X_OK):
        raise BadInput(f"{state} is not a directory that can be written")
    if state.stat().st_mode & 0o077:
        raise BadInput(f"others may look into {state}; forbid it by: chmod 700 {state}")
    free = shutil.disk_usage(state).free
    if free < LEAST:
        raise BadInput(f"{state} has {size(free)} left, and methods may need {size(LEAST)}")
    return f"{size(free)} free in {state}, which nobody else may enter"


def check_key(folder: Path, key: Path) -> str:
    public = keys.public_half(keys.load_key(key))
    if not keys.same_key(public, members.read_enrolment(folder / ENROLMENT).key):
        raise BadInput(f"{folder / ENROLMENT} is of another key than {key}")
    return f"{keys.fingerprint(public)}, which nobody else may read; when you join you learn whether it is enrolled"


def check_certificate(trust: Path) -> str:
    found, federation = keys.load_certificate(trust / f"{keys.CA}.pem"), members.read_trust(trust)
    if not found.not_valid_before_utc <= keys.now() <= found.not_valid_after_utc:
        raise BadInput(f"it is not valid now (but until {found.not_valid_after_utc:%Y-%m-%d}); is the clock right?")
    return f"of '{federation.name}', valid until {found.not_valid_after_utc:%Y-%m-%d}"


def check_proxy(trust: Path) -> str:
    """Say whether a proxy stands between, as the environment has it."""
    host, _ = keys.host_and_port(members.read_trust(trust).address)
    proxy = reach.proxy_for(host)
    return "none, the server is reached directly" if proxy is None else f"{reach.described(proxy)}, by the environment"


def check_connection(trust: Path) -> str:
    """Check that the server answers, and that it is the one that the coordinator named."""
    with reach.connected(trust) as secure:
        address = members.read_trust(trust).address
        return f"{address} by {secure.version()}, with a certificate of this federation"


def check_clock(trust: Path) -> str:
    """Check that the server will take the times that this site signs."""
    ahead = reach.seconds_ahead(trust)
    if ahead is None:
        return "the server does not tell its time, so set the clock here by a time server"
    if ahead > members.AHEAD or ahead < -members.LATE + 5:
        how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
        raise BadInput(f"the clock here is {how}, and the server refuses that; set it right, best by a time server")
    return "agrees with the server's"


def check_versions(trust: Path) -> str:
    ours, theirs = version("fewlabel"), members.read_trust(trust).version
    if numbers(ours) > numbers(theirs):  # the federation was made before an upgrade
        return f"FewLabel {ours} here; the federation was made with {theirs}, and the coordinator must have {ours} too"
    if ours != theirs:
        raise BadInput(f"FewLabel is {ours} here and {theirs} at the coordinator; both must have the same")
    return f"FewLabel {ours} here and at the coordinator, Flower {version('flwr')} here"


def numbers(version: str) -> list[int]:
    """Return the numbers in a version, to compare it with another."""
    return [int(part) for part in re.findall(r"\d+", version)]
