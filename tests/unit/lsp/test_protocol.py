"""A server that runs for weeks keeps nothing of the messages that it has handled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("pygls", reason="the language server needs pip install 'dslpar[lsp]'")

from lsprotocol import types

from dslpar.lsp.server import ConfigServer


def test_handled_notifications_are_forgotten() -> None:
    seen: list[int] = []

    async def main() -> None:
        server = ConfigServer()

        @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
        async def changed(ls: ConfigServer, params: Any) -> None:
            await asyncio.sleep(0)
            seen.append(params)

        for number in range(5):
            server.protocol._handle_notification(types.WORKSPACE_DID_CHANGE_CONFIGURATION, number)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not server.protocol._request_futures

    asyncio.run(main())
    assert seen == [0, 1, 2, 3, 4]
