"""Labels that people add at a site: a run uses them as they were when it began, and tells only how many there are."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewlabel.core import wire
from fewlabel.core.errors import BadInput
from fewlabel.data.added import NUMBERED
from fewlabel.deploy import members, run_plan, site_labels, wishes
from fewlabel.deploy import site as deployed
from fewlabel.deploy.messages import Order, Refused
from fewlabel.deploy.server import serve
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.engine.executor import Job
from fewlabel.engine.world import World
from fewlabel.experiment import dumps, read
from tests.deploy.federated import SMALL, experiment, federate, grey, lines, local_grid, simulated, split
from tests.deploy.test_site import CONFIG, TERMS

HEAD = "path,label,who,when,seconds,note\n"


@pytest.fixture
def config(tmp_path):
    for number in range(4):
        grey(tmp_path / "site" / "unlabeled" / f"{number}.png", 10 * number)
    grey(tmp_path / "site" / "cat" / "9.png", 90)
    return SiteConfig(0, str(tmp_path / "site"), str(tmp_path / "state"), labels=str(tmp_path / "labels.csv"))


def held(config: SiteConfig, run: str = "") -> tuple[int, int]:
    info = deployed.site_world(config, experiment("method=rscfed"), TERMS, run).info(0, 1)
    return info.num_labeled, info.num_unlabeled


def test_a_site_trains_with_the_labels_that_its_people_added(config, tmp_path):
    assert held(config) == (1, 4)
    (tmp_path / "labels.csv").write_text(
        f"{HEAD}site/unlabeled/2.png,dog,ann,t,1,\nsite/unlabeled/0.png,bee,ann,t,1,\n"
    )
    assert held(config) == (3, 2)
    world = deployed.site_world(config, experiment("method=rscfed"), TERMS)
    # The site's own label first, then those that were added, in the order of the images: 0 is a bee (2), 2 a dog (0).
    assert world.known_labels[torch.from_numpy(world.partition.shares[0].labeled)].tolist() == [1, 2, 0]


def test_a_run_keeps_the_labels_that_were_there_when_it_began(config, tmp_path):
    run = "0" * 32
    site_labels.keep(config, run)
    (tmp_path / "labels.csv").write_text(f"{HEAD}site/unlabeled/2.png,dog,ann,t,1,\n")
    assert held(config, run) == (1, 4)
    assert held(config) == (2, 3)
    later = "1" * 32
    site_labels.keep(config, later)
    (tmp_path / "labels.csv").unlink()
    assert held(config, later) == (2, 3)
    site_labels.keep(config, later)  # again, after a restart
    assert held(config, later) == (2, 3)


@pytest.mark.parametrize("method", ["labels-only", "tutor"])
def test_labels_added_at_sites_give_the_bits_of_a_simulation_with_the_same_labels(method, tmp_path):
    whole = experiment(f"method={method}")
    data = split(whole, tmp_path / "sites", "folder")
    plain = simulated(whole, tmp_path / "plain")
    world = World.open(plain)
    y, classes = world.dataset.splits["train"].labels, world.dataset.classes
    grid = local_grid(data, tmp_path / "state")
    rows = []
    for node, given in grid.configs.items():
        share = world.partition.shares[given["client"]]
        files = sorted((Path(given["data"]) / "unlabeled").glob("*.png"))
        assert len(files) == len(share.unlabeled)
        table = tmp_path / f"{node}.csv"
        chosen = [(n, classes[y[share.unlabeled[n]]]) for n in range(0, min(20, len(files)), 3)]
        table.write_text(HEAD + "".join(f"{files[n]},{label},ann,t,1,\n" for n, label in chosen))
        rows += [f"{NUMBERED.format(share.unlabeled[n])},{label},ann,t,1,\n" for n, label in chosen]
        given["labels"] = str(table)
    (tmp_path / "all.csv").write_text(HEAD + "".join(rows))
    serve(grid, federate(whole, data, tmp_path / "flower"))
    added = read({}, [*SMALL, f"method={method}", f"labels.file={tmp_path / 'all.csv'}"])
    simulated(added, tmp_path / "simulated")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("flower", "simulated"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert lines(tmp_path / "flower") == lines(tmp_path / "simulated")
    before = load_file(plain / "model.safetensors")
    assert not all(torch.equal(found[name], before[name]) for name in before)  # the labels were used


def test_a_server_can_name_no_file_at_a_site(tmp_path):
    (tmp_path / "secret.csv").write_text("a secret\n")
    text = dumps(experiment("model=simple-cnn"))
    text = text.replace("[labels]\n", f'[labels]\nfile = "{tmp_path / "secret.csv"}"\n')
    with pytest.raises(Refused, match="a site adds its own labels, and opens no file that others name"):
        deployed.checked(CONFIG, wire.pack(Order(text, TERMS, Job("0" * 32, "info"))))
    (tmp_path / "l.csv").write_text(f"{HEAD}train[1],1,ann,t,1,\n")
    with pytest.raises(BadInput, match=r"labels\.file is for simulations; a site adds its own"):
        run_plan.prepare(experiment(f"labels.file={tmp_path / 'l.csv'}"), tmp_path / "run", TERMS)


def test_what_the_coordinator_asks_for_is_told_to_people_and_to_nobody_else(config, tmp_path):
    assert site_labels.sentence(tmp_path, config) == ""
    site_labels.note_wanted(config, 3)
    told = site_labels.sentence(tmp_path, config)
    assert told.startswith("the coordinator asks for 3 more labels; if you agree: fewlabel label ")
    assert told.endswith("--count 3")
    (tmp_path / "labels.csv").write_text(
        f"{HEAD}site/unlabeled/0.png,dog,ann,t,1,\nsite/unlabeled/1.png,dog,ann,t,1,\nsite/unlabeled/1.png,cat,bob,t,1,\n"
    )
    told = site_labels.sentence(tmp_path, config)
    assert (
        f"1 label added in {tmp_path / 'labels.csv'}; people disagree about 1 image, which count as unlabeled" in told
    )
    assert told.endswith("--count 2")
    site_labels.note_wanted(config, 3)  # the same wish again, in the next round
    assert site_labels.sentence(tmp_path, config).endswith("--count 2")
    site_labels.note_wanted(config, 1)
    assert site_labels.sentence(tmp_path, config).endswith("--count 1")
    site_labels.note_wanted(config, 0)
    assert site_labels.wanted(config) is None


def test_a_wish_travels_with_the_orders_of_a_run_and_too_large_a_one_is_refused(tmp_path):
    whole = experiment("method=labels-only", "rounds=1", "labels.clients=2")
    data = split(whole, tmp_path / "sites")
    grid = local_grid(data, tmp_path / "state")
    first = next(iter(grid.configs.values()))
    order = Order(
        dumps(whole), deployed.load_terms(data), Job("0" * 32, "client", "local_update", client=0, round=1), 7
    )
    config = SiteConfig(**first)
    checked = deployed.checked(config, wire.pack(order))
    with pytest.raises(Refused):  # an empty message: nothing is trained, but the wish has arrived
        deployed.carry_out(config, *checked, b"", None)
    assert site_labels.wanted(config) == site_labels.Wanted(7)
    with pytest.raises(Refused, match="nobody adds 10000000 labels"):
        deployed.checked(config, wire.pack(replace(order, wanted=10**7)))
    with pytest.raises(Refused, match="nobody adds -1 labels"):
        deployed.checked(config, wire.pack(replace(order, wanted=-1)))


def test_the_coordinator_keeps_what_sites_report_and_what_they_are_asked_for(tmp_path):
    assert wishes.read(tmp_path) == wishes.Labels()
    wishes.change(tmp_path, reported={0: 12, 1: 0})
    wishes.change(tmp_path, wanted={1: 50})
    wishes.change(tmp_path, reported={1: 3})
    assert wishes.read(tmp_path) == wishes.Labels({"0": 12, "1": 3}, {"1": 50})
    wishes.change(tmp_path, wanted={1: 0})
    assert wishes.read(tmp_path).wanted == {}
    assert json.loads((tmp_path / wishes.FILE).read_text())["reported"] == {"0": 12, "1": 3}
    assert members.reported(tmp_path) == {}
