"""Run the notebooks in examples/ and keep what they print: `python docs/notebooks.py [NAME ...]`"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("research", "hospital")


def executed(name: str, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in a folder of its own, and return it with what it prints, without colours and old progress."""
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    shutil.copy(EXAMPLES / "agree.py", folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PATH": path, "COLUMNS": "100"})  # of the kernel alone
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = joined(cell.outputs)
    return book


def joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Return outputs with the pieces of a stream in one, as a terminal shows it in the end."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and found and found[-1].get("name") == output.name:
            found[-1].text += output.text
            continue
        if output.output_type == "execute_result":
            output.execution_count = None
        found.append(output)
    for output in found:
        if output.output_type == "stream":
            lines = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", output.text).replace("\r\n", "\n").split("\n")
            output.text = "\n".join(line.rpartition("\r")[2].rstrip() for line in lines)
    return found


def text(book: nbformat.NotebookNode) -> str:
    """Return all that a notebook prints as text."""
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(name, Path(folder)), EXAMPLES / f"{name}.ipynb")
