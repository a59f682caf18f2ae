"""Transcript of what `dslpar lsp` shows for a config while it is written, for docs/editors.md.

The functions are those that the server calls; an editor draws the same texts beside the lines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.completion import completions
from dslpar.lsp.cursor import place_at
from dslpar.lsp.hints import hints, summary
from dslpar.lsp.hover import explanation_at
from dslpar.lsp.layouts import layouts
from dslpar.lsp.names import Names
from dslpar.lsp.quick_fixes import quick_fixes

CURSOR = "|"
_HEAD = "# dslpar: world-size=64 device=h100-80g\n"
_BATCH = "batch = dict(global_size=512, micro_size=1)\n"
_MODEL = "model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=4096)\n"
_PARALLEL = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
_REST = "zero = dict(stage=1)\nprecision = dict(dtype='bf16')\n"
_LEGAL = _HEAD + _PARALLEL + _MODEL + _BATCH + _REST
_MOST = 6
"""Items of a menu that are shown."""


def session() -> str:
    """Return the transcript in markdown: for each feature, the lines, and what is shown."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.realpath(Path(folder, "cfg.py"))
        return "\n".join([*_parts(path)])


def _parts(path: str) -> Iterator[str]:
    broken = _LEGAL.replace("num_heads=32", "num_heads=30") + "train = dict(steps=(10\noptimzer = dict(lr=1e-3)\n"
    made = _analysed(path, broken)
    yield from _shown("Findings, beside a line that does not parse", "", [*_findings(made)])
    wrong = _analysed(path, _LEGAL.replace("num_heads=32", "num_heads=30"))
    (found,) = [each.finding for each in wrong.findings if each.finding.code == "TEN205"]
    titles = [fix.title for fix in quick_fixes(wrong, found, {})]
    yield from _shown("Quick fixes", _line(wrong, found.location.line), [*titles, f"dslpar: explain {found.code}"])
    yield from _completed("Completion of a key", path, "parallel = dict(pipeline=2, tensor=dict(|", kind="key")
    yield from _completed("Completion of a value", path, "parallel = dict(tensor=dict(size=4, mode='|", kind="value")
    sizes = _PARALLEL.replace("size=4", "size=|")
    yield from _completed("Sizes that are legal on 64 ranks", path, sizes.split("\n")[0], kind="value")
    legal = _analysed(path, _LEGAL)
    begin = _LEGAL.split("\n")[1]
    text = explanation_at(legal, 2, begin.index("tensor") + 1)
    assert text is not None
    yield from _shown("Hover, on `tensor`", begin, text[0].split("\n"))
    lens = summary(legal)
    assert lens is not None
    ends = [f"{_line(legal, each.at.end_line)[: each.at.end_column - 1]}  [{each.text}]" for each in hints(legal)]
    yield from _shown("The line above `parallel`, and hints behind values", "", [lens[1], *ends])
    yield from _shown("Layouts, on `parallel`", begin, [fix.title for fix in layouts(legal, {path: _LEGAL})])
    yield from _renamed(path)


def _renamed(path: str) -> Iterator[str]:
    text = "heads = 32\n" + _MODEL.replace("num_heads=32", "num_heads=heads")
    names = Names([], {path: text})
    symbol = names.at(path, 1, 2)
    assert symbol is not None
    places = [f"line {at.line}, column {at.column}" for at in names.rename(symbol, "num_heads")]
    yield from _shown("Rename of the variable `heads`", text, places)


def _completed(title: str, path: str, line: str, kind: str) -> Iterator[str]:
    before, _, after = line.partition(CURSOR)
    text = _HEAD + before + after + "\n" + (_MODEL + _BATCH + _REST)
    place = place_at(text, 2, len(before) + 1)
    assert place is not None
    around = _HEAD + before.removesuffix(place.word), after + "\n" + (_MODEL + _BATCH + _REST)
    every = completions(_analysed(path, text), place, {}, around)
    items = [each for each in every if each.label.startswith(place.word)]
    shown = [f"{each.label:<14} {each.detail}".rstrip() for each in sorted(items, key=lambda item: item.rank)[:_MOST]]
    yield from _shown(title, line, shown)


def _analysed(path: str, text: str) -> Analysis:
    return analysed(path, {path: text})


def _findings(made: Analysis) -> Iterator[str]:
    for each in made.findings:
        item = each.finding
        if item.severity == "error":
            yield f"{item.location.line}: {_line(made, item.location.line)}"
            yield f"   {item.code} {each.message}" + (f"; help: {item.help}" if item.help else "")


def _line(made: Analysis, number: int) -> str:
    return made.text.split("\n")[number - 1]


def _shown(title: str, line: str, shown: Sequence[str]) -> Iterator[str]:
    yield from (f"### {title}", "", "```text", *([line.rstrip("\n"), ""] if line else []), *shown, "```", "")
