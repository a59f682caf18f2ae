"""Check every class of transformers as `dslpar policy check` does, and follow its helps: the table of classes.

    python -m tests.support.transformers_classes             # all, about an hour of one core; writes record and page
    python -m tests.support.transformers_classes --classes BartForCausalLM MT5ForConditionalGeneration
    python -m tests.support.transformers_classes --page      # writes docs/transformers_classes.md from the record

Each class runs in a process of its own with a time limit, so that a crash or a hang is a row like any other. If a
finding's help is a policy or a setting of the config, the class is checked again with it, as a user would.

The classes are those with a policy, and those that transformers lists for language models, masked tokens,
encoder-decoders, classes of images and pre-training. Every other config class is represented by its first model class.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import pickle
import re
import select
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from dslpar.core.errors import DslparError
from dslpar.policies import check
from dslpar.policies.model_inputs import other_input
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support.paths import ROOT

RECORD = ROOT / "tests" / "support" / "tables" / "transformers_classes.json"
PAGE = ROOT / "docs" / "transformers_classes.md"
COMMAND = "python -m tests.support.transformers_classes"
MODES = {name: check.MODES[name] for name in ("one process", "1d 2", "2d 4", "ring 2")}
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "PRETRAINING")
LIMIT_S = 900.0
_HELPS = 4
"""Largest number of helps to follow for a class."""


class Row(NamedTuple):
    """The result of one class."""

    name: str
    outcome: str
    """exact, refused, wrong, "other input", or crashed."""
    written: Mapping[str, Any]
    """What the helps said to write: "policy", and settings of the config."""
    refused: Mapping[str, str]
    """Mode -> the finding that refuses it, for an exact class."""
    finding: str = ""
    """The finding of a refused class, or the traceback."""
    help: str = ""
    """The finding's help."""


def classes() -> list[str]:
    """Return the names of all classes to check."""
    found: dict[str, None] = dict.fromkeys([*POLICIES, *sorted(DERIVED)])
    for task in TASKS:
        for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            found |= dict.fromkeys([names] if isinstance(names, str) else names)
    configs = {_config_of(name) for name in found}
    for name in dir(transformers):
        config = _config_of(name)
        if config is not None and config not in configs and not name.endswith("PreTrainedModel"):
            configs.add(config)
            found[name] = None
    return list(found)


def _config_of(name: str) -> Any:
    """Return the config class of a model class; None: it is no model class."""
    with contextlib.suppress(ImportError, AttributeError, ModuleNotFoundError):
        cls = getattr(transformers, name)
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        return cls.config_class if is_model and isinstance(cls.config_class, type) else None
    return None


def judged(name: str) -> Row:
    """Check a class; follow the helps of its findings."""
    cls = getattr(transformers, name)
    written: dict[str, Any] = {}
    row = _checked(cls, written)
    for _ in range(_HELPS):
        more = to_write(row.help)
        if row.outcome != "refused" or not more or more.items() <= written.items():
            break
        written |= more
        row = _checked(cls, written)
    return row


def _checked(cls: Any, written: Mapping[str, Any]) -> Row:
    """Check a class with what is written for it."""
    name = cls.__name__
    changes = {key: value for key, value in written.items() if key != "policy"}
    try:
        rows = list(_rows_of(check.miniature_of(cls, None, changes, written.get("policy"))))
    except DslparError as error:
        found = error.findings[0]
        outcome = "other input" if other_input(cls) and not written else "refused"
        return Row(name, outcome, dict(written), {}, _plain(found.message, name), found.help)
    return _row(name, dict(written), rows)


def _rows_of(subject: check.Subject) -> Iterator[check.Row]:
    """Yield the result of each mode; of the first alone if it is refused, as all others then are too."""
    first, *others = MODES.items()
    (row,) = check.check(subject, dict([first]))
    yield row
    if row.outcome != "refused":
        yield from check.check(subject, dict(others))


def _row(name: str, written: Mapping[str, Any], rows: Sequence[check.Row]) -> Row:
    refused = {row.mode: _plain(row.tensor, name) for row in rows if row.outcome == "refused"}
    refused |= {f"{row.mode}, dropout": _plain(row.dropout, name) for row in rows if row.dropout}
    wrong = [f"{row.mode}: {row.worst:.1e} {row.tensor}" for row in rows if row.outcome == "wrong"]
    if wrong:
        return Row(name, "wrong", written, refused, "; ".join(wrong))
    if all(row.outcome == "refused" for row in rows):
        return Row(name, "refused", written, {}, refused["one process"], rows[0].help)
    return Row(name, "exact", written, refused)


def _plain(message: str, name: str) -> str:
    return " ".join(message.removeprefix(f"{name}: ").split())


def to_write(help: str) -> dict[str, Any]:
    """Return what a help says to write: a policy, or a setting of the config; {} if it says neither.

    >>> to_write("policy='T5ForConditionalGeneration', untested: ..."), to_write("tie_word_embeddings=True")
    ({'policy': 'T5ForConditionalGeneration'}, {'tie_word_embeddings': True})
    """
    if written := re.match(r"policy='(\w+)'", help):
        return {"policy": written[1]}
    if written := re.match(r"policy=(dict\(.*?\))(?:, untested|$)", help):
        call = ast.parse(written[1], mode="eval").body
        assert isinstance(call, ast.Call)
        return {"policy": {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}}
    if written := re.fullmatch(r"(\w+)=(\S+)", help):
        with contextlib.suppress(ValueError, SyntaxError):  # such as config=dict(...), which is no value
            return {written[1]: ast.literal_eval(written[2])}
    return {}


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Yield the result of each class, from a process of its own."""
    torch.set_num_threads(1)
    for name in names:
        yield _forked(name)


def _forked(name: str) -> Row:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report(name, writing)
    os.close(writing)
    text = b"".join(_until_closed(reading))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also the ranks of a class that hangs
    os.waitpid(pid, 0)
    return pickle.loads(text) if text else Row(name, "crashed", {}, {}, f"no result within {LIMIT_S:g} s")


def _report(name: str, writing: int) -> None:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # transformers' warnings
    warnings.simplefilter("default")  # which pytest turns into errors
    try:
        row = judged(name)
    except Exception:  # any error is a row of the table, and fails its test
        row = Row(name, "crashed", {}, {}, traceback.format_exc(limit=-3))
    with open(writing, "wb") as file:
        file.write(pickle.dumps(row))
    os._exit(0)


def _until_closed(reading: int) -> Iterator[bytes]:
    """Yield what a process writes, until it closes the pipe or the time is up."""
    ends = time.monotonic() + LIMIT_S
    with open(reading, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, ends - time.monotonic()))[0]:
            if not (part := file.read(65536)):
                return
            yield part


def read() -> tuple[str, dict[str, Row]]:
    """Return the record: transformers' version, and the rows by class."""
    record = json.loads(RECORD.read_text())
    return record["transformers"], {name: Row(name, **fields) for name, fields in record["classes"].items()}


def write(found: Mapping[str, Row]) -> None:
    """Write the record, a line per class."""
    rows = {name: {key: value for key, value in row._asdict().items() if key != "name"} for name, row in found.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    version = json.dumps(transformers.__version__)
    RECORD.write_text(f'{{\n "transformers": {version},\n "classes": {{\n{lines}\n }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="check these, and keep the other rows")
    parser.add_argument("--missing", action="store_true", help="check the classes that the record lacks")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}, and check nothing")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    kept = read()[1] if RECORD.exists() else {}
    counts: Counter[str] = Counter()
    if not args.page:
        names = args.classes or [name for name in classes() if not (args.missing and name in kept)]
        for row in rows(names):
            kept[row.name] = row
            counts[row.outcome] += 1
            write(kept)
            print(f"{row.name:44}{row.outcome:12}{row.finding}", flush=True)
        print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    PAGE.write_text(page(transformers.__version__, kept))
    sys.exit(1 if counts["crashed"] + counts["wrong"] else 0)


def page(version: str, found: Mapping[str, Row]) -> str:
    """Return docs/transformers_classes.md."""
    by_outcome: dict[str, list[Row]] = {}
    for row in sorted(found.values(), key=lambda row: row.name.lower()):
        by_outcome.setdefault(row.outcome, []).append(row)
    exact, refused, other = (by_outcome.get(each, []) for each in ("exact", "refused", "other input"))
    introduction = _INTRODUCTION.format(
        version=version,
        command=COMMAND,
        number=len(found),
        num_exact=len(exact),
        num_as_is=sum(not row.written for row in exact),
        num_refused=len(refused),
        num_other=len(other),
    )
    return _PAGE.format(
        introduction=_filled(introduction),
        modes=_filled(_MODES.format(modes=", ".join(MODES))),
        as_is=_filled(", ".join(row.name for row in exact if not row.written)),
        with_lines=_grouped((_text_of(row.written), row.name) for row in exact if row.written),
        modes_refused=_grouped((reason, row.name) for row in exact for reason in _reasons(row)),
        refused=_lines(f"| {row.name} | {_cell(row.finding)} |" for row in refused),
        other=_grouped((_argument(row.finding), row.name) for row in other),
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _lines(rows: Iterable[str]) -> str:
    return "\n".join(rows)


def _grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the rows of a table: what is said, and the classes of which it is said; the most frequent first."""
    groups: dict[str, dict[str, None]] = {}
    for what, name in pairs:
        groups.setdefault(what, {})[name] = None
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return _lines(f"| {_cell(what)} | {', '.join(names)} |" for what, names in ordered)


def _text_of(written: Mapping[str, Any]) -> str:
    """Return what is written for a class, as in a config."""
    parts = [f"{name}={value!r}" for name, value in written.items() if name != "policy"]
    policy = written.get("policy")
    if policy is not None:
        parts.append(f"policy={policy!r}" if isinstance(policy, str) else _DRAFTED)
    return f"`{', '.join(parts)}`" if policy is None or isinstance(policy, str) else ", ".join(parts)


_DRAFTED = "the policy that `dslpar policy check` drafts for the class"


def _reasons(row: Row) -> Iterator[str]:
    """Yield why modes of an exact class are refused, with these modes, and without the names of modules."""
    modes: dict[str, list[str]] = {}
    for mode, why in row.refused.items():
        general = re.sub(r"^\w+Attention\b", "its attention", why.replace(row.name, "it"))
        modes.setdefault(general, []).append(mode)
    for why, of in modes.items():
        yield f"{', '.join(of)}: {why}"


def _argument(finding: str) -> str:
    return f"`{found[1]}`" if (found := re.search(r" takes (\w+):", finding)) else finding


def _cell(text: str) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= 160 else f"{text[:157]}..."


_INTRODUCTION = """\
What `dslpar policy check` finds about {number} classes of transformers {version}: those with a policy, those for \
language models, masked tokens, encoder-decoders, classes of images and pre-training, and one class of each other \
config. {num_exact} are exact, {num_as_is} of them without a line. {num_refused} are refused by a finding, and \
{num_other} take other inputs than tokens or images. No class computes something else. `{command}` checks all of them, \
follows the helps of findings as a user would, and writes this page.
"""
_MODES = """\
Exact means that logits, loss and every gradient of a class in miniature equal those of plain transformers, to 1e-12 \
in float64, with padded samples, in these modes: {modes}. A class that is refused runs whole on data ranks: pass it to \
`dslpar.initialize(config, model=..., criterion=...)` without `parallel.tensor` and `parallel.pipeline`.
"""
_PAGE = """\
# Classes of transformers

{introduction}

{modes}

## Exact without a line

{as_is}

## Exact with a line

| write | classes |
|---|---|
{with_lines}

## Modes that are refused

| modes and reason | classes |
|---|---|
{modes_refused}

## Refused

| class | finding |
|---|---|
{refused}

## Other inputs

These classes take something besides or instead of tokens or images. The finding of a composite names the class of its
language model, which can be trained alone.

| argument | classes |
|---|---|
{other}
"""


if __name__ == "__main__":
    main()
