"""Masked sums between sites give the simulator's bits, survive sites that drop out, and show nobody alone."""

import json
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Message

from fewlabel.core import fixed, wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import Model
from fewlabel.deploy import keys, masked_site, masking, members, peers, site
from fewlabel.deploy.messages import Group, Masked, Order
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import dumps
from tests.deploy.federated import LocalGrid, experiment, federate, local_grid, reply_with, simulated, split, weights
from tests.flower_processes import Members, until

MASKED = ("clients.sums=masked", "clients.count=4", "rounds=2")
CASES = {
    "fedavg": ["method=fedavg", "labels.at=every-client", "labels.fraction=0.5"],
    "clipped": ["method=fedavg", "labels.at=every-client", "labels.fraction=0.5", "clients.clip=0.05"],
    "fedirm": ["method=fedirm", "labels.clients=1", "method.labeled_share=0.5"],
    "cbafed": ["method=cbafed", "labels.clients=3", "method.warmup_epochs=1"],
    "dropout": ["method=fedavg-fixmatch", "clients.dropout=0.2", "clients.count=6"],
    "two means": ["method=tutor", "labels.clients=3", "clients.count=6", "method.tutors=2", "method.views=1"],
}


class Federation:
    """The members of a federation: a folder at the coordinator, and a key and the list of all at each site."""

    def __init__(self, folder: Path, sites: int) -> None:
        self.folder = folder
        members.create(folder, members.Federation("masked", "127.0.0.1:9443", version("fewlabel")), {})
        made = [keys.new_key(folder / f"key{client}", ssh=True) for client in range(sites)]
        everyone = [
            members.Member(client, f"site {client}", keys.public_half(key), str(client), "", 7000 + client)
            for client, key in enumerate(made)
        ]
        members.write_members(folder, tuple(everyone))
        peers.write(peers.of(folder), folder / peers.FILE)

    def grid(self, data: Path, state: Path, **more) -> LocalGrid:
        found = local_grid(data, state, **more)
        for node, config in found.configs.items():
            config |= {"key": str(self.folder / f"key{node - 7000}"), "peers": str(self.folder / peers.FILE)}
        return found


@pytest.fixture
def federation(tmp_path) -> Federation:
    return Federation(tmp_path / "federation", 10)


def measured(directory: Path) -> list[dict]:
    """Read what a run's rounds measured. A masked sum sends other bytes, and nobody sees who was clipped."""
    wanted = ("round", "asked", "replies", "test", "validation", "thresholds", "class_counts", "relation")
    return [{key: line[key] for key in wanted if key in line} for line in read_rounds(directory)]


@pytest.mark.parametrize("name", CASES)
def test_a_masked_sum_gives_the_bits_of_the_simulator_and_of_the_plain_sum(name, tmp_path, federation):
    whole = experiment(*MASKED, *CASES[name])
    data = split(whole, tmp_path / "sites")
    run = federate(whole, data, tmp_path / "masked", members=str(federation.folder))
    serve(federation.grid(data, tmp_path / "state"), run)
    assert [line.get("failures") for line in read_rounds(run)] == [None] * whole.rounds
    assert weights(run) == weights(simulated(whole, tmp_path / "simulated"))
    assert measured(run) == measured(tmp_path / "simulated")
    plain = replace(whole, clients=replace(whole.clients, sums="fixed"))
    serve(local_grid(data, tmp_path / "plain-state"), federate(plain, data, tmp_path / "plain"))
    assert models(run) == models(tmp_path / "plain")
    floats = replace(whole, clients=replace(whole.clients, sums="float"))
    assert models(run) != models(simulated(floats, tmp_path / "floats"))  # or the setting would change nothing


def models(directory: Path) -> list[list]:
    """Return the weights of a run's models, without the settings in their headers."""
    from safetensors.torch import load

    return [[(n, v.tolist()) for n, v in sorted(load(data).items())] for data in weights(directory)]


# Sites that drop out


@pytest.mark.parametrize("when", ["hidden", *masked_site.STEPS])
def test_two_of_ten_sites_may_drop_out_at_any_step(when, tmp_path, federation):
    whole = experiment(*MASKED, *CASES["fedavg"], "clients.count=10", "rounds=1")
    data, kept, gone = split(whole, tmp_path / "sites"), dict[int, dict](), (2, 7)

    def meddle(job: Job, reply: Message) -> Message:
        if job.kind == "hidden":  # what each site hides, for the test to add up
            (path,) = (tmp_path / "state" / f"client-{job.client}").glob(f"*/{masked_site.WEIGHTS}")
            kept[job.client] = wire.unpack(Model, path.read_bytes()).model
        lost = job.kind == when and job.client in gone
        return reply_with(reply, failed="OSError") if lost else reply

    run = federate(whole, data, tmp_path / "run", members=str(federation.folder))
    serve(federation.grid(data, tmp_path / "state", meddle=meddle), run)
    (line,) = read_rounds(run)
    task = "local_update" if when == "hidden" else f"local_update, {when}"
    assert sorted((one["client"], one["task"]) for one in line["failures"]) == [(2, task), (7, task)]
    sizes = {one["id"]: one["num_labeled"] for one in json.loads((run / "clients.json").read_text())["clients"]}
    trained = [client for client in sizes if when != "hidden" or client not in gone]
    shares = dict(zip(trained, fixed.shares([sizes[c] for c in trained], [True] * len(trained)), strict=True))
    added = range(10) if when in ("survivors", "opening") else [c for c in range(10) if c not in gone]
    total = sum(fixed.units(kept[client], shares[client]) for client in added)
    old = wire.unpack(Model, wire.pack(Model(model_of(run)))).model
    expected = fixed.mean_of(sum(shares[client] for client in added), total, old)
    assert all(torch.equal(old[name], value) for name, value in expected.items())


def model_of(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_if_too_many_drop_out_the_model_stays_and_the_round_says_why(tmp_path, federation):
    whole = experiment(*MASKED, *CASES["fedavg"])
    data = split(whole, tmp_path / "sites")

    def meddle(job: Job, reply: Message) -> Message:
        lost = (job.round, job.kind) == (2, "masked") and job.client < 2
        return reply_with(reply, failed="OSError") if lost else reply

    run = federate(whole, data, tmp_path / "run", members=str(federation.folder))
    serve(federation.grid(data, tmp_path / "state", meddle=meddle), run)
    first, second = read_rounds(run)
    why = "there is no masked sum: 2 of 4 sites are left, and it takes 3"
    assert second["failures"][-1] == {"client": -1, "task": "local_update", "why": why}
    assert first["test"] == second["test"]


def test_nonsense_in_a_masked_upload_is_seen_in_the_sum_and_ends_no_run(tmp_path, federation):
    """Nobody can say whose it was."""
    whole = experiment(*MASKED, *CASES["fedavg"], "rounds=3")
    data = split(whole, tmp_path / "sites")

    def meddle(job: Job, reply: Message) -> Message:
        if (job.kind, job.client, job.round) != ("masked", 1, 2):
            return reply
        numbers = wire.unpack(Masked, reply.content[RECORD]["upload"]).numbers
        return reply_with(reply, upload=wire.pack(Masked(-numbers)))

    run = federate(whole, data, tmp_path / "run", members=str(federation.folder))
    serve(federation.grid(data, tmp_path / "state", meddle=meddle), run)
    first, second, third = read_rounds(run)
    why = "there is no masked sum: it is no mean of models, so a site has sent something else"
    assert second["failures"] == [{"client": -1, "task": "local_update", "why": why}]
    assert first["test"] == second["test"] != third["test"]


def test_a_method_that_trains_one_site_alone_is_refused_in_a_sentence(tmp_path, federation):
    whole = experiment(*MASKED, "method=tutor", "labels.clients=1")
    data = split(whole, tmp_path / "sites")
    run = federate(whole, data, tmp_path / "run", members=str(federation.folder))
    grid = federation.grid(data, tmp_path / "state")
    with pytest.raises(BadInput, match="3 clients or more in each mean, and tutor averages labeled clients by themsel"):
        serve(grid, run)
    assert not grid.orders("hidden")


# What a coordinator may not do


class Coordinator:
    """Orders what it likes of some sites, one step after the other."""

    RUN = "a" * 32

    def __init__(self, tmp_path: Path, federation: Federation, sites: int = 3, **policies: str) -> None:
        self.whole = experiment(*MASKED, *CASES["fedavg"], f"clients.count={sites}")
        data = split(self.whole, tmp_path / "sites")
        self.terms = site.load_terms(data)
        self.configs = {
            node - 7000: config for node, config in federation.grid(data, tmp_path / "state").configs.items()
        }
        for client, config in self.configs.items():
            path = tmp_path / f"policy{client}.toml"
            path.write_text(policies.get(f"site{client}", ""))
            config["policy"] = str(path)
        self.model = wire.pack(Model(self.start()))
        self.shares = dict.fromkeys(self.configs, 1)

    def start(self) -> dict[str, Tensor]:
        from tests.nets import tiny

        torch.manual_seed(0)
        return dict(tiny(1, 10, 16).state_dict())

    def order(self, client: int, kind: str, message: bytes, round: int = 1, call: int = 0, **changes) -> dict:
        job = Job(self.RUN, kind, "local_update", client, round, call)
        whole = replace(self.whole, clients=replace(self.whole.clients, **changes)) if changes else self.whole
        order = wire.pack(Order(dumps(whole), self.terms, job))
        return site.reply(self.configs[client], {"order": order, "message": message})

    def upload(self, kind_of, client: int, kind: str, message: bytes = b"", **more):
        found = self.order(client, kind, message, **more)
        if "upload" not in found:
            raise BadInput(found.get("refused") or found["failed"])
        return wire.unpack(kind_of, found["upload"])

    def train(self, only: int | None = None, change: float = 0.0) -> None:
        from fewlabel.methods.fedavg import Message as Sent

        message = wire.pack(Sent({n: v + change for n, v in wire.unpack(Model, self.model).model.items()}))
        for client in self.configs if only is None else [only]:
            assert self.upload(Model, client, "hidden", message).model == {}

    def roster(self) -> masking.Roster:
        adverts = tuple(self.upload(masking.Advert, client, "keys") for client in self.configs)
        return self.roster_of(*adverts)

    def roster_of(self, *adverts: masking.Advert) -> masking.Roster:
        return masking.Roster(self.RUN, 1, "local_update", adverts, self.shares)

    def masked(self) -> None:
        from fewlabel.deploy.messages import Dealt, Inbox

        self.train()
        whole = wire.pack(self.roster())
        dealt = {client: self.upload(Dealt, client, "shares", whole).sealed for client in self.configs}
        self.hidden = {
            client: self.upload(
                Masked, client, "masked", wire.pack(Inbox({sender: dealt[sender][client] for sender in dealt}))
            )
            for client in self.configs
        }

    def survivors(self, client: int, *group: int):
        from fewlabel.deploy.messages import Signature

        return self.upload(Signature, client, "survivors", wire.pack(Group(group)))


def test_weights_never_leave_a_site_that_masks_in_the_plain(tmp_path, federation):
    coordinator = Coordinator(tmp_path, federation, site1="masked = true")
    refused = coordinator.order(0, "client", coordinator.model)["refused"]
    assert refused == "the weights of 'local_update' leave only in masked sums, and clients.sums = 'masked'"
    refused = coordinator.order(1, "client", coordinator.model, sums="fixed")["refused"]
    assert "its weights leave only in masked sums, and clients.sums = 'fixed' (masked)" in refused
    assert "upload" not in coordinator.order(0, "hidden", coordinator.model, sums="float")


def test_no_step_is_done_twice_or_out_of_its_order(tmp_path, federation):
    coordinator = Coordinator(tmp_path, federation)
    with pytest.raises(BadInput, match="this site has no weights for a sum of 'local_update' in round 1"):
        coordinator.upload(masking.Advert, 0, "keys")
    coordinator.masked()
    for step in ("keys", "shares", "masked", "opening"):
        with pytest.raises(BadInput, match=f"'{step}' is not the next step of this sum, and no step is done twice"):
            coordinator.upload(Masked, 0, step)
    with pytest.raises(BadInput, match="no weights for a sum of 'local_update' in round 2"):
        coordinator.upload(Masked, 0, "survivors", round=2)
    assert not list((tmp_path / "state").glob(f"*/*/{masked_site.WEIGHTS}"))  # weights are gone once they have left


def test_a_sum_of_two_is_not_signed_and_a_second_list_is_not_either(tmp_path, federation):
    coordinator = Coordinator(tmp_path, federation)
    coordinator.masked()
    with pytest.raises(BadInput, match="2 sites are in the sum, and of 3 it takes 3"):
        coordinator.survivors(0, 0, 1)
    assert coordinator.survivors(0, 0, 1, 2).text
    with pytest.raises(BadInput, match="'survivors' is not the next step"):
        coordinator.survivors(0, 0, 1, 2)


def test_the_same_call_is_summed_again_only_over_the_same_sites_with_the_same_shares(tmp_path, federation):
    """As after a kill of the server. Over others, the difference of both sums would be one site's weights."""
    coordinator = Coordinator(tmp_path, federation)
    coordinator.masked()
    assert coordinator.survivors(0, 0, 1, 2).text
    coordinator.masked()
    assert coordinator.survivors(0, 0, 1, 2).text
    coordinator.shares = {0: 1, 1: 1, 2: 2}
    coordinator.masked()
    with pytest.raises(BadInput, match="was in a sum of this call over other sites; a second one could show"):
        coordinator.survivors(0, 0, 1, 2)


def test_a_site_takes_no_part_in_a_sum_that_is_nearly_its_own_weights(tmp_path, federation):
    coordinator = Coordinator(tmp_path, federation, site1="largest_share = 0.3")
    coordinator.shares = {0: 98, 1: 1, 2: 1}
    coordinator.train()
    whole = wire.pack(coordinator.roster())
    with pytest.raises(BadInput, match=r"0.75 of the weight at most, and it would have 0.98 \(largest_share\)"):
        coordinator.upload(Masked, 0, "shares", whole)
    coordinator.shares = {0: 1, 1: 1, 2: 0}  # two would know each other's
    coordinator.train()
    with pytest.raises(BadInput, match="sums of 3 sites or more"):
        coordinator.upload(Masked, 0, "shares", wire.pack(coordinator.roster()))
    coordinator.shares = dict.fromkeys(range(3), 1)
    coordinator.train()
    with pytest.raises(BadInput, match=r"with 0\.3 of the weight at most, and it would have 0\.33"):
        coordinator.upload(Masked, 1, "shares", wire.pack(coordinator.roster()))


def test_a_sum_in_which_large_shares_leave_the_low_bits_to_one_site_is_refused(tmp_path, federation):
    """With shares of 2^60, two sites' numbers are multiples of 2^26 or more, and the third's are below."""
    victim, others = torch.tensor([0.3, -0.7]), [torch.tensor([0.5, 0.25]), torch.tensor([-0.125, 0.75])]
    total = sum(fixed.units({"w": one}, 1 << 60) for one in others) + fixed.units({"w": victim}, fixed.WHOLE)
    low = (total + (1 << 25)) % (1 << 26) - (1 << 25)
    assert torch.allclose(low / fixed.STEPS, victim)  # what the server would see
    coordinator = Coordinator(tmp_path, federation)
    coordinator.shares = {0: fixed.WHOLE, 1: 1 << 60, 2: 1 << 60}
    coordinator.train()
    with pytest.raises(BadInput, match="all sites together count more than 268435456"):
        coordinator.upload(Masked, 0, "shares", wire.pack(coordinator.roster()))


def test_a_site_does_not_sign_a_sum_that_is_nearly_its_own_weights_once_others_dropped_out(tmp_path, federation):
    """Of four sites, the one that hides the first is said to have dropped out."""
    coordinator = Coordinator(tmp_path, federation, sites=4)
    coordinator.shares = {0: 700, 1: 2, 2: 2, 3: 296}
    coordinator.masked()
    with pytest.raises(BadInput, match=r"0.75 of the weight at most, and it would have 0.99 \(largest_share\)"):
        coordinator.survivors(0, 0, 1, 2)
    assert coordinator.survivors(0, 0, 1, 2, 3).text


def test_a_site_whose_share_is_next_to_nothing_hides_nobody(tmp_path, federation):
    coordinator = Coordinator(tmp_path, federation)
    coordinator.shares = {0: 1 << 26, 1: 1 << 26, 2: 1}
    coordinator.train()
    with pytest.raises(BadInput, match="sums of 3 sites or more, and only 2 count in this one"):
        coordinator.upload(Masked, 0, "shares", wire.pack(coordinator.roster()))


def test_sites_that_trained_from_different_models_or_settings_make_no_sum(tmp_path, federation):
    """A server could have the others send what it knows, such as a model that their images do not change."""
    coordinator = Coordinator(tmp_path, federation)
    coordinator.train()
    coordinator.train(only=2, change=1e-3)
    with pytest.raises(BadInput, match="trained from different models or settings"):
        coordinator.upload(Masked, 0, "shares", wire.pack(coordinator.roster()))
    other = Coordinator(tmp_path / "settings", federation)
    other.train(only=0)
    slow = replace(other.whole.method, local=replace(other.whole.method.local, lr=1e-30))
    other.whole = replace(other.whole, method=slow)
    for client in (1, 2):
        other.train(only=client)
    adverts = [other.upload(masking.Advert, client, "keys") for client in (1, 2)]
    other.whole = coordinator.whole
    roster = other.roster_of(other.upload(masking.Advert, 0, "keys"), *adverts)
    with pytest.raises(BadInput, match="trained from different models or settings"):
        other.upload(Masked, 0, "shares", wire.pack(roster))


def test_a_coordinator_in_the_middle_has_no_key_that_sites_know(tmp_path, federation):
    """It enrols keys of its own in the place of two members, but a site's list was compared by people."""
    coordinator = Coordinator(tmp_path, federation)
    coordinator.train()
    roster = coordinator.roster()
    forger = keys.new_key(tmp_path / "forger", ssh=True)
    forged = masking.advertise(Coordinator.RUN, 1, "local_update", 1, 0, peers.signer(str(tmp_path / "forger"))).advert
    assert forger
    middle = replace(roster, adverts=(roster.adverts[0], forged, roster.adverts[2]))
    with pytest.raises(BadInput, match="client 1's part is not signed by the key that it is known by"):
        coordinator.upload(Masked, 0, "shares", wire.pack(middle))
    (federation.folder / peers.FILE).unlink()
    coordinator.train()
    with pytest.raises(BadInput, match="this site has no list of the other members' keys; `fewlabel site peers`"):
        coordinator.upload(masking.Advert, 0, "keys")


def test_a_list_of_members_must_be_of_this_federation_and_hold_this_sites_key(tmp_path, federation):
    mine, folder = peers.of(federation.folder), federation.folder
    peers.check(mine, folder / members.TRUST, 1, folder / "key1")
    with pytest.raises(BadInput, match="does not have this site's key for client 1"):
        peers.check(mine, folder / members.TRUST, 1, folder / "key2")
    with pytest.raises(BadInput, match="the list is of 'other', which is not this site's federation"):
        peers.check(replace(mine, federation="other"), folder / members.TRUST, 1, folder / "key1")
    twice = replace(mine, members=(mine.members[0], replace(mine.members[0], client=1)))
    (tmp_path / "twice.json").write_text(json.dumps(asdict(twice)))
    with pytest.raises(BadInput, match="two members with one number, or with one key"):
        peers.read(tmp_path / "twice.json")


# Real processes


@pytest.mark.slow
def test_real_processes_with_tls_and_keys_give_the_bits_of_the_simulator(tmp_path):
    """Three sites, and then one of four whose process ends while weights are masked."""
    whole = experiment(*MASKED, *CASES["fedavg"], "clients.count=4")
    data, folder = split(whole, tmp_path / "sites"), tmp_path / "processes"
    configs = [
        {"client": number, "data": str(data / f"client-{number}.npz"), "modules": "tests.nets"}
        | {"state": str(tmp_path / f"state{number}"), "key": str(folder / f"key{number}")}
        | {"peers": str(folder / peers.FILE)}
        for number in range(4)
    ]
    with Members(folder, configs) as processes:
        more = {"patience": 300.0, "deadline": 300.0, "members": str(folder)}
        told = processes.run(federate(whole, data, tmp_path / "run", **more))
        assert (tmp_path / "run" / "model.safetensors").exists(), told
        longer = replace(whole, rounds=3)
        processes.submit(federate(longer, data, tmp_path / "killed", **more))
        until(lambda: len(read_rounds(tmp_path / "killed")) == 1)
        until(lambda: list((tmp_path / "state3").glob(f"*/{masked_site.SESSION}")))
        processes.kill("site3")
        until(lambda: (tmp_path / "killed" / "summary.json").exists())
    assert weights(tmp_path / "run") == weights(simulated(whole, tmp_path / "simulated"))
    assert measured(tmp_path / "run") == measured(tmp_path / "simulated")
    last = read_rounds(tmp_path / "killed")[-1]
    assert {failure["client"] for failure in last["failures"]} == {3}
    assert last["replies"] == 3
