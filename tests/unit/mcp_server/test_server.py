"""A session of the official client with `dslpar mcp` over stdio."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from dslpar.mcp_server.tools import TOOLS
from tests.support.paths import ROOT

CONFIG = (
    "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=8, vocab_size=256, max_seq_len=96)\n"
    "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
    "batch = dict(global_size=16, micro_size=2)\n"
)
CALLS: dict[str, dict[str, Any]] = {
    "lint": {"path": "cfg.py", "world_size": 8},
    "explain": {"code": "TEN103"},
    "show": {"path": "cfg.py", "world_size": 8},
    "plan": {"path": "cfg.py", "world_size": 8, "device": "h100-80g"},
    "diff": {"path": "cfg.py", "other": "other.py", "world_size": 8},
    "import": {"path": "ds.json"},
    "runs": {"folder": "outputs"},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "outputs").mkdir(parents=True)
    (folder / "cfg.py").write_text(CONFIG)
    (folder / "other.py").write_text(CONFIG.replace("pipeline=2", "pipeline=1"))
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')
    (tmp_path / "secret.py").write_text("x = 'hush'\n")
    (tmp_path / "hosts").write_text("hush slots=8\n")
    return folder


def session(root: Path, use: Callable[[ClientSession], Awaitable[None]]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = StdioServerParameters(command=sys.executable, args=["-m", "dslpar", "mcp", "--root", str(root)], env=env)

    async def run() -> None:
        async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            await use(client)

    anyio.run(run)


def text_of(result: Any) -> str:
    return "".join(each.text for each in result.content)


def test_each_tool_answers_in_its_schema(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == set(TOOLS)
        for name, given in CALLS.items():
            result = await client.call_tool(name, given)
            assert not result.is_error, (name, text_of(result))
            jsonschema.validate(result.structured_content, tools[name].output_schema)

    session(root, use)


def test_prove_is_refused_without_the_flag(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        result = await client.call_tool("prove", {"path": "cfg.py", "world_size": 8})
        assert result.is_error
        assert "--allow-prove" in text_of(result)

    session(root, use)


def test_nothing_leaves_the_root(root: Path) -> None:
    (root / "link.py").symlink_to(root.parent / "secret.py")
    (root / "up.py").write_text("from ..secret import x\n" + CONFIG)
    (root / "base.py").write_text("_base_ = '../secret.py'\n" + CONFIG)
    (root / "via_link.py").write_text("from .link import x\n" + CONFIG)
    calls: list[dict[str, Any]] = [
        {"path": "../secret.py"},
        {"path": str(root.parent / "secret.py")},
        {"path": "link.py"},
        {"path": "cfg.py", "hostfile": "../hosts"},
        {"path": "up.py", "world_size": 8},
        {"path": "base.py", "world_size": 8},
        {"path": "via_link.py", "world_size": 8},
    ]

    async def use(client: ClientSession) -> None:
        for given in calls:
            shown = text_of(await client.call_tool("lint", given))
            assert "outside of" in shown, (given, shown)
            assert "hush" not in shown

    session(root, use)
