"""Sites agree on what they train, refuse what they did not agree to, and say before what will leave them."""

import csv
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.cli.main import main
from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.core.federation import ClientInfo, Model, TooFewReplies
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import tasks
from fewlabel.data.site_files import Pixels, Terms, moments
from fewlabel.deploy import run_plan
from fewlabel.deploy import site as deployed
from fewlabel.deploy.consent import consent, consent_to_all, consented
from fewlabel.deploy.messages import Order, Refused
from fewlabel.deploy.server import serve
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.engine import checkpoint
from fewlabel.engine.executor import Job
from fewlabel.engine.record import read_rounds
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment, Net, dumps
from fewlabel.methods import METHODS
from tests.data.test_own import dicom
from tests.deploy.federated import experiment, federate, grey, local_grid, reply_with, simulated, split, weights
from tests.nets import tiny

TERMS = Terms(("dog", "cat", "bee", "ant"), 1, 4, (0.5,), (0.25,))
CONFIG = SiteConfig(0, "", "")


def site(path: Path, terms: Terms = TERMS):
    """A site's splits as its world has them."""
    config = replace(CONFIG, data=str(path))
    return deployed.site_world(config, Experiment(method="rscfed"), terms).dataset.splits


def by_pixel(split) -> dict[int, int]:
    """The label of each image, which is known by the grey that it is."""
    return dict(zip(split.images.pixels[:, 0, 0, 0].tolist(), split.labels.tolist(), strict=True))


# Labels


def test_a_site_needs_no_labels_and_no_list_of_classes(tmp_path):
    for number in (2, 0, 1):
        grey(tmp_path / "site" / "unlabeled" / f"{number}.png", 10 * number)
    config = SiteConfig(0, str(tmp_path / "site"), str(tmp_path / "state"))
    world = deployed.site_world(config, Experiment(method="rscfed"), TERMS)
    assert world.info(0, 1) == ClientInfo(0, 0, 3)
    images = world.site(0, 1, Rng(0), torch.nn.Identity()).unlabeled
    assert images is not None
    ((x, _),) = images.batches(("plain",), 3, shuffle=False)
    assert [round(float(v), 4) for v in x[:, 0, 0, 0]] == [round((10 * n / 255 - 0.5) / 0.25, 4) for n in range(3)]


def test_sites_whose_folders_have_different_classes_mean_the_same_by_a_label(tmp_path):
    for number, (where, label) in enumerate([("a", "ant"), ("a", "dog"), ("b", "bee"), ("b", "ant")]):
        grey(tmp_path / where / label / "1.png", number)
    assert by_pixel(site(tmp_path / "a")["train"]) == {0: 3, 1: 0}
    assert by_pixel(site(tmp_path / "b")["train"]) == {2: 2, 3: 3}


def test_labels_of_a_table_count_by_name_and_those_to_test_on_stay_apart(tmp_path):
    rows = [("image", "label", "split"), ("0.png", "bee", "train"), ("1.png", "", "train"), ("2.png", "cat", "test")]
    for row in rows[1:]:
        grey(tmp_path / row[0], int(row[0][0]))
    with (tmp_path / "table.csv").open("w") as file:
        csv.writer(file).writerows(rows)
    found = site(tmp_path / "table.csv")
    assert by_pixel(found["train"]) == {0: 2, 1: -1}
    assert by_pixel(found["test"]) == {2: 1}


def test_labels_that_nobody_else_knows_are_named_with_those_that_are_known(tmp_path):
    for label in ("ant", "Cat", "wasp"):
        grey(tmp_path / label / "1.png", 1)
    with pytest.raises(
        BadInput, match=r"has images of 'Cat', 'wasp', which are no classes .* it has dog, cat, bee, an"
    ):
        site(tmp_path)


def test_a_class_whose_name_no_folder_can_have_is_known_by_its_folder(tmp_path):
    grey(tmp_path / "ant-bee" / "1.png", 5)
    terms = replace(TERMS, classes=("cat", "ant/bee"))
    assert by_pixel(site(tmp_path, terms)["train"]) == {5: 1}


def test_an_image_to_train_on_is_not_tested_on(tmp_path):
    grey(tmp_path / "train" / "ant" / "1.png", 5)
    grey(tmp_path / "test" / "ant" / "2.png", 5)
    with pytest.raises(BadInput, match="different splits for 1 image"):
        site(tmp_path)


def test_a_site_has_images_to_train_on(tmp_path):
    grey(tmp_path / "test" / "ant" / "1.png", 5)
    with pytest.raises(BadInput, match="has no images to train on"):
        site(tmp_path)


# Brightness


def test_an_image_of_more_than_eight_bits_is_as_bright_at_every_site(tmp_path):
    """1000 of 4095 is 62.3 of 255, whatever else a site has."""
    for where, other in (("a", 1001), ("b", 65535)):
        grey(tmp_path / where / "ant" / "1.png", 1000, "I;16")
        grey(tmp_path / where / "dog" / "2.png", other, "I;16")
    grey(tmp_path / "eight" / "ant" / "1.png", 200)
    terms = replace(TERMS, values=(0.0, 4095.0))
    assert by_pixel(site(tmp_path / "a", terms)["train"]) == {62: 3, 62: 0}  # noqa: F601
    assert by_pixel(site(tmp_path / "b", terms)["train"]) == {62: 3, 255: 0}
    assert by_pixel(site(tmp_path / "eight", terms)["train"]) == {200: 3}
    with pytest.raises(
        BadInput, match=r"more than eight bits, .* `values`, of which this site's need \[0.0, 65535.0\]"
    ):
        site(tmp_path / "b")


def test_dicom_of_every_site_is_seen_through_the_window_of_the_terms(tmp_path):
    """A window of 81 around 40 goes from -0.5 to 79.5, in which 40 is 40.5 * 255 / 80 = 129.1, whatever a file says."""
    for where, own in (("a", 100), ("b", 1000)):
        pixels = np.full((4, 4), 40, np.uint16)
        dicom(tmp_path / where / "ant" / "1.dcm", pixels, WindowCenter=own, WindowWidth=own)
        found = site(tmp_path / where, replace(TERMS, window=(40.0, 81.0)))
        assert by_pixel(found["train"]) == {129: 3}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"classes": ("a",)}, "two classes or more"),
        ({"classes": ("a", "b", "a")}, "each once"),
        ({"channels": 0}, "a channel or more"),
        ({"image_size": 10**6}, "a size up to 4096"),
        ({"mean": None}, "or neither is given"),
        ({"mean": (0.5, 0.5)}, "mean and std are 1 numbers each"),
        ({"std": (0.0,)}, "each std must be above 0"),
        ({"values": (5.0, 5.0)}, "values are two numbers"),
        ({"window": (40.0,)}, "a window is two numbers"),
    ],
)
def test_terms_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(BadInput, match=said):
        replace(TERMS, **wrong)


# Mean and std


def test_mean_and_std_of_all_sites_by_hand():
    """In 0..1 one site has 0, 1, 0, 1 and the other eight times 0.2.

    The mean is 3.6 / 12 = 0.3, the variance (2 + 8 * 0.04) / 12 - 0.09 = 0.10333...
    """
    first = Pixels.of(np.array([0, 255, 0, 255], np.uint8).reshape(1, 1, 2, 2))
    second = Pixels.of(np.full((2, 1, 2, 2), 51, np.uint8))
    assert (first, second) == (Pixels(4, (510,), (130050,)), Pixels(8, (408,), (20808,)))
    mean, std = moments([first, second])
    assert mean == (0.3,)
    assert std == (pytest.approx(math.sqrt(0.31 / 3), rel=1e-15),)


def test_channels_are_summed_apart_and_an_even_one_has_a_deviation_that_can_be_divided_by():
    pixels = np.stack([np.full((2, 2), value, np.uint8) for value in (0, 51, 255)])[None]
    assert moments([Pixels.of(pixels)]) == ((0.0, 0.2, 1.0), (1e-6, 1e-6, 1e-6))


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (Pixels(15, (100,), (2000,)), "it sums 15 pixels, but 1 images have 16"),
        (Pixels(16, (100, 100), (2000, 2000)), "in 1 channels"),
        (Pixels(16, (-1,), (1,)), "not those of pixels"),
        (Pixels(16, (100,), (100,)), "not those of pixels"),  # less than if all were alike
        (Pixels(16, (100,), (25501,)), "not those of pixels"),  # more than if all were black or white
    ],
)
def test_sums_that_cannot_be_are_refused(sums, said):
    Pixels(16, (100,), (2000,)).check(TERMS, 1)
    with pytest.raises(BadInput, match=said):
        sums.check(TERMS, 1)


@pytest.fixture
def sites(tmp_path):
    """An experiment, and what its sites hold."""
    whole = experiment("method=labels-only", "labels.clients=2", "rounds=2", "clients.min_replies=2")
    return whole, split(whole, tmp_path / "sites")


def test_mean_and_std_that_terms_leave_open_are_those_of_the_simulator_and_asked_for_once(sites, tmp_path):
    whole, data = sites
    terms = replace(deployed.load_terms(data), mean=None, std=None)
    run = run_plan.prepare(whole, tmp_path / "run", terms, data=str(data))

    def meddle(job, reply):
        return reply_with(reply, failed="OSError") if job.round == 2 else reply

    first = local_grid(data, tmp_path / "state", meddle=meddle)
    with pytest.raises(TooFewReplies):
        serve(first, run)
    found, wanted = deployed.load_terms(run), dataset_of(whole).splits["train"].images
    assert found.mean == pytest.approx(wanted.mean, rel=1e-12)
    assert found.std == pytest.approx(wanted.std, rel=1e-12)
    assert [order.job.client for order in first.orders("pixels")] == [0, 1, 2, 3]
    serve(again := local_grid(data, tmp_path / "state"), run)
    assert again.orders("pixels") == []
    assert {order.terms.mean for order in first.orders("client") + again.orders("client")} == {found.mean}
    assert deployed.load_terms(run) == found


def test_a_site_that_gives_no_sums_is_named(sites, tmp_path):
    whole, data = sites
    run = run_plan.prepare(
        whole, tmp_path / "run", replace(deployed.load_terms(data), mean=None, std=None), data=str(data)
    )
    false = wire.pack(Pixels(1, (1,), (1,)))

    def meddle(job, reply):
        return reply_with(reply, upload=false) if (job.kind, job.client) == ("pixels", 2) else reply

    with pytest.raises(RunFailed, match=r"client 2 gave no sums of its pixels: it sums 1 pixels, but \d+ images have"):
        serve(local_grid(data, tmp_path / "state", meddle=meddle), run)
    assert not (run / "terms.json").exists()


def checked(config=CONFIG, terms=TERMS, text: str = "", **job) -> Order:
    job = Job(**{"run": "0" * 32, "kind": "client", "client": 0, "task": "local_update"} | job)
    return deployed.checked(config, wire.pack(Order(text, terms, job)))[0]


def test_nobody_trains_before_mean_and_std_are_fixed():
    with pytest.raises(Refused, match="the terms have no mean and no std yet"):
        checked(terms=replace(TERMS, mean=None, std=None), round=1)


def test_a_site_reads_its_images_in_no_other_way_than_it_was_told(tmp_path):
    (tmp_path / "terms.json").write_text(json.dumps(vars(TERMS)))
    config = replace(CONFIG, terms=str(tmp_path))
    assert checked(config).terms == TERMS
    for other in ({"image_size": 9}, {"classes": TERMS.classes[::-1]}, {"values": (7.0, 8.0)}, {"mean": (0.9,)}):
        with pytest.raises(Refused, match="not those that this site was given"):
            checked(config, replace(TERMS, **other))
    (tmp_path / "terms.json").write_text(json.dumps(vars(replace(TERMS, mean=None, std=None))))
    assert checked(config).terms == TERMS  # once all sites have worked them out


def test_sums_of_pixels_are_told_only_while_mean_and_std_are_open():
    assert checked(terms=replace(TERMS, mean=None, std=None), kind="pixels", task="")
    with pytest.raises(Refused, match="mean and std are known"):
        checked(kind="pixels", task="")


@pytest.mark.parametrize("stream", ["", "[stream]\nsteps = 4\n"])
def test_statistics_are_of_all_images_or_none(stream):
    """Of a part of them that a server chooses, they would tell of single images."""
    text = f"rounds = 4\n{stream}[model]\nbuffers = 'recomputed'\n"
    if not stream:
        assert checked(text=text, kind="statistics", task="")
    for wrong in [text] if stream else ["rounds = 4"]:
        with pytest.raises(Refused, match="statistics are those of all images at once"):
            checked(text=wrong, kind="statistics", task="")


def test_a_name_that_is_no_text_names_no_code():
    with pytest.raises(Refused, match="the name of the method is no text"):
        checked(text="method = { name = ['os:system'] }")


# What sites test on


def test_a_server_may_name_a_network_of_timms_but_no_other_code_there():
    assert deployed.trusted('model = "timm:resnet18"', []).model.name == "timm:resnet18"
    for part in ("method", "data"):
        with pytest.raises(BadInput, match="trusts no module"):
            deployed.trusted(f'{part} = "timm:create_model"', [])


def test_a_site_normalises_for_pretrained_weights_as_the_simulator_does():
    terms = Terms(("a", "b"), 3, 8, (0.1, 0.1, 0.1), (0.2, 0.2, 0.2))
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert deployed.viewed(pixels, Experiment(model="resnet18"), terms).mean == (0.1, 0.1, 0.1)
    seen = deployed.viewed(pixels, Experiment(model=Net("resnet18", pretrained=True)), terms)
    assert (seen.mean, seen.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def give_tests(data: Path, counts: dict[int, int]) -> int:
    """Gives parts of the common test set to sites as their own; returns how many images it has."""
    with np.load(data / "test.npz") as test:
        images, labels, start = test["test_images"], test["test_labels"], 0
    for client, count in counts.items():
        path = data / f"client-{client}.npz"
        with np.load(path) as site:
            arrays = dict(site)
        part = slice(start, start := start + count)
        np.savez(path, **arrays, test_images=images[part], test_labels=labels[part])
    return len(images)


def test_sites_that_test_give_the_metrics_of_all_their_images_together(sites, tmp_path):
    whole, data = sites
    assert give_tests(data, {0: 130, 3: 170}) == 300
    serve(here := local_grid(data, tmp_path / "state"), run := federate(whole, data, tmp_path / "run"))
    told = [line["sites"] for line in read_rounds(run)]
    asked = [(order.job.client, order.job.task, order.job.round) for order in here.orders("evaluate")]
    assert asked == [(0, "test", 1), (3, "test", 1), (0, "test", 2), (3, "test", 2)]
    assert (told[-1]["asked"], told[-1]["failures"], told[-1]["images"]) == (2, [], 250)  # 100 and 150
    # No class has 50 images at a site. The accuracies are whole steps of 2 and of 3, each at most a step off.
    assert told[-1]["recall_per_class"] == [None] * 10
    for line, exact in zip(told, [line["test"] for line in read_rounds(run)], strict=True):
        assert any(line["accuracy"] == pytest.approx((50 * a + 50 * b) / 250) for a in range(3) for b in range(4))
        assert abs(line["accuracy"] - exact["accuracy"]) < 0.5
    simulated(whole, tmp_path / "simulated")  # and nobody trained on what is for the test
    assert weights(run) == weights(tmp_path / "simulated")


def test_where_the_server_has_nothing_to_test_on_the_sites_metrics_are_the_results(sites, tmp_path):
    whole, data = sites
    give_tests(data, {0: 130, 3: 170})
    (data / "test.npz").unlink()
    serve(local_grid(data, tmp_path / "state"), run := federate(whole, data, tmp_path / "run"))
    told, found = read_rounds(run)[-1], json.loads((run / "summary.json").read_text())["last"]["test"]
    assert found["images"] == 250
    assert found == told["test"]
    assert found.items() <= told["sites"].items()
    assert main(["show", str(run), "--report", str(tmp_path / "page.html")]) == 0
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "exported")]) == 0


def test_a_site_with_few_images_to_test_on_tells_nothing_of_them(sites, tmp_path):
    whole, data = sites
    give_tests(data, {1: 49})
    serve(here := local_grid(data, tmp_path / "state"), run := federate(whole, data, tmp_path / "run"))
    assert here.orders("evaluate") == []
    assert "sites" not in read_rounds(run)[0]
    order = Order(dumps(whole), deployed.load_terms(data), Job("0" * 32, "evaluate", "test", client=1, round=1))
    found = deployed.reply(here.configs[7001], {"order": wire.pack(order), "message": b""})
    assert found == {"refused": "this site has fewer than 50 images to test on"}


def test_a_wrong_answer_of_a_site_is_named_and_left_out(sites, tmp_path):
    whole, data = sites
    give_tests(data, {0: 150, 1: 150})

    def meddle(job, reply):
        return reply_with(reply, upload=b"no") if (job.kind, job.client) == ("evaluate", 1) else reply

    serve(local_grid(data, tmp_path / "state", meddle=meddle), federate(whole, data, tmp_path / "run"))
    told = read_rounds(tmp_path / "run")[0]["sites"]
    assert told["images"] == 150
    assert told["asked"] == 2
    ((client, task, why),) = (failure.values() for failure in told["failures"])
    assert (client, task) == (1, "evaluate")
    assert "the buffer is cut short" in why


# What sites keep


def test_what_a_site_keeps_between_rounds_outlives_a_power_cut(tmp_path, monkeypatch):
    written, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: written.append(file) or sync(file))
    for durable, count in ((False, 0), (True, 1)):
        states = checkpoint.ClientStates(tmp_path / str(durable), durable=durable)
        states.save(0, 1, 0, Model({"w": torch.ones(1)}), Model, 0)
        assert len(written) == count


# What is said before


@pytest.mark.parametrize("name", METHODS)
def test_consent_names_every_field_that_a_task_sends_and_what_it_reveals(name):
    said = consent(name)
    for task in tasks(type(METHODS[name])).values():
        if "client" in task.places:
            upload = next(
                part for part in (task.upload, *getattr(task.upload, "__args__", ())) if hasattr(part, "__mro__")
            )
            assert f"\n{task.name}, " in said
            assert all(f"\n  {field.name}: " in said for field in fields(upload))
    assert "does not say" not in said
    assert "rounded by chance" in said


def test_consent_says_what_each_field_is():
    said = consent("cbafed")
    assert "  nothing, or\n" in said
    assert "  used: a whole number (images trained on)\n" in said
    assert "  counts: a tensor, or nothing (images of each class)\n" in said
    assert "  sigma: several parts, or nothing (if labels moved it)\n    values: a tensor\n" in consent("fedmatch")
    network = tree.of(tiny(1, 10, 16))
    size = sum(4 * value.numel() for value in network.values())
    told = consent(Experiment(method="rscfed"), network)
    bytes_ = int(told.partition("the network's weights, ")[2].partition(" bytes")[0].replace(",", ""))
    assert size < bytes_ < size + 2000


def test_consent_to_a_method_that_does_not_exist_is_an_error():
    with pytest.raises(BadInput, match="there is no method 'rscfd'; did you mean 'rscfed'"):
        consent("rscfd")


def test_who_names_no_method_asks_for_consent_to_all_of_them():
    said = consent_to_all("lungs")
    assert all(f"\n{name}: " in said for name in ("fedavg", "fedirm", "cbafed", "fedmatch"))
    assert "rounded by chance" in said


def test_what_was_consented_to_is_what_a_site_does():
    assert consented("labels-only", Experiment("fedavg"))
    assert consented("labels-only, fedirm", Experiment("fedirm"))
    assert consented("", Experiment("fedirm"))
    assert not consented("labels-only", Experiment("fedirm"))
    assert not consented("local-sl", Experiment("fedavg"))  # whose weights leave
    assert not consented("labels-only", Experiment("fedirm", name="labels-only"))


def test_terms_are_read_as_they_are_written(tmp_path):
    terms = replace(TERMS, mean=None, std=None, values=(0.0, 4095.0))
    (tmp_path / "terms.json").write_text(json.dumps(vars(terms)))
    assert deployed.load_terms(tmp_path) == terms
    assert wire.unpack(Terms, wire.pack(terms)) == terms
