"""Quick fixes: every help that can be carried out is, in the text, and its finding is gone then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslpar.linter import fixes
from dslpar.linter.help_edits import ByProgram, Trust, alternatives, changes
from dslpar.linter.registry import RULES
from dslpar.linter.rule import Rule
from dslpar.lsp.analysis import Analysis, analysed
from dslpar.lsp.quick_fixes import QuickFix, quick_fixes, replacement
from tests.support.rule_pages import example_of

MODEL = "model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)\n"


def analysis_of(folder: Path, text: str) -> Analysis:
    path = str(folder / "cfg.py")
    return analysed(path, {os.path.realpath(path): text})


def fixes_of(made: Analysis, code: str) -> list[QuickFix]:
    texts = {os.path.realpath(made.path): made.text}
    return [
        fix for each in made.findings if each.finding.code == code for fix in quick_fixes(made, each.finding, texts)
    ]


@pytest.mark.parametrize(
    ("text", "code", "title", "after"),
    [
        pytest.param(
            "# dslpar: world-size=4\n"
            + MODEL.replace("num_heads=4", "num_heads=6")
            + "parallel = dict(tensor=dict(size=4, mode='1d'))\n",
            "TEN201",
            "num_heads=8 (TEN201)",
            ("num_heads=6", "num_heads=8"),
            id="one-of-two-values",
        ),
        pytest.param(
            MODEL + "zero = dict(stge=1)\n",
            "CFG101",
            "did you mean 'stage'? (CFG101)",
            ("stge", "stage"),
            id="own-fix",
        ),
        pytest.param(
            "# dslpar: world-size=8\n" + MODEL + "parallel = dict(tensor=dict(size=3, mode='1d'))\n",
            "PAR101",
            "start 9 ranks (PAR101)",
            ("world-size=8", "world-size=9"),
            id="world-of-the-comment",
        ),
        pytest.param(
            "# dslpar: wolrd-size=8 device=h100-80g\n" + MODEL,
            "CFG230",
            "did you mean 'world-size'? (CFG230)",
            ("wolrd-size=8", "world-size=8"),
            id="name-in-the-comment",
        ),
        pytest.param(
            "# dslpar: world-size=8 device=h100\n" + MODEL,
            "CFG230",
            "did you mean 'h100-80g'? (CFG230)",
            ("device=h100", "device=h100-80g"),
            id="value-in-the-comment",
        ),
        pytest.param(
            MODEL + "precision = dict(dtype='fp16', fp16_master_weights_and_grads=True)\nzero = 2\n",
            "PRE102",
            "optimizer.type='DeepSpeedCPUAdam' with zero.offload_optimizer='cpu' (PRE102)",
            (
                "zero = 2\n",
                "zero = dict(stage=2, offload_optimizer='cpu')\noptimizer = dict(type='DeepSpeedCPUAdam')\n",
            ),
            id="two-keys-and-a-short-form",
        ),
        pytest.param(
            MODEL + "optimizer = {'type': 'AdamW', 'lr': 3e-4, 'lr': 1e-4}\n",
            "CFG012",
            "leave the second out (CFG012)",
            (", 'lr': 1e-4", ""),
            id="one-of-two-entries",
        ),
    ],
)
def test_a_help_is_carried_out_where_the_keys_stand(
    tmp_path: Path, text: str, code: str, title: str, after: tuple[str, str]
) -> None:
    found = {fix.title: fix for fix in fixes_of(analysis_of(tmp_path, text), code)}
    assert title in found
    assert fixes.apply(text, [found[title].edit]) == text.replace(*after)


def test_values_that_the_file_computes_or_imports_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("heads = 6\n")
    text = "# dslpar: world-size=4\nfrom .common import heads\n" + MODEL.replace("num_heads=4", "num_heads=heads")
    made = analysis_of(tmp_path, text + "parallel = dict(tensor=dict(size=4, mode='1d'))\n")
    assert "TEN201" in [each.finding.code for each in made.findings]
    assert not [fix for fix in fixes_of(made, "TEN201") if "num_heads" in fix.title]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_page_s_example_of_each_rule_can_be_fixed(rule: Rule, tmp_path: Path) -> None:
    """Each alternative of its help is an action, except what is no part of the file."""
    example = example_of(rule)
    if example.hostfile is not None or example.overrides or not example.path.endswith(".py"):
        return  # the finding is not of a config in Python
    comment = f"# dslpar: world-size={example.world}\n" if example.world else ""
    made = analysis_of(tmp_path, comment + example.text)
    texts = {os.path.realpath(made.path): made.text}
    for item in [each.finding for each in made.findings if each.finding.code == rule.code]:
        found = quick_fixes(made, item, texts)
        if any(fix.is_own for fix in found):
            continue
        asked = [
            each
            for each in alternatives(item.help)
            if not any(isinstance(change, (ByProgram, Trust)) for change in changes(each, item))
        ]
        assert [fix.title for fix in found] == [f"{each} ({rule.code})" for each in asked]


@given(st.text("ab\n", max_size=20), st.text("ab\n", max_size=20))
def test_a_replacement_turns_one_text_into_the_other(before: str, after: str) -> None:
    assert fixes.apply(before, [replacement("cfg.py", before, after)]) == after
