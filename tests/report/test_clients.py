"""A picture of a partition must show what it holds, in the terminal and on a page."""

from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.partition import Holding, Partition, deal
from fewlabel.experiment import Clients, Labels
from fewlabel.report.clients import bars, draw, plot, rounded

# Client 0: classes 0, 0, 1 with labels. Client 1 is left out. Client 2: 1, 2, 2, 2, 2 and one nobody knows, no labels.
LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 2, -1, 0])
NONE = np.array([], np.int64)
PARTITION = Partition((Holding(np.arange(3), NONE), Holding(NONE, NONE), Holding(NONE, np.arange(3, 9))), np.array([9]))


def test_lengths_are_rounded_so_that_their_sum_is():
    assert rounded(np.array([1.5, 2.25, 0.25])) == [2, 2, 0]
    assert rounded(np.array([0.4, 0.4, 0.4, 0.8])) == [1, 0, 0, 1]
    assert rounded(np.array([3.0, 0.0])) == [3, 0]


def test_bars_hold_each_place_by_class():
    found = [
        (bar.name, bar.size, bar.labeled.tolist(), bar.unlabeled.tolist())
        for bar in bars(PARTITION, LABELS, ("a", "b", "c"))
    ]
    assert found == [
        ("client 0", 3, [2, 1, 0], [0, 0, 0]),
        ("client 2", 6, [0, 0, 0], [0, 1, 4]),
        ("server", 1, [1, 0, 0], [0, 0, 0]),
    ]


def test_the_terminal_shows_classes_as_signs():
    console = Console(width=80, record=True, file=StringIO())
    console.print(draw(PARTITION, LABELS, ("ant", "[b]ee", "cat"), width=12))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["images", "labeled", "classes"]
    # The longest, of six, has twelve signs.
    assert lines[1:4] == [
        ["client", "0", "3", "3", "000011"],
        ["client", "2", "6", "0", "1122222222.."],
        ["server", "1", "1", "00"],
    ]
    assert " ".join(lines[4]) == "0 ant, 1 [b]ee, 2 cat, . unknown"


def test_wrong_labels_are_counted_and_holders_named():
    noisy = replace(PARTITION, noise=np.array([[1, 9], [2, 1]]))
    console = Console(width=80, record=True, file=StringIO())
    console.print(draw(noisy, LABELS, ("ant", "bee", "cat"), width=12, holders=np.array(list("[[[yyyyyyy"))))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["images", "labeled", "wrong", "classes"]
    assert lines[1] == ["client", "0:", "[", "3", "3", "1", "000011"]
    assert lines[2][:6] == ["client", "2:", "y", "6", "0", "0"]
    assert lines[3] == ["server", "1", "1", "1", "00"]
    names = plot(noisy, LABELS, ("a", "b", "c"), holders=np.array(list("xxxyyyyyyy"))).axes[0].get_yticklabels()
    assert [text.get_text() for text in names] == ["client 0: x", "client 2: y", "server"]


def test_a_hundred_classes_are_drawn_with_a_legend_of_the_first(tmp_path):
    y = np.repeat(np.arange(100), 10)
    partition = deal(y, Clients(), Labels(validation=0.1), 0)
    classes = tuple(f"class {n}" for n in range(100))
    console = Console(width=200, record=True, file=StringIO())
    console.print(draw(partition, y, classes))
    text = " ".join(console.export_text().split())
    assert "validation" in text
    assert "j class 19 and 80 more" in text
    assert plot(partition, y, classes).legends == []


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_page_shows_a_stacked_bar_for_each_place(tmp_path, kind):
    figure = plot(PARTITION, LABELS, ("a", "$b$", "c"), tmp_path / f"p.{kind}")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["client 0", "client 2", "server"]
    widths = [
        [bar.get_width() for bar in container] for container in axes.containers
    ]  # by class, labeled and not, and unknown
    assert widths == [[2, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 4, 0], [0, 1, 0]]
    assert axes.containers[5][1].get_x() == 1  # on top of the one image of class 1
    written = (tmp_path / f"p.{kind}").read_bytes()
    assert written.startswith(b"\x89PNG") if kind == "png" else ElementTree.fromstring(written).tag.endswith("svg")


def test_a_picture_that_cannot_be_saved_says_why(tmp_path):
    with pytest.raises(BadInput, match=r"a plot cannot be saved as 'p.doc'; its ending must be one of .*png.*svg"):
        plot(PARTITION, LABELS, ("a", "b", "c"), tmp_path / "p.doc")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file cannot be made: File exists; choose another directory"):
        plot(PARTITION, LABELS, ("a", "b", "c"), tmp_path / "file" / "p.png")
