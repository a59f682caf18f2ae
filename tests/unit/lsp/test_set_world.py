"""The number of ranks is set by an action and by a command of the editor, through the real server."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("pygls") is None:
    pytest.skip("pygls is not installed (extra lsp)", allow_module_level=True)

from lsprotocol import types

from tests.unit.lsp.test_server import YAML, Editor, in_editor

CONFIG = """\
parallel = dict(pipeline=2, tensor=dict(size=8, mode='1d'))
model = dict(type='GPT', num_layers=8, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=64)
batch = dict(global_size=64, micro_size=2)
"""


async def titles(editor: Editor, name: str, line: int) -> list[str]:
    document = types.TextDocumentIdentifier(editor.uri(name))
    at = types.Range(types.Position(line, 0), types.Position(line, 0))
    context = types.CodeActionContext([], only=[types.CodeActionKind.RefactorRewrite])
    actions = await editor.client.text_document_code_action_async(types.CodeActionParams(document, at, context))
    return [each.title for each in actions or ()]


def test_actions_on_the_first_line(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", CONFIG)
        assert "dslpar: lint for 16 ranks" in await titles(editor, "cfg.py", 0)
        assert await titles(editor, "cfg.py", 1) == []
        await editor.write("cfg.py", "# dslpar: world-size=16\n" + CONFIG)
        assert "dslpar: lint for 64 ranks" in await titles(editor, "cfg.py", 0)
        await editor.write("new.py", "")
        assert await titles(editor, "new.py", 0) == [f"dslpar: lint for {size} ranks" for size in (8, 16, 32, 64)]
        await editor.write("program.py", "import os\n")
        assert await titles(editor, "program.py", 0) == [], "other Python files get no actions"

    in_editor(tmp_path, use)


@pytest.mark.parametrize(("name", "text"), [("cfg.py", CONFIG), ("cfg.yaml", YAML)])
def test_the_command(tmp_path: Path, name: str, text: str) -> None:
    async def use(editor: Editor) -> None:
        edits: list[types.TextEdit] = []

        @editor.client.feature(types.WORKSPACE_APPLY_EDIT)
        def apply_edit(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
            for each in (params.edit.changes or {})[editor.uri(name)]:
                assert isinstance(each, types.TextEdit)
                edits.append(each)
            return types.ApplyWorkspaceEditResult(True)

        async def command(*arguments: str) -> object:
            params = types.ExecuteCommandParams("dslpar.setWorld", arguments=list(arguments))
            return await editor.client.workspace_execute_command_async(params)

        provider = editor.capabilities.execute_command_provider
        assert provider is not None
        assert "dslpar.setWorld" in provider.commands
        await editor.write(name, text)
        assert await command(editor.uri(name), "8,64") is True
        (edit,) = edits
        assert edit.range.start == types.Position(0, 0 if name == "cfg.py" else 10)
        assert edit.new_text == ("# dslpar: world-size=8,64\n" if name == "cfg.py" else "world-size=8,64")
        for sizes in ("0", "many", "8, 64"):
            with pytest.raises(Exception, match="world-size is one or several numbers of ranks"):
                await command(editor.uri(name), sizes)
        with pytest.raises(Exception, match="is not open"):
            await command(editor.uri("other.py"), "8")

    in_editor(tmp_path, use)
