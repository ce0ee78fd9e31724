"""The table of a page: the main numbers of every row, with their intervals."""

from collections.abc import Sequence
from dataclasses import replace

from fewlabel.report import intervals
from fewlabel.report.groups import Group
from fewlabel.report.intervals import in_words
from fewlabel.report.result_tables import (
    Column,
    about_images,
    about_recipes,
    about_rounds,
    distinct_rows,
    metric,
    table_of,
    trained,
    warnings,
)
from fewlabel.report.runs import FLOOR, Row
from fewlabel.report.tables import Table, megabytes, percent


def interval_column(heading: str, key: str) -> Column:
    """Return a column of a metric with its interval over test images and seeds."""

    def cell(_: Group, row: Row) -> str:
        spread, ends = row.last[key], row.interval.get(key)
        return percent(spread.mean if spread else None) + (f" ({in_words(ends)})" if spread and ends else "")

    return Column(heading, cell, lambda row: row.last[key])


def above_labels(group: Group, row: Row) -> str:
    """Write how much better a row is than labels alone in balanced accuracy, with the interval of the difference."""
    floor = group.row_named(FLOOR)
    found = row.above(floor) if floor and floor is not row else None
    if found is None:
        return "–"
    return f"{100 * found.mean:+.1f} ({' to '.join(f'{100 * end:+.1f}' for end in found.interval)})".replace("-", "−")


PAGE = (
    interval_column("balanced accuracy", "balanced_accuracy"),
    Column("above labels alone", above_labels),
    interval_column("accuracy", "accuracy"),
    metric("AUC", lambda row: row.last["auc"]),
    Column("images, thousands", lambda _, row: trained(row)),
    Column("sent, MB", lambda _, row: megabytes(row.spent["bytes_up"] + row.spent["bytes_down"])),
)


def page_table(groups: Sequence[Group]) -> Table:
    """Show the main numbers of every row with their intervals, for a page."""
    rows = distinct_rows(groups)
    images = {row.test_images for row in rows} - {None}
    over = f" ({', '.join(f'{n:,}' for n in sorted(filter(None, images)))} test images)" if images else ""
    notes = [f"{about_rounds(groups, rows)} {about_recipes([row.experiment for row in rows])}"]
    if any(row.interval for row in rows):
        most = max(len(row.seeds) for row in rows)
        notes.append(intervals.about(most))
    if any(group.row_named(FLOOR) for group in groups):
        notes.append(
            f"Above labels alone: points of balanced accuracy above {FLOOR}. Its interval takes the test images of "
            "both models as different ones, so it is rather too wide. If it holds 0, the difference may be chance."
        )
    table = table_of(groups, PAGE, [*notes, *about_images(rows), *warnings(groups, rows)])
    return replace(table, title=table.title.replace(", in percent", f"{over}, in percent"))
