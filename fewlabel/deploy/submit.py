"""A run that a SuperLink carries out: how it is submitted, watched, and ended by whoever watches it."""

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fewlabel.cli.options import tell
from fewlabel.core.errors import RunFailed
from fewlabel.deploy import keys, processes, superlink

FAILED = re.compile(r"client (\d+)(?: failed in '\w+' of round \d+)?: (.*)", re.S)


def command(folder: Path, directory: Path) -> list[str]:
    """Flower's command that submits a run."""
    from fewlabel.deploy.flower import write_app

    app = str(write_app(folder / "flower"))
    config = f"directory={json.dumps(str(directory))}"
    return [str(processes.BIN / "flwr"), "run", app, superlink.HERE, "--run-config", config, "--format", "json"]


def follow(folder: Path, directory: Path, rounds: int) -> None:
    """Submits a run, and shows what it waits for, each round as it is written, and who gave no reply."""
    from fewlabel.engine.record import read_rounds
    from fewlabel.report.terminal import Rounds

    lines, summary, log = (directory / name for name in ("rounds.jsonl", "summary.json", "flower.log"))
    seen, former, missing = checkpointed(directory), identity(lines), Missing(folder)
    number = str(superlink.answered(folder, command(folder, directory.absolute()))["run-id"])
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "runs" / number).write_text(str(directory.absolute()))
    tell("submitted; Flower starts it, which takes some seconds")
    stream = [str(processes.BIN / "flwr"), "log", number, superlink.HERE, "--stream"]
    with (
        processes.interruptible(),
        log.open("ab") as told,
        log.open(errors="replace") as heard,
        Rounds(rounds, pace=0) as screen,
    ):
        began, rest = heard.seek(0, os.SEEK_END), ""
        environment = {**superlink.environment(folder), "PYTHONUNBUFFERED": "1"}
        listen = partial(subprocess.Popen, stream, stdout=told, stderr=told, env=environment, start_new_session=True)
        watching = listen()
        spoken = known = 0  # FewLabel's own lines of the log: those said here, and those of them in this stream
        try:
            over = False
            while not over:
                silent = watching.poll() is not None
                over = summary.exists() or (silent and ended(folder, number))
                *said, rest = (rest + heard.read()).split("\n")
                for text in said:
                    if text.startswith("fewlabel: "):
                        known += 1
                        if known > spoken:
                            screen.say(text)
                            spoken = known
                if silent and not over:  # the stream alone has ended: a new one begins with the first line again
                    watching, known, rest = listen(), 0, ""
                for line in read_rounds(directory)[seen:] if identity(lines) != former else ():
                    screen.watch(line)
                    seen = line["round"]
                    for news in missing.news(line):
                        screen.say(f"fewlabel: {news}")
                time.sleep(0.2 * (not over))
        except BaseException as error:
            until = time.monotonic() + 10
            while seen == rounds and not summary.exists() and time.monotonic() < until:
                time.sleep(0.05)
            if not isinstance(error, KeyboardInterrupt) or not summary.exists():  # or it is over, and all is well
                with suppress(RunFailed):
                    superlink.flwr(folder, "stop", number)
                processes.end(folder, using=directory.resolve() / ".lock")  # or it would compute on, for nobody
                error.add_note(f"to go on: {again(folder, directory)}")
                raise
        finally:
            watching.terminate()
            watching.wait()
    if not summary.exists():
        why = reason(processes.read_from(log, began))
        raise RunFailed(f"the run has ended: {why}; to go on: {again(folder, directory)}")


def ended(folder: Path, number: str) -> bool:
    """Whether a run is over to Flower, or Flower is."""
    try:
        listed = superlink.flwr(folder, "list")["runs"]
    except RunFailed:
        return True
    return all(run["status"].startswith("finished") for run in listed if run["run-id"] == number)


def identity(path: Path) -> int | None:
    """Which file it is: a run begins with a new one, of the rounds that it need not compute anew."""
    return path.stat().st_ino if path.exists() else None


def checkpointed(directory: Path) -> int:
    """The round of a run's last checkpoint."""
    return max((int(path.name.split("-")[1]) for path in directory.glob("checkpoint/round-*.safetensors")), default=0)


def last_round(directory: Path) -> str:
    """The last line of a run, whose directory may be gone."""
    with suppress(OSError, ValueError):
        lines = (directory / "rounds.jsonl").read_text().splitlines()
        return str(json.loads(lines[-1])["round"]) if lines else "0"
    return "0"


def going_on(directory: Path, rounds: int) -> str:
    """Where a run is resumed, and what that repeats."""
    done, last = checkpointed(directory), int(last_round(directory))
    where = f"goes on after round {done} of {rounds}, its last checkpoint" if done else "begins with round 1"
    lost = f"; computed anew: round{'s' * (last > done + 1)} {' to '.join(map(str, sorted({done + 1, last})))}"
    return f"{directory} {where}{lost if last > done else ''}"


class Missing:
    """The sites that were asked and gave no reply that can be used."""

    def __init__(self, folder: Path) -> None:
        self.names = {str(member.client): f" '{member.name}'" for member in keys.members(folder)}
        self.why: dict[str, str] = {}

    def news(self, line: Mapping[str, Any]) -> Iterator[str]:
        """What a round's line tells of them that those before did not."""
        told = [*line.get("sites", {}).get("failures", ()), *line.get("failures", ())]
        now = {found[1]: found[2] for text in told if (found := FAILED.fullmatch(text))}
        for client, why in now.items():
            if self.why.get(client) != why:
                yield f"client {client}{self.names.get(client, '')} gave no reply in round {line['round']}: {why}"
        if now:
            self.why |= now
        elif self.why and not told:  # a reply may be empty, so replies are not counted
            self.why.clear()
            yield f"all sites that were asked replied in round {line['round']}"


def again(folder: Path, directory: Path) -> str:
    return shlex.join(["fewlabel", "federation", "run", str(folder), "--resume", str(directory)])


def reason(said: str) -> str:
    """FewLabel's own sentence in what a run said at its end, or else Flower's last word."""
    found = [line for line in said.splitlines() if line.startswith("fewlabel.")]
    return found[-1].partition(": ")[2] if found else processes.last_word(said)
