"""What a site ran: one readable file for each run, with its whole experiment, what left, and who approved it."""

import hashlib
import re
import tomllib
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fewlabel.core import schema, storage
from fewlabel.core.described import most_passes
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.site_files import Terms
from fewlabel.deploy.consent import consent
from fewlabel.deploy.messages import Order, Refused
from fewlabel.deploy.policy import Policy
from fewlabel.experiment import read

RAN, WAITING, WITHDRAWN = "experiments", "waiting", "withdrawn.toml"
MOST_WAITING = 20  # runs that wait for approval


@dataclass(frozen=True)
class Sent:
    """The replies to one task."""

    replies: int
    bytes: int
    first_round: int
    last_round: int


@dataclass(frozen=True)
class Record:
    """What is kept of a run."""

    run: str
    first: str  # time of its first order, UTC
    sha256: str  # of the experiment as it was sent
    experiment: dict[str, Any]
    terms: dict[str, Any]
    approved: str = ""  # when, if a person was asked
    sent: dict[str, Sent] = field(default_factory=dict)  # by task
    measured: dict[str, str] = field(default_factory=dict)  # round -> hash of the weights, the same at every site
    epsilon: float = 0.0  # of differential privacy that it has spent; 0 if there was none


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def new(order: Order) -> Record:
    terms = {name: value for name, value in vars(order.terms).items() if value is not None}
    return Record(order.job.run, now(), digest(order.experiment), tomllib.loads(order.experiment), terms)


def path_of(state: Path, run: str, folder: str = RAN) -> Path:
    return state / folder / f"{run}.toml"


def load(state: Path, run: str, folder: str = RAN) -> Record | None:
    """Read the record of a run, if there is one."""
    path = path_of(state, run, folder)
    try:
        table = tomllib.loads(path.read_text())
        sent = {task: Sent(**row) for task, row in table.pop("sent", {}).items()}
        return Record(**table, sent=sent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}; move it away") from None


def save(state: Path, record: Record, folder: str = RAN) -> None:
    import tomli_w

    path = path_of(state, record.run, folder)
    storage.make_folder(path.parent)
    storage.write(path, tomli_w.dumps(plain(asdict(record))).encode())


def plain(value: Any) -> Any:
    """Return tables and lists as TOML has them."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


def names(state: Path, folder: str = RAN) -> list[str]:
    """Return the runs of which there are records, the oldest first."""
    found = [path for path in (state / folder).glob("*.toml") if re.fullmatch(r"[0-9a-f]{32}", path.stem)]
    return [path.stem for path in sorted(found, key=lambda path: path.stat().st_mtime)]


# Before a run


def admit(state: Path, order: Order, policy: Policy) -> None:
    """Refuse a run that is another than it was, one too many, or one that nobody here has approved."""
    if (state / WITHDRAWN).exists():
        raise Refused("this site has withdrawn from the federation")
    known = load(state, order.job.run)
    if known is not None and known.sha256 != digest(order.experiment):
        raise Refused("this run began with another experiment, and a run has one")
    if known is None and policy.most_runs is not None and len(names(state)) >= policy.most_runs:
        most = f"it takes part in {policy.most_runs} runs, and had as many (most_runs)"
        raise Refused(f"the policy of this site does not allow it: {most}")
    if policy.ask == "never" or (known is not None and known.approved):
        return
    if policy.ask == "once" and any(
        (record := load(state, run)) is not None and record.approved and record.sha256 == digest(order.experiment)
        for run in names(state)
    ):
        return
    if load(state, order.job.run, WAITING) is None:
        if len(names(state, WAITING)) >= MOST_WAITING:
            raise Refused(f"{MOST_WAITING} runs wait for approval at this site already")
        save(state, new(order), WAITING)
    what = "each run" if policy.ask == "every-run" else "each experiment"
    raise Refused(f"a person at this site approves {what}, and has not yet approved this one (fewlabel site approve)")


def approve(state: Path, run: str) -> None:
    """Let a run that waits take place."""
    record = load(state, run, WAITING)
    if record is None:
        raise BadInput(f"no run {run} waits for approval")
    save(state, replace(record, approved=now()))
    path_of(state, run, WAITING).unlink()


def reject(state: Path, run: str) -> None:
    path_of(state, run, WAITING).unlink(missing_ok=True)


def summary(record: Record) -> str:
    """Describe a run to the person who approves it: its settings, and what would leave."""
    experiment = read(record.experiment)
    local = getattr(experiment.method, "local", None)
    training = "".join(
        f", {name} {value}" for name, value in (vars(local) if local else {}).items() if value is not None
    )
    if (passes := most_passes(experiment)) is not None:
        training += f"; all tasks of a round together pass over your images {passes} times at most"
    terms = schema.read(Terms, record.terms)
    lines = [
        f"run {record.run}, asked for at {record.first}",
        f"  method    {experiment.name}, for {experiment.rounds} rounds",
        f"  network   {experiment.model.name}{', pretrained' * experiment.model.pretrained}",
        f"  images    {terms.image_size}x{terms.image_size} pixels, of {len(terms.classes)} classes",
        f"  training  {experiment.recipe.words}{training}",
        f"  measured  every {experiment.evaluate.every} rounds, on images that you keep to test on, if you have any",
    ]
    return "\n".join([*lines, consent(experiment)])


# During a run


def note_sent(state: Path, order: Order, bytes: int, weights: str = "", epsilon: float = 0.0) -> None:
    """Note that a reply leaves, which weights it measures if it does, and the privacy that the run has spent."""
    record = load(state, order.job.run) or new(order)
    job = order.job
    task, number = job.task if job.kind in ("client", "hidden") else job.kind, job.round
    old = record.sent.get(task, Sent(0, 0, number, number))
    row = Sent(old.replies + 1, old.bytes + bytes, min(old.first_round, number), max(old.last_round, number))
    measured = record.measured | ({str(number): weights} if weights else {})
    spent = max(epsilon, record.epsilon)
    save(state, replace(record, sent=record.sent | {task: row}, measured=measured, epsilon=spent))


def epsilon(state: Path, run: str) -> float:
    """Return the privacy that a run has spent here."""
    record = load(state, run)
    return 0.0 if record is None else record.epsilon


# After it


def sent_until_now(state: Path) -> list[str]:
    """Return a line for each run: what left this site in it."""
    lines = []
    for run in names(state):
        record = load(state, run)
        assert record is not None
        method = record.experiment.get("name") or record.experiment.get("method")
        parts = [
            f"{row.replies} x {task} in rounds {row.first_round} to {row.last_round} ({row.bytes:,} bytes)"
            for task, row in record.sent.items()
        ]
        private = f", with epsilon {record.epsilon:.3g}" if record.epsilon else ""
        lines.append(f"run {run} of {record.first} ({method}): {', '.join(parts) or 'nothing'}{private}")
    return lines


def withdraw(state: Path) -> None:
    """Refuse everything from now on."""
    import tomli_w

    storage.make_folder(state)
    storage.write(state / WITHDRAWN, tomli_w.dumps({"time": now()}).encode())


def check_not_withdrawn(state: Path) -> None:
    if (path := state / WITHDRAWN).exists():
        raise BadInput(f"this site has withdrawn; to take part again, remove {path}")
