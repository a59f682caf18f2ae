"""Sessions of the official client with `dslpar mcp` over stdio."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("mcp") is None:
    pytest.skip("mcp is not installed (extra mcp)", allow_module_level=True)

import anyio
import jsonschema
import psutil
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError

from dslpar.mcp_server.tools import TOOLS
from tests.support.paths import ROOT

CONFIG = (
    "model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=8, vocab_size=256, max_seq_len=96)\n"
    "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
    "batch = dict(global_size=16, micro_size=2)\n"
)
CALLS: dict[str, dict[str, Any]] = {
    "lint": {"path": "cfg.py", "world_size": 7},
    "explain": {"code": "TEN103"},
    "show": {"path": "cfg.py", "world_size": 8},
    "plan": {"path": "cfg.py", "world_size": 8, "device": "h100-80g"},
    "diff": {"path": "cfg.py", "other": "other.py", "world_size": 8},
    "import": {"path": "ds.json"},
    "runs": {"folder": "outputs"},
}
SMALL = {"path": "cfg.py", "world_size": 2, "overrides": ["parallel.pipeline=1", "parallel.tensor.size=2"]}
OWN_CLASS = """\
open({marker!r}, "w").close()
import torch


class Own(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
"""
Use = Callable[[ClientSession], Awaitable[None]]


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


def session(root: Path, use: Use, *flags: str, cwd: Path | None = None) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = ["-m", "dslpar", "mcp", "--root", str(root), *flags]
    server = StdioServerParameters(command=sys.executable, args=args, env=env, cwd=cwd)

    async def run() -> None:
        async with stdio_client(server) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            await use(client)

    anyio.run(run)


def text_of(result: Any) -> str:
    return "".join(each.text for each in result.content)


def ended(name: str, within_s: float = 20) -> bool:
    """Return whether no process below this one has `name` in its command line, after waiting for it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not running(name):
            return True
        time.sleep(0.1)
    return False


def running(name: str) -> bool:
    found = []
    for each in psutil.process_iter(["cmdline"]):
        found += [word for word in each.info["cmdline"] or () if name in word]
    return bool(found)


def test_each_tool_answers_in_its_schema(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == set(TOOLS)
        assert [name for name, tool in tools.items() if not tool.annotations.read_only_hint] == ["prove"]
        for name, given in CALLS.items():
            result = await client.call_tool(name, given)
            assert not result.is_error, (name, text_of(result))
            schema, made = tools[name].output_schema, result.structured_content
            jsonschema.validate(made, schema)
            assert json.loads(text_of(result)) == made
            described = schema["properties"]["result"]
            if name not in ("runs",):  # an empty list
                record = made["result"][0] if TOOLS[name].is_list else made["result"]
                assert set(record) == set(described.get("items", described)["properties"]), name

    session(root, use)


def test_the_list_of_runs_is_as_described(root: Path) -> None:
    run = root / "outputs" / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (run / "resolved.json").write_text("{}")

    async def use(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        made = (await client.call_tool("runs", {"folder": "outputs"})).structured_content
        jsonschema.validate(made, tools["runs"].output_schema)
        assert [(each["name"], each["step"], each["loss"]) for each in made["result"]] == [("run", 1, 2.5)]

    session(root, use)


def test_a_folder_is_linted_and_a_mistake_is_an_error_of_the_tool(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        made = (await client.call_tool("lint", {"path": ".", "world_size": 7})).structured_content
        assert {each["path"] for each in made["result"]} == {"cfg.py", "other.py"}
        for name, given, expected in (
            ("lint", {"pth": "cfg.py"}, "'pth' was unexpected"),
            ("lint", {"path": "--fix"}, "would be read as a flag"),
            ("show", {"path": "cfg.py", "world_size": 7}, "PAR102"),
            ("explain", {"code": "TEN999"}, "unknown rule"),
            ("launch", {}, "unknown tool"),
        ):
            result = await client.call_tool(name, given)
            assert result.is_error
            assert expected in text_of(result)

    session(root, use)


def test_resources_are_the_overview_and_the_pages_of_rules(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        listed = (await client.list_resources()).resources
        assert [each.uri for each in listed] == ["dslpar://llms.txt"]
        shown = (await client.read_resource("dslpar://llms.txt")).contents[0].text
        assert shown == (ROOT / "docs" / "llms.txt").read_text()
        (template,) = (await client.list_resource_templates()).resource_templates
        page = (await client.read_resource(template.uri_template.replace("{code}", "TEN103"))).contents[0].text
        assert page.startswith("# TEN103 not-a-cube\n\nThe size of mode '3d' is not a cube.")
        with pytest.raises(MCPError, match="no resource 'dslpar://rules/TEN999'"):
            await client.read_resource("dslpar://rules/TEN999")

    session(root, use)


def test_the_session_in_the_docs_is_what_the_server_answers(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text().partition("<!-- Session")[2]
    (config,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    texts = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "cfg.py").write_text(config)

    async def use(client: ClientSession) -> None:
        for called, shown in zip(texts[::2], texts[1::2], strict=True):
            made = (await client.call_tool(**json.loads(called))).structured_content
            assert json.loads(json.dumps(made).replace(ROOT.as_uri(), "file:///site-packages")) == json.loads(shown)

    assert len(texts) >= 6
    session(tmp_path, use)


# The root ---------------------------------------------------------------------------------------------------------


def test_nothing_leaves_the_root(root: Path) -> None:
    (root / "link.py").symlink_to(root.parent / "secret.py")
    (root / "up.py").write_text("from ..secret import x\n" + CONFIG)
    (root / "base.py").write_text("_base_ = '../secret.py'\n" + CONFIG)
    (root / "via_link.py").write_text("from .link import x\n" + CONFIG)
    (root / "get.py").write_text("from dslpar.config import get_config\nx = get_config('secret.py')\n" + CONFIG)
    calls: list[dict[str, Any]] = [
        {"path": "../secret.py"},
        {"path": str(root.parent / "secret.py")},
        {"path": "link.py"},
        {"path": "cfg.py", "hostfile": "../hosts"},
        {"path": "up.py", "world_size": 8},
        {"path": "base.py", "world_size": 8},
        {"path": "via_link.py", "world_size": 8},
        {"path": "get.py", "world_size": 8},
    ]

    async def use(client: ClientSession) -> None:
        for given in calls:
            shown = text_of(await client.call_tool("lint", given))
            assert "outside of" in shown, (given, shown)
            assert "hush" not in shown

    session(root, use)


def test_files_that_a_config_names_are_not_read_out_of_the_root(root: Path) -> None:
    model = root.parent / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2", "n_embd": 96, "n_head": 77}')
    (root / "pre.py").write_text("model = dict(type='transformers.GPT2LMHeadModel', pretrained='../model')\n")
    (root.parent / "tokens").mkdir()
    (root.parent / "tokens" / "meta.json").write_text('{"vocab_size": 4242}')
    (root.parent / "measured.json").write_text('{"device": 4242}')
    (root / "calibrated.py").write_text(CONFIG + "cluster = dict(calibration='../measured.json')\n")
    (root / "data.py").write_text(CONFIG + "data = dict(type='tokens', path='../tokens')\n")

    async def use(client: ClientSession) -> None:
        for tool, name in (("lint", "pre.py"), ("lint", "data.py"), ("plan", "calibrated.py")):
            device = {"device": "h100-80g"} if tool == "plan" else {}
            shown = text_of(await client.call_tool(tool, {"path": name, "world_size": 8, **device}))
            assert "outside of" in shown or '"error"' in shown, (name, shown)
            assert "77" not in shown
            assert "4242" not in shown

    session(root, use)


def test_a_deepspeed_file_out_of_the_root_is_not_read(root: Path) -> None:
    (root.parent / "hush.json").write_text('{"train_micro_batch_size_per_gpu": 4242}')
    (root / "hf.yaml").write_text("per_device_train_batch_size: 2\ndeepspeed: ../hush.json\n")

    async def use(client: ClientSession) -> None:
        for tool in ("import", "lint"):
            shown = text_of(await client.call_tool(tool, {"path": "hf.yaml"}))
            assert "cannot read '../hush.json': it is outside of" in shown, (tool, shown)
            assert "4242" not in shown

    session(root, use)


def test_a_path_with_nul_is_an_error_of_the_tool(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        for tool, given in (
            ("import", {"path": "ds\0.json"}),
            ("lint", {"path": "cfg.py", "hostfile": "\0"}),
            ("runs", {"folder": "a\0"}),
        ):
            result = await client.call_tool(tool, given)
            assert result.is_error
            assert "has a NUL character" in text_of(result)

    session(root, use)


def test_a_pyproject_above_the_root_has_no_effect(root: Path) -> None:
    (root.parent / "pyproject.toml").write_text("[tool.dslpar]\nworld-size = 7\n")

    async def use(client: ClientSession) -> None:
        made = (await client.call_tool("lint", {"path": "cfg.py"})).structured_content
        assert [each["code"] for each in made["result"]] == ["CFG112"]  # no world size is known
        (root / "pyproject.toml").write_text("[tool.dslpar]\nworld-size = 7\n")
        made = (await client.call_tool("lint", {"path": "cfg.py"})).structured_content
        assert [each["code"] for each in made["result"]] == ["PAR102"]

    session(root, use)


def test_nothing_below_the_root_is_executed(root: Path) -> None:
    """Also not a class that the project trusts, nor a module with the name of a library's."""
    marker = str(root / "executed")
    (root / "own.py").write_text(OWN_CLASS.format(marker=marker))
    for name in ("yaml", "tomllib", "torch", "difflib"):
        (root / f"{name}.py").write_text(f"open({marker!r}, 'w').close()\n")
    (root / "pyproject.toml").write_text("[tool.dslpar]\ntrusted = ['own']\n")
    (root / "own_cfg.py").write_text("model = dict(type='own.Own', width=8)\nbatch = dict(global_size=4)\n")
    (root / "cfg.yaml").write_text("parallel: {pipeline: 2}\nbatch: {global_size: 4}\n")

    async def use(client: ClientSession) -> None:
        for path in ("own_cfg.py", "cfg.yaml"):
            for name in ("lint", "show", "plan", "diff"):
                device = {"device": "h100-80g"} if name == "plan" else {}
                other = {"other": "cfg.py"} if name == "diff" else {}
                await client.call_tool(name, {"path": path, "world_size": 2, **device, **other})
                assert not os.path.exists(marker), (path, name)

    session(root, use, cwd=root)


# prove ------------------------------------------------------------------------------------------------------------


def test_prove_is_refused_without_the_flag(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        result = await client.call_tool("prove", {"path": "cfg.py", "world_size": 8})
        assert result.is_error
        assert "--allow-prove" in text_of(result)

    session(root, use)


def test_prove_lints_below_the_root_first(root: Path) -> None:
    (root / "base.py").write_text("_base_ = '../secret.py'\n" + CONFIG)

    async def use(client: ClientSession) -> None:
        result = await client.call_tool("prove", {"path": "base.py", "world_size": 8})
        assert result.is_error
        assert "outside of" in text_of(result)

    session(root, use, "--allow-prove")


@pytest.mark.prove  # it waits for real proofs, and a mistake would keep an agent waiting
def test_a_proof_ends_with_its_time_and_with_its_call(root: Path) -> None:
    path = f"slow_{os.getpid()}.py"
    (root / path).write_text(CONFIG)
    given = {**SMALL, "path": path, "steps": 5000}

    async def time_out(client: ClientSession) -> None:
        result = await client.call_tool("prove", given)
        assert result.is_error
        assert "took more than 1 s" in text_of(result)
        assert ended(path)

    async def cancel(client: ClientSession) -> None:
        seen = False
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "prove", given)
            while not seen:
                await anyio.sleep(0.1)
                seen = running(path)
            assert not (await client.call_tool("lint", {"path": "cfg.py"})).is_error  # beside the proof
            assert running(path)
            group.cancel_scope.cancel()
        assert ended(path)
        assert not (await client.call_tool("lint", {"path": "cfg.py"})).is_error

    session(root, time_out, "--allow-prove", "--timeout", "1")
    session(root, cancel, "--allow-prove")


@pytest.mark.prove
def test_prove_proves(root: Path) -> None:
    async def use(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool("prove", {**SMALL, "steps": 1, "ranks": 2})
        jsonschema.validate(result.structured_content, tools["prove"].output_schema)
        assert result.structured_content["result"]["verdict"] == "proved"

    session(root, use, "--allow-prove")
