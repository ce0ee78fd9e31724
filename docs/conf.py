"""Settings of the manual. `make docs` builds it without a network; every warning is an error.

Pages are written for GitHub, where they must be whole. `read` changes what Sphinx wants otherwise.
"""

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
myst_fence_as_directive = ["math"]
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


def mathml(formula, **options):
    """Return a formula as MathML. Browsers draw it themselves, so no script or font is loaded."""
    return convert(re.sub(r"\\arg\b", r"\\operatorname{arg}", formula), **options)  # which latex2mathml does not know


def inline(writer, node):
    from docutils.nodes import SkipNode

    writer.body.append(mathml(node.astext()))
    raise SkipNode


def displayed(writer, node):
    from docutils.nodes import SkipNode

    writer.body.append(f'<div class="math">{mathml(node.astext(), display="block")}</div>')
    raise SkipNode


def read(app, name, source):
    """Turn a page that GitHub can show into one for Sphinx. Links to files outside the manual become plain text."""
    here = (HERE / name).parent

    def named(link):
        target = here / link[2].partition("#")[0]
        within = link[2].startswith("#")
        outside = not within and target.exists() and (target.is_dir() or not target.resolve().is_relative_to(HERE))
        return link[1] if outside else link[0]

    page = generated.bare(source[0]) + (generated.reference() if name == "python" else "")
    page = re.sub(r"<!-- chapters -->\n(.*?)<!-- end chapters -->", chapters, page, flags=re.S)
    page = re.sub(r"\$`([^`]+)`\$", r"$\1$", page)  # GitHub's way to keep Markdown out of a formula
    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^):\s]+)\)", named, page)


def chapters(listed):
    """Return a list of pages, and Sphinx's own lists of them, by which it orders the manual."""
    parts = re.findall(r"(?:\*\*(.+?)\*\*\n\n)?((?:- \[.+?\]\(.+?\)\n)+)", listed[1])
    trees = []
    for caption, links in parts:
        names = re.findall(r"\]\((\S+?)\.md\)", links)
        head = f":caption: {caption}\n" if caption else ""
        trees.append("```{toctree}\n" + head + ":hidden:\n\n" + "\n".join(names) + "\n```\n")
    return listed[1] + "\n" + "\n".join(trees)
