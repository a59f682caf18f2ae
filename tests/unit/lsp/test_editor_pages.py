"""The lines in editors/helix.md and editors/zed.md, for editors that are not run here.

Their keys are compared with what the editors' sources read:
- Helix: helix-core/src/syntax/config.rs (commit 027fa463), `LanguageServerConfiguration` and `LanguageConfiguration`,
  both in kebab case, the latter with `deny_unknown_fields`; names of servers and languages: languages.toml (0003a117).
- Zed: crates/project/src/lsp_store.rs (commit 001aa661), `get_language_server_binary`: with `binary.path`, the server
  is that program with `binary.arguments`. docs/src/languages/python.md (0a1cc885): which servers Zed knows for Python.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import COMMANDS
from tests.support.paths import ROOT

SERVER = {"command", "args", "environment", "config", "timeout", "required-root-patterns"}
LANGUAGE = {"name", "language-servers", "scope", "file-types", "roots", "auto-format", "formatter", "indent"}
OF_HELIX = {"python": {"ty", "ruff", "jedi", "pylsp"}, "yaml": {"yaml-language-server", "ansible-language-server"}}
OF_ZED = {"basedpyright", "ruff", "ty", "pyrefly", "pyright", "pylsp"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "editors" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_lines_for_helix() -> None:
    languages, config = map(tomllib.loads, blocks("helix.md", "toml"))
    assert languages.keys() == {"language-server", "language"}
    ((name, server),) = languages["language-server"].items()
    assert name == "dslpar"
    assert set(server) <= SERVER
    assert [server["command"], *server["args"]] == ["dslpar", "lsp"]
    assert "lsp" in COMMANDS
    for language in languages["language"]:
        assert set(language) <= LANGUAGE
        *others, last = language["language-servers"]
        assert last == "dslpar"
        assert set(others) <= OF_HELIX[language["name"]]
    assert config == {"editor": {"lsp": {"display-inlay-hints": True}}}


def zed() -> dict[str, Any]:
    (lines,) = blocks("zed.md", "json")
    settings = json.loads(lines)
    assert isinstance(settings, dict)
    return settings


def test_the_lines_for_zed() -> None:
    settings = zed()
    servers = settings["languages"]["Python"]["language_servers"]
    assert set(servers) <= OF_ZED
    ((name, server),) = settings["lsp"].items()
    assert name in servers
    assert set(server["binary"]) == {"path", "arguments"}
    assert [Path(server["binary"]["path"]).name, *server["binary"]["arguments"]] == ["dslpar", "lsp"]


@pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed (extra lsp)")
def test_the_settings_of_pylsp_do_no_harm(tmp_path: Path) -> None:
    """Zed sends those that it has for pylsp, at the start and later."""
    from lsprotocol import types

    from tests.unit.lsp.test_server import TEXT, Editor, in_editor

    async def use(editor: Editor) -> None:
        of_pylsp = {"pylsp": {"plugins": {"pycodestyle": {"enabled": False}}}}
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(of_pylsp))
        (found,) = await editor.write("cfg.py", TEXT.replace("hidden_size", "hiden_size"))
        assert found.code == "CFG101"
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams({}))
        assert await editor.write("cfg.py", TEXT) == []

    in_editor(tmp_path, use)
