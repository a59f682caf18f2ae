"""Print every public name as a line of text, to compare before and after a refactoring.

    python -m tests.support.inventory > before.txt      # on one commit
    python -m tests.support.inventory > after.txt       # on the next
    diff before.txt after.txt                           # what was lost, and what came

The lines come from the program itself: codes (`dslpar explain`), keys (`dslpar config --reference`), commands and their
flags (`--help`), the public names of `dslpar`, `dslpar.layers` and `dslpar.models`, and pytest's list of tests. Tests
are counted by function and parameters, without the path of their file, so that moving a test changes nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGES = ("dslpar", "dslpar.layers", "dslpar.models", "dslpar.config")


def output(*command: str) -> str:
    """Return a command's output. It must exit with 0, or print its usage."""
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode in (0, 2), f"{command}: {ran.stderr[-2000:]}"
    return ran.stdout


def dslpar(*arguments: str) -> str:
    return output("-m", "dslpar.cli", *arguments)


def codes() -> Iterator[str]:
    """Yield code, severity and name of every finding."""
    for line in dslpar("explain").splitlines():
        if found := re.match(r"([A-Z]+\d+)\s+(\w+)\s+(\S+)", line):
            yield "code " + " ".join(found.groups())


def keys() -> Iterator[str]:
    """Yield every key with its default and its other names."""
    for entry in json.loads(dslpar("config", "--reference", "--format", "json")):
        yield f"key {entry['key']} ({entry['of']}) = {entry['default']} {' '.join(sorted(entry['aliases']))}".strip()


def commands(prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every command and its flags."""
    text = dslpar(*prefix, "--help")
    yield from (f"flag {' '.join(prefix)} {flag}" for flag in sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))))
    below = text.partition("\ncommands:\n")[2]
    for name in re.findall(r"(?m)^  (\S+)", below):
        yield f"command {' '.join((*prefix, name))}"
        yield from commands((*prefix, name))


def names() -> Iterator[str]:
    """Yield the names that a program may import."""
    for package in PACKAGES:
        code = f"import {package} as package; print(*package.__all__)"
        yield from (f"name {package}.{name}" for name in sorted(output("-c", code).split()))


def tests() -> Iterator[str]:
    """Yield every test by function and parameters, with its count, including those of `make prove`."""
    listed = output("-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider").splitlines()
    counted = Counter(line.partition("::")[2] for line in listed if "::" in line)
    yield from (f"test {name} * {number}" for name, number in sorted(counted.items()))
    yield f"tests {sum(counted.values())}"


def main() -> None:
    for part in (codes, keys, commands, names, tests):
        print("\n".join(part()))


if __name__ == "__main__":
    main()
