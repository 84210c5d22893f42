"""Settings of Sphinx. The reference pages are made first, by the script beside this file."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make_reference  # noqa: E402

import colossus  # noqa: E402

make_reference.write(HERE / "reference")

project = "colossus"
version = release = colossus.__version__
copyright = "the colossus authors, Apache-2.0"
extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `Name` in a docstring links to the object, where that is on a page
nitpick_ignore_regex = [("py:.*", ".*")]  # the others, and the types of torch, stay code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_attr_annotations = True
napoleon_use_ivar = True  # attributes of a dataclass are fields of it, no second description
add_module_names = False
python_maximum_signature_line_length = 80
pygments_style = "default"
smartquotes = False  # -- stays -- in help texts

html_theme = "pydata_sphinx_theme"
html_title = "colossus"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "tutorial": []}
html_theme_options = {
    "logo": {"text": "colossus"},
    "navbar_align": "left",
    "navigation_with_keys": False,
    "show_nav_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
}

#: what a page links on GitHub -> the page of the site that takes its place
ON_THE_SITE = {
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../benchmarks/README.md": "benchmark-commands.md",
    "../colossus/config/sections.py": "reference/config.md#checkpoint",
    "../colossus/config/schema.py": "reference/config.md",
    "../colossus/config/training.py": "reference/config.md#train",
    "../colossus/data/__init__.py": "reference/data.md",
    "../colossus/data_parallel/options/exact_options.py": "reference/options.md#strategies",
    "../colossus/data_parallel/options/server_options.py": "reference/options.md#server",
    "../colossus/data_parallel/strategy.py": "reference/extending.md",
    "../colossus/engine/fit.py": "reference/engine.md",
    "../colossus/graphs/builtin/fixed.py": "reference/options.md#graphs",
    "../colossus/models/options.py": "reference/options.md#models",
    "../colossus/server/__init__.py": "reference/server.md",
}


def link_the_site(app: Any, page: str, source: list[str]) -> None:
    """Replace links to files of the repository by those to pages of the site."""
    if page not in ("one-train-step", "one-run"):  # these pages are about the code
        for file, other in ON_THE_SITE.items():
            source[0] = source[0].replace(f"]({file}", f"]({other}")


def setup(app: Any) -> None:
    app.connect("source-read", link_the_site)
