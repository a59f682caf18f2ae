"""Times of linting: once for changes that come together, and again when a file changes on disk."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("pygls") is None:
    pytest.skip("pygls is not installed (extra lsp)", allow_module_level=True)

import torch.testing._internal
from lsprotocol import types

from dslpar.language.limits import MAX_SOURCE_BYTES
from dslpar.lsp.analysis import analysed
from tests.unit.lsp.test_server import TEXT, Editor, in_editor

IMPORTING = TEXT.replace("parallel", "from .common import heads\nparallel", 1).replace("num_heads=4", "num_heads=heads")


async def until(editor: Editor, name: str, codes: list[str]) -> None:
    """Wait until the published findings of a file are those."""

    def found() -> list[object]:
        return [each.code for each in editor.published[editor.uri(name)].diagnostics]

    async def wait() -> None:
        while found() != codes:
            editor.changed.clear()
            await editor.changed.wait()

    try:
        await asyncio.wait_for(wait(), 30)
    except TimeoutError:
        pytest.fail(f"{found()} instead of {codes}")


def test_changes_that_come_together_are_linted_once(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", TEXT)
        published: list[int | None] = []
        uri = editor.uri("cfg.py")
        editor.on_publish = lambda params: published.append(params.version)
        for version in range(2, 42):
            of = types.VersionedTextDocumentIdentifier(version=version, uri=uri)
            text = TEXT.replace("hidden_size", "hiden_size") + f"_x = {version}\n"
            whole = types.TextDocumentContentChangeWholeDocument(text)
            editor.client.text_document_did_change(types.DidChangeTextDocumentParams(of, [whole]))
        while 41 not in published:
            editor.changed.clear()
            await asyncio.wait_for(editor.changed.wait(), 30)
        assert published[-1] == 41
        assert len(published) < 20, "each change was linted"

    in_editor(tmp_path, use)


def test_a_request_sees_the_newest_text(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", TEXT)
        of = types.VersionedTextDocumentIdentifier(version=2, uri=editor.uri("cfg.py"))
        whole = types.TextDocumentContentChangeWholeDocument("# dslpar: world-size=8\n\n" + TEXT.partition("\n")[2])
        editor.client.text_document_did_change(types.DidChangeTextDocumentParams(of, [whole]))
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        (lens,) = await editor.client.text_document_code_lens_async(types.CodeLensParams(document)) or ()
        assert lens.range.start.line == 2

    in_editor(tmp_path, use)


def test_closing_an_unsaved_import_shows_the_findings_of_its_file(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        (tmp_path / "common.py").write_text("heads = 4\n")
        assert await editor.write("cfg.py", IMPORTING) == []
        await editor.write("common.py", "heads = 5\n")
        await until(editor, "cfg.py", ["TEN205", "TEN201"])
        document = types.TextDocumentIdentifier(editor.uri("common.py"))
        editor.client.text_document_did_close(types.DidCloseTextDocumentParams(document))
        await until(editor, "cfg.py", [])

    in_editor(tmp_path, use)


def test_saving_lints_again_what_other_programs_changed(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        (tmp_path / "common.py").write_text("heads = 4\n")
        assert await editor.write("cfg.py", IMPORTING) == []
        (tmp_path / "common.py").write_text("heads = 5\n")
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        editor.client.text_document_did_save(types.DidSaveTextDocumentParams(document))
        await until(editor, "cfg.py", ["TEN205", "TEN201"])

    in_editor(tmp_path, use)


def test_files_that_appear_and_change_on_disk_are_read(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        registered = await asyncio.wait_for(editor.registered, 30)
        assert [each.method for each in registered.registrations] == ["workspace/didChangeWatchedFiles"]
        assert (await editor.write("cfg.py", IMPORTING))[0].code == "CFG006"
        for name, text, codes in [
            ("common.py", "heads = 4\n", []),
            ("common.py", "heads = 5\n", ["TEN205", "TEN201"]),
            ("pyproject.toml", '[tool.dslpar]\nignore = ["TEN2"]\n', []),
        ]:
            (tmp_path / name).write_text(text)
            event = types.FileEvent(editor.uri(name), types.FileChangeType.Changed)
            editor.client.workspace_did_change_watched_files(types.DidChangeWatchedFilesParams([event]))
            await until(editor, "cfg.py", codes)

    watching = types.DidChangeWatchedFilesClientCapabilities(dynamic_registration=True)
    workspace = types.WorkspaceClientCapabilities(did_change_watched_files=watching)
    in_editor(tmp_path, use, types.ClientCapabilities(workspace=workspace))


def test_other_python_files_are_not_linted(tmp_path: Path) -> None:
    """No rule runs for a program, and one of 27,000 lines is not even parsed."""
    folder = Path(inspect.getfile(torch.testing._internal)).parent
    program = max(folder.glob("*.py"), key=lambda path: path.stat().st_size)
    text = program.read_text(encoding="utf-8")
    assert len(text) > MAX_SOURCE_BYTES
    began = time.process_time()
    ast.parse(text)
    parsed = time.process_time()
    made = analysed(str(program), {os.path.realpath(program): text})
    assert time.process_time() - parsed < 0.5 * (parsed - began)
    assert not made.is_config
    assert not made.checked
    assert made.findings == ()
    small = str(tmp_path / "program.py")
    assert not analysed(small, {os.path.realpath(small): "import os\nprint(os.name)\n"}).checked
