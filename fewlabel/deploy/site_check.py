"""What must be right before a site joins: its data, disk and key, and the server's certificate, address and version."""

import os
import re
import shutil
import socket
import ssl
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members
from fewlabel.deploy.site_folder import ENROLMENT, SiteConfig, SiteFile

LEAST = 10**9  # bytes on the disk for what methods keep between rounds


class NoAnswer(BadInput):
    """A server that does not answer now, and may do so later."""


def checks(folder: Path, site: SiteFile) -> dict[str, Callable[[], str]]:
    """Return the checks of a site by name. Each returns a sentence, or raises an error that says what to mend."""
    trust = Path(site.trust)
    return {
        "data": lambda: check_data(site.place, trust),
        "disk": lambda: check_disk(Path(site.place.state)),
        "key": lambda: check_key(folder, Path(site.key)),
        "certificate": lambda: check_certificate(trust),
        "connection": lambda: check_connection(trust),
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


def check_connection(trust: Path) -> str:
    """Check that the server answers, and that it is the one that the coordinator named."""
    address = members.read_trust(trust).address
    host, port = keys.host_and_port(address)
    context = ssl.create_default_context(cafile=trust / f"{keys.CA}.pem")
    try:
        with (
            socket.create_connection((host, port), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return f"{address} by {secure.version()}, with a certificate of this federation"
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        why = "it does not speak TLS, as if served with --insecure" if why == "WRONG_VERSION_NUMBER" else why
        raise BadInput(f"{address} is not the server of this federation: {why}") from None
    except OSError as error:
        raise NoAnswer(f"{address} does not answer: {error.strerror or error}") from None


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
