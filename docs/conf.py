"""Settings of the manual. `make docs` builds it without a network; every warning is an error."""

import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generated  # noqa: E402

project, author = "FewLabel", "the FewLabel authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "results"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
default_role = "code"
smartquotes = False  # or --set would lose a dash
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = "FewLabel"
html_math_renderer = "mathml"
html_show_copyright = html_show_sphinx = html_copy_source = False
html_static_path = ["manual.css"]
html_css_files = ["manual.css"]


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (displayed, None))
    app.connect("source-read", read)
    app.connect("autodoc-process-signature", shorter)


def shorter(app, what, name, obj, options, signature, returned):
    """Shorten a signature: types without their ranges, and nested settings without their defaults."""
    if signature is None:
        return None
    plain = re.sub(r"(?:~typing\.)?Annotated\[(\w+), [~.\w]*Range\([^()]*\)\]", r"\1", signature)
    return re.sub(r"= (\w+)\(\w+=[^()]*\)", r"= \1()", plain), returned


def inline(writer, node):
    """Write a formula as MathML. Browsers draw it themselves, so no script or font is loaded."""
    from docutils.nodes import SkipNode

    writer.body.append(convert(node.astext()))
    raise SkipNode


def displayed(writer, node):
    from docutils.nodes import SkipNode

    number = f'<span class="eqno">({node["label"]})</span>' if node.get("label") else ""
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}{number}</div>')
    raise SkipNode


def read(app, name, source):
    """Put the generated parts into a page. Links to files outside the manual become plain text."""
    here = (HERE / name).parent

    def named(link):
        target = here / link[2].partition("#")[0]
        outside = target.exists() and (target.is_dir() or not target.resolve().is_relative_to(HERE))
        return link[1] if outside else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^):\s]+)\)", named, generated.expand(source[0]))
