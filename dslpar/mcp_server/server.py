"""The server: answers an agent's client over stdin and stdout, with the official package `mcp`.

Commands run in this process, one at a time, confined to the root. `prove` forks ranks, so it is a process of its own,
and other commands run beside it. Its config is linted here first, under the confinement. The process itself is not
confined: it builds the config's model, and so imports and runs the classes that the config names. Without --allow-prove
no file below the root is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import jsonschema
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from dslpar.core.version import VERSION
from dslpar.linter import registry
from dslpar.mcp_server import calls, overview
from dslpar.mcp_server.confinement import confine
from dslpar.mcp_server.tools import TOOLS, RefusedError, command_line

OVERVIEW_URI = "dslpar://llms.txt"
RULES_URI = "dslpar://rules/"
INSTRUCTIONS = f"Read {OVERVIEW_URI} before you write a config. Correct every error of lint before plan and prove."


class Handlers:
    """Handlers of one server's requests."""

    def __init__(
        self, command: calls.Command, commands: Mapping[str, str], root: str, allow_prove: bool, timeout_s: float
    ) -> None:
        """Make the handlers of a server; `commands` are the help texts of dslpar's commands by name."""
        self.command, self.commands, self.root = command, commands, root
        self.allow_prove, self.timeout_s = allow_prove, timeout_s
        self._starting: int | None = None
        self._one_command, self._one_proof = anyio.Lock(), anyio.Lock()

    def may_start(self) -> bool:
        """Return whether this thread is starting `prove`, the only program that may be; commands run in others."""
        return self._starting == threading.get_ident()

    async def list_tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        """List the tools."""
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=name,
                    description=spec.help,
                    input_schema=spec.input_schema,
                    output_schema=spec.output_schema,
                    # A proof runs the config's own classes, which may do anything.
                    annotations=types.ToolAnnotations(read_only_hint=name != "prove", open_world_hint=name == "prove"),
                )
                for name, spec in TOOLS.items()
            ]
        )

    async def list_resources(self, ctx: Any, params: Any) -> types.ListResourcesResult:
        """List the resources that have one name: llms.txt."""
        description = "dslpar in short: workflow, commands, modes, keys with types and defaults"
        resource = types.Resource(name="llms.txt", uri=OVERVIEW_URI, description=description, mime_type="text/markdown")
        return types.ListResourcesResult(resources=[resource])

    async def list_templates(self, ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        """List the templates of resources: the rules' pages."""
        template = types.ResourceTemplate(
            name="rule",
            uri_template=RULES_URI + "{code}",
            description="the page of a rule: what it finds, why, an example, what to use instead",
            mime_type="text/markdown",
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(self, ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        """Return a resource's text. Raises MCPError: there is none of that name."""
        text = await anyio.to_thread.run_sync(self._resource, params.uri)
        if text is None:
            raise MCPError(
                types.INVALID_PARAMS, f"no resource {params.uri!r}; there are {OVERVIEW_URI}, {RULES_URI}CODE"
            )
        contents = types.TextResourceContents(uri=params.uri, mime_type="text/markdown", text=text)
        return types.ReadResourceResult(contents=[contents])

    def _resource(self, uri: str) -> str | None:
        if uri == OVERVIEW_URI:
            return overview.text(self.commands)
        pages = {f"{RULES_URI}{page.code}": page for page in registry.pages()}
        return f"# {pages[uri].code} {pages[uri].name}\n\n{pages[uri].text()}" if uri in pages else None

    async def call_tool(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        """Call a tool; a mistake of the caller is an error of the tool, with its text."""
        given = params.arguments or {}
        if params.name not in TOOLS:
            return _error(f"unknown tool {params.name!r}; the tools are {', '.join(TOOLS)}")
        try:
            jsonschema.validate(given, TOOLS[params.name].input_schema)
            line = command_line(params.name, given, self.root)
            output = await (self._prove(line, given) if params.name == "prove" else self._run(line))
            structured = calls.answer(params.name, output)
        except jsonschema.ValidationError as error:
            return _error(error.message)
        except (RefusedError, calls.CallError) as error:
            return _error(str(error))
        shown = json.dumps(structured, ensure_ascii=False)
        return types.CallToolResult(content=[types.TextContent(text=shown)], structured_content=structured)

    async def _run(self, line: Sequence[str]) -> calls.Output:
        async with self._one_command:  # its output is the process's
            return await anyio.to_thread.run_sync(calls.run, self.command, line)

    async def _prove(self, line: Sequence[str], given: Mapping[str, Any]) -> calls.Output:
        """Run `prove` in a process of its own; end it, and its ranks, with the call. Raises RefusedError."""
        if not self.allow_prove:
            raise RefusedError("prove starts processes, which this server may not: start it with --allow-prove")
        of_lint = {key: value for key, value in given.items() if key in TOOLS["lint"].arguments}
        checked = await self._run(command_line("lint", of_lint, self.root))
        if checked.status:
            raise RefusedError(checked.out + checked.err)
        async with self._one_proof:
            return await self._in_a_process(line)

    async def _in_a_process(self, line: Sequence[str]) -> calls.Output:
        self._starting = threading.get_ident()
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
            self._starting = None
        try:
            with anyio.fail_after(self.timeout_s):
                out, err = await anyio.to_thread.run_sync(process.communicate, abandon_on_cancel=True)
        except TimeoutError:
            raise RefusedError(f"prove took more than {self.timeout_s:g} s and was ended") from None
        finally:  # also if the client cancels the call
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return calls.Output(process.returncode, out, err)


def _error(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)


def start(command: calls.Command, commands: Mapping[str, str], root: str, allow_prove: bool, timeout_s: float) -> None:
    """Serve over stdin and stdout until the client ends, confined to `root`, which becomes the working folder."""
    root = os.path.realpath(root)
    os.chdir(root)

    async def serve() -> None:
        handlers = Handlers(command, commands, root, allow_prove, timeout_s)
        server = Server(
            "dslpar",
            version=VERSION,
            instructions=INSTRUCTIONS,
            on_list_tools=handlers.list_tools,
            on_call_tool=handlers.call_tool,
            on_list_resources=handlers.list_resources,
            on_list_resource_templates=handlers.list_templates,
            on_read_resource=handlers.read_resource,
        )
        async with stdio_server() as (read, write):
            confine(root, handlers.may_start)
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)
