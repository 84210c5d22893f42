"""Settings of Sphinx. Pictures and reference pages are made first, by the two scripts beside this file."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import make_pictures  # noqa: E402
import make_reference  # noqa: E402
import toolbox_pictures  # noqa: E402

import colossus  # noqa: E402

make_pictures.write(HERE / "pictures")
toolbox_pictures.write(HERE / "pictures")
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
