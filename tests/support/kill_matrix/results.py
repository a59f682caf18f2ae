"""Results of mutants as lines of JSON, one per mutant and proof or test; an interrupted run continues from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tests.support.paths import ROOT

FOLDER = ROOT / "build" / "kill_matrix"


@dataclass(frozen=True)
class Result:
    """The result of one mutant."""

    mutant: str
    by: str
    """The layout of a proof, such as 'prove 2d', or a test's node id."""
    verdict: str
    """'killed', 'stopped' (an error that is no verdict of prove), 'survived', 'not met', 'timeout'."""
    parameter: str = ""
    """prove only: the first difference."""
    axis: str = ""
    guess: str = ""
    failed: tuple[str, ...] = ()
    """prove only: the failed checks."""
    seconds: float = 0.0

    @property
    def kills(self) -> bool:
        """Return whether the mistake was detected."""
        return self.verdict in ("killed", "stopped", "timeout")


class Results:
    """A file of results, to which lines are added."""

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.known: dict[tuple[str, str], Result] = {(each.mutant, each.by): each for each in self._read()}

    def _read(self) -> Iterator[Result]:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                values = json.loads(line)
                yield Result(**{**values, "failed": tuple(values["failed"])})

    def add(self, result: Result) -> None:
        """Keep a result, and write it at once."""
        self.known[result.mutant, result.by] = result
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def killers(self, mutant: str) -> list[Result]:
        """Return the results that killed a mutant."""
        return [each for each in self.known.values() if each.mutant == mutant and each.kills]
