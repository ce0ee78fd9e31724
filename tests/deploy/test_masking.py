"""The sum of masked numbers is exact whoever drops out when, and a server that lies about it learns nothing more."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fewlabel.core.errors import BadInput
from fewlabel.deploy import masking

RUN, ROUND, TASK = "0" * 32, 4, "local_update"
LENGTH = 1000


@dataclass
class Site:
    """A site that keeps to the protocol."""

    client: int
    numbers: torch.Tensor
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    sealed: dict = field(default_factory=dict)

    def sign(self, text: bytes) -> str:
        return self.key.sign(text).hex()

    def advertise(self) -> masking.Advert:
        self.own = masking.advertise(RUN, ROUND, TASK, self.client, 0, self.sign)
        return self.own.advert


class Sum:
    """A sum of some sites, with an honest server. `drop(phase, client)` is whether a site is silent from then on."""

    def __init__(self, count: int, drop=lambda phase, client: False, shares=None) -> None:
        draw = torch.Generator().manual_seed(count)
        self.drop, self.gone = drop, set()
        self.sites = {
            client: Site(client, torch.randint(-(2**34), 2**34, (LENGTH,), generator=draw)) for client in range(count)
        }
        self.shares = shares or {client: 1 + client for client in self.sites}

    def there(self, phase: str, clients) -> list[int]:
        self.gone |= {client for client in clients if self.drop(phase, client)}
        return sorted(client for client in clients if client not in self.gone)

    def verify(self, client: int, text: bytes, signature: str) -> None:
        try:
            self.sites[client].key.public_key().verify(bytes.fromhex(signature), text)
        except (InvalidSignature, ValueError):
            raise BadInput(f"client {client} has not signed this") from None

    def begin(self) -> None:
        adverts = [self.sites[client].advertise() for client in self.there("keys", self.sites)]
        clients = [advert.client for advert in adverts]
        self.roster = masking.Roster(RUN, ROUND, TASK, tuple(adverts), {c: self.shares[c] for c in clients})
        self.dealers = self.there("shares", clients)
        for client in self.dealers:
            site = self.sites[client]
            masking.check_roster(site.own, self.roster, RUN, ROUND, TASK, self.verify)
            for to, text in masking.deal(site.own, self.roster).items():
                self.sites[to].sealed[client] = text
        self.masked = {}
        for client in self.there("masked", self.dealers):
            site = self.sites[client]
            self.masked[client] = masking.mask(site.own, self.roster, sorted(site.sealed), site.numbers)
        self.survivors = sorted(self.masked)

    def signatures(self, survivors, among) -> dict[int, str]:
        return {
            client: masking.agree(self.sites[client].own, self.roster, self.dealers, survivors, self.sites[client].sign)
            for client in among
        }

    def open(self, client: int, survivors, signatures) -> masking.Opening:
        site = self.sites[client]
        return masking.opened(site.own, self.roster, site.sealed, survivors, signatures, self.verify)

    def play(self) -> torch.Tensor:
        self.begin()
        signatures = self.signatures(self.survivors, self.there("agree", self.survivors))
        openings = [self.open(client, self.survivors, signatures) for client in self.there("open", signatures)]
        return masking.unmasked(self.roster, self.dealers, self.masked, openings)

    def plain(self, clients) -> torch.Tensor:
        return sum(self.sites[client].numbers for client in clients)


def is_uniform(numbers: torch.Tensor) -> bool:
    """Compare the bytes of numbers with uniform ones. Uniform bytes fail it once in 10^9 times."""
    counts = np.bincount(numbers.numpy().view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-9, 255))


@pytest.mark.parametrize("clients", [3, 4, 10])
def test_the_sum_is_exact(clients):
    whole = Sum(clients)
    assert torch.equal(whole.play(), whole.plain(range(clients)))


@pytest.mark.parametrize("phase", ["keys", "shares", "masked", "agree", "open"])
def test_two_of_ten_may_drop_out_in_any_phase(phase):
    whole = Sum(10, lambda now, client: now == phase and client in (2, 7))
    found = whole.play()
    left = [c for c in range(10) if c not in (2, 7)] if phase in ("keys", "shares", "masked") else range(10)
    assert torch.equal(found, whole.plain(left))


def test_sites_that_drop_out_one_after_the_other_leave_an_exact_sum():
    when = {1: "keys", 4: "shares", 8: "masked"}
    whole = Sum(10, lambda now, client: when.get(client) == now)
    assert torch.equal(whole.play(), whole.plain(set(range(10)) - set(when)))


def test_with_more_than_a_third_gone_there_is_no_sum():
    whole = Sum(10, lambda now, client: now == "masked" and client < 4)
    with pytest.raises(BadInput, match="6 sites are in the sum, and of 10 it takes 7"):
        whole.play()


def test_the_threshold_is_more_than_two_thirds_and_at_least_three():
    assert [masking.threshold(n) for n in (3, 4, 5, 6, 9, 10)] == [3, 3, 4, 5, 7, 7]


def test_a_masked_upload_is_uniform_whatever_it_hides():
    whole = Sum(3)
    for site in whole.sites.values():
        site.numbers = torch.zeros(20_000, dtype=torch.int64)
    whole.begin()
    assert not is_uniform(whole.sites[0].numbers)
    assert all(map(is_uniform, whole.masked.values()))
    first = whole.masked[0]
    whole.begin()  # again, with new keys: nothing of the first is left
    assert is_uniform(whole.masked[0] - first)


def test_a_site_that_is_said_to_have_dropped_out_is_still_hidden_by_its_own_mask():
    """The classic attack: the server has a masked upload, and asks the others to open its sender's shared masks."""
    whole = Sum(10)
    for site in whole.sites.values():
        site.numbers = torch.zeros(20_000, dtype=torch.int64)
    whole.begin()
    victim, others = 3, [c for c in range(10) if c != 3]
    signatures = whole.signatures(others, others)
    openings = [whole.open(client, others, signatures) for client in others]
    assert all(victim in opening.mask_keys and victim not in opening.seeds for opening in openings)
    key = masking.combined([opening.mask_keys[victim] for opening in openings], 7, victim)
    left = masking.unsigned(whole.masked[victim])
    for other in others:
        pair = masking.pair_key(key.hex(), whole.roster.of(other).mask_key, whole.roster, victim, other)
        shared = masking.stream(pair, 20_000)
        left = left - shared if victim < other else left + shared
    assert is_uniform(masking.signed(left))  # all shared masks are gone, and it still looks like nothing
    own = masking.stream(bytes.fromhex(whole.sites[victim].own.seed), 20_000)
    assert not (left - own).any()  # with the seed it would be the victim's zeros


def test_a_server_that_tells_sites_different_survivors_gets_neither_opened():
    """Half of the sites hear that the victim dropped out, the others that it did not: each group is too small."""
    whole = Sum(10)
    whole.begin()
    victim, without = 3, [c for c in range(10) if c != 3]
    told_gone, told_there = [0, 1, 2, 4, 5, 6], [3, 7, 8, 9]
    gone, there = whole.signatures(without, told_gone), whole.signatures(range(10), told_there)
    with pytest.raises(BadInput, match="6 sites have signed who is in the sum, and it takes 7"):
        whole.open(0, without, gone)
    with pytest.raises(BadInput, match="4 sites have signed"):
        whole.open(7, range(10), there)
    with pytest.raises(BadInput, match="client 7 has not signed this"):
        whole.open(0, without, gone | {7: there[7]})  # a signature of one list does not count for another
    with pytest.raises(BadInput, match=f"client {victim} has signed who is in the sum, and is not in it"):
        whole.open(0, without, gone | {victim: there[victim]})


def test_the_server_cannot_put_its_own_keys_in_the_place_of_a_members():
    whole = Sum(3)
    whole.begin()
    liar = masking.advertise(RUN, ROUND, TASK, 1, 0, lambda text: Ed25519PrivateKey.generate().sign(text).hex())
    forged = replace(whole.roster, adverts=(whole.roster.adverts[0], liar.advert, whole.roster.adverts[2]))
    with pytest.raises(BadInput, match="client 1 has not signed this"):
        masking.check_roster(whole.sites[0].own, forged, RUN, ROUND, TASK, whole.verify)


def test_keys_of_another_round_are_refused():
    whole = Sum(3)
    whole.begin()
    earlier = masking.advertise(RUN, ROUND - 1, TASK, 1, 0, whole.sites[1].sign)
    mixed = replace(whole.roster, adverts=(whole.roster.adverts[0], earlier.advert, whole.roster.adverts[2]))
    with pytest.raises(BadInput, match="client 1 has not signed this"):
        masking.check_roster(whole.sites[0].own, mixed, RUN, ROUND, TASK, whole.verify)
    with pytest.raises(BadInput, match="for another sum"):
        masking.check_roster(whole.sites[0].own, replace(whole.roster, round=5), RUN, ROUND, TASK, whole.verify)


def test_two_sites_make_no_sum():
    whole = Sum(3)
    whole.begin()
    small = replace(whole.roster, adverts=whole.roster.adverts[:2], shares={0: 1, 1: 2})
    with pytest.raises(BadInput, match="a masked sum is of 3 sites or more, and this one of 2"):
        masking.check_roster(whole.sites[0].own, small, RUN, ROUND, TASK, whole.verify)


def test_shares_that_were_changed_on_their_way_are_refused():
    whole = Sum(3)
    whole.begin()
    signatures = whole.signatures(whole.survivors, whole.survivors)
    text = whole.sites[0].sealed[1]
    whole.sites[0].sealed[1] = text[:-2] + f"{int(text[-2:], 16) ^ 1:02x}"
    with pytest.raises(BadInput, match="what client 1 dealt to this site was changed on its way"):
        whole.open(0, whole.survivors, signatures)
    whole.sites[0].sealed[1] = whole.sites[2].sealed[1]  # and so is another site's
    with pytest.raises(BadInput, match="what client 1 dealt to this site was changed on its way"):
        whole.open(0, whole.survivors, signatures)


def test_a_site_that_opens_a_wrong_share_spoils_no_sum_in_silence():
    whole = Sum(3)
    whole.begin()
    signatures = whole.signatures(whole.survivors, whole.survivors)
    openings = [whole.open(client, whole.survivors, signatures) for client in whole.survivors]
    right = openings[0].seeds[1]
    wrong = right[:8] + f"{int(right[8:10], 16) ^ 1:02x}" + right[10:]
    openings[0] = replace(openings[0], seeds=openings[0].seeds | {1: wrong})
    with pytest.raises(BadInput, match="the shares of client 1's mask do not fit together"):
        masking.unmasked(whole.roster, whole.dealers, whole.masked, openings)
