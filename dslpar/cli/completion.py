"""`dslpar completion SHELL`: print a script with which bash, zsh or fish completes what `dslpar` takes.

The script holds no words of its own: at a TAB it runs `dslpar __complete WORD...`, which answers with one candidate for
the last word per line, perhaps followed by a tab and its help. Commands, flags and choices come from the parsers, keys
and their values from the schema, so that an upgraded dslpar needs no new script. cobra and click have the same design;
shtab writes static scripts, in which the keys of a config have no place. No torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from dslpar.core.argument_parser import ArgumentParser
from dslpar.core.visible import visible

EPILOG = """\
dslpar completion bash > ~/.local/share/bash-completion/completions/dslpar    # needs bash-completion
dslpar completion zsh > ~/.zfunc/_dslpar         # in ~/.zshrc: fpath=(~/.zfunc $fpath), before compinit
dslpar completion fish > ~/.config/fish/completions/dslpar.fish

Or for one session: source <(dslpar completion bash). TAB completes commands, flags, their values,
config files, and behind them keys and the values of keys:

    dslpar show configs/gpt_3d.py parallel.tensor.mode=<TAB>
"""

# In bash, words are broken at = and : as well; a reply must leave out what stands before the last of them.
_BASH = """\
# bash completion of dslpar
_dslpar() {
    local line=${COMP_LINE:0:COMP_POINT} word help
    local -a words=()
    read -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=${words[${#words[@]} - 1]} before=""
    [[ $last == *[=:]* && $COMP_WORDBREAKS == *=* ]] && before=${last%"${last##*[=:]}"}
    COMPREPLY=()
    while IFS=$'\\t' read -r word help; do
        word=${word#"$before"}
        COMPREPLY+=("$(printf %q "$word")")
    done < <(dslpar __complete "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _dslpar dslpar
"""
_ZSH = """\
#compdef dslpar
_dslpar() {
    local word help shown
    local -a closed closed_shown open open_shown
    while IFS=$'\\t' read -r word help; do
        shown=${word}${help:+  -- $help}
        if [[ $word == *[=/.] ]]; then
            open+=("$word")
            open_shown+=("$shown")
        else
            closed+=("$word")
            closed_shown+=("$shown")
        fi
    done < <(dslpar __complete "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    (( $#open )) && compadd -S '' -l -d open_shown -- "${open[@]}"
    (( $#closed )) && compadd -l -d closed_shown -- "${closed[@]}"
    (( $#open + $#closed ))
}
if [[ ${funcstack[1]} == _dslpar ]]; then
    _dslpar "$@"
else
    compdef _dslpar dslpar
fi
"""
_FISH = """\
# fish completion of dslpar
function __dslpar_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    dslpar __complete $words[2..-1] "$word" 2>/dev/null
end
complete -c dslpar -f -a '(__dslpar_complete)'
"""
SCRIPTS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Script by shell."""

_CONFIGS = (".py", ".yaml", ".yml", ".json")
_OF_CONFIGS = frozenset({"config", "diff", "launch", "lint", "plan", "prove", "show"})
"""Commands whose operands are configs and overrides."""
_FOLDERS = frozenset({"DIR", "FOLDER", "RUN", "OUTPUT_DIR"})
_FILES = frozenset({"FILE", "PATH", "OUT", "SRC", "CFG"})


class Candidate(NamedTuple):
    """A word that may stand in place of the last one."""

    word: str
    help: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell to print a script for")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script."""
    sys.stdout.write(SCRIPTS[args.shell])
    return 0


def print_candidates(words: Sequence[str], commands: Mapping[str, str], modules: Mapping[str, str]) -> int:
    """Print the candidates for the last word, one per line, for the scripts.

    `commands`: help by command; `modules`: the module of dslpar.cli by command, where the two names differ.
    """
    for word, help in candidates(words, commands, modules):
        if "\n" not in word:
            print(visible(word), *([visible(" ".join(help.split()))] if help else []), sep="\t")
    return 0


def candidates(words: Sequence[str], commands: Mapping[str, str], modules: Mapping[str, str]) -> list[Candidate]:
    """Return the candidates for the last of `words`, which follow `dslpar`. Unknown commands have none."""
    *before, last = words or [""]
    if before[:1] == ["help"]:
        before.pop(0)
    if not before:
        return _starting(last, chain(_named(commands), [Candidate("--help"), Candidate("--version")]))
    name = before.pop(0)
    if name not in commands:
        return []
    operand = bool(before) and not last.startswith("-") and not before[-1].startswith("-")
    if operand and name in _OF_CONFIGS and any(word.endswith(_CONFIGS) for word in before):
        return [*_paths(last, _CONFIGS), *_keys(last)]  # as the parser would say, after 60 ms of imports
    command = importlib.import_module(f"dslpar.cli.{modules.get(name, name)}")
    found: list[Candidate] = []
    if actions := getattr(command, "ACTIONS", None):
        default = getattr(command, "DEFAULT", "")
        if not before:
            found = _starting(last, _named({each: action.help for each, action in actions.items()}))
        chosen = before.pop(0) if before and before[0] in actions else default
        if not chosen:
            return found
        command = actions[chosen]
    parser = ArgumentParser(prog=name)
    command.add_arguments(parser)
    return found + _arguments(parser, before, last)


def _named(helps: Mapping[str, str]) -> Iterator[Candidate]:
    return (Candidate(name, help) for name, help in helps.items())


def _starting(prefix: str, found: Iterable[Candidate]) -> list[Candidate]:
    return [each for each in found if each.word.startswith(prefix)]


# ---- a command's arguments ----


def _arguments(parser: argparse.ArgumentParser, before: list[str], last: str) -> list[Candidate]:
    """Return the candidates for the last word of a command line, by the command's parser."""
    flags = parser._option_string_actions  # argparse has no public list of its flags
    flag, equals, value = last.partition("=")
    if equals and flag in flags:
        return [Candidate(f"{flag}={each.word}", each.help) for each in _values(flags[flag], value)]
    if before and (action := flags.get(before[-1])) is not None and action.nargs != 0:
        return _values(action, last)
    if last.startswith("-"):
        shown = {action for action in flags.values() if action.help != argparse.SUPPRESS}
        return sorted(
            Candidate(name, _help(action, parser))
            for name, action in flags.items()
            if action in shown and name.startswith(last) and (name.startswith("--") or last == name)
        )
    operands = [action for action in parser._actions if not action.option_strings]
    if not operands:
        return []
    # Operands stand in order, and the last one may repeat.
    given = sum(1 for _ in _operands(before, flags))
    action = operands[min(given, len(operands) - 1)]
    found = _values(action, last)
    if "key=value" in str(action.metavar) and any(not word.startswith("-") for word in before):
        found += _keys(last)
    return found


def _operands(words: Sequence[str], flags: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Yield the words that are neither flags nor values of flags."""
    previous = ""
    for word in words:
        takes_value = previous in flags and flags[previous].nargs != 0
        if not word.startswith("-") and not takes_value:
            yield word
        previous = word


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _values(action: argparse.Action, prefix: str) -> list[Candidate]:
    """Return the values of a flag or operand: its choices, or files and folders by its metavar."""
    if action.choices:
        return _starting(prefix, (Candidate(str(each)) for each in action.choices))
    metavar = str(action.metavar or action.dest).partition(" ")[0]
    if "key=value" in str(action.metavar):
        return _paths(prefix, _CONFIGS)
    if metavar in _FILES or action.dest == "hostfile":
        return _paths(prefix, ("",))
    if metavar in _FOLDERS:
        return _paths(prefix, ())
    if metavar == "KEY":
        return [Candidate(each.word.rstrip("="), each.help) for each in _keys(prefix)]
    return _rules(prefix) if metavar in ("CODE", "CODES") else []


def _rules(prefix: str) -> list[Candidate]:
    from dslpar.linter.registry import RULES  # only of `explain` and --select

    return _starting(prefix, (Candidate(rule.code, rule.name) for rule in RULES))


def _paths(prefix: str, suffixes: tuple[str, ...]) -> list[Candidate]:
    """Return the folders, and the files with these suffixes, that begin with `prefix`; hidden ones if it has a dot."""
    folder, name = os.path.split(prefix)
    found: list[Candidate] = []
    # A folder that cannot be read has no candidates: a TAB is no place for an error.
    with contextlib.suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
                continue
            if entry.is_dir():
                found.append(Candidate(f"{os.path.join(folder, entry.name)}/"))
            elif suffixes and entry.name.endswith(suffixes):
                found.append(Candidate(os.path.join(folder, entry.name)))
    return sorted(found)


# ---- overrides: keys and their values ----


def _keys(prefix: str) -> list[Candidate]:
    """Return the keys that begin with `prefix`, up to the next dot, or behind `key=` the values of that key."""
    from dslpar.schema.keys import declared  # 30 ms, for keys alone

    key, equals, value = prefix.partition("=")
    if equals:
        return [Candidate(f"{key}={each}") for each in _values_of(key) if each.startswith(value)]
    removal = "~" if prefix.startswith("~") else ""
    start = prefix.removeprefix("~")
    names = {each.key for each in declared() if "*" not in each.key}
    depth = start.count(".") + 1
    found: set[str] = set()
    for name in names:
        if name.startswith(start):
            parts = name.split(".")
            found.add(".".join(parts[:depth]) + ("." if len(parts) > depth else "" if removal else "="))
    return [Candidate(removal + each) for each in sorted(found)]


def _values_of(key: str) -> list[str]:
    from dslpar.schema import datasets, families, sections
    from dslpar.schema.keys import declared, type_of

    types = {
        "model.type": families.sections(),
        "optimizer.type": sections.OPTIMIZERS,
        "lr_scheduler.type": sections.LR_SCHEDULERS,
        "data.type": datasets.DATASETS,
    }
    if key in types:
        return sorted(types[key])
    found: set[str] = set()
    for field in (each.field for each in declared() if each.key == key):
        with contextlib.suppress(KeyError):  # a section, or any value
            known = type_of(field)
            found.update(known.choices, ("True", "False") if bool in known.python_types else ())
    return sorted(found)
