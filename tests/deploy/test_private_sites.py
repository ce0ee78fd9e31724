"""A site that wants differential privacy trains by it whatever a run asks for, and says what it has spent."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytest.importorskip("opacus", reason="Opacus is not installed: pip install '.[privacy]'")

from pathlib import Path

from fewlabel.core.errors import RunFailed
from fewlabel.deploy import experiments
from fewlabel.deploy.server import serve
from fewlabel.engine.record import read_rounds
from tests.deploy.federated import LocalGrid, experiment, federate, local_grid, split
from tests.deploy.test_masked_sums import Federation

CHANGES = ("method=fedavg", "labels.at=every-client", "labels.fraction=0.1", "clients.count=3", "rounds=2")
PRIVATE = ("model=simple-cnn", "data.image_size=16", *CHANGES)


def with_policy(grid: LocalGrid, path: Path, text: str, *nodes: int) -> LocalGrid:
    path.write_text(text)
    for node in nodes:
        grid.configs[node]["policy"] = str(path)
    return grid


def spent(state: Path, client: int) -> float:
    (run,) = experiments.names(state / f"client-{client}")
    return experiments.load(state / f"client-{client}", run).epsilon


def test_a_site_protects_its_images_by_its_own_policy(tmp_path):
    whole = experiment(*PRIVATE)
    data = split(whole, tmp_path / "sites")
    grid = local_grid(data, tmp_path / "state")
    with_policy(grid, tmp_path / "policy.toml", "[privacy]\nepsilon = 2.0\n", 7001)
    serve(grid, federate(whole, data, tmp_path / "run"))
    first, second = read_rounds(tmp_path / "run")
    assert 0 < first["epsilon"] < second["epsilon"] <= 2.0
    assert spent(tmp_path / "state", 1) == pytest.approx(second["epsilon"], rel=1e-3)
    assert spent(tmp_path / "state", 0) == 0.0  # which did not ask for it
    assert "with epsilon" in experiments.sent_until_now(tmp_path / "state" / "client-1")[0]


def test_an_experiment_that_asks_for_less_privacy_gets_the_sites_own(tmp_path):
    whole = experiment(*PRIVATE, "privacy.epsilon=8")
    data = split(whole, tmp_path / "sites")
    grid = with_policy(
        local_grid(data, tmp_path / "state"), tmp_path / "policy.toml", "[privacy]\nepsilon = 2.0\n", 7001
    )
    serve(grid, federate(whole, data, tmp_path / "run"))
    assert spent(tmp_path / "state", 1) <= 2.0
    assert 6.0 < spent(tmp_path / "state", 0) <= 8.0


def test_a_run_that_cannot_be_private_is_refused_by_such_a_site(tmp_path):
    whole = experiment("method=cbafed", "labels.clients=1", "clients.count=3")
    data = split(whole, tmp_path / "sites")
    grid = with_policy(
        local_grid(data, tmp_path / "state"), tmp_path / "policy.toml", "[privacy]\nepsilon = 2.0\n", 7000, 7001, 7002
    )
    why = "the policy of this site does not allow it: privacy.epsilon = 2: cbafed is not for it"
    with pytest.raises(RunFailed, match=why):
        serve(grid, federate(whole, data, tmp_path / "run", patience=0.5))


def test_exact_sums_of_pixels_do_not_leave_a_private_site(tmp_path):
    import json

    whole = experiment(*PRIVATE, "privacy.epsilon=3")
    data = split(whole, tmp_path / "sites")
    terms = json.loads((data / "terms.json").read_text())
    (data / "terms.json").write_text(json.dumps(terms | {"mean": None, "std": None}))
    with pytest.raises(RunFailed, match="exact sums of pixels are not private; have the federation fix mean and std"):
        serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "run"))


def test_private_training_and_masked_sums_go_together(tmp_path):
    whole = experiment(*PRIVATE, "privacy.epsilon=3", "clients.sums=masked")
    data, members = split(whole, tmp_path / "sites"), Federation(tmp_path / "federation", 3)
    run = federate(whole, data, tmp_path / "run", members=str(members.folder))
    serve(members.grid(data, tmp_path / "state"), run)
    lines = read_rounds(run)
    assert [line.get("failures") for line in lines] == [None, None]
    assert 2.0 < lines[-1]["epsilon"] <= 3.0


def test_sites_that_have_spent_their_privacy_end_the_run_with_what_it_has(tmp_path):
    """The coordinator is killed before the last checkpoint, and the sites' replies are lost."""
    whole = experiment(*PRIVATE, "privacy.epsilon=3")
    data, run = split(whole, tmp_path / "sites"), tmp_path / "run"

    def kill(line: dict) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(local_grid(data, tmp_path / "state"), federate(whole, data, run), watch=kill)
    for reply in (tmp_path / "state").rglob("*.reply"):
        reply.unlink()
    found = serve(local_grid(data, tmp_path / "state"), run)
    assert found["ended"] == (
        "It ended after round 1 of 2: every site with labels has spent its privacy (privacy.epsilon)."
    )
    assert (run / "model.safetensors").exists()
    assert [spent(tmp_path / "state", client) <= 3.0 for client in range(3)] == [True] * 3
