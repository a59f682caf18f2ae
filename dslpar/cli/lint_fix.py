"""`dslpar lint --fix` and `--diff`: find the files that may be changed, and fix each one or print its diff."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from dslpar.core.errors import Finding
from dslpar.core.visible import visible, visible_lines
from dslpar.language.load import Config
from dslpar.linter import check, fixes

Linted = tuple[Config, list[Finding]]
"""A config with its findings."""


class Fixer:
    """One run of --fix or --diff over all configs that were linted."""

    def __init__(
        self,
        findings_of: Callable[[Config], list[Finding]],
        overrides: Sequence[str],
        stdin: Mapping[str, str],
        trusted: Sequence[str] = (),
    ) -> None:
        """Keep the functions and texts that the fixes need.

        `findings_of`: lints a config. `overrides` and `trusted`: as for loading. `stdin`: the text of the config on
        standard input, by its real path; empty if there is none.
        """
        self.findings_of, self.overrides, self.stdin, self.trusted = findings_of, overrides, stdin, trusted
        self.texts = dict(stdin)
        """Texts that are linted in place of files, by real path: the text on stdin, and the texts of fixed files."""

    def run(self, batch: Sequence[Linted], roots: Sequence[str], *, write: bool) -> tuple[list[Linted], bool]:
        """Fix the files below `roots`, or print a diff if not `write`.

        Return the configs with their findings after the fixes, and whether anything changed.
        """
        repairs = []
        # Repair one file after the other. A file may import files that are already fixed, so it is linted with those.
        for path, data in self._fixable_files(batch, roots).items():
            repair = self._repair(path, data, batch)
            if repair.after != repair.before and (not write or self._written(repair, data)):
                self.texts[os.path.realpath(path)] = repair.after
                repairs.append(repair)
            for finding, why in repair.refused:
                sys.stderr.write(visible(f"{finding.location}: {finding.code} is not fixed: {why}") + "\n")
        if not write:
            text = "".join(fixes.diff(repairs))
            # A terminal or a CI log could interpret control characters in the text, so they are escaped there. `patch`
            # needs the text unchanged.
            for_people = sys.stdout.isatty() or os.environ.get("CI")
            _print_bytes(visible_lines(text) if for_people else text)
        elif self.stdin:
            _print_bytes(next(iter(self.texts.values())))
        if not repairs:
            return list(batch), False
        fixed = (self._load(config.path, self.texts) for config, _ in batch)
        return [(config, self.findings_of(config)) for config in fixed], True

    def _load(self, path: str, texts: Mapping[str, str]) -> Config:
        return check.load(path, self.overrides, texts, self.trusted)

    def _repair(self, path: str, data: bytes, batch: Sequence[Linted]) -> fixes.Repair:
        """Repair one file. Its changes are judged by the findings of every config that reads it."""
        real = os.path.realpath(path)
        readers = [config.path for config, _ in batch if real in map(os.path.realpath, config.sources)]

        def relint(texts: Mapping[str, str]) -> list[Finding]:
            found = (item for each in readers for item in self.findings_of(self._load(each, texts)))
            return list(dict.fromkeys(found))  # without repetitions: several configs may import the same file

        return fixes.repair(path, fixes.decode(data), relint, self.texts)

    def _fixable_files(self, batch: Sequence[Linted], roots: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes, by path, of files with fixable findings that are named or below a named folder."""
        locations = [item.fix.location.path for _, findings in batch for item in findings if item.fix is not None]
        # Configs may import one file by several paths. The first of these paths names it.
        paths = {os.path.realpath(path): path for path in reversed(locations)}
        real_roots = [os.path.realpath(root) for root in roots]
        files = {}
        for real, path in paths.items():
            if real in self.stdin:
                files[path] = self.stdin[real].encode("utf-8")
            elif not self.stdin and any(real == root or real.startswith(root + os.sep) for root in real_roots):
                with open(path, "rb") as file:
                    files[path] = file.read()
        return files

    def _written(self, repair: fixes.Repair, data: bytes) -> bool:
        """Write the changed text to its file, unless it came from stdin; return False if writing failed."""
        if not self.stdin:
            try:
                fixes.write(repair.path, data, repair.after)
            except OSError as error:
                sys.stderr.write(visible(f"{repair.path} is not changed: {error.strerror or error}") + "\n")
                return False
        sys.stderr.write(visible(f"{repair.path}: {repair.changes} fixed") + "\n")
        return True


def _print_bytes(text: str) -> None:
    """Print a file's text to stdout in UTF-8, whatever stdout's encoding is, for `patch` and editors."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
