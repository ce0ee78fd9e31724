"""What the numbers say about all data sets together, in sentences that follow from them by rules.

Only rows with all seeds count. "By more than chance" means: the 95 % interval of the difference from labels alone
leaves out zero, and every seed says the same.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments import plan
from experiments.beside import (
    NAMES,
    NONE,
    Rows,
    above,
    box,
    digits,
    is_method,
    is_own,
    is_whole,
    networks,
    points,
    seeds_of,
    shown,
    side,
    wanted_seeds,
)
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.tables import Table

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Findings:
    """What each method gains over labels alone, in points of balanced accuracy, by data set."""

    gains: Mapping[str, Mapping[str, float]]  # by method, by data set
    better: Mapping[str, Sequence[str]]  # where a method is above labels alone by more than chance
    worse: Mapping[str, Sequence[str]]  # where it is below
    ceilings: Mapping[str, float]  # what all labels gain by more than chance, and more than every method

    @property
    def names(self) -> list[str]:
        """All data sets on which any method has all seeds."""
        return [name for name in NAMES.values() if any(name in gain for gain in self.gains.values())]

    @property
    def shared(self) -> list[str]:
        """The data sets by which methods are ranked: those of the method that has most of them, our own if several."""
        return list(max(self.gains.values(), key=len))

    @property
    def means(self) -> dict[str, float]:
        """The mean gains of the methods that have all shared data sets, best first."""
        found = {
            row: statistics.fmean(gain[name] for name in self.shared)
            for row, gain in self.gains.items()
            if set(self.shared) <= set(gain)
        }
        return dict(sorted(found.items(), key=lambda one: -one[1]))


def findings(found: Mapping[str, Rows]) -> Findings | None:
    """Return what rows by data set say, or None if no method has all seeds on any."""
    gains: dict[str, dict[str, float]] = {}
    ceilings: dict[str, float] = {}
    sides: dict[str, dict[str, list[str]]] = {"above": {}, "below": {}, "level": {}}
    for name, rows_here in found.items():
        for row in rows_here:
            gain = above(rows_here, row) if is_whole(rows_here, row) else None
            if gain is None:
                continue
            where = side(rows_here, row)
            if is_method(row):
                gains.setdefault(row, {})[name] = 100 * gain.mean
                sides[where].setdefault(row, []).append(name)
            elif row == CEILING and where == "above":
                ceilings[name] = 100 * gain.mean
    if not gains:
        return None
    best = {name: max((gain[name] for gain in gains.values() if name in gain), default=0.0) for name in ceilings}
    ceilings = {name: gain for name, gain in ceilings.items() if gain > best[name]}
    ordered = dict(sorted(gains.items(), key=lambda one: not is_own(one[0])))  # of equals, our own is first
    return Findings(ordered, sides["above"], sides["below"], ceilings)


# Sentences.


def sentences(found: Findings) -> tuple[str, str, str]:
    """Return whether unlabeled images help, which method comes first, and what to do."""
    return f"{helps(found)}.", f"{first(found)}.", f"{advice(found)}."


def helps(found: Findings) -> str:
    """Say how many methods are above labels alone, and how many below, by more than chance."""
    names, many = found.names, len(found.gains)
    judged = f"{counted(many)} method{'s' * (many > 1)}"
    if found.better:
        each = joined(f"`{row}` on {joined(where)}" for row, where in found.better.items())
        verb = "is" if len(found.better) == 1 else "are"
        said = f"{counted(len(found.better))} of {judged} {verb} above labels alone by more than chance: {each}"
    else:
        where = f"any of {counted(len(names))} data sets" if names[1:] else names[0]
        said = f"none of {judged} is above labels alone by more than chance on {where}"
    below = len(found.worse)
    where = " on at least one" if names[1:] and below else ""
    return (
        f"{said}; {counted(below) if below else 'none'} {'are' if below > 1 else 'is'} below by more than chance{where}"
    )


def first(found: Findings) -> str:
    """Say which method has the best mean, and how sure that is."""
    (best, gain), *others = found.means.items()
    over = "in the mean" if found.shared[1:] else f"on {found.shared[0]}"
    if found.shared[1:] and len(found.shared) < len(found.names):
        over += f" of {joined(found.shared)}"
    told = f"{gain:+.1f} points{span(found, best)}"
    if gains_nothing(gain):
        return f"{over}, none of these methods is above labels alone; `{best}` is nearest with {told}"
    if best in found.better:
        told += f", by more than chance on {joined(found.better[best])}"
    else:
        told += ", though on no data set by more than chance" if found.shared[1:] else ", which may be chance"
    if best in found.worse:
        told += f"; it is below by more than chance on {joined(found.worse[best])}"
    own = ", FewLabel's own," if is_own(best) else ""
    following = f"; next is `{others[0][0]}` with {others[0][1]:+.1f}" if others else ""
    return f"{over}, `{best}`{own} is first with {told}{following}"


def advice(found: Findings) -> str:
    """Say what to try. More labels are named where they bring more than any method, by more than chance."""
    best, gain = next(iter(found.means.items()))
    more = joined(f"{points:+.1f} points on {name}" for name, points in found.ceilings.items())
    labels = f"label more images if you can (labels at all sites bring {more})" if more else ""
    if gains_nothing(gain) or best in found.worse:
        other = "use another method only if it is better on your own data"
        return f"train labels alone, {labels}, and {other}" if labels else f"train labels alone, and {other}"
    tries = f"compare `{best}` with labels alone on your own data"
    return f"train labels alone first; if that is not good enough, {f'{labels}, and {tries}' if labels else tries}"


def gains_nothing(gain: float) -> bool:
    return round(gain, 1) <= 0


def span(found: Findings, row: str) -> str:
    """The smallest and the largest gain of a method, if it has several."""
    gains = [found.gains[row][name] for name in found.shared]
    return f" ({min(gains):+.1f} to {max(gains):+.1f})" if gains[1:] else ""


def counted(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


def joined(words: Iterable[str]) -> str:
    *others, last = list(words) or [""]
    return f"{', '.join(others)} and {last}" if others else last


# Parts of pages.


def concluded(tables: Mapping[str, Rows]) -> Findings | None:
    """Return what rows say once our own method is among them: it runs last, so others are there before."""
    found = findings(tables)
    return found if found and any(map(is_own, found.gains)) else None


def conclusion(tables: Mapping[str, Rows]) -> str:
    """The three sentences, with which pages begin."""
    found = concluded(tables)
    if found is None:
        return ""
    heads = ("Do unlabeled images help?", "Which method is first?", "What to do?")
    told = (f"- **{head}** {said[0].upper()}{said[1:]}" for head, said in zip(heads, sentences(found), strict=True))
    return "\n".join(told) + "\n"


def why() -> str:
    """The same in the README, for readers who know no method yet."""
    found = concluded(box())
    if found is None:
        return ""
    own = next(row for row in found.gains if is_own(row))
    design = f"[`{own}`](docs/methods/{own}.md) was designed with validation images of these data sets. "
    told = " ".join(said[0].upper() + said[1:] for said in sentences(found))
    return (
        "**What unlabeled images bring.** With labels at one site, we compared methods that learn from the images of "
        "all sites with training on the labeled ones alone (balanced accuracy on test images, "
        f"{counted(len(plan.SEEDS))} seeds, nothing tuned). {told} {design}"
        "[All results](docs/RESULTS.md)."
    )


def network() -> str:
    """What our own method gains with the larger network of table (q), where it has all seeds."""
    name, tables = list(networks().items())[-1]
    own = next(row for row in plan.rows() if is_own(row))
    gains = {data: found for data, found in tables.items() if is_whole(found, own)}
    if not gains:
        return ""
    return f"**With a larger network**, `{name}`, which has GroupNorm, {beside_floor(own, gains)}"


def digits_too() -> str:
    """What our own method gains on data by which none of its settings was chosen, where it has all seeds."""
    own = next(row for row in plan.rows() if is_own(row))
    gains = {data: found for data, found in digits().items() if is_whole(found, own)}
    return f"**On data by which none of its settings was chosen**, {beside_floor(own, gains)}" if gains else ""


def beside_floor(own: str, tables: Mapping[str, Rows]) -> str:
    """Say by how much a row is above labels alone in each of these tables, and whether that may be chance."""
    chance = {"above": "by more than chance", "below": "by more than chance", "level": "which may be chance"}
    each = "; ".join(
        f"{points(above(found, own))} on {data}, {chance[side(found, own)]} (labels alone have {shown(found[FLOOR])} %)"
        for data, found in tables.items()
    )
    seeds = wanted_seeds(next(iter(tables.values()))[own])
    return (
        f"`{own}` has these points more than labels alone: {each}. {counted(seeds).capitalize()} seeds, nothing tuned."
    )


def choice() -> str:
    """Which methods gain, by data set."""
    tables = box()
    found = findings(tables)
    if found is None:
        return ""
    body = []
    for name in found.names:
        here = {row: gain[name] for row, gain in found.gains.items() if name in gain}
        order = sorted(here, key=lambda row: -here[row])
        said = [f"{row} {here[row]:+.1f}{star(found, row, name)}" for row in order]
        ceiling = tables[name].get(CEILING, ())
        body.append((
            name,
            shown(tables[name][FLOOR]),
            f"{shown(ceiling)}{seeds_of(ceiling)}" if ceiling else NONE,
            ", ".join(said[:3]),
            f"{sum(gain < 0 for gain in here.values())} of {len(here)}",
            said[-1],
        ))  # fmt: skip
    notes = ("Points above labels alone. A star: by more than chance. Without a star, a difference may be chance.",)
    columns = ("data", "labels alone", "all labels", "best three", "below labels alone", "worst")
    return Table("Balanced accuracy on test, %, and which methods gain", columns, tuple(body), notes).markdown()


def star(found: Findings, row: str, name: str) -> str:
    return " *" if name in found.better.get(row, ()) or name in found.worse.get(row, ()) else ""
