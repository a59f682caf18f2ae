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

    capabilities: types.ServerCapabilities

    def __init__(self, folder: Path, of_client: types.ClientCapabilities | None = None) -> None:
        self.folder, self.client = folder, LanguageClient("tests", "1")
        self.of_client = of_client or types.ClientCapabilities()
        self.published: dict[str, types.PublishDiagnosticsParams] = {}
        self.changed = asyncio.Event()
        self.versions: dict[str, int] = {}
        self.on_publish: Callable[[types.PublishDiagnosticsParams], None] = lambda params: None
        self.registered: asyncio.Future[types.RegistrationParams] = asyncio.get_running_loop().create_future()

        @self.client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def publish(params: types.PublishDiagnosticsParams) -> None:
            self.published[params.uri] = params
            self.on_publish(params)
            self.changed.set()

        @self.client.feature(types.CLIENT_REGISTER_CAPABILITY)
        def register(params: types.RegistrationParams) -> None:
            self.registered.set_result(params)

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    async def start(self) -> None:
        await self.client.start_io(sys.executable, "-c", START, str(ROOT))
        folder = types.WorkspaceFolder(self.folder.as_uri(), "tests")
        made = await self.client.initialize_async(
            types.InitializeParams(capabilities=self.of_client, workspace_folders=[folder])
        )
        self.capabilities = made.capabilities
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


def in_editor(
    folder: Path, use: Callable[[Editor], Awaitable[None]], of_client: types.ClientCapabilities | None = None
) -> None:
    async def run() -> None:
        editor = Editor(folder, of_client)
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


RELATED = types.ClientCapabilities(
    text_document=types.TextDocumentClientCapabilities(
        publish_diagnostics=types.PublishDiagnosticsClientCapabilities(related_information=True)
    )
)


def test_findings_have_related_places_for_clients_that_show_them(tmp_path: Path) -> None:
    text = TEXT.replace("num_heads=4", "num_heads=5").replace("size=2", "size=4")

    async def use(editor: Editor) -> None:
        of = {each.code: each.related_information or () for each in await editor.write("cfg.py", text)}
        assert [each.message for each in of["TEN205"]] == ["num_heads = 5 is written here"]
        places = of["TEN201"]
        assert [each.message for each in places] == [
            "tensor.size = 4 is written here",
            "tensor.mode = '1d' is written here",
        ]
        at = places[0].location
        assert (at.uri, at.range.start, at.range.end.character) == (editor.uri("cfg.py"), types.Position(1, 45), 46)

    async def without(editor: Editor) -> None:
        assert all(each.related_information is None for each in await editor.write("cfg.py", text))

    in_editor(tmp_path, use, RELATED)
    in_editor(tmp_path, without)


def test_a_finding_of_an_imported_value_is_where_the_config_takes_it(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        model = TEXT.split("\n")[2].replace("num_heads=4", "num_heads=5")
        (tmp_path / "common.py").write_text(model + "\n")
        text = TEXT.replace(TEXT.split("\n")[2], "from .common import model")
        found = await editor.write("cfg.py", text)
        assert {each.code for each in found} == {"TEN205", "TEN201"}
        assert {(each.range.start.line, each.range.start.character) for each in found} == {(2, 20)}
        (of_heads,) = [each for each in found if each.code == "TEN201"]
        first = (of_heads.related_information or ())[0]
        assert (first.message, first.location.uri) == ("the value is written here", editor.uri("common.py"))
        assert first.location.range.start.character == model.index("=5") + 1

    in_editor(tmp_path, use, RELATED)


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


def test_hints_at_one_place_are_told_apart(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", TEXT.replace("world-size=8", "world-size=8 device=h100-80g"))
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        whole = types.Range(types.Position(0, 0), types.Position(9, 0))
        hints = await editor.client.text_document_inlay_hint_async(types.InlayHintParams(document, whole))
        first, second, *_ = [str(hint.label) for hint in hints or () if hint.position.line == 1]
        assert first == "data 2"
        assert second.startswith("· ")
        assert second.endswith("GiB")

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
        assert titles == [
            "did you mean 'hidden_size'? (CFG101)",
            "dslpar: explain CFG101",
            "dslpar: fix all (1)",
        ]
        await editor.write("cfg.py", TEXT.replace("num_heads=4", "num_heads=6").replace("size=2,", "size=4,"))
        actions = await client.text_document_code_action_async(types.CodeActionParams(document, whole, context))
        assert [action.title for action in actions or ()] == [
            "num_heads=4 (TEN201)",
            "num_heads=8 (TEN201)",
            "dslpar: explain TEN201",
        ]

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


def test_variables_across_files_are_found_and_renamed(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        (tmp_path / "common.py").write_text("heads = 4\ntwice = [heads for _ in range(2)]\n")
        (tmp_path / "other.py").write_text("from .common import heads as n\ntrain = dict(steps=n)\n")
        (tmp_path / "base.py").write_text("def heads(heads):\n    return heads\nbatch = dict(global_size=16)\n")
        text = TEXT.replace("parallel", "from .common import heads\nparallel", 1).replace(
            "num_heads=4", "num_heads=heads"
        )
        await editor.write("cfg.py", text)
        client = editor.client
        place = editor.at("cfg.py", 3, text.split("\n")[3].index("=heads") + 2)
        found = await client.text_document_definition_async(types.DefinitionParams(**place))
        assert isinstance(found, types.Location)
        assert found.uri == editor.uri("common.py")
        assert found.range.start == types.Position(0, 0)
        of_import = await client.text_document_definition_async(types.DefinitionParams(**editor.at("cfg.py", 1, 8)))
        assert isinstance(of_import, types.Location)
        assert of_import.uri == editor.uri("common.py")

        every = await client.text_document_references_async(
            types.ReferenceParams(context=types.ReferenceContext(include_declaration=True), **place)
        )
        places = {(Path(each.uri).name, each.range.start.line, each.range.start.character) for each in every or []}
        column = text.split("\n")[3].index("=heads") + 1
        assert places == {
            ("common.py", 0, 0),
            ("common.py", 1, 9),
            ("cfg.py", 1, 20),
            ("cfg.py", 3, column),
            ("other.py", 0, 20),
            ("other.py", 0, 29),
            ("other.py", 1, 19),
        }
        made = await client.text_document_rename_async(types.RenameParams(new_name="width", **place))
        assert made is not None
        assert {Path(uri).name: len(edits) for uri, edits in (made.changes or {}).items()} == {
            "common.py": 2,
            "cfg.py": 2,
            "other.py": 1,
        }
        for name, why in (("model", "is a section"), ("if", "is no name"), ("twice", "has 'twice' already")):
            with pytest.raises(Exception, match=why):
                await client.text_document_rename_async(types.RenameParams(new_name=name, **place))
        with pytest.raises(Exception, match="'parallel' is a section"):
            await client.text_document_rename_async(types.RenameParams(new_name="x", **editor.at("cfg.py", 2, 3)))

    in_editor(tmp_path, use)


def test_folds_and_the_action_that_explains_a_rule(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        text = TEXT.replace("num_heads=4", "num_heads=5") + "train = dict(\n    steps=3,\n)\n# one\n# two\n"
        found = await editor.write("cfg.py", text)
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        folds = await editor.client.text_document_folding_range_async(types.FoldingRangeParams(document))
        assert {(each.start_line, each.end_line, each.kind) for each in folds or []} == {
            (4, 6, None),
            (7, 8, types.FoldingRangeKind.Comment),
        }
        (heads,) = [each for each in found if each.code == "TEN205"]
        actions = await editor.client.text_document_code_action_async(
            types.CodeActionParams(document, heads.range, types.CodeActionContext(diagnostics=[]))
        )
        assert "dslpar: explain TEN205" in [each.title for each in actions or ()]
        shown = []

        @editor.client.feature(types.WINDOW_SHOW_DOCUMENT)
        def show(params: types.ShowDocumentParams) -> types.ShowDocumentResult:
            shown.append(params.uri)
            return types.ShowDocumentResult(True)

        result = await editor.client.workspace_execute_command_async(
            types.ExecuteCommandParams("dslpar.explainRule", arguments=["TEN205"])
        )
        assert result is True
        assert shown[0].endswith("/TEN205.md")

    window = types.WindowClientCapabilities(show_document=types.ShowDocumentClientCapabilities(support=True))
    in_editor(tmp_path, use, types.ClientCapabilities(window=window))


def test_an_editor_that_opens_no_pages_gets_the_address(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        shown: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        @editor.client.feature(types.WINDOW_SHOW_MESSAGE)
        def show(params: types.ShowMessageParams) -> None:
            shown.set_result(params.message)

        command = types.ExecuteCommandParams("dslpar.explainRule", arguments=["TEN205"])
        assert await editor.client.workspace_execute_command_async(command) is False
        message = await asyncio.wait_for(shown, 60)
        assert message.startswith("`dslpar explain TEN205` prints this page: file://")
        assert message.endswith("/TEN205.md")

    in_editor(tmp_path, use)


def test_on_the_name_of_a_key_are_the_fixes_of_its_value(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        text = TEXT.replace("num_heads=4, vocab_size=256", "num_heads=5")
        await editor.write("cfg.py", text)
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))

        async def fixes(before: str) -> list[str]:
            column = text.split("\n")[2].index(before)
            at = types.Range(types.Position(2, column), types.Position(2, column))
            actions = await editor.client.text_document_code_action_async(
                types.CodeActionParams(document, at, types.CodeActionContext([]))
            )
            return [each.title for each in actions or () if "TEN201" in each.title]

        assert await fixes("num_heads") == ["num_heads=4 (TEN201)", "num_heads=6 (TEN201)", "dslpar: explain TEN201"]
        assert await fixes("5") == await fixes("num_heads")
        assert await fixes("num_layers") == []

    in_editor(tmp_path, use)


def test_sizes_are_sorted_as_numbers(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", TEXT.replace("world-size=8", "world-size=32").replace("size=2, ", "size="))
        made = await editor.client.text_document_completion_async(types.CompletionParams(**editor.at("cfg.py", 1, 45)))
        assert isinstance(made, types.CompletionList)
        items = sorted(made.items, key=lambda item: item.sort_text or "")
        assert [each.label for each in items] == ["1", "2", "4", "8", "16", "32"]

    in_editor(tmp_path, use)


def test_settings_devices_and_paths_are_completed(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        async def labels(text: str) -> list[str]:
            await editor.write("cfg.py", text)
            lines = text.split("\n")
            place = editor.at("cfg.py", len(lines) - 1, len(lines[-1]))
            made = await editor.client.text_document_completion_async(types.CompletionParams(**place))
            return [each.label for each in made.items] if isinstance(made, types.CompletionList) else []

        assert await labels("# ") == ["dslpar:"]
        assert await labels("# dslpar: wor") == ["world-size=", "device="]
        assert "h100-80g" in await labels("# dslpar: world-size=8 device=h")
        assert "h100-80g" in await labels("cluster = dict(device='")
        assert await labels("x = 1\n# ") == []
        assert f"{ROOT}/configs/" in await labels(f"data = dict(type='text', path='{ROOT}/con")

    in_editor(tmp_path, use)


YAML = """\
# dslpar: world-size=8
parallel:
  pipeline: 2
model: {type: GPT, num_layers: 4, hidden_size: 48, num_heads: 4, vocab_size: 256, max_seq_len: 64}
batch: {global_size: 16, micro_size: 2}
"""


def test_what_yaml_files_get(tmp_path: Path) -> None:
    async def use(editor: Editor) -> None:
        client, document = editor.client, types.TextDocumentIdentifier(editor.uri("cfg.yaml"))
        (found, _missing) = await editor.write("cfg.yaml", YAML.replace("hidden_size", "hiden_size"))
        assert found.code == "CFG101"
        actions = await client.text_document_code_action_async(
            types.CodeActionParams(document, found.range, types.CodeActionContext([]))
        )
        assert "dslpar: fix all (1)" in [each.title for each in actions or ()]
        assert [each.code for each in await editor.write("cfg.yaml", YAML)] == ["PERF104"]
        hover = await client.text_document_hover_async(types.HoverParams(**editor.at("cfg.yaml", 2, 3)))
        assert hover is not None
        (lens,) = await client.text_document_code_lens_async(types.CodeLensParams(document)) or ()
        assert lens.range.start.line == 1
        whole = types.Range(types.Position(0, 0), types.Position(9, 0))
        hints = await client.text_document_inlay_hint_async(types.InlayHintParams(document, whole))
        assert "layers 2 2" in [hint.label for hint in hints or ()]
        symbols = await client.text_document_document_symbol_async(types.DocumentSymbolParams(document))
        assert [each.name for each in symbols or ()] == ["parallel", "model", "batch"]
        for line, column in ((2, 2), (2, 12), (5, 0)):
            made = await client.text_document_completion_async(
                types.CompletionParams(**editor.at("cfg.yaml", line, column))
            )
            assert not (made.items if isinstance(made, types.CompletionList) else made)

    in_editor(tmp_path, use)


def test_a_symbol_contains_its_key_also_where_a_variable_holds_the_value(tmp_path: Path) -> None:
    """VS Code refuses the whole list otherwise."""

    async def use(editor: Editor) -> None:
        await editor.write("cfg.py", "heads = 4\n" + TEXT.replace("num_heads=4", "num_heads=heads"))
        document = types.TextDocumentIdentifier(editor.uri("cfg.py"))
        symbols = await editor.client.text_document_document_symbol_async(types.DocumentSymbolParams(document))
        every = [each for symbol in symbols or () for each in (symbol, *(symbol.children or ()))]
        assert "num_heads" in [each.name for each in every]
        for each in every:
            own, key = each.range, each.selection_range
            assert (own.start.line, own.start.character) <= (key.start.line, key.start.character)
            assert (key.end.line, key.end.character) <= (own.end.line, own.end.character)

    in_editor(tmp_path, use)


def test_completions_keep_the_order_of_the_reference(tmp_path: Path) -> None:
    """An editor sorts them by this text: by their labels, 16 ranks would come before 2."""

    async def use(editor: Editor) -> None:
        text = "# dslpar: world-size=64\nparallel = dict(pipeline="
        await editor.write("cfg.py", text)
        made = await editor.client.text_document_completion_async(
            types.CompletionParams(**editor.at("cfg.py", 1, len(text.split("\n")[1])))
        )
        items = made.items if isinstance(made, types.CompletionList) else list(made or ())
        ordered = sorted(items, key=lambda item: item.sort_text or "")
        assert [item.label for item in ordered] == ["1", "2", "4", "8", "16", "32", "64", "dict()"]

    in_editor(tmp_path, use)
