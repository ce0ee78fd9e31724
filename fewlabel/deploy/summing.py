"""The server's part in a masked sum: it carries what sites say to each other, and learns the sum alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from fewlabel.core import wire
from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.deploy import masking
from fewlabel.deploy.messages import Dealt, Group, Inbox, Masked, Signature, Signatures
from fewlabel.engine.executor import Executor, Job, Summed

T = TypeVar("T")


@dataclass
class Sum:
    """A masked sum under way. `run` is its name at sites, and `length` how many numbers a site adds."""

    executor: Executor
    run: str
    jobs: Mapping[int, Job]
    shares: Mapping[int, int]
    length: int
    verify: masking.Verify
    up: int = 0
    down: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)

    def play(self) -> Summed:
        """Play all steps. There is no sum if too few sites are left."""
        try:
            clients, numbers = self.steps()
            return Summed(clients, numbers, self.up, self.down, tuple(self.failures))
        except BadInput as error:
            return Summed((), torch.empty(0), self.up, self.down, tuple(self.failures), str(error))

    def steps(self) -> tuple[tuple[int, ...], torch.Tensor]:
        first = next(iter(self.jobs.values()))
        context = self.run, first.round, first.task

        def signed(client: int, advert: masking.Advert) -> None:
            """Refuse wrong keys here, too: sites would refuse the whole sum because of one that sends them."""
            if advert.client != client:
                raise BadInput("it sent another site's keys")
            self.verify(client, masking.signed_part(*context, advert), advert.signature)

        adverts = self.ask("keys", dict.fromkeys(self.jobs, b""), masking.Advert, signed)
        usual = Counter(advert.start for advert in adverts.values()).most_common(1)
        clients = sorted(client for client in adverts if adverts[client].start == usual[0][0])
        for client in sorted(adverts.keys() - set(clients)):
            self.failures.append(
                (client, "keys", "it trained from another model than most sites, or from other settings")
            )
        needed = masking.threshold(len(clients))
        self.enough(clients, needed)
        roster = masking.Roster(
            *context, tuple(adverts[client] for client in clients), {client: self.shares[client] for client in clients}
        )

        def complete(client: int, dealt: Dealt) -> None:
            if sorted(dealt.sealed) != clients:
                raise BadInput("it did not deal shares to all sites")

        dealt = self.ask("shares", dict.fromkeys(clients, wire.pack(roster)), Dealt, complete)
        dealers = sorted(dealt)
        self.enough(dealers, needed)

        def fits(client: int, masked: Masked) -> None:
            if masked.numbers.dtype != torch.int64 or masked.numbers.shape != (self.length,):
                raise BadInput(f"it sent {list(masked.numbers.shape)} numbers, and the network has {self.length}")

        inboxes = {to: wire.pack(Inbox({sender: dealt[sender].sealed[to] for sender in dealers})) for to in dealers}
        masked = self.ask("masked", inboxes, Masked, fits)
        survivors = sorted(masked)
        self.enough(survivors, needed)

        def agreed(client: int, signature: Signature) -> None:
            self.verify(client, masking.survivors_part(roster, survivors), signature.text)

        signatures = self.ask(
            "survivors", dict.fromkeys(survivors, wire.pack(Group(tuple(survivors)))), Signature, agreed
        )
        self.enough(sorted(signatures), needed)
        whole = wire.pack(Signatures({client: one.text for client, one in signatures.items()}))
        openings = self.ask("opening", dict.fromkeys(signatures, whole), masking.Opening)
        numbers = {client: one.numbers for client, one in masked.items()}
        return tuple(survivors), masking.unmasked(roster, dealers, numbers, list(openings.values()))

    def ask(
        self,
        step: str,
        messages: Mapping[int, bytes],
        kind: type[T],
        check: Callable[[int, T], None] = lambda client, found: None,
    ) -> dict[int, T]:
        """Ask sites for a step. Return the replies of those that gave one that can be used."""
        tickets = {
            client: self.executor.submit(replace(self.jobs[client], kind=step), message, None)
            for client, message in messages.items()
        }
        self.down += sum(map(len, messages.values()))
        while not all(map(self.executor.tickets.ready, tickets.values())):
            self.executor.wait()
        found: dict[int, Any] = {}
        for client, ticket in tickets.items():
            outcome = self.executor.tickets.collect(ticket)
            self.up += len(outcome.payload or b"")
            try:
                if outcome.payload is None:
                    raise BadInput(outcome.failure or "it sent nothing")
                reply = wire.unpack(kind, outcome.payload)
                check(client, reply)
                found[client] = reply
            except FewLabelError as error:
                self.failures.append((client, step, str(error)))
        return found

    def enough(self, clients: Sequence[int], needed: int) -> None:
        """Raise BadInput if too few sites are left."""
        if len(clients) < needed:
            raise BadInput(f"{len(clients)} of {len(self.jobs)} sites are left, and it takes {needed}")
