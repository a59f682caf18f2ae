"""pygls's protocol, without the memory that it keeps of each notification.

pygls 2.1 has a table of the handlers that run, by the message's id, from which a request's answer removes its handler.
A notification has no answer, so that each key stroke leaves some 3 KB behind: an editor that is open for weeks sends
hundreds of thousands. Here a handler leaves the table as soon as it is done (pygls/protocol/json_rpc.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from pygls.protocol import LanguageServerProtocol


class Protocol(LanguageServerProtocol):
    """Protocol of a server that may run for weeks."""

    def _execute_handler(self, msg_id: Any, *args: Any, **kwargs: Any) -> None:
        super()._execute_handler(msg_id, *args, **kwargs)
        future = self._request_futures.get(msg_id)
        if future is not None:
            future.add_done_callback(lambda _: self._forget(msg_id))

    def _forget(self, msg_id: Any) -> None:
        # Later: a shutdown goes through the table, and cancels what it finds, which ends such a handler at once.
        asyncio.get_running_loop().call_soon(self._request_futures.pop, msg_id, None)
