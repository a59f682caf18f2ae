"""Sphinx's settings for the site that `make docs` builds: these pages as they are, and the reference from docstrings.

The source folder is the repository's root, so that links between pages, and to files of the code, are the same on the
site and in a checkout. MyST reads the pages, with GitHub's anchors; `public` (site_reference.py) writes the reference.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore", module="torch")

from dslpar import __version__  # noqa: E402

project, author, version = "dslpar", "the authors of dslpar", __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "site_reference"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/*.md", "docs/*/*.md", "layers/README.md", "tests/README.md"]
html_theme = "furo"
html_title = f"dslpar {version}"
html_show_sphinx = False

myst_heading_anchors = 6  # GitHub's, of headings
suppress_warnings = ["misc.highlighting_failure"]  # blocks of a page's own dialect are shown plain

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings write `name`, as Markdown does
