"""Sphinx settings: `sphinx-build -W docs build/docs`."""

project = "accumext"
author = "accumext contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
autodoc_typehints = "none"  # shapes and units are in the docstrings
autodoc_member_order = "bysource"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_static_path = ["static"]
html_css_files = ["diffs.css"]
