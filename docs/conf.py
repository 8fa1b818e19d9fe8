"""Sphinx settings: `sphinx-build -W docs build/docs`.

The pages are readable without a network: formulas become MathML here, and nothing else is fetched.
"""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

project = "accumext"
author = copyright = "accumext contributors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
html_title = "accumext"
html_static_path = ["_static"]
html_css_files = ["accumext.css"]
html_math_renderer = "mathml"
smartquotes_action = "D"  # dashes; quotes of error messages stay what people paste
default_role = "code"  # `x` in docstrings, as in Markdown
maximum_signature_line_length = 80  # a longer one has a line for each argument
autodoc_typehints = "none"  # shapes and units are in the docstrings
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_attr_annotations = False  # as autodoc_typehints
napoleon_use_param = False  # "a, b: as in f" stays one entry
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 3


def mathml(translator, node):
    """A formula as MathML, which browsers show by themselves."""
    block = isinstance(node, nodes.math_block)
    try:
        formula = tex2mathml(node.astext(), as_block=block)
    except Exception as error:  # docutils documents no type
        logging.getLogger(__name__).warning("formula: %s", error, location=node)
        formula = ""
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def default_names(app, what, name, obj, options, signature, returned):
    """Functions that are defaults, by their names instead of `<function Tensor.backward>`."""
    if signature:
        signature = signature.replace("<function Tensor.backward>", "torch.Tensor.backward")
    return signature, returned


def mark_long_code(app, doctree, page):
    """Code in tables that may break inside of a word, where a screen is narrow."""
    for table in doctree.findall(nodes.table):
        for code in table.findall(nodes.literal):
            if max(map(len, code.astext().split()), default=0) > 15:
                code["classes"].append("long")


def setup(app):
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-signature", default_names)
    app.connect("doctree-resolved", mark_long_code)
