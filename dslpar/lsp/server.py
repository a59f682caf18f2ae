"""The server of `dslpar lsp`: what an editor asks over stdio, in terms of the other modules of this package.

The protocol is pygls's and lsprotocol's. Places are characters here, and units of the client there. A change makes the
analyses of a text, and of the files that read it, stale. They are made anew when no other change has come for some
milliseconds, or when a request needs one. Where files change on disk, all analyses are stale.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from dslpar.core.errors import Fix, Location, Severity
from dslpar.core.version import VERSION
from dslpar.linter.registry import url_of
from dslpar.lsp.analysis import Analysis, Shown, analysed
from dslpar.lsp.completion import Item, completions, settings_at
from dslpar.lsp.cursor import place_at, rest_at, rest_of_setting
from dslpar.lsp.hints import hints, summary
from dslpar.lsp.hover import explanation_at, key_at
from dslpar.lsp.layouts import layouts, place_of
from dslpar.lsp.lines import lines_of
from dslpar.lsp.names import Names, RefusedError, Symbol, foldable
from dslpar.lsp.outline import Entry, outline
from dslpar.lsp.protocol import Protocol
from dslpar.lsp.quick_fixes import quick_fixes
from dslpar.lsp.settings import worlds_of
from dslpar.lsp.world_size import offered, with_world_size
from dslpar.lsp.world_size import place_of as place_of_worlds

_SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "info": types.DiagnosticSeverity.Information,
}
_KINDS = {
    "section": types.CompletionItemKind.Module,
    "key": types.CompletionItemKind.Property,
    "value": types.CompletionItemKind.Value,
    "class": types.CompletionItemKind.Class,
    "file": types.CompletionItemKind.File,
    "name": types.CompletionItemKind.Variable,
}
_WITHOUT_EFFECT = "DEAD"
"""Family of rules about keys without effect, which editors show faded."""
_FIX_ALL = f"{types.CodeActionKind.SourceFixAll.value}.dslpar"
"""Has a name of its own, so that an editor can apply these on saving and not those of other servers."""
_ACTIONS = [types.CodeActionKind.QuickFix, _FIX_ALL, types.CodeActionKind.RefactorRewrite]
EXPLAIN = "dslpar.explainRule"
"""Command that opens a rule's page; its argument is the code."""
SET_WORLD = "dslpar.setWorld"
"""Command that writes the number of ranks into a config: its URI, and the number, or several such as "8,64"."""
_CONFIG = (".py", ".yaml", ".yml")
_WATCHED = ("**/*.{py,yaml,yml,json}", "**/pyproject.toml")
"""Files that a config, or the settings of one, may come from."""
_PAUSE_S = 0.01
"""Changes that come faster are linted once: an editor sends those of an undone macro, or of a slow lint, at once."""


class ConfigServer(LanguageServer):
    """Server with the analyses of all open configs."""

    def __init__(self) -> None:
        # Whole texts: pygls applies an edit of a range to its own lines, which end at form feeds too.
        kind = types.TextDocumentSyncKind.Full
        super().__init__("dslpar", VERSION, text_document_sync_kind=kind, protocol_cls=Protocol)
        self.analyses: dict[str, Analysis] = {}
        """By URI; some may be stale."""
        self.stale: dict[str, None] = {}
        """URIs of open documents whose newest text, or that of a file that they read, is not analysed yet, in order."""

    @property
    def texts(self) -> dict[str, str]:
        """The texts of all open documents, by real path."""
        documents = self.workspace.text_documents.values()
        return {os.path.realpath(path): document.source for document in documents if (path := path_of(document.uri))}

    def analysis(self, uri: str) -> Analysis | None:
        """Return the analysis of a document's newest text; None if it is neither Python nor YAML."""
        if uri in self.stale:
            self._analyse(uri)
        return self.analyses.get(uri)

    def config(self, uri: str) -> Analysis | None:
        """Return the analysis of a document that is a config."""
        made = self.analysis(uri)
        return made if made is not None and made.is_config else None

    def changed(self, uri: str) -> None:
        """Mark a document as stale if it is open, and those that read it."""
        path = path_of(uri)
        if path is None:
            return
        if uri in self.workspace.text_documents and path.endswith(_CONFIG):
            self.stale[uri] = None
        real = os.path.realpath(path)
        self.stale |= dict.fromkeys(other for other, made in self.analyses.items() if real in made.files)

    def all_changed(self) -> None:
        """Mark all documents as stale: a file was created, too, that one of them could not find before."""
        self.stale |= dict.fromkeys(self.analyses)

    async def refresh(self) -> None:
        """Analyse what is stale, document by document, so that requests come in between."""
        while self.stale:
            self._analyse(next(iter(self.stale)))
            await asyncio.sleep(0)

    def _analyse(self, uri: str) -> None:
        """Lint a document's newest text, and publish what was found."""
        self.stale.pop(uri)
        path = path_of(uri)
        assert path is not None, "only files become stale"
        document = self.workspace.get_text_document(uri)
        gc.disable()  # a collection takes as long as lint: the editor gets its findings first
        try:
            made = analysed(path, self.texts)
            self.analyses[uri] = made
            diagnostics = [self.diagnostic(document, made, each) for each in _own(made)] if made.is_config else []
            self.text_document_publish_diagnostics(
                types.PublishDiagnosticsParams(uri=uri, version=document.version, diagnostics=diagnostics)
            )
        finally:
            gc.enable()

    def names(self) -> Names:
        """Return the variables of the configs below the client's folders."""
        folders = [path for uri in self.workspace.folders if (path := path_of(uri)) is not None]
        return Names(folders, self.texts)

    def symbol(self, names: Names, params: types.ReferenceParams | types.RenameParams) -> Symbol | None:
        """Return the variable at a request's position, if its file is a config."""
        made = self.config(params.text_document.uri)
        document = self.workspace.get_text_document(params.text_document.uri)
        return names.at(made.path, *self.character(document, params.position)) if made is not None else None

    # ---- places ----

    def location(self, at: Location) -> types.Location:
        """Return a place of any file: under the URI by which the client has opened the file, if it has."""
        real = os.path.realpath(at.path)
        opened = (uri for uri in self.workspace.text_documents if os.path.realpath(path_of(uri) or "") == real)
        uri = next(opened, Path(real).as_uri())
        return types.Location(uri, self.range(self.workspace.get_text_document(uri), at))

    def range(self, document: TextDocument, at: Location) -> types.Range:
        """Return a place in the client's units."""
        lines = _lines(document)
        last = len(lines) - 1
        begin, end = (types.Position(min(line - 1, last), column - 1) for line, column in (at[1:3], at[3:5]))
        return self.workspace.position_codec.range_to_client_units(lines, types.Range(begin, end))

    def character(self, document: TextDocument, position: types.Position) -> tuple[int, int]:
        """Return a line and column, both from 1, for a position in the client's units."""
        found = self.workspace.position_codec.position_from_client_units(_lines(document), position)
        return found.line + 1, found.character + 1

    def edit(self, document: TextDocument, fix: Fix) -> types.TextEdit:
        """Return a replacement in the client's units."""
        return types.TextEdit(self.range(document, fix.location), fix.text)

    def diagnostic(self, document: TextDocument, made: Analysis, shown: Shown) -> types.Diagnostic:
        """Return a finding as the client shows it; with related places if it shows any."""
        item = shown.finding
        help = f"\nhelp: {item.help}" if item.help else ""
        return types.Diagnostic(
            range=self.range(document, shown.place if not shown.place.path.startswith("<") else Location("")),
            message=shown.message + help,
            severity=_severity(item.severity),
            code=item.code,
            code_description=types.CodeDescription(href=url_of(item.code)) if url_of(item.code) else None,
            source="dslpar",
            tags=[types.DiagnosticTag.Unnecessary] if item.code.startswith(_WITHOUT_EFFECT) else None,
            related_information=self.related(document, made, shown) or None,
        )

    def related(self, document: TextDocument, made: Analysis, shown: Shown) -> list[types.DiagnosticRelatedInformation]:
        """Return the related places of a finding; none if the client does not show them."""
        of_text = self.client_capabilities.text_document
        able = of_text.publish_diagnostics if of_text is not None else None
        if able is None or not able.related_information:
            return []
        return [
            types.DiagnosticRelatedInformation(
                types.Location(document.uri, self.range(document, place.location))
                if place.location.path == made.path
                else self.location(place.location),
                place.message,
            )
            for place in made.related(shown)
        ]


def _lines(document: TextDocument) -> list[str]:
    """Return the lines, each with an end, which pygls does not count as a character of the line."""
    return [f"{line}\n" for line in lines_of(document.source)]


def path_of(uri: str) -> str | None:
    """Return the path of a file's URI; None for others."""
    parsed = urlparse(uri)
    return unquote(parsed.path) if parsed.scheme == "file" else None


def _severity(severity: Severity) -> types.DiagnosticSeverity:
    return _SEVERITIES[severity]


def _own(made: Analysis) -> Iterator[Shown]:
    """Yield the findings of the file itself, of values that it takes from other files, and of no file."""
    for each in made.findings:
        path = each.place.path
        if path == made.path or path.startswith("<"):
            yield each


server = ConfigServer()


@server.feature(types.INITIALIZED)
async def initialized(ls: ConfigServer, params: types.InitializedParams) -> None:
    """Ask the client to report files that change on disk, if it can."""
    workspace = ls.client_capabilities.workspace
    able = workspace.did_change_watched_files if workspace is not None else None
    if able is None or not able.dynamic_registration:
        return
    options = types.DidChangeWatchedFilesRegistrationOptions([types.FileSystemWatcher(each) for each in _WATCHED])
    registration = types.Registration("files", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, options)
    await ls.client_register_capability_async(types.RegistrationParams([registration]))


@server.feature(types.TEXT_DOCUMENT_DID_OPEN)
async def did_open(ls: ConfigServer, params: types.DidOpenTextDocumentParams) -> None:
    """Lint a document that was opened, and those that read it: its text may not be that of the file."""
    ls.changed(params.text_document.uri)
    await ls.refresh()


@server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
async def did_change(ls: ConfigServer, params: types.DidChangeTextDocumentParams) -> None:
    """Lint a document that was changed, and those that read it, unless a newer change comes."""
    uri, version = params.text_document.uri, params.text_document.version
    ls.changed(uri)
    await asyncio.sleep(_PAUSE_S)
    document = ls.workspace.text_documents.get(uri)
    if document is not None and document.version == version:
        await ls.refresh()


@server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
async def did_close(ls: ConfigServer, params: types.DidCloseTextDocumentParams) -> None:
    """Forget a document, and lint those that read it: they read the file again, whose text may be another."""
    uri = params.text_document.uri
    ls.analyses.pop(uri, None)
    ls.stale.pop(uri, None)
    ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri=uri, diagnostics=[]))
    ls.changed(uri)
    await ls.refresh()


@server.feature(types.TEXT_DOCUMENT_DID_SAVE)
async def did_save(ls: ConfigServer, params: types.DidSaveTextDocumentParams) -> None:
    """Lint all documents: not every client reports what changes on disk."""
    ls.all_changed()
    await asyncio.sleep(_PAUSE_S)
    await ls.refresh()


@server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
async def did_change_watched_files(ls: ConfigServer, params: types.DidChangeWatchedFilesParams) -> None:
    """Lint all documents: they may read the files, or look for them."""
    ls.all_changed()
    await asyncio.sleep(_PAUSE_S)
    await ls.refresh()


@server.feature(
    types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=["(", ",", "=", "'", '"', "."])
)
def complete(ls: ConfigServer, params: types.CompletionParams) -> types.CompletionList | None:
    """Offer what may be written at the cursor."""
    uri = params.text_document.uri
    made = ls.analysis(uri)
    document = ls.workspace.get_text_document(uri)
    if made is None:
        return None
    line, column = ls.character(document, params.position)
    text = "\n".join(lines_of(document.source))
    of_comment = settings_at(text, line, column)
    if of_comment is not None:
        word, items = of_comment
        rest = rest_of_setting(text, line, column)
    else:
        place = place_at(text, line, column)
        if place is None or (place.kind == "name" and made.text.strip() and not made.is_config):
            return None
        rest, is_assigned = rest_at(text, line, column, place)
        word, items = place.word.rpartition("\n")[2], completions(made, place, ls.texts, is_assigned)
    at = ls.range(document, Location(made.path, line, column - len(word), line, column + rest))
    return types.CompletionList(is_incomplete=False, items=[_completion(*each, at) for each in enumerate(items)])


def _completion(number: int, item: Item, at: types.Range) -> types.CompletionItem:
    return types.CompletionItem(
        label=item.label,
        kind=_KINDS[item.kind],
        detail=item.detail or None,
        documentation=item.help or None,
        # The order of the reference; by their labels, 16 would come before 2.
        sort_text=f"{item.rank}{number:05}",
        filter_text=item.label,
        insert_text_format=types.InsertTextFormat.Snippet,
        text_edit=types.TextEdit(
            range=at, new_text=item.insert.replace("$0", "\0").replace("$", r"\$").replace("\0", "$0")
        ),
    )


@server.feature(types.TEXT_DOCUMENT_HOVER)
def hover(ls: ConfigServer, params: types.HoverParams) -> types.Hover | None:
    """Explain the key at the cursor."""
    made = ls.config(params.text_document.uri)
    if made is None:
        return None
    document = ls.workspace.get_text_document(params.text_document.uri)
    found = explanation_at(made, *ls.character(document, params.position))
    if found is None:
        return None
    text, at = found
    return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text), ls.range(document, at))


@server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
def inlay_hints(ls: ConfigServer, params: types.InlayHintParams) -> list[types.InlayHint]:
    """Show values that follow from the config."""
    made = ls.config(params.text_document.uri)
    document = ls.workspace.get_text_document(params.text_document.uri)
    shown: list[types.InlayHint] = []
    for each in hints(made) if made is not None else ():
        at = ls.range(document, each.at).end
        # An editor leaves no gap: "data 8" and "30.7 of 79.6 GiB" would read as "data 830.7".
        label = f"· {each.text}" if shown and shown[-1].position == at else each.text
        shown.append(types.InlayHint(at, label, tooltip=each.why, padding_left=True))
    return shown


@server.feature(types.TEXT_DOCUMENT_CODE_LENS)
def code_lens(ls: ConfigServer, params: types.CodeLensParams) -> list[types.CodeLens]:
    """Summarize the layout above `parallel`."""
    made = ls.config(params.text_document.uri)
    found = summary(made) if made is not None else None
    if found is None:
        return []
    document = ls.workspace.get_text_document(params.text_document.uri)
    return [types.CodeLens(ls.range(document, found[0]), types.Command(found[1], ""))]


@server.feature(
    types.TEXT_DOCUMENT_CODE_ACTION,
    types.CodeActionOptions(_ACTIONS),
)
def code_actions(ls: ConfigServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Offer the fixes of the findings at the cursor, all fixes of the file, and on `parallel` other layouts."""
    uri = params.text_document.uri
    made = ls.analysis(uri)
    if made is None:
        return []
    actions = _config_actions(ls, made, params) if made.is_config else []
    # An empty file may become a config; other files that are none get no actions.
    if made.is_config or not made.text.strip():
        actions += _world_actions(ls, made, params)
    return [action for action in actions if _is_asked(action, params.context.only)]


def _world_actions(ls: ConfigServer, made: Analysis, params: types.CodeActionParams) -> list[types.CodeAction]:
    """Offer numbers of ranks where the cursor is on the comment of settings, or on the first line."""
    uri = params.text_document.uri
    document = ls.workspace.get_text_document(uri)
    place = ls.range(document, place_of_worlds(made.path, made.text))
    if params.range.start.line < place.start.line or params.range.end.line > place.end.line:
        return []
    return [
        types.CodeAction(
            f"dslpar: lint for {size} ranks",
            types.CodeActionKind.RefactorRewrite,
            edit=types.WorkspaceEdit({uri: [ls.edit(document, with_world_size(made.path, made.text, size))]}),
        )
        for size in offered(made)
    ]


def _config_actions(ls: ConfigServer, made: Analysis, params: types.CodeActionParams) -> list[types.CodeAction]:
    uri = params.text_document.uri
    document = ls.workspace.get_text_document(uri)
    texts = ls.texts
    actions = [
        types.CodeAction(
            fix.title,
            types.CodeActionKind.QuickFix,
            [ls.diagnostic(document, made, each)],
            is_preferred=fix.is_own,
            edit=types.WorkspaceEdit({uri: [ls.edit(document, fix.edit)]}),
        )
        for each in _at(ls, document, made, params.range)
        for fix in quick_fixes(made, each.finding, texts)
    ]
    codes = dict.fromkeys(each.finding.code for each in _at(ls, document, made, params.range))
    actions += [
        types.CodeAction(
            f"dslpar: explain {code}",
            types.CodeActionKind.QuickFix,
            command=types.Command(f"explain {code}", EXPLAIN, arguments=[code]),
        )
        for code in codes
        if url_of(code)
    ]
    own = [each.finding.fix for each in _own(made) if each.finding.fix is not None]
    every = [ls.edit(document, fix) for fix in own if fix.location.path == made.path]
    if every:
        actions.append(
            types.CodeAction(
                f"dslpar: fix all ({len(every)})",
                _FIX_ALL,
                edit=types.WorkspaceEdit({uri: every}),
            )
        )
    at = place_of(made)
    if at is not None and _overlap(ls.range(document, at), params.range):
        actions += [
            types.CodeAction(
                fix.title,
                types.CodeActionKind.RefactorRewrite,
                edit=types.WorkspaceEdit({uri: [ls.edit(document, fix.edit)]}),
            )
            for fix in layouts(made, texts)
        ]
    return actions


def _is_asked(action: types.CodeAction, only: Sequence[types.CodeActionKind | str] | None) -> bool:
    """Return whether the client asks for this kind of actions: for it, or for one of those that contain it."""
    kind = action.kind or ""
    return only is None or any(not each or kind == each or kind.startswith(f"{each}.") for each in only)


def _at(ls: ConfigServer, document: TextDocument, made: Analysis, cursor: types.Range) -> list[Shown]:
    """Return the findings at the cursor or selection; those of its lines if there is none."""
    ranges = {each: ls.range(document, each.place) for each in _own(made)}
    lines = types.Range(types.Position(cursor.start.line, 0), types.Position(cursor.end.line + 1, 0))
    # On the name of a key, the findings about its value too.
    key = key_at(made, *ls.character(document, cursor.start)) if cursor.start == cursor.end else None
    is_value = key is not None and not key.node.is_mapping and key.node.location.path == made.path
    value = ls.range(document, key.node.location) if key is not None and is_value else cursor
    found = [each for each, at in ranges.items() if _overlap(at, cursor) or _overlap(at, value)]
    return found or [each for each, at in ranges.items() if _overlap(at, lines) and at.start.line <= cursor.end.line]


def _overlap(one: types.Range, other: types.Range) -> bool:
    def pair(position: types.Position) -> tuple[int, int]:
        return position.line, position.character

    return pair(one.start) <= pair(other.end) and pair(other.start) <= pair(one.end)


@server.feature(types.TEXT_DOCUMENT_DEFINITION)
def definition(ls: ConfigServer, params: types.DefinitionParams) -> types.Location | None:
    """Go to the file of an import, to where a variable is assigned, or to where the value of a key was written."""
    made = ls.config(params.text_document.uri)
    if made is None:
        return None
    document = ls.workspace.get_text_document(params.text_document.uri)
    at = ls.character(document, params.position)
    names = ls.names()
    file = names.file_at(made.path, *at)
    if file is not None:
        return ls.location(Location(file))
    symbol = names.at(made.path, *at)
    place = names.definition(symbol) if symbol is not None else None
    if place is not None:
        return ls.location(place)
    key = key_at(made, *at)
    if key is None or key.node.location.path.startswith("<"):
        return None
    return ls.location(key.node.location)


@server.feature(types.TEXT_DOCUMENT_REFERENCES)
def references(ls: ConfigServer, params: types.ReferenceParams) -> list[types.Location]:
    """List the places of a variable, in every config that reads it."""
    names = ls.names()
    symbol = ls.symbol(names, params)
    if symbol is None:
        return []
    assigned = None if params.context.include_declaration else names.definition(symbol)
    return [ls.location(at) for at in names.occurrences(symbol) if at != assigned]


@server.feature(types.TEXT_DOCUMENT_RENAME)
def rename(ls: ConfigServer, params: types.RenameParams) -> types.WorkspaceEdit | None:
    """Rename a variable, in every config that reads it."""
    names = ls.names()
    symbol = ls.symbol(names, params)
    if symbol is None:
        return None
    try:
        places = names.rename(symbol, params.new_name)
    except RefusedError as error:
        raise JsonRpcException(str(error), types.LSPErrorCodes.RequestFailed) from error
    changes: dict[str, list[types.TextEdit]] = {}
    for at in map(ls.location, places):
        changes.setdefault(at.uri, []).append(types.TextEdit(at.range, params.new_name))
    return types.WorkspaceEdit(changes)


@server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
def folding_ranges(ls: ConfigServer, params: types.FoldingRangeParams) -> list[types.FoldingRange]:
    """Fold sections, calls, lists and comments that take several lines."""
    document = ls.workspace.get_text_document(params.text_document.uri)
    return [
        types.FoldingRange(first - 1, last - 1, kind=types.FoldingRangeKind.Comment if is_comment else None)
        for first, last, is_comment in foldable(document.source, document.path)
    ]


@server.command(EXPLAIN)
async def explain_rule(ls: ConfigServer, code: str) -> bool:
    """Open the page of a rule in the editor; one that opens no pages gets a message with the address."""
    url = url_of(code)
    if not url:
        return False
    window = ls.client_capabilities.window
    if window is None or window.show_document is None or not window.show_document.support:
        message = f"`dslpar explain {code}` prints this page: {url}"
        ls.window_show_message(types.ShowMessageParams(types.MessageType.Info, message))
        return False
    shown = await ls.window_show_document_async(types.ShowDocumentParams(uri=url, external=url.startswith("http")))
    return shown.success


@server.command(SET_WORLD)
async def set_world(ls: ConfigServer, uri: str, sizes: str) -> bool:
    """Write the number of ranks, or several, into the comment of settings; return whether the editor did."""
    worlds = worlds_of(sizes)
    if isinstance(worlds, str):
        raise JsonRpcException(f"{sizes!r}: {worlds}", types.ErrorCodes.InvalidParams)
    made = ls.analysis(uri)
    if made is None:
        raise JsonRpcException(f"{uri} is not open, or neither Python nor YAML", types.LSPErrorCodes.RequestFailed)
    document = ls.workspace.get_text_document(uri)
    edit = ls.edit(document, with_world_size(made.path, made.text, sizes))
    label = f"dslpar: lint for {sizes} ranks"
    applied = await ls.workspace_apply_edit_async(
        types.ApplyWorkspaceEditParams(types.WorkspaceEdit({uri: [edit]}), label=label)
    )
    return applied.applied


@server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
def symbols(ls: ConfigServer, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    """List the sections and their keys."""
    made = ls.config(params.text_document.uri)
    if made is None:
        return []
    document = ls.workspace.get_text_document(params.text_document.uri)
    return [_symbol(ls, document, each) for each in outline(made)]


def _symbol(ls: ConfigServer, document: TextDocument, entry: Entry) -> types.DocumentSymbol:
    kind = types.SymbolKind.Module if entry.is_section else types.SymbolKind.Property
    whole, key = ls.range(document, entry.whole), ls.range(document, entry.key)
    return types.DocumentSymbol(
        entry.name, kind, whole, key, children=[_symbol(ls, document, each) for each in entry.children]
    )


def start() -> None:
    """Serve over stdin and stdout until the client ends."""
    gc.freeze()  # what was imported stays: collections need not look at it
    server.start_io()
