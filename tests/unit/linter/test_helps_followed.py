"""Every help of every rule, followed to the letter, removes its finding and adds none.

The examples of the rules' pages are fixed. If only the author knows what to write, the table ANSWERS has a possible
answer. Otherwise `tests.support.helps` carries the help out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from dslpar.core.errors import Finding
from dslpar.linter.help_edits import HOLE, UnreadableHelpError, alternatives
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from tests.support.helps import Linted, carry_out
from tests.support.lint import MODEL, PATH, TOO_SMALL
from tests.support.rule_pages import example_of
from tests.unit.linter.test_messages import SAID


def replacing(old: str, new: str) -> Callable[[Linted], Linted]:
    """Return an answer that replaces text in a config, a hostfile, a flag or an override."""

    def write(before: Linted) -> Linted:
        texts = before.text, before.hostfile or "", before.hosts[1], " ".join(before.overrides)
        assert any(old in text for text in texts), (old, texts)
        return before._replace(
            text=before.text.replace(old, new),
            hostfile=None if before.hostfile is None else before.hostfile.replace(old, new),
            hosts=(before.hosts[0], before.hosts[1].replace(old, new)),
            overrides=tuple(text.replace(old, new) for text in before.overrides),
        )

    return write


Follow = Callable[[Finding, Linted], Iterator[tuple[str, Linted]]]
ANSWERS: Mapping[str, Callable[[Linted], Linted]] = {
    "CFG001": replacing("size=2)", "size=2, mode='1d'))"),
    "CFG002": replacing("while steps < 1000:", "for step in range(20):\n    if steps >= 1000: break"),
    "CFG003": replacing("make_model(num_layers=2)", MODEL.removeprefix("model = ").strip()),
    "CFG004": replacing("1_000_000, 0", "1_000_000, 64"),
    "CFG005": replacing("[0] * 10**10", "[0] * 4 + [1] * 4"),
    "CFG006": replacing("from .missing import optimizer", ""),
    "CFG007": replacing("from .cfg import optimizer", ""),
    "CFG008": replacing("import *", "import sqrt"),
    "CFG009": replacing(
        'optimizer = get_config("/home/someone/private.py").optimizer', 'train = get_config("common/train.py").train'
    ),
    "CFG011": replacing("lr.value=1e-4", "lr=1e-4"),
    "CFG013": replacing("L(MyModel)", "L(MyModel)(num_layers=2)"),
    "CFG103": replacing("pipeline=0", "pipeline=1"),
    "CFG104": replacing("mode=", "size=2, mode="),
    "CFG112": lambda before: before._replace(world=8),
    "CFG116": replacing("  # dslpar: ignore[CFG103]", ""),
    "CFG120": replacing("update(dict(dist=dict(tensor_parallel_size=4)))", "dist.tensor_parallel_size = 4"),
    "CFG122": replacing("LazyCall(system)(command='nproc')", "4"),
    "CFG123": lambda before: before._replace(text=MODEL),  # a short form of what `dslpar import` would write
    "CFG128": lambda before: before._replace(text=MODEL, path=PATH),
    "CFG129": lambda before: before._replace(text=MODEL),
    "TEN107": replacing("(2, 3, 1)", "(1, 4, 1)"),
    "PIP104": replacing("[0, 1, 2, 5]", "[0, 1, 2, 3]"),
    "PIP110": replacing("MyModel'", "MyModel', layers_cfg=[dict(type='Linear', in_features=8, out_features=8)] * 2"),
    "PIP114": replacing("type:Embedding|Head", "type:Block"),
    "BAT111": replacing("no_such_corpus.txt", "."),
    "PERF110": replacing("num_local_experts=6", "num_local_experts=8"),
    "TEN133": replacing("Mamba", "Llama"),
    "CFG125": replacing("LazyCall(GPT2Config)(n_positions=64)", "dict(max_position_embeddings=64)"),
    "CFG126": replacing("'Lama'", "'derived'"),
    "CFG127": replacing("num_attention_heads=0", "num_attention_heads=8"),
    "CKP101": replacing("pretrained='.'", "config=dict(max_position_embeddings=64)"),
    "CKP102": replacing("pretrained='no_such_folder'", "config=dict(max_position_embeddings=64)"),
    "CKP103": replacing("pretrained='.'", ""),
    "HST101": replacing("other 8", "other slots=8"),
    "HST102": replacing("localhost slots=4\nlocalhost slots=4", "localhost slots=8"),
    "HST104": replacing("slots=0", "slots=2"),
    "HST111": replacing("2,4", "2,3"),
    "HST112": replacing("node1,node2", "node1@node2"),
    "HST113": replacing("node1\nnode2", "node1 slots=4\nnode2 slots=4"),
    "HST114": replacing("node1:4\nnode2:4", "node1 slots=4\nnode2 slots=4"),
}
"""Answers that only the author of a page's example can know."""


def repairs(finding: Finding, before: Linted) -> Iterator[tuple[str, Linted]]:
    """Yield the results of a finding's help: each of its alternatives, and the author's answer if there is one."""
    yield from carry_out(finding, before)
    if finding.code in ANSWERS:
        assert HOLE.search(finding.help), f"{finding.help!r} leaves nothing to the author"
        yield "the author's answer", ANSWERS[finding.code](before)


def check_every_alternative(
    found: list[Finding], before: Linted, ignored: tuple[str, ...], follow: Follow = carry_out
) -> int:
    """Follow the helps of these findings, and return the number of alternatives."""
    known = {(item.code, item.key, item.message) for item in before.findings(ignored)}
    tried = 0
    for finding in found:
        for alternative, after in follow(finding, before):
            tried += 1
            left = {(item.code, item.key, item.message) for item in after.findings((*ignored, "CFG111"))}
            old = known - {(finding.code, finding.key, finding.message)}
            assert left <= old, f"{alternative!r} of {finding.help!r} leads to {left - old}"
    return tried


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_followed_help_repairs(rule: Rule) -> None:
    ignored = () if rule.code in TOO_SMALL else TOO_SMALL
    before = example_of(rule)
    found = [item for item in before.findings(ignored) if item.code == rule.code and item.help]
    tried = check_every_alternative(found, before, ignored, repairs)
    assert tried or (rule.severity == "info" and not found), "only an info, in which nothing is wrong, has no help"


@pytest.mark.parametrize("text", [text for text, _, _ in SAID])
def test_followed_help_repairs_mistakes_about_classes(text: str) -> None:
    """For optimizers, schedulers, handlers and layers, helps with answers of the author are left out."""
    before = Linted(text if "model =" in text else MODEL + text)
    found = [item for item in before.findings(TOO_SMALL) if item.help]
    tried = check_every_alternative(found, before, TOO_SMALL)
    assert tried or any(HOLE.search(item.help) for item in found)


def test_a_package_is_trusted_as_the_help_says() -> None:
    text = "from dslpar import LazyCall as L\nfrom my_pkg import Act\nmodel = dict(type='a.B', act=L(Act)(size=2))\n"
    before = Linted(text)
    found = before.findings(("CFG111",))
    assert [item.code for item in found] == ["CFG122"]
    assert check_every_alternative(found, before, ()) == 2, "pyproject.toml, and the command line"


def test_every_answer_is_asked_for() -> None:
    assert set(ANSWERS) <= {rule.code for rule in RULES}


def finding_with(help: str) -> Finding:
    (finding, *_) = Linted("model = dict(type='GPT')\n").findings()
    return finding._replace(help=help)


@pytest.mark.parametrize("help", ["consider another layout", "make it smaller", "size 4", "use the docs or ask"])
def test_vague_help_is_told(help: str) -> None:
    """The harness does not count an unreadable help as followed."""
    with pytest.raises(UnreadableHelpError):
        list(carry_out(finding_with(help), Linted("model = dict(type='GPT')\n")))


def test_alternatives_are_all_tried() -> None:
    text = "nearest legal: num_heads=4 or 8; or choose a mode, or leave it out"
    assert alternatives(text) == ["num_heads=4", "num_heads=8"]
    assert alternatives("keep one of a and b") == ["leave b out", "leave a out"]
    assert alternatives("2 without quotes: '2' is a string; a remark") == ["2 without quotes"]
