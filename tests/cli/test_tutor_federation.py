"""FewLabel's own method in a real federation, as it is out of the box, gives the simulator's bits."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.deploy import processes
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import load
from tests.cli.test_federation import Session
from tests.deploy.federated import lines, simulated, weights


@pytest.mark.slow
def test_tutor_with_one_labeled_site_of_three_gives_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """Tutors learn in the first round and label in the second. The fourth has the exam, on labels the site kept."""
    session = Session(tmp_path)
    session.set_up(sites=3, rounds=4, more="[labels]\nclients = 1\nheld_out = 0.25\n", method="tutor")
    for policy in tmp_path.glob("site-*/policy.toml"):  # counts over held-out labels leave a site by its leave alone
        policy.write_text(policy.read_text().replace("held_out = false", "held_out = true"))
    try:
        session.begin("serve", "federation serve fed", "serving at")
        for n in (1, 2):
            session.run(f"federation enrol fed site-{n}/enrolment.json")
        for n in range(3):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        told = session.run("federation run fed e.toml --data sites --out run --deadline 120 --patience 120")
        assert "round 4/4  accuracy 0." in told
    finally:
        session.end()
    assert [processes.marked(tmp_path / name) for name in ("fed", "site-0", "site-1", "site-2")] == [[]] * 4
    found = read_rounds(tmp_path / "run")
    # 5 tutors; then labels alone, 2 lessons and a correction, once with the count of mistakes, and once with the exam.
    assert [line["replies"] for line in found] == [5, 1 + 4, 4, 4 + 1]
    assert found[-1]["gain_images"] > 0
    print([round(line["seconds"], 1) for line in found], "s,", {k: v for k, v in found[-1].items() if "gain" in k})
    simulated(load(tmp_path / "run" / "experiment.toml"), tmp_path / "simulated")
    assert lines(tmp_path / "run") == lines(tmp_path / "simulated")
    assert weights(tmp_path / "run") == weights(tmp_path / "simulated")
