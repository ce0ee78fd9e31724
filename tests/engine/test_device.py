"""Devices: nothing on one meets what is on another. No GPU is needed: a stand-in has its rules."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fewlabel.cli import main
from fewlabel.core import wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import LabelPlace, Model
from fewlabel.core.rng import Rng
from fewlabel.data.views import VIEWS, make_views
from fewlabel.engine import device
from fewlabel.engine.conformance import lines, weights
from fewlabel.engine.local import with_executor
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.worker import Worker
from fewlabel.experiment import Experiment
from fewlabel.learn import sparse
from fewlabel.methods import METHODS
from tests.fake_device import ELSEWHERE, Elsewhere, Far
from tests.methods.test_conformance import cases, experiment

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def elsewhere(monkeypatch):
    """Workers compute on the stand-in."""
    monkeypatch.setattr(device, "of", lambda name, worker=0: ELSEWHERE)
    with Elsewhere():
        yield


# The stand-in


def test_the_stand_in_has_the_rules_of_a_gpu():
    here = torch.arange(3.0)
    with Elsewhere():
        there = here.to(ELSEWHERE)
        assert isinstance(there, Far)
        assert there.device == ELSEWHERE
        assert not there.is_cpu
        assert torch.equal((there[torch.tensor([2, 0])] * torch.tensor(2.0)).cpu(), torch.tensor([4.0, 0.0]))
        assert torch.equal(torch.ones(3).copy_(there), here)
        assert float(there.sum()) == 3.0
        for wrong in (
            lambda: there + here,
            lambda: here[there.long()],
            lambda: there.index_select(0, torch.tensor([0])),
            lambda: torch.stack([there.sum(), here.sum()]),
            lambda: there.uniform_(generator=torch.Generator()),
            lambda: there.numpy(),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()


# Placement


def in_large_batches(whole: Experiment) -> Experiment:
    """The stand-in takes long for each step."""
    return replace(whole, method=replace(whole.method, local=replace(whole.method.local, batch_size=128)))


@pytest.mark.parametrize(("method", "setting"), list(cases(lambda m: sorted(m.label_places)[:1])))
def test_a_method_trains_on_a_device_what_it_trains_on_the_cpu(method, setting, tmp_path, request):
    wanted = replace(in_large_batches(experiment(method, setting)), rounds=2)
    execute(prepare(wanted, tmp_path / "cpu"), executor=Serial())
    request.getfixturevalue("elsewhere")
    execute(prepare(wanted, tmp_path / "elsewhere"), executor=Serial())
    assert weights(tmp_path / "elsewhere") == weights(tmp_path / "cpu")
    assert lines(tmp_path / "elsewhere") == lines(tmp_path / "cpu")


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
def test_statistics_go_where_the_network_is(buffers, tmp_path, request):
    wanted = replace(experiment(METHODS["fedavg"], LabelPlace.SOME_CLIENTS, buffers), rounds=2)
    execute(prepare(wanted, tmp_path / "cpu"), executor=Serial())
    request.getfixturevalue("elsewhere")
    execute(prepare(wanted, tmp_path / "elsewhere"), executor=Serial())
    assert weights(tmp_path / "elsewhere") == weights(tmp_path / "cpu")


def test_network_images_and_messages_of_a_worker_are_on_its_device(run_dir, elsewhere):
    worker = Worker(run_dir())
    site = worker.world.site(0, 1, Rng("task"), worker.model)
    sent = wire.unpack(Model, wire.pack(Model({"w": torch.ones(2)})), device=site.device).model["w"]
    x, y = next(site.labeled.batches())
    for tensor in (*worker.model.parameters(), *worker.model.buffers(), sent, x, y):
        assert isinstance(tensor, Far)
    assert all(isinstance(split.images.pixels, Far) for split in worker.world.dataset.splits.values())
    assert wire.pack(Model({"w": sent})) == wire.pack(Model({"w": torch.ones(2)}))


def test_a_sparse_tree_is_packed_and_unpacked_on_the_device():
    old = torch.arange(40.0)
    new = old.clone()
    new[3] = 7.0
    with Elsewhere():
        before = {"w": old.to(ELSEWHERE)}
        packed = sparse.pack({"w": new.to(ELSEWHERE)}, before)
        assert isinstance(packed.marked, Far)
        assert torch.equal(sparse.unpack(packed, before)["w"].cpu(), new)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_drawn_on_the_cpu_and_made_on_the_device(name):
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    (here,) = make_views([name], images, torch.Generator().manual_seed(2))
    with Elsewhere():
        (there,) = make_views([name], images.to(ELSEWHERE), torch.Generator().manual_seed(2))
        assert isinstance(there, Far)
        assert there.dtype == torch.uint8
        apart = (there.cpu().int() - here.int()).abs()
    resized = [step for step in VIEWS[name].recipe if getattr(step, "scale", 1) != 1]
    # Brightness, contrast and saturation may each stretch the one that resizing is off, by 1.4, and round.
    assert apart.max() <= (0 if not resized else 1 if len(VIEWS[name].recipe) == 1 else 4)


# Choice


@without_gpu
def test_a_device_that_is_not_here_is_refused_in_one_sentence(run_dir, tmp_path):
    with pytest.raises(BadInput, match="there is no cuda here"):
        prepare(Experiment(device="cuda"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    directory = run_dir()
    settings = directory / "experiment.toml"
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda"'))
    with pytest.raises(BadInput, match="there is no cuda here"):
        execute(directory)


@without_gpu
def test_the_command_takes_a_device(tmp_path):
    for name, sentence in (("cuda", "there is no cuda here"), ("tpu", "device must be one of cpu, cuda")):
        done = CliRunner().invoke(main.app, ["run", "--device", name, "--out", str(tmp_path / name)])
        assert isinstance(done.exception, BadInput)
        assert sentence in str(done.exception)


def test_workers_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.workers("cuda") == 4
    assert [device.of("cuda", worker).index for worker in range(4)] == [0, 1, 0, 1]


def test_workers_on_a_gpu_are_processes_of_their_own_and_not_forks():
    kinds: list[str] = []
    with_executor(Experiment(device="cuda"), 2, lambda pool: kinds.extend(type(p).__name__ for p in pool._processes))
    assert set(kinds) == {"SpawnProcess"}
