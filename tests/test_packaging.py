"""The package as people install it: a wheel in a new environment with a CPU PyTorch, and the tutorial from it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import console  # noqa: E402

# What `pip install` gets for a PyTorch without CUDA. pip's own settings name other places, if there is no connection.
CPU_TORCH = os.environ.get("FEWLABEL_CPU_TORCH", "torch==2.13.0")


def words(text: str) -> set[str]:
    """Return the words of an output. Numbers, and where columns are broken, differ between machines."""
    return set(re.findall(r"[^\W\d_]+", re.sub(r"[¹²]", "", text)))


def environment() -> dict[str, str]:
    """Return this environment without what would show the source tree to Python."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"COLUMNS": "80"}


def call(*command: str | Path, at: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=at)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new environment with a CPU PyTorch and the wheel. It is a gigabyte, so it is deleted at the end."""
    folder = tmp_path_factory.mktemp("packaging")
    try:
        call(sys.executable, "-m", "venv", "env", at=folder)
        pip = [folder / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
        torch = [*pip, "install", *shlex.split(CPU_TORCH)]
        done = subprocess.run(torch, capture_output=True, text=True, env=environment(), cwd=folder)
        if done.returncode:
            pytest.skip(f"a CPU PyTorch cannot be installed here: {done.stderr[-300:]}")
        call(*pip, "wheel", "--no-deps", "--wheel-dir", "dist", ROOT, at=folder)
        (wheel,) = (folder / "dist").glob("fewlabel-*.whl")
        call(*pip, "install", wheel, at=folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_the_wheel_leaves_a_cpu_pytorch_as_it_is_and_brings_no_cuda(installed: Path) -> None:
    python = installed / "env" / "bin" / "python"
    listed = json.loads(call(python, "-m", "pip", "list", "--format", "json", at=installed))
    names = {package["name"].lower(): package["version"] for package in listed}
    assert [name for name in names if name.startswith(("nvidia", "cuda", "triton"))] == []
    assert "torchvision" not in names
    assert call(python, "-c", "import torch; print(torch.version.cuda)", at=installed) == "None\n"
    assert "site-packages" in call(python, "-c", "import fewlabel; print(fewlabel.__file__)", at=installed)


@pytest.mark.slow
def test_what_is_no_python_is_in_the_wheel(installed: Path) -> None:
    (package,) = (installed / "env").glob("lib/python*/site-packages/fewlabel")
    kinds = {".toml", ".jinja", ".html", ".js", ".css", ".typed"}
    source = {path.relative_to(ROOT / "fewlabel") for path in (ROOT / "fewlabel").rglob("*") if path.suffix in kinds}
    source |= {Path("py.typed")}
    assert {path for path in source if not (package / path).exists()} == set()


@pytest.mark.slow
def test_the_tutorial_runs_from_the_wheel(installed: Path) -> None:
    page, at = ROOT / "docs" / "tutorial.md", installed / "tutorial"
    at.mkdir()
    here = Path.cwd()
    os.chdir(at)
    try:
        console.write_files(page)
    finally:
        os.chdir(here)
    for command, told in console.shown(page.read_text()):
        name, *rest = shlex.split(command)
        assert words(call(installed / "env" / "bin" / name, *rest, at=at)) == words(told), command
    assert (at / "runs" / "first" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("network", "extra"), [("resnet18", "vision"), ("timm:resnet18", "timm")])
def test_a_network_of_an_extra_names_the_extra(installed: Path, network: str, extra: str) -> None:
    command = [installed / "env" / "bin" / "fewlabel", "run", "--set", f"model.name={network}", "--out", "runs/none"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=installed)
    assert done.returncode == 2
    assert f"pip install '.[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
