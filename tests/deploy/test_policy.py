"""A site's own policy: what it refuses, in which words, what it keeps of a run, and how it asks and withdraws."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.cli.main import main
from fewlabel.core import schema, wire
from fewlabel.core.errors import BadInput
from fewlabel.deploy import experiments, policy, site_folder
from fewlabel.deploy import site as deployed
from fewlabel.deploy.messages import Order, Refused
from fewlabel.deploy.nodes import Nodes
from fewlabel.deploy.server import serve
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.engine.executor import Job
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import Experiment, Labels, Net, dumps
from fewlabel.methods import METHODS
from tests.deploy.federated import experiment, federate, local_grid, simulated, split, weights


def fresh(folder: Path) -> policy.Policy:
    policy.write_fresh(folder)
    return policy.load(str(folder / policy.FILE))


@pytest.mark.parametrize("name", METHODS)
def test_a_fresh_policy_allows_every_method_as_the_recipe_trains_it(name, tmp_path):
    place = sorted(METHODS[name].label_places, key=lambda place: place != "some-clients")[0]
    whole = Experiment(method=name, train="fewlabel", labels=Labels(at=place.value), rounds=100)
    assert list(policy.objections(fresh(tmp_path), whole, labeled=9)) == []


def test_a_fresh_policy_is_a_file_that_is_read_as_it_says(tmp_path):
    found = fresh(tmp_path)
    assert (found.least_batch, found.least_steps, found.largest_rate, found.ask) == (8, 2, 0.1, "never")
    assert (found.evaluate.least, found.evaluate.most, found.most_runs) == (50, 500, 20)
    assert found.last_day() is not None
    text = (tmp_path / policy.FILE).read_text()
    assert {*tomllib.loads(text)} == {*vars(found)} - {"privacy"}  # it names every setting
    # What its comments offer can be turned on as they say.
    assert tomllib.loads(text.replace("\n# [", "\n[").replace("\n# eps", "\neps"))["privacy"] == {"epsilon": 3.0}


def test_a_fresh_policy_lets_no_exact_statistics_leave(tmp_path):
    whole = Experiment(method="fedavg", model=Net("resnet18", buffers="recomputed"))
    sentence = "no exact statistics of images leave it, and model.buffers = 'recomputed' (statistics)"
    assert list(policy.objections(fresh(tmp_path), whole)) == [sentence]
    assert list(policy.objections(policy.Policy(), whole)) == []


OBJECTIONS = {
    "held out": (
        {"held_out": False},
        "no exact counts over held-out labels leave it: set labels.held_out = 0, not 0.1 (held_out)",
    ),
    "methods": ({"methods": ("rscfed",)}, "its methods are rscfed, and this is fedavg (methods)"),
    "networks": ({"networks": ("resnet18",)}, "its networks are resnet18, and this is simple-cnn (networks)"),
    "rounds": ({"most_rounds": 29}, "it takes part for 29 rounds, and rounds = 30 (most_rounds)"),
    "epochs": ({"most_epochs": 4}, "it trains for 4 epochs at most, and method.local.epochs = 5 (most_epochs)"),
    "rate": ({"largest_rate": 0.02}, "its largest learning rate is 0.02, and method.local.lr = 0.03 (largest_rate)"),
    "batch": ({"least_batch": 33}, "its smallest batch has 33 images, and method.local.batch_size = 32 (least_batch)"),
    "until": ({"until": "2020-02-29"}, "it takes part until 2020-02-29, and that day is over (until)"),
}


@pytest.mark.parametrize("what", OBJECTIONS)
def test_each_limit_refuses_in_a_sentence_with_its_name(what):
    limits, sentence = OBJECTIONS[what]
    whole = Experiment(method="fedavg", train="fewlabel", labels=Labels(held_out=0.1))
    assert list(policy.objections(policy.Policy(), whole)) == []
    assert sentence in list(policy.objections(policy.Policy(**limits), whole))
    with pytest.raises(Refused, match="the policy of this site does not allow it: "):
        policy.check(policy.Policy(**limits), whole)


def test_batches_are_not_made_smaller_than_a_quarter_of_few_labels():
    """The recipe has 4 batches in a pass: with 20 labels, 5 images. A coordinator may not ask for 10 batches of 2."""
    limits, whole = policy.Policy(least_batch=8), Experiment(method="fedavg", train="fewlabel")
    assert list(policy.objections(limits, whole, labeled=20)) == []
    many = replace(whole, train=replace(whole.train, batches=10))
    assert list(policy.objections(limits, many, labeled=20)) == [
        "with train.batches = 10 its batches would have 2 images (least_batch)"
    ]
    assert list(policy.objections(limits, many, labeled=800)) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("most_run = 3", "policy.toml: unknown setting 'most_run'; did you mean 'most_runs'?"),
        ("methods = ['rscfd']", "there is no method 'rscfd'; did you mean 'rscfed'?"),
        ("networks = ['resnet1']", "there is no network 'resnet1'; did you mean 'resnet18'?"),
        ("until = 'soon'", "until must be a day such as '2027-12-31', found 'soon'"),
        ("ask = 'always'", "ask must be one of never, once, every-run"),
        ("largest_rate = 0", "largest_rate must be above 0, found 0"),
        ("evaluate.least = 0", "evaluate.least must be at least 1, found 0"),
        ("][", "policy.toml cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_is_named_with_its_file(text, sentence, tmp_path):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(BadInput) as error:
        policy.load(str(tmp_path / "policy.toml"))
    assert sentence in str(error.value)
    assert "policy.toml" in str(error.value)


# At a site


@pytest.fixture
def sites(tmp_path):
    """An experiment, what its sites hold, and the file of client 0's policy."""
    whole = experiment("method=labels-only", "labels.clients=2", "rounds=2")
    data = split(whole, tmp_path / "sites")
    return whole, data, tmp_path / "policy.toml"


def grid(data: Path, state: Path, file: Path):
    found = local_grid(data, state)
    found.configs[7000]["policy"] = str(file)
    return found


def ask(
    config: dict, whole: Experiment, data: Path, kind: str = "info", run: str = "b" * 32, message: bytes = b"", **job
):
    order = Order(dumps(whole), deployed.load_terms(data), Job(run, kind, client=config["client"], **job))
    return deployed.reply(config, {"order": wire.pack(order), "message": message})


EXACT_GRADIENT = ("method.local.lr=1.0", "method.local.batch_size=100000", "method.local.momentum=0.0")


def test_a_full_batch_at_rate_1_is_refused_and_both_sides_see_why(sites, tmp_path, capfd):
    _, data, file = sites
    policy.write_fresh(tmp_path)
    exact = experiment("method=labels-only", "labels.clients=2", *EXACT_GRADIENT)
    nodes = Nodes(here := grid(data, tmp_path / "state", file), federated_plan(exact, data, tmp_path), exact)
    nodes.look()
    nodes.look()
    sentence = "its largest learning rate is 0.1, and method.local.lr = 1 (largest_rate)"
    assert sentence in nodes.refused[7000]  # at the coordinator
    assert f"fewlabel: refused info: the policy of this site does not allow it: {sentence}" in capfd.readouterr().err
    assert sorted(claim.info.id for claim in nodes.claims.values()) == [1, 2, 3]  # who has no policy takes part
    assert here.orders("client") == []


def federated_plan(whole: Experiment, data: Path, folder: Path):
    from fewlabel.deploy.run_plan import load_plan

    return load_plan(federate(whole, data, folder / "planned"))


def test_one_full_batch_step_at_a_small_rate_leaves_no_site_either(sites, tmp_path):
    """Weights after a single step are the gradient, whatever the rate."""
    _, data, file = sites
    policy.write_fresh(tmp_path)
    step = experiment("method=labels-only", "labels.clients=2", "rounds=1", "method.local.batch_size=100000")
    serve(grid(data, tmp_path / "state", file), run := federate(step, data, tmp_path / "run"))
    (failure,) = read_rounds(run)[0]["failures"]
    assert failure["client"] == 0
    assert "it made 1 step of training, and weights leave after 2 or more" in failure["why"]
    record = experiments.load(tmp_path / "state" / "client-0", run_name(run))
    assert record is None or "local_update" not in record.sent


def run_name(run: Path) -> str:
    from fewlabel.deploy.run_plan import load_plan

    return load_plan(run).run


def test_a_rate_that_comes_in_a_message_is_refused_as_well(sites, tmp_path):
    """FedAvg's message has a factor of the learning rate, so the settings alone do not bound it."""
    from fewlabel.core import tree
    from fewlabel.methods.fedavg import Message
    from tests.nets import tiny

    whole, data, file = sites
    policy.write_fresh(tmp_path)
    config = grid(data, tmp_path / "state", file).configs[7000]
    network = tree.of(tiny(1, 10, 16))
    for rate, said in ((1.0, "upload"), (1000.0, "refused")):
        found = ask(
            config, whole, data, "client", round=1, task="local_update", message=wire.pack(Message(network, rate))
        )
        assert [*found] == [said], found
    assert found["refused"] == "the largest learning rate here is 0.1, and the task asks for 30 (largest_rate)"


def test_a_site_takes_part_in_so_many_runs_and_keeps_each_as_a_file_that_can_be_read(sites, tmp_path):
    whole, data, file = sites
    file.write_text("most_runs = 1\n")
    serve(grid(data, tmp_path / "state", file), run := federate(whole, data, tmp_path / "run"))
    state = tmp_path / "state" / "client-0"
    table = tomllib.loads((state / "experiments" / f"{run_name(run)}.toml").read_text())
    assert table["experiment"]["rounds"] == 2
    assert table["experiment"]["method"]["local"]["batch_size"] == 32
    assert table["sent"]["local_update"]["replies"] == 2
    assert (table["sent"]["local_update"]["first_round"], table["sent"]["local_update"]["last_round"]) == (1, 2)
    simulated(whole, tmp_path / "simulated")
    assert weights(run) == weights(tmp_path / "simulated")
    config = grid(data, tmp_path / "state", file).configs[7000]
    assert "it takes part in 1 runs, and had as many (most_runs)" in ask(config, whole, data)["refused"]
    assert "upload" in ask(config, whole, data, run=run_name(run))  # a run that goes on is no new one


# Approval


@pytest.mark.parametrize("how", ["once", "every-run"])
def test_a_person_approves_what_will_run(how, sites, tmp_path, capsys):
    whole, data, file = sites
    folder = tmp_path / "folder"
    folder.mkdir()
    state = tmp_path / "state" / "client-0"
    place = SiteConfig(0, str(data / "client-0.npz"), str(state), modules="tests.nets", policy=str(file))
    site_folder.write(folder, site_folder.SiteFile("north", "", "", place))
    file.write_text(f"ask = '{how}'\n")
    config = vars(place)
    told = ask(config, whole, data)["refused"]
    assert "a person at this site approves" in told
    assert "fewlabel site approve" in told
    assert ask(config, whole, data)["refused"] == told  # asked again, it waits once
    assert main(["site", "approve", str(folder)]) == 2  # there is nobody to ask
    shown = capsys.readouterr()
    assert "add --yes" in shown.err
    assert "method    labels-only, for 2 rounds" in shown.out
    assert "network   tests.nets:tiny" in shown.out
    assert "lr 0.03" in shown.out
    assert "If you take part in 'labels-only', this leaves your site." in shown.out
    assert main(["site", "approve", str(folder), "--yes"]) == 0
    assert "upload" in ask(config, whole, data)
    assert tomllib.loads((state / "experiments" / f"{'b' * 32}.toml").read_text())["approved"]
    again = ask(config, whole, data, run="c" * 32)
    assert ("upload" in again) == (how == "once")
    changed = replace(whole, rounds=3)
    assert "a person at this site" in ask(config, changed, data, run="d" * 32)["refused"]
    assert main(["site", "approve", str(folder), "--yes"]) == 0
    assert "upload" in ask(config, changed, data, run="d" * 32)


def test_a_server_cannot_fill_the_disk_with_runs_that_wait(sites, tmp_path):
    whole, data, file = sites
    file.write_text("ask = 'every-run'\n")
    config = grid(data, tmp_path / "state", file).configs[7000]
    for number in range(20):
        ask(config, whole, data, run=f"{number:032x}")
    assert ask(config, whole, data, run="f" * 32) == {"refused": "20 runs wait for approval at this site already"}


# Leaving


def test_who_withdraws_learns_what_was_sent_and_refuses_from_then_on(sites, tmp_path, capsys):
    whole, data, file = sites
    serve(grid(data, tmp_path / "state", file), federate(whole, data, tmp_path / "run"))
    folder, state = tmp_path / "folder", tmp_path / "state" / "client-0"
    folder.mkdir()
    place = SiteConfig(0, str(data / "client-0.npz"), str(state), modules="tests.nets")
    site_folder.write(folder, site_folder.SiteFile("north", str(folder), str(folder / "key"), place))
    assert main(["site", "leave", str(folder), "--withdraw"]) == 0
    shown = capsys.readouterr().out
    assert "(labels-only): 2 x local_update in rounds 1 to 2 (" in shown
    assert "a model that learned from your images does not unlearn them" in shown
    assert ask(vars(place), whole, data) == {"refused": "this site has withdrawn from the federation"}
    assert main(["site", "join", str(folder), "--insecure"]) == 2
    assert "this site has withdrawn; to take part again, remove" in capsys.readouterr().err


def test_a_folder_without_a_policy_is_as_it_was(tmp_path):
    assert policy.load("") == policy.load(str(tmp_path / "policy.toml")) == policy.Policy()
    assert schema.plain(policy.Policy()) == {
        "methods": [],
        "networks": [],
        "statistics": True,
        "held_out": True,
        "masked": False,
        "largest_share": 0.75,
        "ask": "never",
        "evaluate": {"least": 50, "most": 500},
    }
