"""The contract: what a method may be, what may cross between server and site, and what BatchNorm's statistics do."""

import math
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import (
    ClientError,
    ClientInfo,
    Federation,
    LabelPlace,
    Model,
    Site,
    batch_statistics,
    broadcast,
)
from fewlabel.core.images import Unlabeled, cut
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import accept, check_method, on_client, on_server, perform, state_kind, task_of, tasks
from fewlabel.core.tree import Tree
from fewlabel.data.images import Images
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.engine.worker import EVALUATION_BATCH
from fewlabel.methods.fedavg import FedAvg, Message
from tests.nets import tiny
from tests.toys import Still


@dataclass(frozen=True)
class Memory:
    step: int


@dataclass(frozen=True)
class Whole(Still):
    """A method with a task of every sort."""

    rate: float = 0.1

    @on_client
    def train(self, site: Site[Memory], msg: Model) -> Model | None:
        return msg

    @on_server
    def distil(self, site: Site[None], item: int) -> float:
        return item / 2

    @on_client
    @on_server
    def count(self, site: Site[Memory], msg: tuple[int, ...]) -> dict[str, Tensor]:
        return {"drawn": torch.rand(msg[0])}

    def unmarked(self, site: Site[None], msg: Model) -> Model:
        return msg


# Tasks


def test_tasks_are_found_with_their_places_and_types():
    found = tasks(Whole)
    assert found.keys() == {"train", "distil", "count"}
    assert found["train"].places == {"client"}
    assert (found["train"].state, found["train"].message, found["train"].upload) == (Memory, Model, Model | None)
    assert found["distil"].places == {"server"}
    assert (found["distil"].state, found["distil"].message, found["distil"].upload) == (type(None), int, float)
    assert found["count"].places == {"client", "server"}


def test_only_a_marked_function_of_the_method_itself_can_be_run():
    method = Whole()
    assert task_of(method, method.train, "client").name == "train"
    for function, place in [
        (method.unmarked, "client"),
        (method.train, "server"),
        (method.distil, "client"),
        (Whole(rate=0.2).train, "client"),
        (Whole.train, "client"),
        (FedAvg().local_update, "client"),
        (print, "client"),
    ]:
        with pytest.raises(BadInput, match=rf"cannot be run: it is not marked @on_{place} in this Whole"):
            task_of(method, function, place)


class Unsendable:
    pass


def method_with(**functions: Any) -> type:
    """A method that is whole but for these functions."""
    return dataclass(frozen=True)(type("Odd", (Whole,), functions))


def unannotated_message(self, site: Site[None], msg) -> Model: ...
def unannotated_return(self, site: Site[None], msg: Model): ...
def unannotated_site(self, site, msg: Model) -> Model: ...
def too_few(self, site: Site[None]) -> Model: ...
def too_many(self, site: Site[None], msg: Model, more: int) -> Model: ...
def misspelt(self, site: "Site[None]", msg: "Modle") -> Model: ...  # noqa: F821
def list_message(self, site: Site[None], msg: list[int]) -> Model: ...
def object_upload(self, site: Site[None], msg: Model) -> Unsendable: ...
def object_state(self, site: Site[Unsendable], msg: Model) -> Model: ...
def any_upload(self, site: Site[None], msg: Model) -> Any: ...


SHAPE = r"Odd.task must be \(self, site: Site\[…\], message: …\) -> …, all annotated"
SENT = "what Odd.task keeps, gets or returns cannot be sent or stored"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (unannotated_message, SHAPE),
        (unannotated_return, SHAPE),
        (unannotated_site, SHAPE),
        (too_few, SHAPE),
        (too_many, SHAPE),
        (misspelt, "an annotation of Odd.task cannot be resolved: name 'Modle' is not defined"),
        (list_message, f"{SENT}: list: list.* cannot be sent; use tuple"),
        (object_upload, f"{SENT}: Unsendable: Unsendable cannot be sent; only frozen dataclasses"),
        (object_state, f"{SENT}: Unsendable: Unsendable cannot be sent"),
        (any_upload, f"{SENT}: .*Any cannot be sent"),
    ],
)
def test_a_task_that_does_not_say_what_it_sends_is_refused_in_a_sentence(function, sentence):
    method = method_with(task=on_client(function))
    for check in (tasks, check_method):
        with pytest.raises(BadInput, match=sentence):
            check(method)


# Methods


def test_a_whole_method_passes():
    check_method(Whole)
    check_method(FedAvg)
    assert state_kind(Whole) is Model


def unannotated_round(self, state, fed): ...
def round_of_list(self, state: Model, fed: Federation) -> list[int]: ...


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (type("Bare", (), {}), "method Bare must be a frozen dataclass; its fields are its settings"),
        (make_dataclass("Thawed", []), "method Thawed must be a frozen dataclass"),
        (make_dataclass("Empty", [], frozen=True), "method Empty lacks label_places, init, round, model"),
        (make_dataclass("Needy", [("mu", float, field(kw_only=True))], bases=(Whole,), frozen=True),
         "method Needy must have a default for mu"),
        (make_dataclass("Lazy", [], frozen=True, namespace={
            n: vars(Still)[n] for n in ("label_places", "init", "round", "model")}),
         "method Lazy has no task marked @on_client or @on_server"),
        (method_with(round=unannotated_round), r"method Odd must say in an annotation what Odd\.round returns"),
        (method_with(round=round_of_list), r"what Odd\.round returns cannot be sent or stored: list: list"),
        (method_with(train=FedAvg.local_update),
         r"method Odd must give the site of all its @on_client tasks one type of state: Site\[…\]"),
    ],
)  # fmt: skip
def test_a_class_that_does_not_keep_the_contract_is_refused_in_a_sentence(method, sentence):
    with pytest.raises(BadInput, match=sentence):
        check_method(method)


def test_settings_are_where_labels_may_be():
    assert [str(setting) for setting in LabelPlace] == ["some-clients", "every-client", "server"]
    assert "server" in frozenset(LabelPlace)


# Jobs and uploads


def test_a_broadcast_lists_the_largest_client_first_and_ties_by_number():
    infos = [ClientInfo(0, 5, 5), ClientInfo(1, 20, 0), ClientInfo(2, 0, 10), ClientInfo(3, 0, 30)]
    message = object()
    jobs = list(broadcast(reversed(infos), message))
    assert [client.id for client, _ in jobs] == [3, 1, 0, 2]
    assert all(sent is message for _, sent in jobs)


def bare_site(**more: Any) -> Site[Any]:
    return Site(ClientInfo(3, 0, 0), **{
        "round": 1, "rounds": 2, "num_classes": 10, "model": nn.Linear(1, 1), "rng": Rng("site")} | more)  # fmt: skip


def test_a_task_runs_from_bytes_to_bytes_with_its_own_random_numbers():
    method = Whole()
    task = tasks(Whole)["count"]
    sites = [bare_site(rng=Rng(key)) for key in ("a", "a", "b")]
    sent = [perform(method, task, site, wire.pack((4,), task.message)) for site in sites]
    assert sent[0] == sent[1] != sent[2]
    assert wire.unpack(task.upload, sent[0])["drawn"].shape == (4,)


def test_a_task_that_returns_nothing_sends_nothing():
    task = tasks(FedAvg)["local_update"]
    message = wire.pack(Message(tree.of(nn.Linear(1, 1))))
    assert perform(FedAvg(), task, bare_site(labeled=None), message) is None


NETWORK = tree.of(tiny(1, 10, 8))


def upload_of(**changes: Tensor) -> bytes:
    return wire.pack(Model(NETWORK | {name.replace("_", ".", 1): value for name, value in changes.items()}))


def test_an_upload_has_all_that_leaves_a_site():
    """With statistics where they leave. One that lacks them where others have them would end the round's average."""
    task, client, alone = tasks(FedAvg)["local_update"], ClientInfo(7, 1, 1), tree.parameters(NETWORK)
    assert accept(task, client, 3, upload_of(), NETWORK).model.keys() == NETWORK.keys()
    assert accept(task, client, 3, wire.pack(Model(alone)), alone).model.keys() == alone.keys() < NETWORK.keys()
    with pytest.raises(ClientError, match=r"its model lacks 1\.num_batches_tracked, 1\.running_mean, 1\.running_var"):
        accept(task, client, 3, wire.pack(Model(alone)), NETWORK)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (upload_of(**{"6_bias": torch.full((16,), math.nan)}), "expected finite values, found NaN or Inf"),
        (upload_of(**{"6_bias": torch.full((16,), -math.inf)}), "expected finite values, found NaN or Inf"),
        (upload_of(**{"1_running_var": torch.full((4,), math.inf)}), "expected finite values, found NaN or Inf"),
        (upload_of(**{"6_bias": torch.zeros(17)}), r"\['6.bias'\]: expected torch.float32 \[16\], found .* \[17\]"),
        (
            upload_of(**{"6_bias": torch.zeros(16).double()}),
            r"expected torch.float32 \[16\], found torch.float64 \[16\]",
        ),
        (upload_of(extra=torch.zeros(1)), r"\['extra'\]: expected no such entry, found torch.float32 \[1\]"),
        (wire.pack(Model({"6.bias": torch.zeros(16)})), r"expected torch.float32 .*, found no such entry"),
        (upload_of()[:-9], "failed|cut short"),
        (b"", "failed|cut short"),
        (wire.pack(Memory(3)), "the field 'model' is missing"),
    ],
)
def test_a_bad_upload_is_refused_by_the_number_of_its_client(data, cause):
    with pytest.raises(
        ClientError, match=r"client 7 failed in 'local_update' of round 3: its upload is refused: "
    ) as e:
        accept(tasks(FedAvg)["local_update"], ClientInfo(7, 1, 1), 3, data, NETWORK)
    assert e.match(cause)
    assert (e.value.client, e.value.task, e.value.round) == (7, "local_update", 3)


# BatchNorm's statistics at a site


def site_with(buffers: str, statistics: Tree | None = None) -> Site[None]:
    """A site whose scratch network is full of another client's leftovers."""
    net = tiny(1, 10, 8)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.fill_(99)
    return bare_site(model=net, buffers=buffers, statistics=statistics)


def filled(value: float) -> Tree:
    return {name: torch.full_like(entry, value) for name, entry in NETWORK.items()}


def holds(found: Tree, expected: Tree) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_global_statistics_come_and_go_with_the_weights():
    site = site_with("global", statistics=tree.statistics(filled(5)))
    assert site.load(filled(2)) is site.model
    assert holds(tree.of(site.model), filled(2))
    assert holds(site.weights(), filled(2))


def test_global_weights_must_be_whole():
    with pytest.raises(RuntimeError, match="running_mean"):
        site_with("global").load(tree.parameters(filled(2)))


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
def test_weights_without_statistics_take_those_of_the_site(buffers):
    own = tree.statistics(filled(5))
    for sent in (filled(2), tree.parameters(filled(2))):
        site = site_with(buffers, own)
        site.load(sent)
        assert holds(tree.of(site.model), tree.parameters(filled(2)) | own)


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
def test_a_site_without_statistics_starts_from_those_sent_or_fresh_ones_never_from_leftovers(buffers):
    site = site_with(buffers)
    site.load(filled(2))
    assert holds(tree.of(site.model), filled(2))
    site.load(tree.parameters(filled(3)))
    assert holds(tree.of(site.model), tree.parameters(filled(3)) | tree.statistics(NETWORK))


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
def test_missing_parameters_are_never_another_clients_leftovers(buffers):
    partial = {name: value for name, value in filled(2).items() if name != "6.bias"}
    with pytest.raises(RuntimeError, match=r"6\.bias"):
        site_with(buffers).load(partial)


def test_a_site_of_local_statistics_begins_with_those_of_its_own_images():
    def begun(buffers: str) -> Tree:
        images = Images(torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=Rng(1).torch), (0.5,), (0.5,))
        site = site_with(buffers)
        site.unlabeled = Unlabeled(images, torch.arange(40), Rng(2).torch)
        return tree.statistics(tree.of(site.load(tree.parameters(NETWORK))))

    assert (begun("local")["1.running_var"] != 1).all()
    assert (begun("recomputed")["1.running_var"] == 1).all()  # where the server has them, it sends them


def test_local_statistics_stay_at_the_site():
    site = site_with("local", tree.statistics(filled(5)))
    site.load(filled(2))
    with torch.no_grad():
        for value in site.model.state_dict().values():
            value.add_(1)
    assert holds(site.weights(), tree.parameters(filled(3)))
    assert holds(site.statistics, tree.statistics(filled(6)))


def test_recomputed_statistics_do_not_leave_the_site_nor_change_by_training():
    pooled = tree.statistics(filled(5))
    site = site_with("recomputed", pooled)
    site.load(filled(2))
    with torch.no_grad():
        for value in site.model.state_dict().values():
            value.add_(1)
    assert holds(site.weights(), tree.parameters(filled(3)))
    assert holds(site.statistics, tree.statistics(filled(5)))


def test_weights_are_a_copy():
    site = site_with("global")
    site.load(filled(2))
    found = site.weights()
    site.load(filled(3))
    assert holds(found, filled(2))


def test_audit_and_score_do_nothing_where_nobody_watches():
    alone = bare_site()
    alone.audit(torch.zeros(1), torch.zeros(1))
    alone.score({})
    assert alone.audited is alone.scored is None
    watched = bare_site(watched=True)
    watched.audit(torch.tensor([3]), torch.tensor([5]), 2)
    watched.score({"w": torch.ones(1)})
    assert watched.audited == [(torch.tensor([3]), torch.tensor([5]), 2)]
    assert watched.scored == [{"w": torch.ones(1)}]


# BatchNorm's statistics of images


def test_batch_statistics_of_one_batch_are_its_mean_and_unbiased_variance():
    # Of 1, 3, 4, 6, 8: the mean is 22/5 = 4.4, the squared distances from it sum to 126 - 22^2/5 = 29.2, and
    # PyTorch's running variance divides them by one less than their number: 29.2/4 = 7.3.
    found = batch_statistics(nn.BatchNorm1d(1), [torch.tensor([[1.0], [3.0], [4.0], [6.0], [8.0]])])
    assert found["running_mean"].item() == pytest.approx(4.4)
    assert found["running_var"].item() == pytest.approx(7.3)
    assert found["num_batches_tracked"] == 1


def test_batch_statistics_of_two_batches_weigh_their_images_and_add_the_variance_of_the_means():
    # 1, 3 have mean 2 and variance 2; 4, 6, 8 have mean 6 and variance 4. Together: mean (2*2 + 3*6)/5 = 4.4 and
    # variance (2*2 + 3*4)/5 + (2/5)(3/5)(6 - 2)^2 = 3.2 + 3.84 = 7.04. It is not 7.3 because each batch divides by one
    # less than its number: of the 500 images in our batches that is nothing.
    found = batch_statistics(nn.BatchNorm1d(1), [torch.tensor([[1.0], [3.0]]), torch.tensor([[4.0], [6.0], [8.0]])])
    assert found["running_mean"].item() == pytest.approx(4.4)
    assert found["running_var"].item() == pytest.approx(7.04)
    assert found["num_batches_tracked"] == 2


def test_batch_statistics_of_images_are_numpys_by_channel():
    images = torch.randn(30, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 4 + 2
    found = batch_statistics(nn.BatchNorm2d(3), [images])
    pixels = images.numpy().astype(np.float64)
    np.testing.assert_allclose(found["running_mean"], pixels.mean(axis=(0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(found["running_var"], pixels.var(axis=(0, 2, 3), ddof=1), rtol=1e-5)


def test_batch_statistics_forget_what_was_there_and_leave_the_rest_of_the_model_as_it_was():
    net, images = tiny(1, 10, 8), torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = tree.parameters(tree.of(net))
    first = batch_statistics(net, [images])
    net.train()
    net(images * 7)
    assert holds(batch_statistics(net, [images]), first)
    assert holds(tree.statistics(tree.of(net)), first)
    assert holds(tree.parameters(tree.of(net)), before)
    assert all(module.training for module in net.modules())
    assert [net[1].momentum, net[7].momentum] == [0.1, 0.1]
    assert all(value.grad is None for value in net.parameters())


def test_batch_statistics_know_no_dropout():
    net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(1))
    before = torch.random.get_rng_state()
    found = batch_statistics(net, [torch.ones(100, 1)])
    assert (found["1.running_mean"], found["1.running_var"]) == (1, 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_fails_keeps_its_momentum():
    norm = nn.BatchNorm1d(1)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        batch_statistics(norm, [torch.ones(1)])
    assert norm.momentum == 0.1


def test_a_model_without_batch_norm_has_no_statistics():
    assert batch_statistics(nn.Linear(1, 1), [torch.ones(2, 1)]) == {}


def test_statistics_pooled_over_clients_are_those_of_all_their_images(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an older version of the data may lie in the user's
    # One client has the dark images and the other the bright ones, so that most of the variance is between them.
    changes = ("data=tests.owndata:shades", "data.image_size=8", "clients.alpha=0.001", "clients.balanced=false")
    simulation = Server(run_dir("model=tests.nets:tiny", "clients.count=2", *changes), Serial())
    sizes = [client.size for client in simulation.clients]
    assert sorted(sizes) == [100, 200]
    pooled = simulation._recompute(simulation.initial)
    train = simulation.world.dataset.splits["train"].images
    images = train.view(torch.arange(len(train.pixels)), "plain", torch.Generator())
    with torch.no_grad():
        seen = nn.functional.conv2d(images.double(), simulation.initial["0.weight"].double(), stride=2, padding=1)
    mean, variance = seen.mean(dim=(0, 2, 3)), seen.var(dim=(0, 2, 3))
    # The first BatchNorm, because what the second sees depends on the batches of the first. Single precision holds 24
    # bits, and about a thousand times less after a sum of this many values.
    torch.testing.assert_close(pooled["1.running_mean"].double(), mean, rtol=1e-4, atol=1e-5)
    # A variance of n values is too large by n/(n - 1) to be added to others as it is, in each batch of each client:
    # the pooled one may differ by 1/(n - 1), where n is the pixels that the smallest batch has after the convolution.
    batches = [len(batch) for size in sizes for batch in cut(torch.arange(size), EVALUATION_BATCH)]
    smallest = min(batches) * seen[0, 0].numel()
    torch.testing.assert_close(pooled["1.running_var"].double(), variance, rtol=1 / (smallest - 1) + 1e-5, atol=0)


# Whole runs under each policy


def weights(directory) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def lines(directory) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not key.startswith("seconds")} for line in read_rounds(directory)
    ]


@pytest.mark.parametrize("buffers", ["global", "local", "recomputed"])
def test_a_run_has_the_same_bits_in_one_process_and_in_two_whatever_happens_to_statistics(run_dir, pool, buffers):
    # Two of four clients take part in a round, so some come late, to a scratch network that others have used.
    changes = (
        "model=tests.nets:tiny", f"model.buffers={buffers}", "clients.count=4", "clients.per_round=2", "rounds=4",
        "labels.at=every-client", "labels.fraction=0.3", "evaluate.every=1", "evaluate.local=true",
    )  # fmt: skip
    alone, together = run_dir(*changes), run_dir(*changes)
    execute(alone, workers=1)
    execute(together, executor=pool)
    assert weights(alone) == weights(together)
    assert lines(alone) == lines(together)


def uploads(run_dir, monkeypatch, buffers: str) -> tuple[Server, list[Tree]]:
    """All that clients sent in a run of two rounds."""
    from fewlabel.engine import rounds

    sent: list[Tree] = []

    def spy(*arguments: Any) -> Any:
        upload = accept(*arguments)
        sent.append(upload.model)
        return upload

    monkeypatch.setattr(rounds, "accept", spy)
    directory = run_dir("model=tests.nets:tiny", f"model.buffers={buffers}", "rounds=2", "labels.clients=3")
    execute(directory, workers=1)
    return Server(directory, Serial()), sent


@pytest.mark.parametrize(("buffers", "leave"), [("global", True), ("local", False), ("recomputed", False)])
def test_statistics_leave_a_client_under_the_global_policy_alone(run_dir, monkeypatch, buffers, leave):
    simulation, sent = uploads(run_dir, monkeypatch, buffers)
    assert len(sent) == 6
    expected = simulation.initial if leave else tree.parameters(simulation.initial)
    assert all(one.keys() == expected.keys() for one in sent)


def test_under_the_local_policy_a_client_keeps_its_statistics_from_round_to_round(run_dir):
    directory = run_dir("model=tests.nets:tiny", "model.buffers=local", "rounds=3", "labels.clients=1")
    execute(directory, workers=1)
    simulation = Server(directory, Serial())
    images = simulation.clients[0].num_labeled
    kept = sorted((directory / "clients" / "0").iterdir())[-1].read_bytes()
    Stored = make_dataclass("Stored", [("state", type(None)), ("statistics", Tree | None)], frozen=True)  # noqa: N806
    statistics = wire.unpack(Stored, kept).statistics
    # One for the statistics to begin with, and one more for each step: 3 rounds of one epoch in batches of 32.
    steps = 1 + 3 * len(torch.split(torch.arange(images), 32)) - 3 * (images % 32 == 1)
    assert statistics["1.num_batches_tracked"] == steps
