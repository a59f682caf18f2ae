"""Launches of a script: which of its commands start programs, and the words that each program receives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dslpar.migrate.shell.interpreter import Started
from dslpar.migrate.shell.letters import HOLE, Text, is_known, plain

INTERPRETERS = ("python", "torchrun", "deepspeed", "accelerate", "colossalai", "mpirun", "srun")
"""Commands that start a program of Python; a version may follow (python3.11)."""
TOOLS = frozenset(
    [
        "cat",
        "cp",
        "mv",
        "rm",
        "ls",
        "ln",
        "mkdir",
        "touch",
        "chmod",
        "chown",
        "grep",
        "sed",
        "awk",
        "tee",
        "git",
        "tar",
        "rsync",
        "scp",
        "ssh",
        "wget",
        "curl",
        "diff",
        "head",
        "tail",
        "less",
        "wc",
        "find",
        "sort",
        "uniq",
        "xargs",
        "vim",
        "nano",
        "pip",
        "conda",
        "module",
        "docker",
        "apptainer",
        "singularity",
        "sbatch",
        "scancel",
        "kill",
        "pkill",
        "sleep",
        "date",
    ]
)
"""Commands that start no program of Python, whatever their arguments name."""
MODULES_OF_LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run", "accelerate.commands.launch", "deepspeed")


class Launch(NamedTuple):
    """Command that starts a program."""

    command: tuple[Text, ...]
    """The words up to the program: launchers and their options."""
    program_word: Text
    """The program's name as the script has it."""
    words: tuple[Text, ...]
    """The words that the program receives."""
    at: int
    """Position of the command in the script."""

    @property
    def program(self) -> str:
        """Return the program's name; an unknown part is empty."""
        return plain(self.program_word).replace(HOLE, "")

    @property
    def is_python(self) -> bool:
        """Return whether the name is that of a Python program or module, which most likely trains."""
        return self.program.endswith(".py") or "-m" in map(plain, self.command)


def launches(started: Iterable[Started]) -> list[Launch]:
    """Return the launches among the commands that a script starts, in its order."""
    return [launch for command in started for launch in _launch(command)]


def _launch(started: Started) -> Iterator[Launch]:
    words = [plain(word) for word in started.words]
    if not words or words[0].rpartition("/")[2] in TOOLS:
        return
    index = _program(words, started.words)
    if index is not None:
        yield Launch(started.words[:index], started.words[index], started.words[index + 1 :], started.at)


def _program(words: list[str], texts: tuple[Text, ...]) -> int | None:
    """Return the index of the program among a command's words; None if it starts none that has arguments."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index
        if index and words[index - 1] == "-m" and word not in MODULES_OF_LAUNCHERS:
            return index
    if words[0].rpartition("/")[2].rstrip("0123456789.").startswith(INTERPRETERS):
        return next((index for index, text in enumerate(texts) if index and not is_known(text)), None)
    first_option = next((index for index, word in enumerate(words) if word.startswith("--")), None)
    return first_option - 1 if first_option else None
