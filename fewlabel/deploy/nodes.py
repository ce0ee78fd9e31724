"""Flower's nodes as the server sees them: which client each one is, and the executor that has them do clients' jobs."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.core.federation import ClientInfo, Model
from fewlabel.core.rng import preserved
from fewlabel.deploy import peers, summing, waiting
from fewlabel.deploy.log_heads import Heads
from fewlabel.deploy.members import called
from fewlabel.deploy.messages import MAX_IMAGES, MAX_INTRODUCTION, Introduction, Order
from fewlabel.deploy.pace import Pace
from fewlabel.deploy.pulls import Pulls
from fewlabel.deploy.run_plan import RunPlan
from fewlabel.engine import flower_messages, run
from fewlabel.engine.executor import SERVER_ID, Job, Outcome, Summed, Tickets
from fewlabel.engine.worker import Worker
from fewlabel.experiment import Experiment, dumps

POLL = (0.05, 1.0)  # seconds between two looks for replies: at first, and at most
LOOK = 2.0  # seconds between two looks for nodes
AGAIN = 10.0  # seconds until a node that was refused is asked again: its site may have been mended


class Absent(RunFailed):
    """A client that cannot be asked now."""


class Nodes:
    """The nodes of a Flower run, and the clients that they say they are.

    Without a key a node has a new id each time it starts. So each node is asked who it is when it is first seen.
    `admit(node, client)` may refuse it, for example because its key is another client's. People know a client by its
    name in `names`, and `client_of(node)` knows whose key a node has, if it has one. `wanted` says how many labels each
    client is asked to add.
    """

    def __init__(
        self,
        grid: Any,
        plan: RunPlan,
        experiment: Experiment,
        admit: Callable[[int, int], None] = lambda node, client: None,
        names: Mapping[int, str] = MappingProxyType({}),
        client_of: Callable[[int], int | None] = lambda node: None,
        wanted: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.names, self.client_of, self.wanted = names, client_of, wanted
        self.heads: Heads | None = None  # where lines of the sites' logs are kept
        self.grid, self.plan, self.admit, self.count = grid, plan, admit, experiment.clients.count
        self.experiment = dumps(experiment)
        self.claims: dict[int, Introduction] = {}
        self.refused: dict[int, str] = {}
        self.clients: Mapping[int, ClientInfo] | None = None  # fixed once the run has begun
        self._online: set[int] = set()
        self._asked: dict[str, int] = {}
        self._again: dict[int, float] = {}  # when to ask a node again that was refused
        self._looked = 0.0
        self._introductions, self.pulls = Pulls(grid), Pulls(grid)

    def order(self, job: Job) -> bytes:
        """Pack the order for a job. It names the run, and not the directory at the server."""
        wanted = 0 if job.kind == "info" else self.wanted.get(job.client, 0)
        return wire.pack(Order(self.experiment, self.plan.terms, replace(job, run=self.plan.run), wanted))

    def look(self) -> None:
        """Ask new nodes who they are, and read what those say that were asked before."""
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._online = set(self.grid.get_node_ids())
            order = self.order(Job("", "info"))
            for node in sorted(self._online - {*self.claims, *self._asked.values()}):
                if self._looked < self._again.get(node, 0.0):
                    continue
                if sent := flower_messages.send(
                    self.grid, node, self.plan.patience, "query", "", order=order, message=b""
                ):
                    self._asked[sent] = node
        for sent, reply in self.receive(self._asked, self._introductions):
            node = self._asked.pop(sent)
            try:
                introduction = wire.unpack(Introduction, flower_messages.upload_of(reply, MAX_INTRODUCTION) or b"")
                self._check(node, introduction)
                self.claims[node] = introduction
                self.refused.pop(node, None)
            except flower_messages.NoReply:
                continue  # it is asked again as long as it is there
            except FewLabelError as error:
                self.refused[node] = str(error)
                self._again[node] = time.monotonic() + AGAIN

    def receive(self, sent: Iterable[str], pulls: Pulls) -> list[tuple[str, Any]]:
        """Return the replies that have come, and keep the lines of the sites' logs that came with them."""
        replies = pulls.receive(sent)
        for _, reply in replies:
            if self.heads is not None and not isinstance(reply, BadInput) and not reply.has_error():
                self.heads.take(reply.metadata.src_node_id, flower_messages.parts_of(reply))
        return replies

    def _check(self, node: int, introduction: Introduction) -> None:
        info = introduction.info
        if not 0 <= info.id < self.count:
            raise BadInput(f"it claims to be client {info.id}, and clients are from 0 to {self.count - 1}")
        if not 0 < info.size <= MAX_IMAGES or min(info.num_labeled, info.num_unlabeled) < 0:
            raise BadInput(f"client {info.id} claims {info.num_labeled} labeled and {info.num_unlabeled} other images")
        if not 0 <= introduction.test <= MAX_IMAGES:
            raise BadInput(f"client {info.id} claims {introduction.test} images to test on")
        ours, theirs = run.versions()["fewlabel"], introduction.versions.get("fewlabel")
        if theirs != ours:
            raise BadInput(
                f"client {info.id} has fewlabel {flower_messages.printable(str(theirs))}, and the server {ours}"
            )
        if self.clients is not None and self.clients.get(info.id) != info:
            raise BadInput(f"client {info.id} was not there, or had other images, when this run began")
        self.admit(node, info.id)

    def gather(
        self,
        sites: int,
        say: Callable[[str], None] = lambda text: None,
        note: Callable[[Sequence[waiting.Waited]], None] = lambda waited: None,
    ) -> dict[int, ClientInfo]:
        """Wait until so many sites have said who they are, or patience ends. Say and note who is not there yet.

        A site that has come back without a key is there twice, until Flower drops its first node after a minute.
        """
        end, last, since = time.monotonic() + self.plan.patience, "", round(time.time(), 1)
        while True:
            self.look()
            here = [claim.info for node, claim in self.claims.items() if node in self._online]
            found = {info.id: info for info in here}
            absent = [client for client in range(self.count) if client not in found] if sites == self.count else []
            names = f"; waiting for {', '.join(called(self.names, client) for client in absent)}" if absent else ""
            text = f"{len(found)} of {sites} sites are there{names * (len(found) < sites)}{self.refusals}"
            if text != last:
                say(last := text)
                why = {self.client_of(node): reason for node, reason in self.refused.items()}
                note([waiting.Waited(client, since, refused=why.get(client, "")) for client in absent])
            if sites <= len(found) == len(here) or time.monotonic() > end:
                for client in found:
                    self.node_of(client)  # raises if there are two
                return found
            time.sleep(POLL[0])

    @property
    def refusals(self) -> str:
        """Say who refuses or is refused, and why."""
        return "".join(f"; {self.called(node)} {in_words(text)}" for node, text in self.refused.items())

    def called(self, node: int) -> str:
        """Name the client whose key a node has, or say that nobody knows."""
        client = self.client_of(node)
        return f"a site without a member's key (Flower's node {node})" if client is None else called(self.names, client)

    def node_of(self, client: int) -> int:
        nodes = [n for n, introduction in self.claims.items() if introduction.info.id == client and n in self._online]
        if len(nodes) > 1:
            raise Absent(f"{len(nodes)} sites say that they are {called(self.names, client)}; stop all but one of them")
        if not nodes:
            raise Absent("it is not connected")
        return nodes[0]


def in_words(refusal: str) -> str:
    """Say who does not want: the site itself, or the server."""
    own = refusal.removeprefix("it refused: ")
    return f"is refused: {refusal}" if own == refusal else f"refuses: {own}"


@dataclass
class Sent:
    """A job at a client."""

    ticket: int
    job: Job
    began: float
    deadline: float  # seconds


class NodeExecutor:
    """Has clients' jobs done by their nodes, and the server's own here."""

    def __init__(self, nodes: Nodes, worker: Worker, directory: Path) -> None:
        self.directory = directory
        self.nodes, self.worker, self.window = nodes, worker, 2 * max(1, worker.world.experiment.clients.count)
        model = len(wire.pack(Model(tree.of(worker.model))))
        self.max_upload = nodes.plan.max_upload or 8 * model + (1 << 20)
        self.tickets = Tickets()
        self.pace = Pace(nodes.plan, {client: info.size for client, info in (nodes.clients or {}).items()})
        self._sent: dict[str, Sent] = {}
        self._waited: list[waiting.Waited] = []

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        ticket = self.tickets.open(job)
        if job.client == SERVER_ID:
            with preserved():
                self.tickets.close(ticket, self.worker.attempt(job, message, statistics))
            return ticket
        deadline = self.pace.deadline(job)
        try:
            if why := self.pace.left_out(job):
                raise Absent(why)
            node = self.nodes.node_of(job.client)
            parts = {"order": self.nodes.order(job), "message": message, "statistics": statistics}
            sent = flower_messages.send(
                self.nodes.grid, node, deadline, "train", str(job.round), seconds=f"{deadline:g}", **parts
            )
            if not sent:
                raise Absent("the message to it could not be sent")
            self._sent[sent] = Sent(ticket, job, time.monotonic(), deadline)
        except Absent as error:
            self.tickets.close(ticket, Outcome(None, {}, str(error)))
        return ticket

    def masked_sum(self, jobs: Mapping[int, Job], shares: Mapping[int, int], length: int) -> Summed:
        plan = self.nodes.plan
        if plan.members is None:
            raise RunFailed("clients.sums = 'masked' needs sites with keys; serve and run without --insecure")
        return summing.Sum(self, plan.run, jobs, shares, length, peers.verifier_of(Path(plan.members))).play()

    def wait(self) -> None:
        pause = POLL[0]
        while not self._receive():
            self.nodes.pulls.wait(pause)
            pause = min(1.5 * pause, POLL[1])

    def _receive(self) -> bool:
        """Read the replies that have come. Return True if a job has ended."""
        before = len(self._sent)
        self.nodes.look()
        for sent, reply in self.nodes.receive(self._sent, self.nodes.pulls):
            done = self._sent.pop(sent)
            try:
                upload = flower_messages.upload_of(reply, self.max_upload)
                self.tickets.close(done.ticket, Outcome(upload, flower_messages.told(reply)))
            except flower_messages.NoReply as error:  # Flower answers in place of the site
                self.tickets.close(done.ticket, Outcome(None, {}, str(error)))
                if isinstance(error, flower_messages.TooLate):
                    self.pace.missed(done.job)
                continue
            except FewLabelError as error:
                self.tickets.close(done.ticket, Outcome(None, flower_messages.told(reply), str(error)))
            self.pace.replied(done.job, time.monotonic() - done.began)
        for sent, open_ in list(self._sent.items()):
            deadline = min(open_.deadline, self.pace.first_deadline(open_.job))
            if time.monotonic() > open_.began + deadline:  # a reply that comes later is not read
                del self._sent[sent]
                self.pace.missed(open_.job)
                self.tickets.close(open_.ticket, Outcome(None, {}, f"it was silent for {round(deadline, 1):g} s"))
        self._note_waiting()
        return len(self._sent) < before

    def _note_waiting(self) -> None:
        """Write down who has been waited for so long that it should be named."""
        now, ago = time.monotonic(), time.time() - time.monotonic()
        late = [open_ for open_ in self._sent.values() if now - open_.began >= waiting.NAMED]
        found = [
            waiting.Waited(one.job.client, round(ago + one.began, 1), self.pace.usual(one.job) or 0.0) for one in late
        ]
        if [one.client for one in found] != [one.client for one in self._waited]:
            waiting.write(self.directory, found)
        self._waited = found

    def discard(self) -> None:
        self._sent.clear()
        self.tickets.clear()
        self._note_waiting()
