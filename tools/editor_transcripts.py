"""More of the transcript in docs/editors.md: which files are configs, number of ranks, completion by kind, navigation.

`editor_session` has the first part, and puts these behind it. Each is a heading, the lines, and what is shown.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dslpar.core.errors import Location
from dslpar.linter.fixes import apply
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.completion import completions, settings_at
from dslpar.lsp.cursor import place_at
from dslpar.lsp.hints import summary
from dslpar.lsp.names import Names, foldable
from dslpar.lsp.outline import Entry, outline
from dslpar.lsp.world_size import offered, with_world_size

CURSOR = "|"
HEAD = "# dslpar: world-size=64 device=h100-80g\n"
MODEL = "model = dict(type='GPT', num_layers=32, hidden_size=4096, num_heads=32, vocab_size=32000, max_seq_len=4096)\n"
PARALLEL = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
BATCH = "batch = dict(global_size=512, micro_size=1)\n"
MOST = 4
"""Items of a menu that are shown; `...` stands for more."""


def transcripts() -> Iterator[str]:
    """Yield the lines of markdown."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(os.path.realpath(folder))
        yield from _claims(root)
        yield from _worlds(str(root / "cfg.py"))
        yield from _without_effect(str(root / "cfg.py"))
        yield from _fix_all(str(root / "cfg.py"))
        yield from _kinds_of_completion(root)
        yield from _places(root)
        yield from _outline(str(root / "cfg.py"))


def _claims(root: Path) -> Iterator[str]:
    (root / "pyproject.toml").write_text("[tool.dslpar]\nconfigs = ['runs/*']\n", encoding="utf-8")
    (root / "runs").mkdir()
    files = {
        "new.py": "# dslpar: world-size=64\n",
        "cfg.py": "model = dict(type='GPT')\n",
        "runs/new.py": "",
        "train.py": "import torch\n",
    }
    made = {name: _analysed(str(root / name), text) for name, text in files.items()}
    (root / "pyproject.toml").unlink()
    yield from _shown(
        "Which files are configs",
        "pyproject.toml: [tool.dslpar] configs = ['runs/*']",
        [
            f"{name:<13}{files[name].strip() or '(empty)':<28}{'a config' if each.is_config else 'not a config'}"
            for name, each in made.items()
        ],
    )


def _worlds(path: str) -> Iterator[str]:
    comment = "# dslpar: world-size=8,12"
    made = _analysed(path, f"{comment}\n{PARALLEL}{MODEL}{BATCH}")
    lens = summary(made)
    assert lens is not None
    errors = [f"{each.finding.code} {each.message}" for each in made.findings if each.finding.severity == "error"]
    yield from _shown("Two numbers of ranks at once", comment, [lens[1], PARALLEL.rstrip(), *errors])
    sizes = offered(made)
    after = apply(made.text, [with_world_size(path, made.text, sizes[-1])]).split("\n")[0]
    actions = [f"dslpar: lint for {size} ranks" for size in sizes]
    yield from _shown("Another number of ranks: actions on the comment", comment, [*actions, "", after])


def _without_effect(path: str) -> Iterator[str]:
    line = "zero = dict(stage=1, overlap_comm=True)"
    made = _analysed(path, HEAD + PARALLEL + MODEL + BATCH + line + "\n")
    (found,) = [each.finding for each in made.findings if each.finding.code.startswith("DEAD")]
    shown = line[found.location.column - 1 : found.location.end_column - 1]
    texts = [f"{found.code} {found.message}; help: {found.help}", f"dslpar: explain {found.code}"]
    yield from _shown("A key without effect, shown faded", line, [f"faded: {shown}", *texts])


def _fix_all(path: str) -> Iterator[str]:
    lines = "zero = dict(stge=1)\ntrain = dict(step=100)\n"
    made = _analysed(path, HEAD + PARALLEL + MODEL + BATCH + lines)
    own = [each.finding.fix for each in made.findings if each.finding.fix is not None]
    after = apply(made.text, own).removeprefix(HEAD + PARALLEL + MODEL + BATCH).rstrip("\n")
    yield from _shown("Fix all", lines, [f"dslpar: fix all ({len(own)})", "", *after.split("\n")])


def _kinds_of_completion(root: Path) -> Iterator[str]:
    path = root / "cfg.py"
    (root / "tokens").mkdir()
    (root / "common.py").write_text(f"heads = 32\n{MODEL}", encoding="utf-8")
    before = os.getcwd()
    os.chdir(root)  # paths are those of the working folder
    try:
        lines = {
            "a skeleton": "optimizer = dict(type='AdamW')\nlr|",
            "a class of transformers": "model = dict(type='transformers.Llama|",
            "an optimizer of torch": "optimizer = dict(type='Ada|",
            "a device": "cluster = dict(device='h|",
            "a path": "data = dict(type='text', path='to|",
            "a name of another config": "from .common import |",
        }
        menus = [_menu(str(path), title, line) for title, line in lines.items()]
        comment = "# dslpar: world-size=64 device=b|"
        menus.insert(3, _of_comment(comment))
    finally:
        os.chdir(before)
    yield from ("### Completion by kind", "", "```text", "\n\n".join(menus), "```", "")


def _menu(path: str, title: str, line: str) -> str:
    text = HEAD + line.removesuffix(CURSOR)
    last = text.rpartition("\n")[2]
    place = place_at(text, text.count("\n") + 1, len(last) + 1)
    assert place is not None
    items = [each for each in completions(_analysed(path, text), place, {}) if each.label.startswith(place.word)]
    assert items, title
    inserted = [each.insert.replace("$0", CURSOR) for each in sorted(items, key=lambda item: (item.rank, item.label))]
    return "\n".join([f"{last}{CURSOR}     {title}", *_first(inserted)])


def _of_comment(line: str) -> str:
    text = line.removesuffix(CURSOR)
    found = settings_at(text, 1, len(text) + 1)
    assert found is not None
    word, items = found
    labels = sorted(each.label for each in items if each.label.startswith(word))
    return "\n".join([f"{line}     a device, in the comment", *_first(labels)])


def _first(labels: Sequence[str]) -> Iterable[str]:
    return [f"    {label}" for label in labels[:MOST]] + (["    ..."] if len(labels) > MOST else [])


def _places(root: Path) -> Iterator[str]:
    text = f"from .common import heads\n{MODEL.replace('num_heads=32', 'num_heads=heads')}"
    path = str(root / "cfg.py")
    names = Names([], {path: text, str(root / "common.py"): f"heads = 32\n{MODEL}"})
    column = text.split("\n")[1].index("=heads") + 2
    symbol = names.at(path, 2, column)
    assert symbol is not None
    assigned = names.definition(symbol)
    assert assigned is not None

    def shown(at: Location) -> str:
        return f"{os.path.basename(at.path)}:{at.line}:{at.column}"

    uses = [shown(at) for at in names.occurrences(symbol)]
    file = names.file_at(path, 1, len("from .com"))
    assert file is not None
    of_import = f"definition of .common: {os.path.basename(file)}"
    yield from _shown(
        "Definition and references of `heads`",
        text,
        [f"definition of heads: {shown(assigned)}", of_import, f"references: {', '.join(uses)}"],
    )


def _outline(path: str) -> Iterator[str]:
    text = "batch = dict(\n    global_size=512,\n    micro_size=1,\n)\n" + PARALLEL

    def lines(entries: Iterable[Entry], depth: int) -> Iterator[str]:
        for each in entries:
            yield "    " * depth + each.name
            yield from lines(each.children, depth + 1)

    folds = [f"fold: lines {first} to {last}" for first, last, _ in foldable(text, path)]
    yield from _shown("Symbols and folds", text, [*lines(outline(_analysed(path, text)), 0), *folds])


def _analysed(path: str, text: str) -> Analysis:
    return analysed(path, {path: text})


def _shown(title: str, lines: str, shown: Sequence[str]) -> Iterator[str]:
    yield from (f"### {title}", "", "```text", lines.rstrip("\n"), "", *shown, "```", "")
