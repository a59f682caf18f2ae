"""The real language server over stdio, driven by a client of pygls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("pygls") is None:
    pytest.skip("pygls is not installed (extra lsp)", allow_module_level=True)

from lsprotocol import types
from pygls.lsp.client import LanguageClient

from tests.support.paths import ROOT

TEXT = """\
# dslpar: world-size=8
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64)
batch = dict(global_size=16, micro_size=2)
"""
START = "import sys; sys.path.insert(0, sys.argv[1]); from dslpar.lsp.server import start; start()"


class Editor:
    """An editor with one folder: it sends texts, and keeps what the server publishes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.client = folder, LanguageClient("tests", "1")
        self.published: dict[str, types.PublishDiagnosticsParams] = {}
        self.changed = asyncio.Event()
        self.versions: dict[str, int] = {}

        @self.client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(params: types.PublishDiagnosticsParams) -> None:
            self.published[params.uri] = params
            self.changed.set()

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    async def start(self) -> None:
        await self.client.start_io(sys.executable, "-c", START, str(ROOT))
        await self.client.initialize_async(types.InitializeParams(capabilities=types.ClientCapabilities()))
        self.client.initialized(types.InitializedParams())

    async def write(self, name: str, text: str) -> list[types.Diagnostic]:
        """Open or change a document; return the diagnostics of this version."""
        uri, version = self.uri(name), self.versions.get(name, 0) + 1
        self.versions[name] = version
        if version == 1:
            item = types.TextDocumentItem(uri, "python", version, text)
            self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        else:
            of = types.VersionedTextDocumentIdentifier(version=version, uri=uri)
            change = types.TextDocumentContentChangeWholeDocument(text)
            self.client.text_document_did_change(types.DidChangeTextDocumentParams(of, [change]))
        while uri not in self.published or self.published[uri].version != version:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)
        return list(self.published[uri].diagnostics)

    def at(self, name: str, line: int, column: int) -> dict[str, Any]:
        """Return the arguments of a request at a line and column, both from 0."""
        document = types.TextDocumentIdentifier(self.uri(name))
        return {"text_document": document, "position": types.Position(line, column)}

    async def stop(self) -> None:
        await self.client.shutdown_async(None)
        self.client.exit(None)
        await self.client.stop()


def in_editor(folder: Path, use: Callable[[Editor], Awaitable[None]]) -> None:
    async def run() -> None:
        editor = Editor(folder)
        await editor.start()
        try:
            await asyncio.wait_for(use(editor), 120)
        finally:
            await editor.stop()

    asyncio.run(run())


def test_findings_follow_each_change(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        assert await editor.write("cfg.py", TEXT) == []
        (found,) = await editor.write("cfg.py", TEXT.replace("hidden_size", "hiden_size"))
        assert (found.code, found.source, found.severity) == ("CFG101", "dslpar", types.DiagnosticSeverity.Error)
        assert (found.range.start.line, found.range.start.character) == (2, 39)
        assert found.code_description is not None
        assert found.code_description.href.endswith("/dslpar/linter/rules/pages/CFG101.md")
        assert await editor.write("cfg.py", TEXT) == []

    in_editor(tmp_path, use)


def test_a_statement_that_does_not_parse_hides_no_other(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        broken = TEXT.replace("num_heads=4", "num_heads=5") + "train = dict(steps=(3\nzero = dict(stge=1)\n"
        found = await editor.write("cfg.py", broken)
        assert {(each.code, each.range.start.line) for each in found} >= {("CFG001", 4), ("TEN205", 2), ("CFG101", 5)}
        assert "CFG107" not in [each.code for each in found], "the model is there"

    in_editor(tmp_path, use)


def test_other_python_files_get_no_findings(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        assert await editor.write("program.py", "import os\n\ndef main():\n    return undefined\n") == []

    in_editor(tmp_path, use)


def test_findings_say_for_which_world_they_hold(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        (found,) = await editor.write("cfg.py", TEXT.replace("world-size=8", "world-size=8,12"))
        assert "(with 12 ranks)" in found.message

    in_editor(tmp_path, use)


def test_a_config_is_linted_again_when_a_file_that_it_reads_changes(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        (tmp_path / "common.py").write_text("heads = 4\n")
        text = TEXT.replace("parallel", "from .common import heads\nparallel", 1).replace(
            "num_heads=4", "num_heads=heads"
        )
        assert await editor.write("cfg.py", text) == []
        await editor.write("common.py", "heads = 5\n")
        while not editor.published[editor.uri("cfg.py")].diagnostics:
            editor.changed.clear()
            await asyncio.wait_for(editor.changed.wait(), 60)
        assert editor.published[editor.uri("cfg.py")].diagnostics[0].code == "TEN205"

    in_editor(tmp_path, use)


def test_completion_explanation_hints_and_fixes(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        client, document = editor.client, types.TextDocumentIdentifier(editor.uri("cfg.py"))
        await editor.write("cfg.py", TEXT + "zero = dict(")
        made = await client.text_document_completion_async(types.CompletionParams(**editor.at("cfg.py", 4, 12)))
        assert isinstance(made, types.CompletionList)
        labels = [item.label for item in made.items]
        assert {"stage", "offload_optimizer"} <= set(labels)
        await editor.write("cfg.py", TEXT)
        hover = await client.text_document_hover_async(types.HoverParams(**editor.at("cfg.py", 1, 3)))
        assert hover is not None
        assert isinstance(hover.contents, types.MarkupContent)
        assert "parallel.data.size = `2`: 8 ranks / (pipeline 2 * tensor 2)" in hover.contents.value
        whole = types.Range(types.Position(0, 0), types.Position(9, 0))
        hints = await client.text_document_inlay_hint_async(types.InlayHintParams(document, whole))
        assert [(hint.position.line, hint.label) for hint in hints or ()] == [
            (1, "data 2"),
            (1, "layers 2 2"),
            (3, "2 x 4 x 2"),
        ]
        (lens,) = await client.text_document_code_lens_async(types.CodeLensParams(document)) or ()
        assert lens.command is not None
        assert lens.command.title.startswith("8 ranks: pipe 2 x data 2 x tensor 2")
        await editor.write("cfg.py", TEXT.replace("hidden_size", "hiden_size"))
        context = types.CodeActionContext([])
        actions = await client.text_document_code_action_async(types.CodeActionParams(document, whole, context))
        titles = [action.title for action in actions or ()]
        assert titles == ["did you mean 'hidden_size'? (CFG101)", "dslpar: fix all (1)"]
        await editor.write("cfg.py", TEXT.replace("num_heads=4", "num_heads=6").replace("size=2,", "size=4,"))
        actions = await client.text_document_code_action_async(types.CodeActionParams(document, whole, context))
        assert [action.title for action in actions or ()] == ["num_heads=4 (TEN201)", "num_heads=8 (TEN201)"]

    in_editor(tmp_path, use)


def test_layouts_of_plan_are_actions_on_parallel(tmp_path: Path) -> None:
    text = TEXT.replace("world-size=8", "world-size=8 device=h100-80g")

    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", text)
        for line, only, is_offered in [
            (1, None, True),
            (1, ["quickfix"], False),
            (1, ["refactor"], True),
            (2, None, False),
        ]:
            at = types.Range(types.Position(line, 0), types.Position(line, 0))
            params = types.CodeActionParams(
                types.TextDocumentIdentifier(editor.uri("cfg.py")), at, types.CodeActionContext([], only)
            )
            actions = await editor.client.text_document_code_action_async(params)
            titles = [action.title for action in actions or ()]
            assert any("times as fast" in title for title in titles) is is_offered, (line, only, titles)

    in_editor(tmp_path, use)


def test_places_are_in_the_client_s_units(tmp_path: Path) -> None:
    """UTF-16, unless the client asks for more: an emoji has two units there, and is one character here."""

    async def use(editor: Editor) -> None:
        (found,) = await editor.write("cfg.py", TEXT + "name = '\U0001f600'; zero = dict(stge=1)\n")
        assert (found.range.start.line, found.range.start.character) == (4, len("name = '__'; zero = dict("))

    in_editor(tmp_path, use)
