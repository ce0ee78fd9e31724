"""What is not installed must be named in one sentence, with the extra that brings it."""

import json
import subprocess
import sys
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
        "resnet18": "model 'resnet18' needs torchvision, which is not installed: pip install 'fewlabel[vision]'",
        "vit-tiny": "model 'vit-tiny' needs torchvision, which is not installed: pip install 'fewlabel[vision]'",
        "timm:resnet18": "model 'timm:resnet18' needs timm, which is not installed: pip install 'fewlabel[timm]'",
    }
