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

sys.path.insert(0, str(Path(fewlabel.__file__).parents[1] / "docs"))
import imports as diagram

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


def top(module: str) -> str:
    """The folder, or the module at the top, that a module lies in."""
    return module.partition(".")[0]


# Directions

# What each folder, or module at the top, may import of the others. docs/architecture.md draws it.
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "networks": {"core"},
    "data": {"core"},
    "learn": {"core"},
    "methods": {"learn", "core"},
    "experiment": {"methods", "learn", "data", "core"},
    "engine": {"experiment", "learn", "data", "networks", "core"},
    "report": {"engine", "experiment", "methods", "data", "networks", "core"},
    "inference": {"report", "engine", "experiment", "learn", "data", "networks", "core"},
    "labeling": {"inference", "report", "engine", "learn", "data", "core"},
    "papers": {"report", "engine", "experiment", "data", "core"},
    "deploy": {"report", "engine", "experiment", "data", "core"},
    "api": {"inference", "report", "engine", "experiment", "core"},
    "cli": {"api", "labeling", "papers", "deploy", "inference", "report", "engine", "experiment", "data", "core"},
    "__main__": {"cli"},
}


def test_the_reader_of_imports_sees_them_all(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "networks" / "odd.py"
    path.parent.mkdir()
    path.write_text(
        "import a.b\nfrom ..core.errors import BadInput\nfrom . import parts\nfrom fewlabel.core import tree\n"
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


@pytest.mark.parametrize("name", ARROWS)
def test_imports_point_one_way(name):
    """All of them: those inside functions, and those for type checkers alone."""
    for path in folder(name) or [NAMES[name]]:
        assert {module for module in ours(path) if top(module) not in ARROWS[name] | {name}} == set(), path


def test_every_module_has_its_place_in_the_arrows():
    assert {top(name) for name in NAMES} - {"__init__"} == ARROWS.keys()
    assert {path.stem for path in FILES if path.parent == PACKAGE} == {"__init__", "__main__", "api", "experiment"}


def test_the_diagram_in_the_manual_is_what_the_code_imports():
    drawn = {(name, below) for name, allowed in ARROWS.items() for below in allowed if name != "__main__"}
    assert diagram.edges() == drawn  # no arrow is allowed that nobody needs
    assert diagram.arrows(diagram.edges()) == diagram.arrows(drawn)


def test_the_arrows_have_no_circle():
    assert_no_circle(ARROWS)


def test_no_module_imports_itself_in_a_circle():
    """Late imports included: what they hide is a circle all the same."""
    assert_no_circle({
        name: {m for m in ours(path, "at once", "late") if m in NAMES and m != name and name != "__init__"}
        for name, path in NAMES.items()
    })  # fmt: skip


def assert_no_circle(edges: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for below in sorted(edges[name]):
                visit(below, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())


HEAVY = {
    "torch", "torchvision", "timm", "huggingface_hub", "matplotlib", "numpy", "sklearn", "scipy", "flwr", "ray", "onnx",
    "pydicom", "PIL", "rich",
}  # fmt: skip


@cache
def brings(name: str) -> frozenset[str]:
    """The heavy libraries that importing a module loads, or that it loads when it is used."""
    path = NAMES[name]
    found = {i.module.split(".")[0] for i in imports(path) if i.when == "at once"} & HEAVY
    return frozenset(
        found.union(*(brings(below) for below in ours(path, "at once") if below in NAMES and below != name))
    )


def test_a_late_import_of_ours_is_for_a_heavy_library_alone():
    """Which the importing module does not load anyway."""
    idle = [
        f"{name} -> {module}"
        for name, path in NAMES.items()
        for module in ours(path, "late")
        if name != "__init__" and module in NAMES and not uses(module) - brings(name)
    ]
    assert idle == []


def uses(name: str) -> frozenset[str]:
    """The heavy libraries of a module, also those that it loads late, and of those that it imports."""
    late = {i.module.split(".")[0] for i in imports(NAMES[name]) if i.when == "late"} & HEAVY
    below = [module for module in ours(NAMES[name], "late") if module in NAMES and module != name]
    return brings(name) | late | frozenset[str]().union(*(brings(module) for module in below))


def test_no_module_uses_the_private_names_of_another():
    for name, path in NAMES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fewlabel")):
                private = [a.name for a in node.names if a.name.startswith("_") and not a.name.endswith("__")]
                assert not private, (name, node.module)
        modules = {module.rpartition(".")[2] for module in ours(path)}
        aliases = (a for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom) for a in node.names)
        modules |= {a.asname for a in aliases if a.asname and a.name in modules}
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert not node.attr.startswith("_") or node.attr.startswith("__"), (name, ast.unparse(node))


@pytest.mark.parametrize("path", folder("methods"), ids=lambda path: path.stem)
def test_a_method_needs_nothing_but_pytorch_and_no_other_method(path):
    mine = path.stem.partition("_")[0]  # another version of a method may build on it
    others = {module for module in ours(path) if top(module) == "methods" and module != f"methods.{mine}"}
    assert path.name in ("__init__.py", "recipe.py") or others == set()  # these two are about all methods
    assert outside(path) <= {"torch"}


def test_the_methods_are_known_to_experiment_and_to_who_lists_them():
    known = {name for name, path in NAMES.items() if any(top(module) == "methods" for module in ours(path))}
    assert {top(name) for name in known} - {"methods", "__init__"} == {"experiment", "report"}


METHOD_FIELDS = (
    "group_size",
    "use_psi",
    "sharing",
    "sub_sampling",
    "thresholds",
    "weight_sigma",
    "use_sigma",
)


@pytest.mark.parametrize("name", [n for n in NAMES if top(n) not in ("methods", "learn", "papers")])
def test_nothing_but_methods_knows_a_methods_field(name):
    nodes = list(ast.walk(parsed(NAMES[name])))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert (texts | attributes) & set(METHOD_FIELDS) == set()


# What is heavy loads late


def places(library: str) -> list[tuple[str, str]]:
    return [
        (name, i.when)
        for name, path in NAMES.items()
        for i in imports(path)
        if i.module.split(".")[0] == library and i.when != "typing"
    ]


def test_flower_is_known_to_its_transport_and_to_its_simulation():
    known = {"deploy.flower", "deploy.superlink", "engine.flower_messages", "engine.ray"}
    known |= {"deploy.masking"}  # for Shamir's shares
    assert {name for name, _ in places("flwr")} <= known


@pytest.mark.parametrize("library", ["torchvision", "timm", "huggingface_hub"])
def test_libraries_of_networks_are_known_to_the_networks_and_load_when_one_is_built(library):
    assert {name.split(".")[0] for name, _ in places(library)} == {"networks"}
    assert {when for _, when in places(library)} == {"late"}


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
        assert not name.startswith("_pickle."), name
        assert not name.startswith(
            ("pickle.", "cPickle.", "dill.", "cloudpickle.", "joblib.", "marshal.", "shelve.")
        ), name
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in ("torch.load", "load_state_dict_from_url", "torch.hub.load_state_dict_from_url"):
            assert options.get("weights_only") == "True", name
        if name in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", name
        assert "shell" not in options, name


def test_pickle_is_known_to_the_reader_of_cifar_alone():
    """Behind a checksum, by an Unpickler that knows four names of NumPy's (DESIGN's named exception)."""
    users = {name for name, path in NAMES.items() if any(i.module == "pickle" for i in imports(path))}
    assert users == {"data.published.pickled"}
    used = {
        ast.unparse(node)
        for node in ast.walk(parsed(NAMES["data.published.pickled"]))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pickle.")
    }
    assert used <= {"pickle.Unpickler", "pickle.UnpicklingError"}


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_has_at_most_450_lines(path):
    assert path.read_text().count("\n") <= 450
