"""Refusals of the confined process, each in a process that ends: a hook cannot be removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BEFORE = """\
import os, shutil, socket, sqlite3, subprocess, sys
sys.path.insert(0, {repo!r})
from dslpar.mcp_server.confinement import confine
root = os.path.realpath(sys.argv[1])
os.chdir(root)
confine(root)
"""
REFUSED = {
    "open('new', 'w')": "writes nothing",
    "open('there', 'r+')": "writes nothing",
    "os.open('there', os.O_WRONLY)": "writes nothing",
    "os.remove('there')": "writes nothing",
    "os.rename('there', 'new')": "writes nothing",
    "os.mkdir('new')": "writes nothing",
    "os.utime('there')": "writes nothing",
    "os.chmod('there', 0o777)": "writes nothing",
    "os.symlink('there', 'new')": "writes nothing",
    "os.chdir('/')": "writes nothing",
    "sqlite3.connect('new')": "writes nothing",
    "shutil.copy('there', 'new')": "writes nothing",
    "open('../outside')": "outside of",
    "open('/etc/passwd')": "outside of",
    "os.open('/etc/passwd', os.O_RDONLY)": "outside of",
    "os.listdir('..')": "outside of",
    "list(os.scandir('/'))": "outside of",
    "open('link')": "outside of",
    "subprocess.run(['true'])": "starts no programs",
    "os.system('true')": "starts no programs",
    "os.fork()": "starts no programs",
    "os.execv('/bin/true', ['true'])": "starts no programs",
    "os.posix_spawn('/bin/true', ['true'], {})": "starts no programs",
    "socket.create_connection(('127.0.0.1', 9))": "connects to nothing",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "there").write_text("here\n")
    (tmp_path / "outside").write_text("hush\n")
    (folder / "link").symlink_to(tmp_path / "outside")
    return folder


def test_what_is_refused_says_why(root: Path) -> None:
    lines = [
        f"try:\n    {code}\nexcept PermissionError as e:\n    print(e)\nelse:\n    print('done')" for code in REFUSED
    ]
    program = BEFORE.format(repo=str(ROOT)) + "\n".join(lines)
    ran = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for (code, why), shown in zip(REFUSED.items(), ran.stdout.splitlines(), strict=True):
        assert why in shown, (code, shown)
    assert sorted(path.name for path in root.iterdir()) == ["link", "there"]
    assert (root / "there").read_text() == "here\n"


def test_the_root_and_code_may_be_read(root: Path) -> None:
    program = BEFORE.format(repo=str(ROOT)) + (
        "print(open('there').read(), os.listdir('.').sort(), open(os.devnull, 'w').write(''))\n"
        "import tomllib, dslpar.cli.lint\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("here")
