"""How long a server waits for a site, and how often it asks one that stays silent."""

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from fewlabel.deploy.run_plan import RunPlan
from fewlabel.engine.executor import Job

KEPT = 10  # rounds whose seconds count
SHORT = 10  # times the least deadline: the longest one of what is no training
LONG = ("client", "hidden", "statistics", "evaluate", "pixels")  # kinds of jobs that look at all images of a site
MISSES = 2  # rounds in which a site may be silent before it is asked less often
FIRST = (
    4  # times as long a site may take for a task that only others have done before; after each silence twice as long
)


@dataclass
class Pace:
    """Learns how long tasks take and who is silent, and says how long to wait and whom to leave out.

    Nothing here changes a result as long as nobody is silent.
    """

    plan: RunPlan
    sizes: Mapping[int, int] = field(default_factory=dict)  # images of each client
    own: dict[tuple[int, str], deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT)))
    slowest: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))  # by task and round
    silent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # rounds by client, since it spoke

    def usual(self, job: Job) -> float | None:
        """Return how many seconds a client's task takes, or None if this client has not done it yet.

        It is the median of the rounds' slowest replies, or of the client's own if that is more.
        """
        if not (own := self.own[job.client, name(job)]):
            return None
        return max(median(own), median(list(self.slowest[name(job)].values())[-KEPT:]))

    def deadline(self, job: Job) -> float:
        """Return how many seconds to wait for a client's task."""
        most, usual = self.plan.deadline, self.usual(job)
        if job.kind not in LONG:
            most = min(most, SHORT * self.plan.least)
        if self.plan.factor is None or usual is None:
            return most
        return min(max(self.plan.factor * usual, self.plan.least), most)

    def first_deadline(self, job: Job) -> float:
        """Return how many seconds to wait for a task that a client has never done, once others have done it.

        They tell what it may take, by their numbers of images. A site that is far slower gets twice as long each time.
        """
        if self.plan.factor is None or self.own[job.client, name(job)]:
            return math.inf
        size = self.sizes.get(job.client, 0)
        others = [
            median(seconds) * max(1.0, size / max(1, self.sizes.get(client, size)))
            for (client, task), seconds in self.own.items()
            if seconds and task == name(job) and client != job.client
        ]
        if not others:
            return math.inf
        times = FIRST * 2.0 ** len(self.silent.get(job.client, ()))
        return min(max(times * self.plan.factor * max(others), times * self.plan.least), self.plan.deadline)

    def replied(self, job: Job, seconds: float) -> None:
        """Note that a client has replied, and after how many seconds."""
        self.own[job.client, name(job)].append(seconds)
        rounds = self.slowest[name(job)]
        rounds[job.round] = max(seconds, rounds.get(job.round, 0.0))
        self.silent.pop(job.client, None)

    def missed(self, job: Job) -> None:
        """Note that a client was silent until the deadline."""
        rounds = self.silent[job.client]
        rounds += [job.round] * (job.round not in rounds)

    def left_out(self, job: Job) -> str:
        """Say why a client is not asked now. The text is empty if it is."""
        rounds = self.silent.get(job.client)
        if self.plan.again is None or not rounds:
            return ""
        if job.round == rounds[-1]:
            return "it was silent earlier in this round"
        back = rounds[-1] + self.plan.again
        if len(rounds) < MISSES or job.round >= back:
            return ""
        return f"it was silent in rounds {rounds[-2]} and {rounds[-1]}, and is asked again in round {back}"


def name(job: Job) -> str:
    return job.task if job.kind in ("client", "hidden") else job.kind
