"""A run that a SuperLink carries out: what must be right before it is submitted, and how it is watched and ended."""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.deploy import members, processes, superlink
from fewlabel.engine import record
from fewlabel.experiment import Experiment
from fewlabel.report.terminal import Rounds, tell

if TYPE_CHECKING:
    from fewlabel.experiment import Experiment

RUNS = "runs"  # folder with a file for each run that was submitted, which names its directory
LOG = "flower.log"


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
    """Submit a run. Show what it waits for, each round as it is written, and which sites gave no reply."""
    lines, log = directory / record.ROUNDS, directory / LOG
    seen, former, missing = checkpointed(directory), file_number(lines), MissingSites(folder)
    number = str(superlink.run_json(folder, command(folder, directory.absolute()))["run-id"])
    (folder / RUNS).mkdir(exist_ok=True)
    (folder / RUNS / number).write_text(str(directory.absolute()))
    tell("submitted; Flower starts it, which takes some seconds")
    stream = [str(processes.BIN / "flwr"), "log", number, superlink.CONNECTION, "--stream"]
    with (
        processes.interruptible(),
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
                        if read > shown:
                            screen.say(text)
                            shown = read
                if silent and not over:  # only the stream has ended, and a new one begins with the first line again
                    streaming, read, rest = start_stream(), 0, ""
                for line in record.read_rounds(directory)[seen:] if file_number(lines) != former else ():
                    screen.watch(line)
                    seen = line["round"]
                    for news in missing.news(line):
                        screen.say(f"fewlabel: {news}")
                time.sleep(0.2 * (not over))
        except BaseException as error:
            until = time.monotonic() + 10
            while seen == experiment.rounds and not record.is_finished(directory) and time.monotonic() < until:
                time.sleep(0.05)
            if not isinstance(error, KeyboardInterrupt) or not record.is_finished(directory):  # or all is well
                with suppress(RunFailed):
                    superlink.flwr(folder, "stop", number)
                # Without this it would compute on, for nobody.
                processes.end(folder, using=directory.resolve() / record.LOCK)
                error.add_note(f"to go on: {resume_command(folder, directory)}")
                raise
        finally:
            streaming.terminate()
            streaming.wait()
    if not record.is_finished(directory):
        why = reason(processes.read_from(log, began))
        raise RunFailed(f"the run has ended: {why}; to go on: {resume_command(folder, directory)}")


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


def reason(output: str) -> str:
    """Return FewLabel's own sentence in what a run printed at its end, or else Flower's last error."""
    found = [line for line in output.splitlines() if line.startswith("fewlabel.")]
    return found[-1].partition(": ")[2] if found else processes.last_error(output)


class MissingSites:
    """The sites that were asked and gave no reply that can be used."""

    def __init__(self, folder: Path) -> None:
        self.names = {member.client: f" '{member.name}'" for member in members.members(folder)}
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
                name = self.names.get(client, "")
                now[client] = why, f"client {client}{name} gave no reply in round {line['round']}: {why}"
        for client, (why, text) in now.items():
            if self.why.get(client) != why:
                yield text
            self.why[client] = why
        if self.why and not failures:  # a reply may be empty, so replies are not counted
            self.why.clear()
            yield f"all sites that were asked replied in round {line['round']}"
