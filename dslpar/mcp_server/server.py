"""The server: answers an agent's client over stdin and stdout, with the official package `mcp`.

Commands run in this process, one at a time, confined to the root. `prove` forks ranks, so it is a process of its own:
its config is linted here first, which reads all that it reads, under the confinement.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import jsonschema
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from dslpar.core.version import VERSION
from dslpar.mcp_server.confinement import confine
from dslpar.mcp_server.tools import TOOLS, RefusedError, command_line

MAX_CHARACTERS = 100_000
"""Bound of a result's JSON: about 25 thousand tokens of a language model."""
Command = Callable[[Sequence[str]], int]
"""Runs `dslpar` with arguments, and returns its exit status."""


class Output(NamedTuple):
    """Output of a command."""

    status: int
    out: str
    err: str


class Tools:
    """The tools of one server."""

    def __init__(self, command: Command, root: str, allow_prove: bool, timeout_s: float) -> None:
        self.command, self.root, self.allow_prove, self.timeout_s = command, root, allow_prove, timeout_s
        self.starting = False
        """Whether `prove` is being started, the only program that may be."""
        self.one_at_a_time = anyio.Lock()

    async def list(self, ctx: Any, params: Any) -> types.ListToolsResult:
        """List the tools."""
        read_only = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=spec.help,
                    input_schema=spec.input_schema,
                    output_schema=spec.output_schema,
                    annotations=read_only,
                )
                for name, spec in TOOLS.items()
            ]
        )

    async def call(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Call a tool; a mistake of the caller is an error of the tool, with its text."""
        given = params.arguments or {}
        if params.name not in TOOLS:
            return _error(f"unknown tool {params.name!r}; the tools are {', '.join(TOOLS)}")
        try:
            jsonschema.validate(given, TOOLS[params.name].input_schema)
            line = command_line(params.name, given, self.root)
        except (jsonschema.ValidationError, RefusedError) as error:
            return _error(getattr(error, "message", str(error)))
        async with self.one_at_a_time:
            if params.name != "prove":
                return _result(params.name, await anyio.to_thread.run_sync(self._run, line))
            return await self._prove(line, command_line("lint", _of_lint(given), self.root))

    def _run(self, line: Sequence[str]) -> Output:
        """Run a command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = self.command(line)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 2
            except OSError as error:  # a refusal where the command expects none
                status = 2
                err.write(f"{error.filename}: {error.strerror}\n" if error.filename else f"{error}\n")
        return Output(status, out.getvalue(), err.getvalue())

    async def _prove(self, line: Sequence[str], lint: Sequence[str]) -> types.CallToolResult:
        if not self.allow_prove:
            return _error("prove starts processes, which this server may not: start it with --allow-prove")
        checked = await anyio.to_thread.run_sync(self._run, lint)
        if checked.status:
            return _error(checked.out + checked.err)
        self.starting = True
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dslpar", *line],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # its ranks end with it
            )
        finally:
            self.starting = False
        try:
            with anyio.fail_after(self.timeout_s):
                out, err = await anyio.to_thread.run_sync(process.communicate, abandon_on_cancel=True)
        except TimeoutError:
            return _error(f"prove took more than {self.timeout_s:g} s and was ended")
        finally:  # also if the client cancels the call
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return _result("prove", Output(process.returncode, out, err))


def _of_lint(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in TOOLS["lint"].arguments}


def _error(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)


def _result(name: str, output: Output) -> types.CallToolResult:
    """Return a command's output: its JSON, which may be on stderr (`import` without -o has it there)."""
    text, messages, config = output.out, output.err, ""
    if name == "import" and "{" in messages:
        begin = messages.index("{")
        config, text, messages = text, messages[begin:], messages[:begin]
    try:
        made = json.loads(text)
    except json.JSONDecodeError:
        return _error((messages or text).strip() or f"{name} ended with status {output.status}")
    if config:
        made["config"] = config
    made, note = cut(made)
    structured = {"exit_status": output.status, "result": made, "messages": messages[:MAX_CHARACTERS], "note": note}
    shown = json.dumps(structured, ensure_ascii=False)
    return types.CallToolResult(content=[types.TextContent(text=shown)], structured_content=structured)


def cut(made: Any) -> tuple[Any, str]:
    """Cut a result to MAX_CHARACTERS of JSON; return it, and a note of what is missing."""
    size = len(json.dumps(made))
    if size <= MAX_CHARACTERS:
        return made, ""
    if isinstance(made, list):
        kept: list[Any] = []
        left = MAX_CHARACTERS
        for item in made:
            left -= len(json.dumps(item)) + 2
            if left < 0:
                break
            kept.append(item)
        return kept, f"cut: the first {len(kept)} of {len(made)} entries; ask for less"
    kept_keys, dropped = dict(made), []
    for key in sorted(made, key=lambda key: len(json.dumps(made[key])), reverse=True):
        if len(json.dumps(kept_keys)) <= MAX_CHARACTERS:
            break
        dropped.append(str(key))
        del kept_keys[key]
    return kept_keys, f"cut: without {', '.join(dropped)}, which are too long"


def start(command: Command, root: str, allow_prove: bool, timeout_s: float) -> None:
    """Serve over stdin and stdout until the client ends, confined to `root`, which becomes the working folder."""
    root = os.path.realpath(root)
    os.chdir(root)

    async def serve() -> None:
        tools = Tools(command, root, allow_prove, timeout_s)
        server = Server("dslpar", version=VERSION, on_list_tools=tools.list, on_call_tool=tools.call)
        async with stdio_server() as (read, write):
            confine(root, lambda: tools.starting)
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)
