"""The language server in a real editor: Emacs with eglot and the lines of editors/emacs.md."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DEBIAN = "/usr/share/emacs/site-lisp/elpa"
INSTALLED = f'(progn (add-to-list \'package-directory-list "{DEBIAN}") (package-initialize))'


def has_eglot() -> bool:
    """Return whether Emacs is installed, with eglot."""
    if (emacs := shutil.which("emacs")) is None:
        return False
    command = [emacs, "-Q", "--batch", "--eval", INSTALLED, "--eval", "(require 'eglot)"]
    return subprocess.run(command, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not has_eglot(), reason="no Emacs with eglot (Debian: apt-get install emacs-nox elpa-eglot)"),
    pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed (extra lsp)"),
]
TEXT = """\
# dslpar: world-size=8
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
batch = dict(global_size=16, micro_size=2)
"""


def test_a_finding_its_fix_and_the_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(TEXT.replace("hidden_size", "hiden_size"))
    server = tmp_path / "bin" / "dslpar"
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {shlex.quote(sys.executable)} -m dslpar "$@"\n')
    server.chmod(0o755)
    lines = re.findall(r"```elisp\n(.*?)```", (ROOT / "editors" / "emacs.md").read_text(), re.DOTALL)
    (tmp_path / "init.el").write_text("\n".join(lines))
    driver = str(ROOT / "tests" / "support" / "emacs_driver.el")
    command = ["emacs", "-Q", "--batch", "--eval", INSTALLED, "-l", "init.el", "-l", driver]
    env = {**os.environ, "PATH": f"{server.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 dslpar [CFG101]: unknown key 'hiden_size' in model" in ran.stdout
    assert '("did you mean \'hidden_size\'? (CFG101)" "dslpar: explain CFG101" "dslpar: fix all (1)")' in ran.stdout
    assert path.read_text() == TEXT
    assert "(with 12 ranks)" in ran.stdout
    assert ran.stdout.endswith("# dslpar: world-size=8,12")
