"""Whatever is wrong, a person reads one line that says what and how to mend it, and a script gets the exit code."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fewlabel.core.tasks import state_kind
from fewlabel.engine import checkpoint, record
from fewlabel.engine.checkpoint import Checkpoints
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.experiment import read
from fewlabel.methods.fedavg import FedAvg
from tests.conftest import SMALL, Command

SETTINGS = [word for change in SMALL for word in ("--set", change)]
RUN = ["run", "--workers", "1", *SETTINGS]
TINY = ["--set", "model=tests.nets:tiny"]  # with BatchNorm behind its last pooling
Complain = Callable[..., tuple[int, str]]
BAD = "tests.bad_methods:"


@pytest.fixture
def complaint(fewlabel: Command) -> Complain:
    """Runs a command that must fail; its exit code and the one line about it."""

    def run(*argv: str) -> tuple[int, str]:
        code, out, err = fewlabel(*argv)
        notes = (
            "fewlabel: Labels: ",
            "fewlabel: No labeled image ",
            "fewlabel: Few labeled images ",
        )
        lines = [line for line in err.splitlines() if not line.startswith(("round ", *notes))]
        hints = ("The model predicts the same class", " rounds are few: ")
        lines = [line for line in lines if not any(hint in line for hint in hints)]
        assert out == ""
        assert len(lines) == 1
        assert lines[0].startswith("fewlabel: ")
        assert "Traceback" not in err
        return code, lines[0]

    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first round; tests spoil copies of it."""
    directory = prepare(read({}, SMALL), tmp_path_factory.mktemp("begun") / "run")
    with pytest.raises(Interrupted):
        execute(directory, workers=1, stop=lambda: True)
    return directory


@pytest.fixture
def broken(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


def saved(directory: Path) -> Path:
    [path] = (directory / "checkpoint").glob("round-*")
    return path


FILES = {
    "words.toml": "rounds = = 3",
    "bytes.toml": b"\xff\xfe\x00",
    "typo.toml": "[clients]\nalhpa = 0.5",
    "grid.toml": "[grid]\nseed = [0, 1]",
    "scalar.toml": "[grid.clients]\nalpha = 0.1",
    "list.toml": "[[method]]\nname = 'fedprox'\n[[method]]\nname = 'cbafed'",
    "number.toml": "method = 5",
    "nonsense.toml": "[method]\nname = 'nonsense'",
    "other.toml": "[methods.nonsense]\nbeta = 0.2",
    "typos.toml": "[methods.cbafed]\nbetta = 0.2",
    "named.toml": "[methods.cbafed]\nname = 'fedprox'",
    "methods.toml": "methods = 'cbafed'",
}

CASES: list[tuple[list[str], int, list[str]]] = [
    ([*RUN, "--method", "fedporx"], 2, ["no method 'fedporx'", "did you mean 'fedprox'"]),
    ([*RUN, "--set", "clients.aplha=1"], 2, ["'clients.aplha'", "did you mean 'clients.alpha'"]),
    ([*RUN, "--rounds", "3"], 2, ["no option --rounds, but a setting: --set rounds=VALUE"]),
    (["compare", "--batch-size", "8"], 2, ["--set method.local.batch_size=VALUE"]),
    (["sweep", "--clients", "8"], 2, ["--set clients.count=VALUE"]),
    ([*RUN, "--forma", "json"], 2, ["No such option '--forma'", "Did you mean '--format'"]),
    ([*RUN, "--set", "method.proximall=1"], 2, ["'method.proximall'", "did you mean 'method.proximal'"]),
    ([*RUN, "--set", "clients.alpha=-1"], 2, ["clients.alpha", "above 0", "-1"]),
    ([*RUN, "--set", "rounds=0"], 2, ["rounds", "at least 1"]),
    ([*RUN, "--set", "rounds=many"], 2, ["rounds", "whole number", "'many'"]),
    ([*RUN, "--set", "labels.clients=6"], 2, ["labels.clients = 6", "clients.count = 5"]),
    ([*RUN, "--set", "clients.count=5000"], 2, ["5000 clients", "1197", "clients.count"]),
    ([*RUN, "--set", "clients.min_replies=6"], 2, ["clients.min_replies"]),
    ([*RUN, "--set", "rounds"], 2, ["--set takes a.b=c", "'rounds'"]),
    ([*RUN, "--set", ".a=1"], 2, ["words joined by dots"]),
    ([*RUN, "--set", "rounds.a=1"], 2, ["rounds"]),
    ([*RUN, "--data", "digist"], 2, ["no data set 'digist'", "did you mean 'digits'"]),
    ([*RUN, "--data", "nosuchmodule:f"], 2, ["'nosuchmodule:f' cannot be imported"]),
    ([*RUN, "--set", "model.name=resnet19"], 2, ["no model 'resnet19'", "resnet18"]),
    ([*RUN, "--set", "clients.partition=dirichelt"], 2, ["'dirichelt'", "did you mean 'dirichlet'"]),
    ([*RUN, "--set", "labels.at=nowhere"], 2, ["labels.at", "some-clients, every-client, server"]),
    ([*RUN, "--method", "tests.keeper:Keeper", "--set", "labels.at=server"], 2, ["labels.at = 'server'", "made for"]),
    ([*RUN, "--method", f"{BAD}NoDataclass"], 2, ["NoDataclass", "frozen dataclass"]),
    ([*RUN, "--method", f"{BAD}Missing"], 2, ["cannot be imported", "Missing"]),
    ([*RUN, "--method", "nosuchmodule:Method"], 2, ["No module named 'nosuchmodule'; modules", "looked for in /"]),
    ([*RUN, "--out", "words.toml/run"], 4, ["words.toml/run", "cannot be written"]),
    ([*RUN, "--out", "/proc/x"], 4, ["/proc/x", "cannot be written"]),
    ([*RUN, "--out", "."], 2, ["is not empty", "--out"]),
    (["run", "missing.toml"], 2, ["no file missing.toml"]),
    (["run", "words.toml"], 2, ["words.toml is not valid TOML", "line 1"]),
    (["run", "bytes.toml"], 4, ["bytes.toml cannot be read"]),
    (["run", "typo.toml"], 2, ["'clients.alhpa'", "did you mean 'clients.alpha'"]),
    (["run", "grid.toml"], 2, ["[grid]", "fewlabel sweep grid.toml"]),
    (["run", "."], 2, ["is a directory; give a TOML file"]),
    (["sweep"], 2, ["needs something to vary"]),
    (["sweep", "--set", "rounds=1", "--vary", "rounds=1,2"], 2, ["rounds is both set and varied"]),
    (["run", "--resume", "."], 2, ["holds no run"]),
    (["run", "--resume", "run", "--seed", "1"], 2, ["--resume", "as it is"]),
    (["run", "--seed", "1", "--seeds", "1,2"], 2, ["--seed", "--seeds", "one of them"]),
    (["run", "--seeds", "x"], 2, ["--seeds takes whole numbers", "'x'"]),
    (["run", "--seeds", "0,-1"], 2, ["seed", "at least 0"]),
    (["run", "--seed", "-1"], 2, ["--seed takes a whole number from 0, found -1"]),
    (["run", "--workers", "0"], 2, ["--workers takes a whole number from 1, found 0"]),
    (["run", "--workers", "two"], 2, ["--workers takes a whole number from 1, found 'two'"]),
    (["run", "--format", "xml"], 2, ["--format", "'xml'"]),
    (["run", "--data-dir", "nowhere"], 2, ["--data-dir", "nowhere"]),
    (["run", "--roundss", "3"], 2, ["--roundss"]),
    (["rnu"], 2, ["'rnu'"]),
    (["compare"], 2, ["--methods"]),
    (["compare", "--methods", "fedporx"], 2, ["did you mean 'fedprox'"]),
    (
        ["compare", "list.toml", "--methods", "fedprox"],
        2,
        ["method must be a name or a table, found a list", "[methods.fedprox]"],
    ),
    (["compare", "number.toml", "--methods", "fedprox"], 2, ["method must be a name or a table, found 5"]),
    (["compare", "nonsense.toml", "--methods", "fedprox"], 2, ["no method 'nonsense'"]),
    (["compare", "other.toml", "--methods", "fedprox"], 2, ["no method 'nonsense'"]),
    (
        ["compare", "typos.toml", "--methods", "fedprox"],
        2,
        ["'methods.cbafed.betta'", "did you mean 'methods.cbafed.beta'"],
    ),
    (["compare", "named.toml", "--methods", "fedprox"], 2, ["methods.cbafed must be a table of settings"]),
    (["compare", "methods.toml", "--methods", "fedprox"], 2, ["[methods.fedprox]", "'cbafed'"]),
    (["run", "list.toml", "--method", "fedprox"], 2, ["found a list"]),
    (["run", "typos.toml"], 2, ["did you mean 'methods.cbafed.beta'"]),
    (["sweep", "scalar.toml"], 2, ["grid.clients.alpha", "list of values"]),
    (["sweep", "--vary", "clients.alpha"], 2, ["--vary takes a.b=c,d"]),
    (["sweep", "--vary", "clients.aplha=1,2"], 2, ["did you mean 'clients.alpha'"]),
    (["compare", "--methods", "rscfed", "--set", "method.group_size=2"], 2, ["labels-only: unknown", "[methods.NAME]"]),
    (["sweep", "--methods", "rscfed,fedirm", "--set", "method.group_size=2"], 2, ["fedirm: unknown", "[methods.NAME]"]),
    ([*RUN, *TINY, "--set", "method.local.batch_size=1"], 2, ["method.local.batch_size = 1 is too few", "raise it"]),
    ([*RUN, "--method", "local-sl", "--set", "labels.at=server"], 2, ["share nothing", "labels.at"]),
    ([*RUN, "--method", "local-uda", "--set", "labels.at=server"], 2, ["share nothing", "labels.at"]),
    ([*RUN, "--method", "__main__:Mine"], 2, ["'__main__:Mine'", "script or notebook", "module of its own"]),
    (["list", "planets"], 2, ["'planets'", "methods"]),
    (["list", "method"], 2, ["'method'", "did you mean 'methods'?"]),
    (["predict", "run", "images", "--unsure-below", "2"], 2, ["--unsure-below takes a number from 0 to 1, found 2.0"]),
    (["predict", "run", "images", "--csv", "nowhere/found.csv"], 2, ["there is no directory nowhere"]),
    (["predict", "run", "images", "--csv", "."], 2, ["is a directory; name a file in it"]),
    (["show", "nowhere"], 2, ["nowhere is not there"]),
    (["bench", "nosuch"], 2, ["measurement"]),
]


@pytest.mark.parametrize(("argv", "code", "words"), CASES, ids=[" ".join(argv[-2:]) for argv, *_ in CASES])
def test_bad_input_is_one_sentence_and_an_exit_code(
    argv: list[str], code: int, words: list[str], complaint: Complain, tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found, sentence = complaint(*argv)
    assert found == code
    assert [word for word in words if word not in sentence] == []


def test_a_run_that_its_method_refuses_leaves_no_directory(complaint: Complain, tmp_path: Path) -> None:
    refused = [*RUN, "--method", "local-sl", "--set", "labels.at=server"]
    (tmp_path / "there").mkdir()
    for out in ("new", "new", "there", "there"):
        code, sentence = complaint(*refused, "--out", out)
        assert (code, "let labels.at name clients" in sentence) == (2, True)
    complaint(*refused)
    left = sorted(path for path in tmp_path.rglob("*") if path.is_file() or path.parent != tmp_path)
    assert left == []
    assert not (tmp_path / "new").exists()


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_with_a_flipped_byte_is_refused(broken: Path, complaint: Complain) -> None:
    flip_a_byte(saved(broken))
    code, sentence = complaint("run", "--resume", "run")
    assert (code, "is damaged" in sentence, "start the run anew" in sentence) == (4, True, True)


def test_a_truncated_checkpoint_is_refused(broken: Path, complaint: Complain) -> None:
    path = saved(broken)
    path.write_bytes(path.read_bytes()[:-100])
    code, sentence = complaint("run", "--resume", "run")
    assert (code, "is damaged" in sentence) == (4, True)


def test_a_checkpoint_of_another_format_is_refused(
    broken: Path, complaint: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Checkpoints(broken / "checkpoint", state_kind(FedAvg), "9.9.9")
    last = files.load()
    assert last is not None
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", "99")
        files.save(last.round, files.pack(last))
    code, sentence = complaint("run", "--resume", "run")
    assert code == 4
    assert "written by fewlabel 9.9.9 in another format (99, here 3)" in sentence


def test_a_partition_that_was_changed_by_hand_is_refused(broken: Path, complaint: Complain) -> None:
    path = broken / "partition.json"
    partition = json.loads(path.read_text())
    partition["clients"][0]["labeled"].pop()
    path.write_text(json.dumps(partition))
    code, sentence = complaint("run", "--resume", "run", "--workers", "1")
    assert (code, "was changed" in sentence) == (4, True)


def test_a_run_in_use_is_left_alone(broken: Path, complaint: Complain) -> None:
    with record.in_use(broken):
        code, sentence = complaint("run", "--resume", "run")
    assert (code, "in use by another process" in sentence) == (4, True)


@contextmanager
def small_disk() -> Iterator[None]:
    """Files of at most 64 kB, less than a checkpoint."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_earlier_checkpoint(broken: Path, complaint: Complain) -> None:
    path = saved(broken)
    before = path.read_bytes()
    with small_disk():
        code, sentence = complaint("run", "--resume", "run", "--workers", "1")
    assert code == 4
    assert "cannot be written: File too large; make room" in sentence
    assert sentence.endswith("to go on: fewlabel run --resume run")
    assert saved(broken) == path
    assert path.read_bytes() == before


def test_an_upload_that_is_not_finite_is_refused(complaint: Complain) -> None:
    code, sentence = complaint(*RUN, "--method", f"{BAD}NotANumber", "--out", "run")
    assert code == 3
    assert "upload is refused" in sentence
    assert sentence.endswith("to go on: fewlabel run --resume run")


def test_a_message_of_another_type_names_the_task_that_it_is_for(complaint: Complain) -> None:
    code, sentence = complaint(*RUN, "--method", f"{BAD}Bare", "--out", "run")
    assert code == 3
    assert "'local_update' is sent a message that is not of its annotation: Model: expected Model, found" in sentence


def test_a_method_that_raises_at_a_client_leaves_its_traceback(complaint: Complain, tmp_path: Path) -> None:
    code, sentence = complaint(*RUN, "--method", f"{BAD}Raises", "--out", "run")
    assert code == 3
    assert "failed in 'local_update' of round 1: ValueError: the scanner is broken" in sentence
    assert sentence.endswith("to go on: fewlabel run --resume run")
    assert "raise ValueError" in (tmp_path / "run" / "error.txt").read_text()


def test_too_few_replies_end_the_run(complaint: Complain) -> None:
    code, sentence = complaint(*RUN, "--set", "clients.dropout=1", "--set", "clients.min_replies=1", "--out", "run")
    assert code == 3
    assert "round 1 had 0 replies" in sentence
    assert "clients.min_replies" in sentence


def test_a_method_of_ones_own_that_raises_at_the_server_is_named(complaint: Complain, tmp_path: Path) -> None:
    code, sentence = complaint(*RUN, "--method", f"{BAD}Stumbles", "--out", "run")
    assert code == 3
    assert "Stumbles failed at the server in round 1: ZeroDivisionError: nothing to share" in sentence
    assert "in round" in (tmp_path / "run" / "error.txt").read_text()


def test_a_bug_is_called_one_and_its_traceback_is_kept(complaint: Complain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("fewlabel.engine.run.Run.finish")
    code, sentence = complaint(*RUN, "--out", "run")
    assert code == 1
    assert "this is a bug in FewLabel: AttributeError" in sentence
    file = Path(sentence.rpartition(" ")[2])
    assert "self.finish" in file.read_text()
    file.unlink()
