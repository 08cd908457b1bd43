"""Configuration of the documentation, for Sphinx."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import sklearn_mhla

# Examples import from each other's folders and save no files; figures are collected by the gallery.
os.environ.setdefault("MPLBACKEND", "Agg")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

project = "sklearn-mhla"
author = "The sklearn-mhla developers"
copyright = "The sklearn-mhla developers"
version = release = sklearn_mhla.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "README.md"]
nitpicky = False

myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_default_options = {"members": True, "inherited-members": True}
autodoc_typehints = "none"  # docstrings say it in words
numpydoc_show_class_members = False  # autodoc lists them, those of this package only
default_role = "py:obj"

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": "auto_examples",
    # Reproductions and benchmarks take minutes to hours: their pages in the guide show results that
    # were stored; the gallery shows their source.
    "filename_pattern": r"examples/plot_",
    "ignore_pattern": r"/benchmarks/|__init__\.py",
    "show_memory": False,
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "backreferences_dir": None,
}

html_theme = "pydata_sphinx_theme"
html_title = "sklearn-mhla"
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
}


def skip_foreign_members(app, what, name, member, skip, options):
    """Members that come from scikit-learn, torch or Python are documented there."""
    function = getattr(member, "fget", getattr(member, "__func__", member))
    module = getattr(function, "__module__", None)
    return skip or module is None or not module.startswith("sklearn_mhla")


def setup(app):
    """Connect the filter."""
    app.connect("autodoc-skip-member", skip_foreign_members)
