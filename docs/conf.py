"""The documentation site: `make docs` builds it from the guides, the docstrings, and the tables in the code."""

import builtins
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent / "_site"))

from horovodish.version import __version__

project = "horovodish"
author = "the horovodish developers"
project_copyright = "2026, the horovodish developers"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "from_code",
    "tabs",
]
exclude_patterns = ["_site"]
html_theme = "furo"
html_title = f"horovodish {release}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "_site/scorer.js")
html_extra_path = ["../llms.txt"]
html_theme_options = {
    "source_repository": "https://github.com/horovodish/horovodish",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# Every reference must lead somewhere. The build has no network, so it cannot ask the sites of other projects.
nitpicky = True
PYTHONS_ERRORS = "|".join(name for name in dir(builtins) if name.endswith("Error"))
nitpick_ignore_regex = [("py:exc", PYTHONS_ERRORS), ("py:class", r"horovodish\..*Compressor")]
default_role = "code"
smartquotes = False  # "--flag" is no dash
pygments_dark_style = "github-dark"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

README = Path(__file__).parent.parent / "README.md"
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def front_page(app, docname, source):
    """The front page is the README, with its links as they are in this folder, and the list of all pages."""

    def link(match):
        path = match[1]
        if path.startswith("http"):
            return match[0]
        return f"]({PAGES.get(path) or (path.removeprefix('docs/') if path.startswith('docs/') else f'../{path}')})"

    if docname == "index":
        source[0] = re.sub(r"\]\(([^)]+)\)", link, README.read_text()) + source[0][source[0].index("```") :]


def setup(app):
    app.connect("source-read", front_page)
