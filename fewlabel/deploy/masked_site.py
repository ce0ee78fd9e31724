"""A site's part in a masked sum: its weights stay here, and leave only behind masks, once.

The order `hidden` trains like `client`, and keeps the weights in the site's folder. What else the task uploads leaves
as it is. The orders of `STEPS` then play the protocol of `masking`. Each is carried out once for a sum. For one call of
a task in a run, a site signs one group of sites: the difference of two sums over other groups would be one site's
weights. All sites of a sum must have trained from the same model with the same settings: others could be made to send
what the server knows already, so that the sum shows one site (Pasquini et al., CCS 2022).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fewlabel.core import fixed, storage, updates, wire
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.federation import Model
from fewlabel.core.tasks import Task, weights_sent
from fewlabel.data.settings import FEWEST
from fewlabel.deploy import masking, peers
from fewlabel.deploy.messages import Dealt, Group, Inbox, Masked, Order, Refused, Signature, Signatures
from fewlabel.deploy.policy import Policy
from fewlabel.deploy.site_folder import SiteConfig

SESSION, WEIGHTS, SIGNED = "sum.safetensors", "sum-weights.safetensors", "sums.jsonl"
LEAST_SHARE = 0.001  # of a sum; a site that counts less does not hide another
STEPS = ("keys", "shares", "masked", "survivors", "opening")  # kinds of jobs, in their order


@dataclass(frozen=True)
class Session:
    """What a site keeps of a sum under way."""

    round: int
    task: str
    call: int
    start: str = ""
    done: int = 0  # how many of STEPS
    own: masking.Secrets | None = None
    roster: masking.Roster | None = None
    sealed: dict[int, str] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()


def start_of(order: Order, message: bytes, statistics: bytes | None) -> str:
    """Identify what a site trains from: settings, terms, and what the server sent for it."""
    given = (order.experiment.encode(), wire.pack(order.terms), message, statistics or b"")
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in given)).hexdigest()


def hide(
    order: Order, task: Task, message: bytes, statistics: bytes | None, upload: bytes, folder: Path, clip: float | None
) -> bytes:
    """Keep the weights of an upload here, for the sum. Return the rest of it.

    A site shortens its update to `clients.clip` itself, because the server cannot see it.
    """
    name, whole = weights_sent(task), wire.unpack(task.upload, upload, finite=True)
    assert name is not None  # or the order would have been refused
    if clip is not None:
        sent = wire.unpack(task.message, message)
        norm = updates.norms(updates.moved(whole, sent)).get("parameter", 0.0)
        if norm > clip:
            whole = updates.scaled(whole, sent, {"parameter": clip / norm})
    try:
        fixed.check(getattr(whole, name))
    except ValueError as error:
        raise Refused(f"{error}; if training has diverged, lower method.local.lr or set method.local.clip") from None
    storage.write(folder / WEIGHTS, wire.pack(Model(getattr(whole, name))))
    start = start_of(order, message, statistics)
    save(folder, Session(order.job.round, order.job.task, order.job.call, start))
    return wire.pack(replace(whole, **{name: {}}), task.upload)


def step(site: SiteConfig, order: Order, message: bytes, folder: Path, limits: Policy) -> bytes:
    """Carry out a step of a sum. Return what leaves the site."""
    session, number = load(folder), STEPS.index(order.job.kind)
    job = order.job
    if session is None or (session.round, session.task, session.call) != (job.round, job.task, job.call):
        raise Refused(f"this site has no weights for a sum of '{job.task}' in round {job.round}")
    if session.done != number:
        raise Refused(f"'{job.kind}' is not the next step of this sum, and no step is done twice")
    try:
        session, made = STEP[job.kind](site, order, session, message, folder, limits)
    except (BadInput, wire.WireError) as error:
        raise Refused(str(error)) from None
    session = replace(session, done=number + 1)
    save(folder, session)  # before it leaves, or a kill would let it be done twice
    if job.kind == "masked":
        (folder / WEIGHTS).unlink()
    if job.kind == STEPS[-1]:
        (folder / SESSION).unlink()
    return wire.pack(made)


Made = tuple[Session, Any]


def keys_step(site: SiteConfig, order: Order, session: Session, message: bytes, folder: Path, limits: Policy) -> Made:
    """Draw the secrets of this sum, and send the public halves."""
    peers.verifier(Path(site.peers))  # a site that knows nobody takes part in no sum
    job = order.job
    signer = peers.signer(site.key)
    own = masking.advertise(job.run, job.round, job.task, site.client, job.call, signer, session.start)
    return replace(session, own=own), own.advert


def shares_step(site: SiteConfig, order: Order, session: Session, message: bytes, folder: Path, limits: Policy) -> Made:
    """Check who takes part, and deal shares of this site's secrets."""
    assert session.own is not None
    roster, job = wire.unpack(masking.Roster, message), order.job
    masking.check_roster(session.own, roster, job.run, job.round, job.task, peers.verifier(Path(site.peers)))
    check_shares(roster.shares, site.client, limits)
    return replace(session, roster=roster), Dealt(masking.deal(session.own, roster))


def check_shares(shares: Mapping[int, int], client: int, limits: Policy) -> None:
    """Refuse a sum that would be nearly this site's own weights, or those of two sites."""
    whole, mine = max(1, sum(shares.values())), shares[client]
    counted = sum(share >= LEAST_SHARE * whole for share in shares.values())
    if counted < FEWEST:
        raise BadInput(f"this site takes part in sums of {FEWEST} sites or more, and only {counted} count in this one")
    if mine > limits.largest_share * whole:
        most = f"takes part with {limits.largest_share:g} of the weight at most"
        raise BadInput(f"this site {most}, and it would have {mine / whole:.2g} (largest_share)")


def masked_step(site: SiteConfig, order: Order, session: Session, message: bytes, folder: Path, limits: Policy) -> Made:
    """Send this site's weights, masked."""
    assert session.own is not None
    assert session.roster is not None
    inbox = wire.unpack(Inbox, message).sealed
    numbers = fixed.units(wire.unpack(Model, (folder / WEIGHTS).read_bytes()).model, session.roster.shares[site.client])
    return replace(session, sealed=inbox), Masked(masking.mask(session.own, session.roster, sorted(inbox), numbers))


def survivors_step(
    site: SiteConfig, order: Order, session: Session, message: bytes, folder: Path, limits: Policy
) -> Made:
    """Sign who is in the sum, unless this site has signed another group for the same call before."""
    assert session.own is not None
    assert session.roster is not None
    survivors, shares = wire.unpack(Group, message).clients, session.roster.shares
    dealers = sorted(session.sealed)
    masking.check_group(session.own, session.roster, survivors, dealers, "are in the sum")
    check_shares({client: shares[client] for client in survivors}, site.client, limits)  # who dropped out hides nobody
    text = masking.agree(session.own, session.roster, dealers, survivors, peers.signer(site.key))
    group = masking.canonical([[client, shares[client]] for client in survivors])
    note_group(folder, session, hashlib.sha256(group).hexdigest())
    return replace(session, survivors=survivors), Signature(text)


def opening_step(
    site: SiteConfig, order: Order, session: Session, message: bytes, folder: Path, limits: Policy
) -> Made:
    """Open shares of masks, if enough sites have signed the same survivors."""
    assert session.own is not None
    assert session.roster is not None
    signatures = wire.unpack(Signatures, message).by
    verify = peers.verifier(Path(site.peers))
    made = masking.opened(session.own, session.roster, session.sealed, session.survivors, signatures, verify)
    return session, made


STEP = dict(zip(STEPS, (keys_step, shares_step, masked_step, survivors_step, opening_step), strict=True))


def note_group(folder: Path, session: Session, group: str) -> None:
    """Remember the group of a sum. Refuse another group for the same call of a task: a resumed run repeats rounds."""
    path, key = folder / SIGNED, [session.round, session.task, session.call]
    try:
        before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None
    known = [line["group"] for line in before if line["call"] == key]
    if known and group not in known:
        raise BadInput("this site was in a sum of this call over other sites; a second one could show a site's weights")
    if not known:
        text = "".join(json.dumps(line) + "\n" for line in [*before, {"call": key, "group": group}])
        storage.write(path, text.encode())


def save(folder: Path, session: Session) -> None:
    storage.write(folder / SESSION, wire.pack(session))


def load(folder: Path) -> Session | None:
    path = folder / SESSION
    return wire.unpack(Session, path.read_bytes()) if path.exists() else None
