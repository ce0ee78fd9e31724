"""What clients send, judged: what is too large is clipped or left out, and whoever sent it is named.

An update is compared with those of earlier rounds, not with the others of its own round. So updates are still taken one
by one, and the result does not depend on who is fast. Only the first round of a task, which has none before it, is held
until all of its updates are there.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fewlabel.core import updates
from fewlabel.core.averaging import Rule
from fewlabel.core.federation import ClientInfo, Reply, TooFewReplies
from fewlabel.core.robust import capped
from fewlabel.core.tasks import Asked
from fewlabel.core.updates import Part
from fewlabel.data.settings import Clients
from fewlabel.engine import sums
from fewlabel.engine.account import Suspect
from fewlabel.engine.attack import claimed
from fewlabel.engine.world import World

REMEMBERED = 50  # norms of each kind that the median is taken of: the last ones
FAR = 10.0  # an update is named if its norm is so many times the median of its kind
FAR_SIZE = 100.0  # a client is named if it claims so many times the images of the median client of its kind
WORDS: dict[Part, str] = {"parameter": "update", "statistic": "change of BatchNorm's statistics"}


@dataclass(frozen=True)
class Conduct:
    """What is known about clients from earlier rounds. A checkpoint keeps it."""

    norms: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by task, kind of client and part of the model
    strikes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rounds in which a client's update was left out


@dataclass(frozen=True)
class Judged:
    """A reply with the message that it answers, and how far it moved what was sent."""

    reply: Reply[Any]
    sent: Any
    norms: dict[Part, float]


class Judge:
    """Judges updates by an experiment's settings. `names` are what people call clients, in quotes."""

    def __init__(self, settings: Clients, names: Mapping[int, str]) -> None:
        self.settings, self.names = settings, names
        self.rule = Rule(settings.aggregate, settings.trim, settings.largest_share, settings.sums != "float")
        self.conduct = Conduct()
        self.suspects: list[Suspect] = []
        self.pairs = frozenset[str]()  # kinds of which there are two clients
        self.round = 0

    def take_suspects(self) -> list[Suspect]:
        """Return who was named since the last call."""
        found, self.suspects = self.suspects, []
        return found

    def name(self, client: int, task: str, why: str, did: str) -> None:
        """Name a client. If its update is left out, that counts against it."""
        if any((client, task, did) == (one["client"], one["task"], one["did"]) for one in self.suspects):
            return  # a client may be asked several times in a round
        known = {"name": self.names[client].strip("'")} if client in self.names else {}
        self.suspects.append({"client": client, **known, "task": task, "why": why, "did": did})
        before = self.conduct.strikes.get(client, ())
        if did != "left out" or self.round in before:
            return
        self.conduct = replace(self.conduct, strikes={**self.conduct.strikes, client: (*before, self.round)})
        if len(before) + 1 == self.settings.exclude_after:
            count = f"its updates were left out in {len(before) + 1} rounds (clients.exclude_after)"
            self.suspects.append({"client": client, **known, "task": task, "why": count, "did": "excluded"})

    def excludes(self, client: int) -> bool:
        """Return True if a client is not asked, because of earlier rounds.

        This round does not count: jobs are made ahead of replies, and how far ahead depends on the number of workers.
        """
        most, strikes = self.settings.exclude_after, self.conduct.strikes.get(client, ())
        return most is not None and sum(round < self.round for round in strikes) >= most

    def sizes(self, claimed: Sequence[ClientInfo], new: bool = True) -> list[ClientInfo]:
        """Return the clients with the sizes that count: none has more than the largest share of its kind.

        Name those whose size is `new` and far larger than the others'.
        """
        found = {info.id: info for info in claimed}
        for labeled in (True, False):
            kind = [info for info in claimed if info.size and (info.num_labeled > 0) == labeled]
            self.pairs = self.pairs - {called(labeled)} | ({called(labeled)} if len(kind) == 2 else set())
            usual = statistics.median([info.size for info in kind]) if len(kind) > 2 else math.inf
            for info in kind if new else ():
                if info.size > FAR_SIZE * usual:
                    why = f"it claims {info.size:,} images, and the median client {called(labeled)} has {usual:,.0f}"
                    self.name(info.id, "", why, "named")
            if self.rule.share is not None:
                counted = capped([info.size for info in kind], self.rule.share)
                found |= {info.id: shrunk(info, size) for info, size in zip(kind, counted, strict=True)}
        return [found[info.id] for info in claimed]

    def judged(self, task: str, replies: Iterable[tuple[Reply[Any], Any]]) -> Iterator[Reply[Any]]:
        """Yield the replies of a phase, each with its update within bounds, without those that are left out."""
        phase: dict[str, list[float]] = {}
        held, everyone = list[Judged](), list[tuple[int, bool, dict[Part, float]]]()
        for reply, sent in replies:
            one = Judged(reply, sent, updates.norms(updates.moved(reply.upload, sent)))
            for part, norm in one.norms.items():
                phase.setdefault(key(task, labeled(reply), part), []).append(norm)
            if held or self._lacks_median(task, one):
                held.append(one)  # also those after it, or replies would not come in the order of jobs
                continue
            everyone.append((reply.client.id, labeled(reply), one.norms))
            yield from self._decided(task, one, phase)
        for one in held:
            everyone.append((one.reply.client.id, labeled(one.reply), one.norms))
            yield from self._decided(task, one, phase)
        self._name_far(task, everyone, phase)
        self._remember(phase)

    def _lacks_median(self, task: str, one: Judged) -> bool:
        if self.settings.clip_median is None and self.settings.outlier is None:
            return False
        return any(key(task, labeled(one.reply), part) not in self.conduct.norms for part in one.norms)

    def _median(self, name: str, phase: Mapping[str, Sequence[float]], high: bool = False) -> float:
        """Return the median norm of earlier rounds, or of this phase if it is the first.

        If most clients of a kind moved nothing, compare with all that moved something, of either kind.
        """
        if usual := self._middle(name, self.conduct.norms.get(name) or phase[name], high):
            return usual
        both = [
            norm for kind in (name, other_kind(name)) for norm in self.conduct.norms.get(kind) or phase.get(kind, ())
        ]
        return statistics.median(found) if (found := [norm for norm in both if norm]) else 0.0

    def _middle(self, name: str, norms: Sequence[float], high: bool = False) -> float:
        """Return the median of norms. Of two clients it is the lower of the two in the middle, or the higher.

        Their mean would be halfway to what one of them alone makes up. The lower bounds what is made up. Whoever is
        left out must be beyond the higher, or one of two could have the other left out by hardly moving itself.
        """
        if name.rsplit(", ", 2)[1] not in self.pairs:
            return statistics.median(norms)
        return statistics.median_high(norms) if high else statistics.median_low(norms)

    def _decided(self, task: str, one: Judged, phase: Mapping[str, Sequence[float]]) -> Iterator[Reply[Any]]:
        """Yield a reply as it is, or with a smaller update, or not at all."""
        settings, factors = self.settings, dict[Part, float]()
        if settings.clip is None and settings.clip_median is None and settings.outlier is None:
            yield one.reply
            return
        for part, norm in one.norms.items():
            usual = self._median(key(task, labeled(one.reply), part), phase)
            highest = self._median(key(task, labeled(one.reply), part), phase, high=True)
            if settings.outlier is not None and norm > settings.outlier * highest > 0:
                self.name(one.reply.client.id, task, compared(one, part, highest), "left out")
                return
            bounds = [settings.clip] if settings.clip is not None and part == "parameter" else []
            bounds += [settings.clip_median * usual] if settings.clip_median is not None and usual else []
            if bounds and norm > min(bounds):
                factors[part] = min(bounds) / norm
        if not factors:
            yield one.reply
            return
        for part in factors:
            usual = self._median(key(task, labeled(one.reply), part), phase)
            self.name(one.reply.client.id, task, compared(one, part, usual), "clipped")
        yield replace(one.reply, upload=updates.scaled(one.reply.upload, one.sent, factors))

    def _name_far(
        self, task: str, everyone: Iterable[tuple[int, bool, dict[Part, float]]], phase: Mapping[str, Sequence[float]]
    ) -> None:
        """Name updates that are far larger than others, though no setting bounds them."""
        named = {(suspect["client"], suspect["task"]) for suspect in self.suspects}
        for client, has_labels, norms in everyone:
            for part, norm in norms.items():
                name = key(task, has_labels, part)
                before = self.conduct.norms.get(name, ())
                usual = max(self._middle(name, phase[name]), self._median(name, phase))
                few = len(before) + len(phase[name]) < 3
                if not few and norm > FAR * usual > 0 and (client, task) not in named:
                    self.name(client, task, words(part, norm, usual, has_labels), "named")

    def _remember(self, phase: Mapping[str, Sequence[float]]) -> None:
        """Keep the norms of a phase for later ones. None counts for more than what its bound let through."""
        limits = [limit for limit in (self.settings.clip_median, self.settings.outlier) if limit is not None]
        norms = dict(self.conduct.norms)
        for name, found in phase.items():
            most = min(limits, default=math.inf) * (self._median(name, phase, high=True) or math.inf)
            norms[name] = (*norms.get(name, ()), *(min(norm, most) for norm in found))[-REMEMBERED:]
        self.conduct = replace(self.conduct, norms=norms)


class PrivacySpent(TooFewReplies):
    """Nobody who is needed may train any more, so the run ends with what it has."""


class Lost:
    """The clients that have failed, of those that did since one with labels last replied, and since any did."""

    def __init__(self) -> None:
        self._labels, self._any = dict[int, str](), dict[int, str]()
        self._spent = set[int]()

    def heard(self, client: ClientInfo, failure: str | None = None, spent: bool = False) -> None:
        """Remember who failed, until someone replies, and who has `spent` all of its privacy."""
        self._spent |= {client.id} if spent else set()
        for lost in [self._any, self._labels] if client.num_labeled else [self._any]:
            if failure is None:
                lost.clear()
            else:
                lost[client.id] = failure

    def check_spent(self, clients: Sequence[ClientInfo]) -> None:
        """End a run once all those with labels have spent their privacy, or simply all: nobody may train any more."""
        there = {client.id for client in clients if client.size}
        with_labels = {client.id for client in clients if client.num_labeled}
        for who, needed in (("site with labels", with_labels), ("site", there)):
            if needed and needed <= self._spent:
                raise PrivacySpent(f"every {who} has spent its privacy (privacy.epsilon)")

    def check(self, round: int, clients: Sequence[ClientInfo], judge: Judge) -> None:
        """Once all those with labels have failed, or simply all, further rounds would be for nothing.

        Who is not asked in a phase or a round may be there in the next, so nobody else's failure ends a run. Who is
        excluded is never asked again.
        """
        there = [client for client in clients if client.size]
        with_labels = [client for client in there if client.num_labeled]
        for who, lost, needed in (("site with labels", self._labels, with_labels), ("site", self._any, there)):
            if needed and all(client.id in lost or judge.excludes(client.id) for client in needed):
                client = needed[0].id
                why = lost.get(client, "it is excluded")
                name = judge.names.get(client, f"client {client}")
                what = f"in round {round} the last {who} was lost ({name}: {why})"
                raise TooFewReplies(f"{what}; have one join, then resume")


def asked_of(world: World, client: int, round: int) -> Asked:
    """Return what an upload of a client may contain in a round, by the images that the client says it has."""
    experiment, classes = world.experiment, len(world.dataset.classes)
    attack, aside = experiment.clients.attack, ClientInfo(client, world.num_held_out(client, round), 0)
    claim, held_out = claimed(attack, world.info(client, round)), claimed(attack, aside).num_labeled
    return Asked(claim, classes, sums.largest(experiment), held_out)


def labeled(reply: Reply[Any]) -> bool:
    return reply.client.num_labeled > 0


def key(task: str, has_labels: bool, part: Part) -> str:
    """Name what norms belong together."""
    return f"{task}, {called(has_labels)}, {part}"


def other_kind(name: str) -> str:
    """Name the norms of the other kind of client."""
    task, kind, part = name.rsplit(", ", 2)
    return f"{task}, {called(kind != called(True))}, {part}"


def called(has_labels: bool) -> str:
    return "with labels" if has_labels else "without labels"


def compared(one: Judged, part: Part, usual: float) -> str:
    return words(part, one.norms[part], usual, labeled(one.reply))


def words(part: Part, norm: float, usual: float, has_labels: bool) -> str:
    """Say how large an update is."""
    times = f"{norm / usual:.3g} times the median" if usual else "and the median is 0,"
    return f"its {WORDS[part]} has norm {norm:.3g}, {times} of clients {called(has_labels)}"


def shrunk(info: ClientInfo, size: float) -> ClientInfo:
    """Return a client that counts as one of this size. It keeps an image of each kind that it has."""
    if size >= info.size:
        return info
    both = info.num_labeled, info.num_unlabeled
    labels, others = (number and max(1, int(number * size / info.size)) for number in both)
    return ClientInfo(info.id, labels, others)
