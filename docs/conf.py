"""Sphinx's settings for the site that `make docs` builds: these pages as they are.

The source folder is the repository's root, so that links between pages, and to files of the code, are the same on the
site and in a checkout. MyST reads the pages, with GitHub's anchors. The reference in docs/api is Markdown too
(tools/api_pages.py), so the site imports none of the code that it documents.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dslpar import __version__  # noqa: E402

project, author, version = "dslpar", "the authors of dslpar", __version__
extensions = ["myst_parser"]
root_doc = "docs/index"
_OTHERS = ["layers/README.md", "tests/README.md", "editors/*.md", "editors/vscode/README.md"]
include_patterns = ["README.md", "docs/*.md", "docs/*/*.md", *_OTHERS]
html_theme = "furo"
html_title = f"dslpar {version}"
html_show_sphinx = False
html_use_index = False  # the search and the lists on top of docs/api's pages find names

myst_heading_anchors = 6  # GitHub's, of headings
suppress_warnings = ["misc.highlighting_failure"]  # blocks of a page's own dialect are shown plain
