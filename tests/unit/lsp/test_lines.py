r"""Lines end at \r\n, \n and \r alone: places, fixes and changes of texts with other separators."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("pygls") is None:
    pytest.skip("pygls is not installed (extra lsp)", allow_module_level=True)

from lsprotocol import types

from dslpar.lsp.lines import lines_of
from tests.unit.lsp.test_server import TEXT, Editor, in_editor

SEPARATORS = "\x0c\x0b\x85\u2028\x1c"


@given(st.text("ab\r\n\x0b\x0c\x1c\x85\u2028"))
def test_lines_are_those_of_python(text: str) -> None:
    assert list(lines_of(text)) == text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def applied(text: str, edits: list[types.TextEdit]) -> str:
    """Apply edits as an editor does; all characters are in the Basic Multilingual Plane."""
    for edit in sorted(edits, key=lambda each: (each.range.start.line, each.range.start.character), reverse=True):
        lines = [*lines_of(text)]
        starts = [0]
        for line in lines:
            end = starts[-1] + len(line)
            starts.append(end + (2 if text[end : end + 2] == "\r\n" else 1))
        begin, end = (starts[at.line] + at.character for at in (edit.range.start, edit.range.end))
        text = text[:begin] + edit.new_text + text[end:]
    return text


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_a_fix_below_a_separator_changes_its_own_line(tmp_path: Path, end: str) -> None:
    comment = "".join(f"# a{separator}b\n" for separator in SEPARATORS)
    legal = TEXT.replace("parallel", f"{comment}parallel", 1).replace("\n", end)
    text = legal.replace("num_heads", "num_haeds")

    async def use(editor: Editor) -> None:
        found = [each for each in await editor.write("cfg.py", text) if each.code == "CFG101"]
        assert [each.range.start.line for each in found] == [2 + len(SEPARATORS)]
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        actions = await editor.client.text_document_code_action_async(
            types.CodeActionParams(document, found[0].range, types.CodeActionContext([]))
        )
        offered = [each for each in actions or () if isinstance(each, types.CodeAction)]
        (fix,) = [each for each in offered if each.kind == "source.fixAll.dslpar"]
        assert fix.edit is not None
        assert fix.edit.changes is not None
        assert applied(text, list(fix.edit.changes[editor.uri("cfg.py")])) == legal
        hover = await editor.client.text_document_hover_async(
            types.HoverParams(**editor.at("cfg.py", 1 + len(SEPARATORS), 3))
        )
        assert hover is not None
        assert "**parallel**" in str(hover.contents)

    in_editor(tmp_path, use)


def test_whole_texts_are_asked_for(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        sync = editor.capabilities.text_document_sync
        assert isinstance(sync, types.TextDocumentSyncOptions)
        assert sync.change == types.TextDocumentSyncKind.Full

    in_editor(tmp_path, use)
