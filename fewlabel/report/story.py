"""What came out, in sentences: the headline of a page, and the findings behind it.

Every sentence follows from numbers by a rule, and each rule has a test. A difference that lies within its interval is
called that. Balanced accuracy counts here, because few labels are rarely of all classes alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fewlabel.core.described import conclusions
from fewlabel.engine.record import FEW
from fewlabel.report.findings import findings, guesses, in_last_round, odd_updates, too_few_rounds
from fewlabel.report.groups import EVERY_LABEL, Group
from fewlabel.report.intervals import ENOUGH, Difference, Interval, in_words
from fewlabel.report.result_tables import about_conclusions, about_unequal_work
from fewlabel.report.runs import CEILING, FLOOR, Row, Run
from fewlabel.report.tables import percent

KEY, NAME = "balanced_accuracy", "balanced accuracy"
UNFOUND = 0.1  # a class of which a model recognizes fewer images is not found
WEAK = 0.7  # a class of which a model recognizes fewer images is worth a finding
SCARCE = 4  # a class has few labels if it has fewer than a quarter of what classes have on average
MOST_NAMES = 3  # classes or rows to name in a sentence
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@dataclass(frozen=True)
class Story:
    """The headline of a page, and the findings behind it."""

    headline: str
    findings: tuple[str, ...] = ()


def story_of_run(run: Run) -> Story:
    """Tell what came out of one run, as far as it has got."""
    row = Row(run.name, (run,))
    if (value := mean_of(row)) is None:
        return Story(f"{run.name}: {not_measured(run)}", tuple(about_run(run)))
    if row.guessing:
        return Story(f"{so_far([row])}{run.name} guesses: {guess_in_words(row)}.", tuple(about_run(run)))
    images = f" on {row.test_images:,} test images" if row.test_images else ""
    lead = f"{so_far([row])}{run.name}: {percent(value)} % {NAME}{bracketed(row)}{images}."
    return Story(join(lead, unfound([row])), (*hardest(row), *about_run(run)))


def story_of_groups(groups: Sequence[Group]) -> Story:
    """Tell what came out of runs side by side. Several groups are told one by one."""
    if len(groups) == 1:
        (group,) = groups
        rows = [row for row in labeled_few(group) if mean_of(row) is not None and not row.guessing]
        return Story(so_far(group.rows) + join(lead_of(group), unfound(rows)), tuple(about_group(group)))
    best = {group.label: row for group in groups if (row := best_of(group))}
    clear = [label for label, row in best.items() if is_clear(above_floor(group_named(groups, label), row))]
    leads = [f"{group.label}: {lead_of(group)}" for group in groups]
    if not best:
        return Story(f"{len(groups)} settings. Nothing is measured yet.", tuple(leads))
    wins: dict[str, int] = {}
    for row in best.values():
        wins[row.name] = wins.get(row.name, 0) + 1
    ranked = sorted(wins.items(), key=lambda item: -item[1])
    (first, most), *others = ranked
    places = [f"{first} has the best {NAME} in {most}", *(f"{name} in {count}" for name, count in others[:MOST_NAMES])]
    if left := sum(count for _, count in others[MOST_NAMES:]):
        places.append(f"others in {left}")
    lead = f"{len(groups)} settings: {', '.join(places)}."
    if any(group.row_named(FLOOR) for group in groups):
        lead += f" In {len(clear)} of {len(groups)} it is clearly above labels alone."
    return Story(lead, tuple(leads))


# One group


def mean_of(row: Row | None) -> float | None:
    """Return a row's balanced accuracy in the last round measured, on average over seeds."""
    found = row.last[KEY] if row else None
    return found.mean if found else None


def best_of(group: Group) -> Row | None:
    """Return the candidate with the best balanced accuracy that does not guess."""
    means = group.means(lambda row: row.last[KEY])
    return max(means, key=lambda row: means[row], default=None)


def labeled_few(group: Group) -> list[Row]:
    """List the rows that had to do with few labels."""
    return [row for row in group.relabeled if row.name not in EVERY_LABEL]


def group_named(groups: Sequence[Group], label: str) -> Group:
    return next(group for group in groups if group.label == label)


def label_in(group: Group, row: Row) -> str:
    return group.row_labels[group.rows.index(row)]


def above_floor(group: Group, row: Row) -> Difference | None:
    """Return how much better a row is than labels alone, if that is known."""
    floor = group.row_named(FLOOR)
    return row.above(floor) if floor else None


def is_clear(found: Difference | None) -> bool:
    return found is not None and found.mean > 0 and not found.chance


def lead_of(group: Group) -> str:
    """Say which candidate is best, and how it compares with labels alone."""
    best, floor = best_of(group), group.row_named(FLOOR)
    if best is None:
        return lead_without_best(group)
    name, value, least = label_in(group, best), mean_of(best), mean_of(floor)
    lead = f"{name}: {percent(value)} % {NAME}"
    others = [row for row in group.candidates if row is not best and mean_of(row) is not None]
    if value is None or least is None:
        equal = [label_in(group, row) for row in others if mean_of(row) == value]
        like = f", as good as {listed(equal)}" if equal else ""
        return f"{lead}{', the best of ' + number(len(others) + 1) + ' methods' + like if others else ''}."
    found = above_floor(group, best)
    gain = found.mean if found else value - least  # in the seeds that both have
    if found is not None and found.chance:
        clear = [row for row in others if not row.guessing and is_clear(above_floor(group, row))]
        if clear:  # a method whose seeds agree more than those of the best one
            return f"{lead_above(group, clear)} {name} has {percent(value)} %, but that difference may be chance."
        who = f"No method is clearly better than labels alone: {name}"
        who = who if others else f"{name} is not clearly better than labels alone: it"
        return f"{who} has {percent(value)} % {NAME}, labels alone {percent(least)} %."
    if gain >= 0:
        return f"{lead}, {points(gain)} above labels alone."
    who = f"No method reaches labels alone ({percent(least)} % {NAME}): the best, {name}, is {points(gain)} below."
    return who if others else f"{lead}, {points(gain)} below labels alone."


def lead_above(group: Group, rows: Sequence[Row]) -> str:
    """Say how far the best of these rows is above labels alone."""
    best = max(rows, key=lambda row: mean_of(row) or 0.0)
    found = above_floor(group, best)
    assert found is not None
    return f"{label_in(group, best)}: {percent(mean_of(best))} % {NAME}, {points(found.mean)} above labels alone."


def lead_without_best(group: Group) -> str:
    """Say what there is to say if no candidate learned anything, or none was asked to."""
    guessing = [row for row in group.candidates if row.guessing]
    if guessing and len(guessing) == len([row for row in group.candidates if mean_of(row) is not None]):
        who = "Every method guesses" if len(guessing) > 1 else f"{label_in(group, guessing[0])} guesses"
        return f"{who}: {guess_in_words(max(guessing, key=lambda row: mean_of(row) or 0.0))}."
    known = [row for row in group.rows if mean_of(row) is not None]
    if not known:
        return "Nothing is measured yet."
    return ", ".join(f"{label_in(group, row)} {percent(mean_of(row))} %" for row in known) + f" {NAME}."


def guess_in_words(row: Row) -> str:
    test = next(run.last["test"] for run in row.results if run.last and guesses(run.last.get("test", {})))
    classes = sum(recall is not None for recall in test["recall_per_class"])
    return f"{percent(mean_of(row))} % {NAME}, and one class for all images has {percent(1 / classes)} %"


def about_group(group: Group) -> Iterator[str]:
    """Yield the findings behind the lead of a group."""
    best = best_of(group)
    found = above_floor(group, best) if best else None
    if best and found:
        way = "above" if found.mean >= 0 else "below"
        lies = "The difference lies within its interval, so it may be chance"
        if not found.chance:
            lies = hardly_chance(found.seeds)
        yield f"{label_in(group, best)} is {points(found.mean)} {way} labels alone. {lies} ({signed(found.interval)})."
    yield from about_bounds(group, best)
    yield from about_others(group, best)
    yield from about_guessing(group)
    yield from about_unequal_work([group])
    yield from about_conclusions(group.rows, every=False)
    if best:
        yield from hardest(best, label_in(group, best))
        yield from about_labels(best.results)
        yield from about_pseudo_labels(best, label_in(group, best))
    if hint := too_few_rounds(group.rows[0].experiment):
        yield hint
    yield about_certainty(group.rows)


def hardly_chance(seeds: int) -> str:
    """Say what a difference outside its interval means. Few seeds tell little about others, and one tells nothing."""
    if seeds == 1:
        return "The choice of test images hardly explains the difference"
    more = f", though {number(seeds)} seeds tell little about others" if seeds < ENOUGH else ""
    return f"The difference is hardly chance{more}"


def about_bounds(group: Group, best: Row | None) -> Iterator[str]:
    """Say what labels alone and all labels reach, and how much of the gap the best row closes."""
    floor, ceiling = group.row_named(FLOOR), group.row_named(CEILING)
    low, high = mean_of(floor), mean_of(ceiling)
    if floor is None or ceiling is None or low is None or high is None:
        return
    text = f"Labels alone reach {percent(low)} %{bracketed(floor)}, all labels {percent(high)} %{bracketed(ceiling)}."
    value, gap = mean_of(best), high - low
    found, over = ceiling.above(floor), best.above(ceiling) if best else None
    if best and over and is_clear(over):
        text += f" {label_in(group, best)} is {points(over.mean)} above all labels, so they are no ceiling here: "
        text += "they may need more rounds."
    elif found and found.chance:
        text += " The gap between them lies within its interval, so there is hardly anything to gain."
    elif best and value is not None and value > low and gap > 0:
        closed = (value - low) / gap
        closes = "all of the gap" if closed >= 1 else f"{100 * closed:.0f} % of the gap"
        text += f" {label_in(group, best)} closes {closes}."
    yield text


def about_others(group: Group, best: Row | None) -> Iterator[str]:
    """Say which candidates may be as good as the best one, and which are below labels alone."""
    others = [row for row in group.candidates if row is not best and not row.guessing and mean_of(row) is not None]
    if best:
        tied = [row for row in others if (found := best.above(row)) and found.chance]
        if tied:
            which = listed([f"{label_in(group, row)} ({percent(mean_of(row))} %)" for row in tied])
            yield f"{which} may be as good as {label_in(group, best)}: the difference lies within its interval."
    worse = [(row, found) for row in others if (found := above_floor(group, row)) and found.mean < 0]
    for chance, what in {
        False: "clearly below labels alone",
        True: "below labels alone, but within the interval",
    }.items():
        if names := [f"{label_in(group, row)} ({points(d.mean)})" for row, d in worse if d.chance is chance]:
            yield f"{listed(names)} {'is' if len(names) == 1 else 'are'} {what}."


def about_guessing(group: Group) -> Iterator[str]:
    """Say which rows guess and, as far as it is known, why and what mends it."""
    for row in [row for row in group.rows if row.guessing][:MOST_NAMES]:
        run = next(run for run in row.results if run.seed in row.guessing)
        each = (*in_last_round(run.experiment, run.rounds), *findings(run.experiment, run.rounds))
        found = [finding for finding in each if finding.kind == "one-class"]  # of the last round, if it is still so
        of = f" Seed {run.seed}:" if len(row.seeds) > 1 else ""  # the numbers of a cause are those of one run
        why = f"{of} {found[0].why} {found[0].mend}" if found else ""
        yield f"{label_in(group, row)} {row.guesses}: {guess_in_words(row)}.{why}"


def about_certainty(rows: Sequence[Row]) -> str:
    """Say how many test images and seeds there are, and what that means."""
    images, seeds = rows[0].test_images, {seed for row in rows for seed in row.seeds}
    parts = [f"{images:,} test images"] if images else []
    widths = [(high - low) / 2 for row in rows if KEY in row.interval for low, high in [row.interval[KEY]]]
    parts.append("one seed" if len(seeds) == 1 else f"{number(len(seeds))} seeds")
    text = " and ".join(parts) + "."
    if widths:
        text += f" By chance alone, {NAME} may be off by {points(max(widths))}."
    if len(seeds) == 1 and len(rows) > 1:
        text += " Another seed may rank methods otherwise."
    return text[:1].upper() + text[1:]


# One run


def about_run(run: Run) -> Iterator[str]:
    """Yield the findings about a single run."""
    row = Row(run.name, (run,))
    yield from conclusions(run.experiment.method, run.rounds)
    last, chosen = run.last, run.chosen
    if last and chosen and chosen["round"] != last["round"] and "test" in last and "test" in chosen:
        now, then = last["test"].get(KEY), chosen["test"].get(KEY)
        if now is not None and then is not None:
            yield (
                f"Validation chose round {chosen['round']}, which has {percent(then)} % on test; the last round has "
                f"{percent(now)} %."
            )
    yield from about_labels([run])
    yield from about_pseudo_labels(row, "")
    for finding in findings(run.experiment, run.rounds):
        if finding.kind == "one-class":
            yield str(finding)
    if hint := too_few_rounds(run.experiment):
        yield hint
    if odd := odd_updates(run.rounds):
        yield f"Odd updates: {odd}."
    steps = (last or {}).get("test", {}).get("steps_of")
    if steps:
        yield f"Sites tell shares in coarse steps ({steps} images or more), so these numbers have no interval."


def not_measured(run: Run) -> str:
    if not run.rounds:
        return f"no round of {run.experiment.rounds} is complete yet."
    return f"{run.status}. Nothing is measured yet." if not run.finished else "nothing was measured."


def so_far(rows: Sequence[Row]) -> str:
    """Say how far unfinished runs are, before anything else is said about them."""
    unfinished = [run for row in rows for run in row.results if not run.finished and run.rounds]
    if not unfinished:
        return ""
    if len(rows) == len(rows[0].results) == 1:
        return f"After round {unfinished[0].rounds[-1]['round']} of {unfinished[0].experiment.rounds}: "
    runs = sum(len(row.results) for row in rows)
    return f"So far ({runs - sum(len(row.unfinished) for row in rows)} of {runs} runs are finished): "


# Classes and labels


def recalls_of(row: Row) -> list[float | None]:
    """Return the recall of each class in the last round measured, on average over seeds."""
    each = [run.last["test"]["recall_per_class"] for run in row.results if run.last and "test" in run.last]
    pairs = zip(*each, strict=True)
    return [sum(known) / len(known) if (known := [r for r in some if r is not None]) else None for some in pairs]


def unfound(rows: Sequence[Row]) -> str:
    """Name the classes that no row finds, and say so if there are hardly any labels of them."""
    if not rows or not all(recalls := [recalls_of(row) for row in rows]):
        return ""
    each = [[recall[n] for recall in recalls] for n in range(len(recalls[0]))]
    missing = [n for n, some in enumerate(each) if all(recall is not None and recall < UNFOUND for recall in some)]
    if not missing:
        return ""
    who = "Nobody finds" if len(rows) > 1 else "It does not find"
    classes = rows[0].classes
    names = [classes[n] for n in missing[:MOST_NAMES]]
    if len(missing) > MOST_NAMES:
        names.append(f"{number(len(missing) - MOST_NAMES)} more")
    what = f"{who} class{'es' * (len(missing) > 1)} {listed(names)}"
    return f"{what}{why_unfound(rows[0].results, missing)}."


def why_unfound(runs: Sequence[Run], classes: Sequence[int]) -> str:
    """Say how many labels there are of these classes, if they are few in every seed. Nothing if that is unknown."""
    each_seed = [run.notes.get("labels", {}) for run in runs]
    labels, seeds = each_seed[0], [labels.get("per_class") for labels in each_seed]
    if not all(seeds):
        return ""
    if any(counts[n] >= max(FEW, sum(counts) / len(counts) / SCARCE) for counts in seeds for n in classes):
        return ""
    found = [max(counts[n] for counts in seeds) for n in classes]
    holders, server = labels["labeled_clients"], labels["at_server"]
    who = "labels have" if holders and server else "the server has" if server else "the labeled client has"
    who = "the labeled clients have" if holders > 1 and not server else who
    if not any(found):
        return f": {who} none of them"
    alike = len(found) == 1 and len({counts[classes[0]] for counts in seeds}) == 1
    each = number(found[0]) if alike else "at most " + number(max(found))
    return f": {who} {each} of {'them' if len(found) == 1 else 'each'}"


def hardest(row: Row, label: str = "") -> Iterator[str]:
    """Name the class that a row finds least, and what it takes these images for, unless all classes are found well."""
    known = {n: recall for n, recall in enumerate(recalls_of(row)) if recall is not None}
    if not known or min(known.values()) >= WEAK:
        return
    worst = min(known, key=lambda n: known[n])
    text = f"{label + ' finds' if label else 'It finds'} {percent(known[worst])} % of class {row.classes[worst]}"
    wrong: dict[int, int] = {}
    for counts in row.confusions.values():
        for n, count in enumerate(counts[worst]):
            if n != worst:
                wrong[n] = wrong.get(n, 0) + count
    total = sum(sum(counts[worst]) for counts in row.confusions.values())
    if total and wrong and max(wrong.values()):
        most = max(wrong, key=lambda n: wrong[n])
        text += f", the fewest of all classes, and takes {percent(wrong[most] / total)} % of it for {row.classes[most]}"
    yield f"{text}."


def about_labels(runs: Sequence[Run]) -> Iterator[str]:
    """Say who has labels, and of how many images, from the seed with the fewest to that with the most."""
    labels = runs[0].notes.get("labels")
    if labels:
        seeds = sorted({run.notes["labels"]["labeled"] for run in runs if run.notes.get("labels")})
        count = f"{seeds[0]:,}" if len(seeds) == 1 else f"{seeds[0]:,} to {seeds[-1]:,}"
        all_images = labels["labeled"] + labels["hidden"] + labels["unknown"]
        who = f"{labels['labeled_clients']} of {labels['clients']} clients" if labels["labeled_clients"] else ""
        who = " and ".join(filter(None, ["the server" if labels["at_server"] else "", who]))
        verb = "has" if who.startswith("1 of") or who == "the server" else "have"
        yield f"{who[:1].upper()}{who[1:]} {verb} labels: {count} of {all_images:,} images."


def about_pseudo_labels(row: Row, label: str) -> Iterator[str]:
    """Say how many unlabeled images a method labels, and how often it is right."""
    right, share = (row.client_metrics[f"pseudo_label_{key}"] for key in ("precision", "coverage"))
    if right and share and share.mean:
        yield (
            f"{label or 'It'} gives {percent(share.mean)} % of the unlabeled images a pseudo-label, and "
            f"{percent(right.mean)} % of these are right."
        )


# Words


def points(share: float) -> str:
    """Write a difference in points, without its sign."""
    size = abs(100 * share)
    text = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    return f"{text} point{'s' * (text != '1.0')}"


def signed(interval: Interval) -> str:
    return " to ".join(f"{100 * end:+.1f}".replace("-", "−") for end in interval)


def bracketed(row: Row) -> str:
    """Write the interval of a row's balanced accuracy behind it, if there is one."""
    return f" ({in_words(row.interval[KEY])})" if KEY in row.interval else ""


def number(count: int) -> str:
    return NUMBERS[count] if 0 <= count < len(NUMBERS) else f"{count:,}"


def listed(names: Sequence[str]) -> str:
    """Write a list, as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def join(*sentences: str) -> str:
    return " ".join(filter(None, sentences))
