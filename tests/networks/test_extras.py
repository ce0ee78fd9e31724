"""What is not installed must be named in one sentence, with the extra that brings it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

MISSING = """
import sys, json
sys.modules.update({"timm": None, "torchvision": None})  # as if they were not installed
from fewlabel.core.errors import BadInput
from fewlabel.networks import build
found = {}
for name in json.loads(sys.argv[1]):
    try:
        build(name, 3, 10, 32)
        found[name] = ""
    except BadInput as error:
        found[name] = str(error)
print(json.dumps(found))
"""


HERE = "in FewLabel's folder, pip install"


def test_without_timm_or_torchvision_one_sentence_names_the_extra_and_the_rest_works() -> None:
    names = ["simple-cnn", "small-resnet", "resnet9", "resnet18", "vit-tiny", "timm:resnet18"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MISSING, json.dumps(names)], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "simple-cnn": "",
        "small-resnet": "",
        "resnet9": "",
        "resnet18": f"model 'resnet18' needs torchvision, which is not installed: {HERE} '.[vision]'",
        "vit-tiny": f"model 'vit-tiny' needs torchvision, which is not installed: {HERE} '.[vision]'",
        "timm:resnet18": f"model 'timm:resnet18' needs timm, which is not installed: {HERE} '.[timm]'",
    }


def test_every_extra_that_a_message_or_a_page_names_can_be_installed_from_here() -> None:
    """Nothing is on PyPI, so a command must name the folder and one of its extras."""
    root = Path(__file__).parents[2]
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("fewlabel/**/*.py")]
    texts = [file.read_text() for file in files]
    named = {name for text in texts for name in re.findall(r"""(?:install\(|\.\[)['"]?([a-z]+)['"]?[\])]""", text)}
    assert {"vision", "timm", "flower", "track", "export", "dicom", "privacy"} <= named <= known.keys()
    assert not [file.name for file, text in zip(files, texts, strict=True) if "fewlabel[" in text]
