"""The labeling page in a real browser, driven by keyboard and touch, before the real program."""

import csv
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.labeling.answers import Answer, Answers
from tests.browser import Browser, browsed, started
from tests.data.test_own import dicom

READY = "shown !== null && !busy"


@pytest.fixture(scope="module")
def model(small_run: Callable[..., Path]) -> Path:
    directory = small_run("method=labels-only", "rounds=4", "labels.at=every-client", "labels.fraction=1")
    execute(directory, executor=Serial())
    return directory


def write_images(root: Path) -> Path:
    """Write forty digits that nobody has labeled, and four that somebody has."""
    pixels, labels = load_digits(return_X_y=True)
    for number in range(44):
        folder = root / "images" / ("unlabeled" if number >= 4 else str(labels[number]))
        folder.mkdir(parents=True, exist_ok=True)
        whole = np.rint(pixels[number].reshape(8, 8) * (255 / 16)).astype(np.uint8)
        Image.fromarray(whole).resize((200, 160), Image.Resampling.NEAREST).save(folder / f"{number}.png")
    return root / "images"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path)


@contextmanager
def labeling(*words: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, and the address that it prints."""
    command = [sys.executable, "-m", "fewlabel", "label", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.stderr.read()
        yield process, address
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """One program for tests that need nothing of their own: its address, and its table of answers."""
    root = tmp_path_factory.mktemp("served")
    file = root / "l.csv"
    with labeling(write_images(root), "--run", model, "--count", "10", "--out", file) as (_, address):
        yield address, file


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def answer(tab: Browser, key: str) -> None:
    """Press a key, and wait until the page has gone on."""
    before = tab.ask("state.done")
    tab.press(key)
    tab.wait(f"state.done !== {before} && !busy")


@browsed
def test_twenty_images_by_keyboard_with_undo_and_a_kill_in_the_middle(model, images, tmp_path, tab):
    file = tmp_path / "images-labels.csv"
    given = (images, "--run", model, "--count", "20", "--who", "ann")
    tab.look(1200, 800)
    with labeling(*given) as (process, address):
        tab.open(address)
        tab.wait(READY)
        assert tab.ask("document.getElementById('count').textContent") == "0 of 20"
        for number in range(8):
            path = tab.ask("about.path")
            answer(tab, str(number))
            assert rows(file)[-1]["path"] == path  # on disk before the next image is there
            assert rows(file)[-1]["label"] == str(number)
        answer(tab, "u")  # the last one was wrong
        assert tab.ask("about.path") == path
        assert tab.ask("state.done") == 7
        answer(tab, "9")
        answer(tab, "s")
        answer(tab, "c")
        shown = tab.ask("about.path")
        process.send_signal(signal.SIGKILL)
        process.wait()
        tab.press("1")  # nobody is there
        tab.wait("!document.getElementById('error').hidden")
        assert "start the command again to go on" in tab.ask("document.getElementById('error').textContent")
        assert len(rows(file)) == 8 + 1 + 1 + 2
    with labeling(*given) as (process, address):
        tab.open(address)
        tab.wait(READY)
        assert tab.ask("[state.done, about.path]") == [10, shown]  # where it was killed
        for _ in range(10):
            answer(tab, "3")
        tab.wait("!document.getElementById('end').hidden")
        end = tab.ask("document.getElementById('end').innerText")
        assert "All 20 images are done" in end
        assert "18 labeled, 1 where you could not tell, 1 skipped" in end
        tab.press("s")  # look at what was skipped
        tab.wait(READY)
        tab.press("5")
        tab.wait("!document.getElementById('end').hidden")
        assert "19 labeled, 1 where you could not tell." in tab.ask("document.getElementById('end').innerText")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "20 of 20 images answered: 0 1, 1 1, 2 1, 3 11, 4 1, 5 2, 6 1, 9 1" in out
    answers = rows(file)
    assert [row["note"] for row in answers[:12]] == [""] * 8 + ["undone", "", "skipped", "cannot tell"]
    assert {row["who"] for row in answers} == {"ann"}
    assert all(float(row["seconds"]) >= 0 and row["when"] for row in answers if row["note"] != "undone")
    assert len({row["path"] for row in answers}) == 20
    with labeling(*given) as (_, address):  # a finished batch is followed by the next
        tab.open(address)
        tab.wait(READY)
        assert tab.ask("[state.done, state.total]") == [0, 20]
        assert tab.ask("about.path") not in {row["path"] for row in answers}


def test_how_to_train_is_told_once_the_table_has_a_label_whoever_gave_it(images, tmp_path):
    file = tmp_path / "ours.csv"

    def told() -> str:
        with labeling(images, "--who", "ann", "--out", file) as (process, address):
            with urllib.request.urlopen(address, timeout=30) as page:  # so that it is served before it is ended
                assert page.status == 200
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
        return out

    assert "no label" in told()
    assert "to train with them" not in told()
    image = next(images.rglob("*.png")).relative_to(tmp_path)
    Answers(file).append(Answer(str(image), "3", "bob"))
    assert "no label" in (out := told())  # of ann's
    assert f"to train with them: --set labels.file={file}" in out


@browsed
def test_the_models_opinion_is_hidden_until_asked_for_and_for_each_image_anew(model, images, tab):
    with labeling(images, "--run", model, "--count", "5") as (_, address):
        tab.open(address)
        tab.wait(READY)
        hidden = "document.getElementById('opinion').hidden && !document.getElementById('opinion').innerText"
        assert tab.ask(hidden)
        before = [url for url in tab.fetched if "/opinion/" in url]
        tab.press("m")
        tab.wait("!document.getElementById('opinion').hidden")
        assert tab.ask("document.getElementById('opinion').innerText").count("%") == 5
        assert [url for url in tab.fetched if "/opinion/" in url][len(before) :] == [f"{address}opinion/0"]
        answer(tab, "1")
        assert tab.ask(hidden)
        for _ in range(4):
            answer(tab, "1")
        tab.wait("!document.getElementById('end').hidden")
        assert "All 5 labels are '1'." in tab.ask("document.getElementById('end').innerText")


@browsed
def test_two_people_label_the_same_images_and_see_where_they_disagree(model, images, tmp_path, tab):
    given = images, "--run", model, "--count", "3", "--out", tmp_path / "both.csv"
    seen = {}
    for who, keys in (("ann", "123"), ("bob", "143")):
        with labeling(*given, "--who", who) as (process, address):
            tab.open(address)
            tab.wait(READY)
            seen[who] = []
            for key in keys:
                seen[who].append(tab.ask("about.path"))
                answer(tab, key)
            tab.wait("!document.getElementById('end').hidden")
            end = tab.ask("document.getElementById('end').innerText")
            if who == "bob":
                assert f"ann: 2, bob: 4 ({seen['ann'][1]})" in end
                tab.ask("document.querySelector('#differing button').click()")
                tab.wait(READY)
                tab.press("2")
                tab.wait("!document.getElementById('end').hidden")
                assert "ann: 2" not in tab.ask("document.getElementById('end').innerText")
            else:
                assert "Different labels" not in end
            process.send_signal(signal.SIGINT)
            assert "different labels" not in process.communicate(timeout=60)[0]
    assert seen["ann"] == seen["bob"]


@browsed
def test_sixteen_bits_and_dicom_are_shown_with_a_contrast_that_can_be_changed(tmp_path, tab):
    folder = tmp_path / "deep"
    (folder / "unlabeled").mkdir(parents=True)
    (folder / "classes.txt").write_text("normal\nodd\n")
    ramp = np.tile(np.linspace(1000, 1400, 120), (90, 1))
    Image.fromarray(ramp.astype(np.uint16)).save(folder / "unlabeled" / "a.png")
    stored = np.tile(np.linspace(0, 4000, 120), (90, 1)).astype(np.int16)
    dicom(
        folder / "unlabeled" / "b.dcm", stored, RescaleSlope=1, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=400
    )
    grey = (
        "(() => {const c = document.createElement('canvas'), i = document.getElementById('image');"
        "c.width = i.naturalWidth; c.height = i.naturalHeight; const g = c.getContext('2d'); g.drawImage(i, 0, 0);"
        "const at = x => g.getImageData(x, 45, 1, 1).data[0]; return [at(0), at(60), at(119)]})()"
    )
    with labeling(folder, "--who", "ann") as (_, address):
        tab.look(1100, 800)
        tab.open(address)
        found = {}
        for _ in range(2):
            tab.wait(READY)
            name = tab.ask("about.path")
            found[name] = tab.ask(grey)
            assert tab.ask("about.deep")
            if name.endswith("a.png"):  # black at 1000, white at 1400 but for half a percent at each end
                assert tab.ask("[about.least, about.most]") == [1000, 1400]
                white = tab.ask("Number(document.getElementById('high').value)")
                for _ in range(10):
                    tab.press(",")
                tab.wait(f"Number(document.getElementById('high').value) < {white} && !drawing && !wanted")
                # White is now a quarter of 400 lower: the middle, 1200 of 1000 to about 1300, is near 2/3 of 255.
                tab.wait(f"Math.abs(({grey})[1] - 170) < 8")
                tab.press("z")
                tab.wait(f"Math.abs(({grey})[1] - 128) < 4")
            else:  # the file's window: 40 - 0.5 - 399 / 2 = -160 to 40 - 0.5 + 399 / 2 = 239, of -1024 to 2976
                assert tab.ask("[about.low, about.high]") == [-160, 239]
                assert tab.ask("[about.least, about.most]") == [-1024, 2976]
            tab.press("1")
            tab.wait("(shown !== null || !document.getElementById('end').hidden) && !busy")
    assert found["deep/unlabeled/a.png"] == pytest.approx([0, 128, 255], abs=3)
    assert found["deep/unlabeled/b.dcm"] == pytest.approx([0, 255, 255], abs=1)
    assert [row["label"] for row in rows(tmp_path / "deep-labels.csv")] == ["normal", "normal"]


@browsed
@pytest.mark.parametrize(("width", "height"), [(390, 844), (820, 1180)])
def test_on_a_telephone_and_a_tablet_fingers_do_it_and_nothing_is_cut_off(width, height, served, tab):
    address, file = served
    before = rows(file)
    with ExitStack() as stack:
        stack.callback(tab.look, 1200, 800)
        tab.look(width, height, mobile=True)
        tab.open(address)
        tab.wait(READY)
        assert tab.ask("document.documentElement.scrollWidth") == width
        small = "[...document.querySelectorAll('#classes button, #actions button')].filter(b => !b.hidden)"
        sizes = tab.ask(f"{small}.map(b => b.getBoundingClientRect()).map(b => [b.width, b.height, b.right])")
        assert len(sizes) == 14
        assert all(w >= 44 and h >= 44 and right <= width for w, h, right in sizes)
        stage = tab.ask("(b => [b.width, b.height])(document.getElementById('stage').getBoundingClientRect())")
        assert min(stage) >= 180
        done = tab.ask("state.done")
        tab.tap("#classes button:nth-child(3)")
        tab.wait(f"state.done === {done + 1} && !busy")
        tab.ask("document.getElementById('stage').dispatchEvent(new MouseEvent('dblclick'))")
        tab.wait("view.scale === 3")
        tab.tap("#undo")
        tab.wait(f"state.done === {done} && !busy")
    assert [(row["label"], row["note"]) for row in rows(file)[len(before) :]] == [("2", ""), ("", "undone")]


@browsed
def test_the_page_loads_nothing_from_elsewhere_and_has_no_errors(served, tab):
    address, _ = served
    tab.open(address)
    tab.wait(READY)
    for key in "+-zm,.;'":
        tab.press(key)
    tab.wait("!busy && !drawing")
    answer(tab, "1")
    assert tab.said == []
    assert {url.startswith((address, "data:,", "blob:")) for url in tab.fetched} == {True}


def test_the_program_answers_nobody_without_the_token(served):
    import http.client

    address, file = served
    before = len(rows(file))
    port, token = int(address.split(":")[2].split("/")[0]), address.rstrip("/").rpartition("/")[2]

    def ask(method: str, path: str, body: str = "", **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path, body, headers)
        return connection.getresponse().status

    answer = '{"image": 9, "note": "", "label": "1", "seconds": 1}'
    assert ask("GET", "/state") == 403
    assert ask("POST", "/answer", answer) == 403
    assert ask("POST", f"/{token}/answer", answer, Origin="http://evil.example") == 403
    assert ask("POST", f"/{token}/answer", answer, Host="evil.example") == 403
    assert len(rows(file)) == before
    assert ask("POST", f"/{token}/answer", answer) == 200
    assert ask("POST", f"/{token}/answer", '{"image": 99, "note": "", "label": "1", "seconds": 1}') == 400
    assert ask("POST", f"/{token}/answer", '{"image": 9, "note": "", "label": "cat", "seconds": 1}') == 400
    assert ask("POST", f"/{token}/answer", "[]") == 400
    assert ask("GET", f"/{token}/image/x") == 400
    assert ask("GET", f"/{token}/image/0") == 200
    assert ask("GET", f"/{token}/../../etc/passwd") == 404
    assert len(rows(file)) == before + 1
