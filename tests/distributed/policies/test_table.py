"""The table of models, modes, stages and ZeRO in docs/transformers.md, against the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from tests.support import transformers_table as written


@pytest.mark.parametrize("page", written.PAGES, ids=lambda path: path.name)
def test_pages_have_the_table_of_what_is_tested(page: Path) -> None:
    text = page.read_text()
    assert written.rewritten(text) == text, f"out of date: {written.COMMAND}"


def test_the_table_says_what_is_refused_and_what_is_trained() -> None:
    rows = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in written.table().splitlines())}
    heads = [cell.strip() for cell in rows["class"]]
    assert rows["Gemma2ForCausalLM"][heads.index("ring")].strip() == "refused"
    assert rows["LlamaForCausalLM"][heads.index("3d")].strip() == "8, 27, 64"
    assert rows["LlamaForCausalLM"][heads.index("stages")].strip() == "2, 3"


def test_a_page_of_before_is_seen() -> None:
    page = written.PAGES[0].read_text()
    assert written.rewritten(page.replace("| refused", "| 2")) != page.replace("| refused", "| 2")
