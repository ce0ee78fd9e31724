"""A run that a SuperLink carries out: what must be right before it is submitted, and how it is watched and ended."""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.deploy import members, processes, superlink, waiting
from fewlabel.engine import record
from fewlabel.experiment import Experiment
from fewlabel.report.terminal import Rounds, tell

if TYPE_CHECKING:
    from fewlabel.experiment import Experiment

RUNS = "runs"  # folder with a file for each run that was submitted, which names its directory
LOG = "flower.log"
ROOM = 1 << 20  # bytes; on a disk with less, no log tells why a run ended


# Before


def check_consent(folder: Path, experiment: "Experiment") -> None:
    """Refuse an experiment that sends what sites have not consented to."""
    from fewlabel.deploy.consent import consented

    methods = ", ".join(members.read_trust(folder / members.TRUST).methods)
    if not consented(methods, experiment):
        raise BadInput(f"sites have consented to {methods}, and {experiment.name} sends something else")


def check_same_keys(folder: Path, run: Path, insecure: bool) -> None:
    """Refuse to resume a run with other keys than it began with."""
    from fewlabel.deploy.run_plan import load_plan

    begun_with = load_plan(run).members
    if begun_with != (None if insecure else str(folder)):
        how = "with --insecure" if begun_with is None else f"with the keys of {begun_with}"
        raise BadInput(f"{run} was begun {how}, and can only be resumed so")


def check_served(folder: Path, insecure: bool) -> None:
    again = f"fewlabel federation serve {shlex.quote(str(folder))}"
    if processes.process_using(folder) is None:
        raise BadInput(f"nobody serves {folder}; start it in another terminal: {again}")
    if superlink.is_insecure(folder) != insecure:
        raise BadInput(f"--insecure is for both or neither of `federation serve` and `federation run`; {again}")


# A run


def command(folder: Path, directory: Path) -> list[str]:
    """Return Flower's command that submits a run."""
    from fewlabel.deploy.flower import write_app

    app = str(write_app(folder / superlink.HOME))
    config = f"directory={json.dumps(str(directory))}"
    flwr = str(processes.BIN / "flwr")
    return [flwr, "run", app, superlink.CONNECTION, "--run-config", config, "--format", "json"]


def follow(folder: Path, directory: Path, experiment: Experiment) -> None:
    """Submit a run and show it until it ends. If that is interrupted, end the run."""
    seen, former, why = checkpointed(directory), file_number(directory / record.ROUNDS), ""
    number = str(superlink.run_json(folder, command(folder, directory.absolute()))["run-id"])
    (folder / RUNS).mkdir(exist_ok=True)
    (folder / RUNS / number).write_text(str(directory.absolute()))
    tell("submitted; Flower starts it, which takes some seconds")
    with processes.interruptible():
        try:
            why = show(folder, directory, experiment, number, seen, former)
        except BaseException as error:
            until = time.monotonic() + 10
            while at_its_end(directory, experiment) and time.monotonic() < until:
                time.sleep(0.05)
            if not record.is_finished(directory):
                end(folder, directory, number)
                error.add_note(f"to go on: {resume_command(folder, directory)}")
            raise
    refuse_unfinished(folder, directory, why)


def show(
    folder: Path,
    directory: Path,
    experiment: Experiment,
    number: str,
    seen: int,
    former: int | None = None,
    gathered: bool = False,
) -> str:
    """Show what a run waits for, each round after `seen` as it is written, and which sites gave no reply.

    Return why it has ended before it was finished. `former` is the number of a file with rounds of an earlier
    submission, which are not shown. Nor is who was there before the first round, if all that are needed have
    `gathered`.
    """
    lines, log, names = directory / record.ROUNDS, directory / LOG, members.names(folder)
    missing, late = MissingSites(names), waiting.News(directory, names)
    stream = [str(processes.BIN / "flwr"), "log", number, superlink.CONNECTION, "--stream"]
    with (
        log.open("ab") as written,
        log.open(errors="replace") as reader,
        Rounds(experiment, directory, pace=0) as screen,
    ):
        began, rest = reader.seek(0, os.SEEK_END), ""
        environment = {**superlink.environment(folder), "PYTHONUNBUFFERED": "1"}
        start_stream = partial(
            subprocess.Popen, stream, stdout=written, stderr=written, env=environment, start_new_session=True
        )
        streaming = start_stream()
        shown = read = 0  # FewLabel's own lines of the log: those shown here, and those read from this stream
        try:
            over = False
            while not over:
                silent = streaming.poll() is not None
                over = record.is_finished(directory) or (silent and is_over(folder, number))
                *texts, rest = (rest + reader.read()).split("\n")
                for text in texts:
                    if text.startswith("fewlabel: "):
                        read += 1
                        if read > shown and not gathered:
                            screen.say(text)
                            shown = read
                if silent and not over:  # only the stream has ended, and a new one begins with the first line again
                    streaming, read, rest = start_stream(), 0, ""
                for line in record.read_rounds(directory)[seen:] if file_number(lines) != former else ():
                    screen.watch(line)
                    seen = line["round"]
                    for news in missing.news(line):
                        screen.say(f"fewlabel: {news}")
                if news := late.news():
                    screen.say(f"fewlabel: {news}")
                time.sleep(0.2 * (not over))
        finally:
            streaming.terminate()
            streaming.wait()
    return "" if record.is_finished(directory) else reason(directory, processes.read_from(log, began))


def refuse_unfinished(folder: Path, directory: Path, why: str) -> None:
    """Raise an error if a run has ended before it was finished."""
    if not record.is_finished(directory):
        raise RunFailed(f"the run has ended: {why}; to go on: {resume_command(folder, directory)}")


def at_its_end(directory: Path, experiment: Experiment) -> bool:
    """Return True if all rounds of a run are written, and its summary will be in a moment."""
    return last_round(directory) == str(experiment.rounds) and not record.is_finished(directory)


def end(folder: Path, directory: Path, number: str | None) -> None:
    """End a run. Without the second step it would compute on, for nobody."""
    if number is not None:
        with suppress(RunFailed):
            superlink.flwr(folder, "stop", number)
    processes.end(folder, using=directory.resolve() / record.LOCK)
    waiting.write(directory, [])


# A run that goes on


def number_of(folder: Path, directory: Path) -> str | None:
    """Return Flower's number of the last submission of a run, or None if it was never submitted here."""
    wanted = str(directory.absolute())
    found = [path for path in (folder / RUNS).glob("*") if path.read_text() == wanted]
    return max(found, key=lambda path: path.stat().st_mtime).name if found else None


def goes_on(folder: Path, directory: Path) -> str | None:
    """Return Flower's number of a run that is under way, or None if it is not."""
    number = number_of(folder, directory)
    if number is None or record.is_finished(directory) or processes.process_using(folder) is None:
        return None
    if not record.is_in_use(directory) and is_over(folder, number):  # Flower is only asked before the run has begun
        return None
    return number


def attach(folder: Path, directory: Path, experiment: Experiment, number: str) -> bool:
    """Show a run that goes on, until it ends or Ctrl-C. Return True if it has ended well; Ctrl-C leaves it running."""
    whole = shlex.quote(str(directory))
    done = last_round(directory)
    where = f"round {done} of {experiment.rounds} is done" if done != "0" else "no round is done yet"
    tell(f"{directory} goes on, {where}; Ctrl-C leaves it running, and `fewlabel federation cancel {whole}` ends it")
    why = ""
    try:
        with processes.interruptible():
            why = show(folder, directory, experiment, number, int(done), gathered=done != "0")
    except KeyboardInterrupt:
        if not record.is_finished(directory):
            tell(f"{directory} goes on; to see it again: fewlabel federation attach {whole}")
            return False
    refuse_unfinished(folder, directory, why)
    return True


def cancel(folder: Path, directory: Path) -> bool:
    """End a run that goes on, whoever submitted it. Return True if there was something to end."""
    number = goes_on(folder, directory)
    found = number is not None or record.is_in_use(directory)
    if found:
        end(folder, directory, number)
    return found


def is_over(folder: Path, number: str) -> bool:
    """Return True if Flower has finished the run, or is gone."""
    try:
        listed = superlink.flwr(folder, "list")["runs"]
    except RunFailed:
        return True
    return all(run["status"].startswith("finished") for run in listed if run["run-id"] == number)


def file_number(path: Path) -> int | None:
    """Identify a file: a run that is resumed replaces rounds.jsonl by one without the rounds that it repeats."""
    return path.stat().st_ino if path.exists() else None


def checkpointed(directory: Path) -> int:
    """Return the round of a run's last checkpoint."""
    found = directory.glob(f"{record.CHECKPOINTS}/round-*.safetensors")
    return max((int(path.name.split("-")[1]) for path in found), default=0)


def last_round(directory: Path) -> str:
    """Return the last round of a run. Its directory may be gone."""
    with suppress(OSError, ValueError):
        lines = (directory / record.ROUNDS).read_text().splitlines()
        return str(json.loads(lines[-1])["round"]) if lines else "0"
    return "0"


def resume_notice(directory: Path, rounds: int) -> str:
    """Say after which round a run goes on, and which rounds it repeats."""
    done, last = checkpointed(directory), int(last_round(directory))
    where = f"goes on after round {done} of {rounds}, its last checkpoint" if done else "begins with round 1"
    lost = f"; computed again: round{'s' * (last > done + 1)} {' to '.join(map(str, sorted({done + 1, last})))}"
    return f"{directory} {where}{lost if last > done else ''}"


def resume_command(folder: Path, directory: Path) -> str:
    return shlex.join(["fewlabel", "federation", "run", str(folder), "--resume", str(directory)])


def reason(directory: Path, output: str) -> str:
    """Return FewLabel's own sentence in what a run printed at its end, or else what is known, and Flower's last error.

    On a full disk the log breaks off before that sentence.
    """
    lines = [line for line in output.splitlines() if not line.startswith(("{", "fewlabel: "))]  # rounds and news
    if found := [line for line in lines if line.startswith("fewlabel.")]:
        return found[-1].partition(": ")[2]
    if shutil.disk_usage(directory).free < ROOM:
        return f"the disk of {directory} is full; make room"
    log = directory / LOG
    if not any(line.startswith("ERROR") for line in lines):
        return "somebody cancelled it, or its SuperLink ended; the terminal of `federation serve` says if that was so"
    words = processes.last_error("\n".join(lines))
    return f"Flower ended it, for a reason that FewLabel does not know (Flower's words: {words}; all of them: {log})"


class MissingSites:
    """The sites that were asked and gave no reply that can be used."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.why: dict[Any, str] = {}

    def news(self, line: Mapping[str, Any]) -> Iterator[str]:
        """Return what a round's line says about them that earlier lines did not."""
        failures = [*line.get("sites", {}).get("failures", ()), *line.get("failures", ())]
        now: dict[Any, tuple[str, str]] = {}
        for failure in failures:
            if isinstance(failure, str):  # FewLabel 0.1 wrote sentences
                now[failure] = failure, failure
            else:
                client, why = failure["client"], failure["why"]
                name = members.called(self.names, client)
                silent = f"{name} gave no reply in round {line['round']}: {why}"
                now[client] = why, silent if client >= 0 else f"round {line['round']} leaves the model as it was: {why}"
        for client, (why, text) in now.items():
            if self.why.get(client) != why:
                yield text
            self.why[client] = why
        if self.why and not failures:  # a reply may be empty, so replies are not counted
            self.why.clear()
            yield f"all sites that were asked replied in round {line['round']}"
