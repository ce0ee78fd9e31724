"""Imports must point one way, what is heavy must load late, and nothing may run what it has only read."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fewlabel

PACKAGE = Path(fewlabel.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


class Import(NamedTuple):
    module: str  # the full name, relative imports resolved
    when: str  # "at once", "late" inside a function, or "typing" for type checkers alone


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[Import, ...]:
    package = ["fewlabel", *path.relative_to(PACKAGE).parent.parts]

    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # `from fewlabel import tree` is an import of fewlabel.core.tree
                whole = f"{base}.{alias.name}"
                yield Import(whole if whole.removeprefix("fewlabel.") in NAMES else base, when)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "late"
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            when = "typing"
        for child in ast.iter_child_nodes(node):
            yield from walk(child, when)

    return tuple(walk(parsed(path), "at once"))


def ours(path: Path, *when: str) -> set[str]:
    """The modules of the package that a file imports, without `fewlabel.` in front."""
    found = [i for i in imports(path) if i.module.split(".")[0] == "fewlabel" and (not when or i.when in when)]
    return {i.module.removeprefix("fewlabel").removeprefix(".") for i in found}


def outside(path: Path) -> set[str]:
    found = {i.module.split(".")[0] for i in imports(path)}
    return found - {"fewlabel", "__future__"} - set(sys.stdlib_module_names)


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def folder(name: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(PACKAGE).parts[0] == name]


# Directions


def test_the_reader_of_imports_sees_them_all(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "models" / "odd.py"
    path.parent.mkdir()
    path.write_text(
        "import a.b\nfrom ..errors import BadInput\nfrom . import parts\nfrom fewlabel import tree\n"
        "if TYPE_CHECKING:\n    import c\ndef f():\n    from d import e\n"
    )
    assert imports(path) == (
        Import("a.b", "at once"),
        Import("fewlabel.core.errors", "at once"),
        Import("fewlabel.networks.parts", "at once"),
        Import("fewlabel.core.tree", "at once"),
        Import("c", "typing"),
        Import("d", "late"),
    )


@pytest.mark.parametrize("path", folder("methods"), ids=lambda path: path.stem)
def test_a_method_imports_what_it_is_made_of_and_nothing_that_runs_it(path):
    allowed = {"learn", "tree", "federation", "strict", "rng", "errors", "wire", "data.sets"}
    if path.name == "__init__.py":
        allowed = {"methods", "learn"}
    elif "_" in path.stem:  # another version of a method may build on it
        allowed.add(f"methods.{path.stem.partition('_')[0]}")
    assert {module for module in ours(path) if not within(module, allowed)} == set()
    assert outside(path) <= {"torch"}


# What a file may import of the package. Whoever is not listed is at the top: cli, api, results, runs, sweep, display.
MAY_IMPORT = {
    "errors": set(),
    "tree": set(),
    "rng": set(),
    "strict": {"errors"},
    "wire": {"errors"},
    "evaluate": {"errors"},
    "learn": {"learn", "tree", "strict", "data.sets", "models.parts"},
    "models": {"models", "errors"},
    "data": {"data", "errors", "rng"},
    "federation": {"tree", "wire", "rng", "errors", "data.sets"},
    "checkpoint": {"tree", "wire", "errors"},
    "experiment": {"strict", "errors", "federation", "methods", "data.own", "data.partition", "data.views"},
    "device": {"errors"},
    "worker": {
        "device", "federation", "wire", "experiment", "data", "models", "evaluate", "checkpoint", "tree", "rng",
        "errors",
    },
    "simulate": {"worker", "federation", "wire", "evaluate", "tree", "rng", "errors"},
    "pool": {"worker", "errors"},
    "report": {"checkpoint", "errors"},
    "resident": {"apart"},
    "flower": {"resident", "fleet", "errors"},
}  # fmt: skip


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_point_one_way(name):
    paths = folder(name) or [NAMES[name]]
    for path in paths:
        found = ours(path, "at once", "late")
        assert {module for module in found if not within(module, MAY_IMPORT[name])} == set(), path


def test_nothing_but_experiment_knows_the_methods_and_who_lists_them_loads_them_late():
    for name, path in NAMES.items():
        if name.startswith("methods") or name == "experiment":
            continue
        known = {i for i in imports(path) if within(i.module, {"fewlabel.methods"})}
        if name in ("cli", "display", "api", "__init__"):  # the command and the API, which list them
            known = {i for i in known if i.when == "at once"}
        assert known == set(), path


def test_no_module_imports_itself_in_a_circle():
    """At once, that is: a late import may close a circle, because by then both ends are there."""
    edges = {name: {m for m in ours(path, "at once") if m in NAMES and m != name} for name, path in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for below in edges[name]:
                visit(below, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


# What is heavy loads late


def places(library: str) -> list[tuple[str, str]]:
    return [
        (name, i.when)
        for name, path in NAMES.items()
        for i in imports(path)
        if i.module.split(".")[0] == library and i.when != "typing"
    ]


def test_flower_is_known_to_its_transport_and_to_its_simulation():
    assert {name for name, _ in places("flwr")} <= {"flower", "cluster"}


def test_torchvision_is_known_to_the_models_and_loads_when_one_is_built():
    assert {name.split(".")[0] for name, _ in places("torchvision")} == {"models"}
    assert {when for _, when in places("torchvision")} == {"late"}


@pytest.mark.parametrize("library", ["sklearn", "matplotlib", "torchvision", "tensorboard", "mlflow", "ray"])
def test_heavy_libraries_load_when_they_are_used(library):
    assert {when for _, when in places(library)} <= {"late"}


def test_a_run_loads_nothing_that_it_does_not_use():
    code = "import sys, fewlabel.engine.run, fewlabel.experiment; fewlabel.experiment.Experiment(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"torchvision", "sklearn", "matplotlib", "flwr", "pandas", "ray"} & set(loaded)


# Nothing runs what it has only read


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_evaluates_or_unpickles(path):
    for name, call in calls(path):
        assert name not in ("eval", "exec", "compile", "__import__"), name
        last = name.split(".")[-1]
        assert last not in ("Unpickler", "read_pickle", "set_start_method"), name
        assert not name.startswith(
            ("pickle.", "cPickle.", "dill.", "cloudpickle.", "joblib.", "marshal.", "shelve.")
        ), name
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("torch.load", "load_state_dict_from_url", "torch.hub.load_state_dict_from_url"):
            assert options.get("weights_only") == "True", name
        if name in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", name
        assert "shell" not in options, name


def test_pickle_is_imported_for_the_name_of_its_error_alone():
    for path in FILES:
        if any(i.module == "pickle" for i in imports(path)):
            used = {
                ast.unparse(node)
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle.")
            }
            assert used == {"pickle.UnpicklingError"}, path


# Form


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    text, spoken = path.read_text().splitlines(), set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            spoken |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        1 for number, line in enumerate(text, 1) if number not in spoken and line.strip() and line.strip()[0] != "#"
    )


@pytest.mark.parametrize("path", folder("methods"), ids=lambda path: path.stem)
def test_a_method_has_at_most_150_lines_of_code(path):
    assert lines_of_code(path) <= 150


def test_lines_of_code_are_counted_without_what_is_said(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""One\n\ntwo."""\n\n# why\nx = 1\n\n\ndef f():\n    """Says."""\n    return """not\n    said"""\n'
    )
    assert lines_of_code(path) == 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_first_why_it_is_there(path):
    said = ast.get_docstring(parsed(path))
    assert said
    assert said.splitlines()[0].endswith((".", ":"))
