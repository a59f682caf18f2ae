"""Confine this process to one folder: refuse to open or list other paths, to write, and to start programs.

Python reports each `open`, `listdir` and `Popen` to audit hooks (PEP 578) before it happens, wherever it is called
from. So an import of a config, a hostfile or a tokenizer's folder is refused before it is read, also through a link.
Refusals are PermissionErrors, which commands report at the line that names the file. A hook cannot be removed.
The names are those of the table of audit events of Python 3.11 to 3.14. Python reports no event for `stat`, so whether
a path exists can be asked. Libraries in other languages open files without telling Python; dslpar's linter and planner
read none through them: YAML's parser gets bytes that Python has read.
"""

from __future__ import annotations

import errno
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READS = ("os.listdir", "os.scandir", "os.getxattr", "os.listxattr")
_CHANGES = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime"),
    *("os.chmod", "os.chown", "os.chflags", "os.setxattr", "os.removexattr", "os.lockf", "os.chdir"),
)
_STARTS = (
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
    *("os.startfile", "pty.spawn"),
)
_CONNECTIONS = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo")
_ELSEWHERE = ("sqlite3.connect",)
"""Events of libraries that open files themselves."""


def is_below(path: str, folder: str) -> bool:
    """Return whether a path, with its links followed, is a folder or below it; `folder` is a real path."""
    real = os.path.realpath(path)
    return real == folder or real.startswith(folder.rstrip(os.sep) + os.sep)


def code_folders() -> tuple[str, ...]:
    """Return the real paths of Python's own library, the installed packages and dslpar: code, which is read as such."""
    paths = (sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    above = os.path.dirname(PACKAGE)
    ours = (PACKAGE, os.path.join(above, "layers"), os.path.join(above, "configs"))
    installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys(map(os.path.realpath, (*paths, *site.getsitepackages(), *installed, *ours))))


def drop_imports_below(root: str) -> None:
    """Let Python import nothing from below `root` but installed packages: a yaml.py there must not be executed."""
    ours = os.path.dirname(PACKAGE)
    code = code_folders()

    def stays(path: str) -> bool:
        return any(is_below(path, each) for each in code) or os.path.realpath(path) == ours or not is_below(path, root)

    sys.path[:] = [path for path in sys.path if stays(path or os.getcwd())]


def confine(root: str, may_start: Callable[[], bool] = lambda: False) -> None:
    """Confine this process to the folder `root` and to installed code, for good.

    Args:
        root: the folder, as a real path.
        may_start: returns whether a program may be started now.
    """
    readable = (root, *code_folders())

    def check(path: Any) -> None:
        if path is None:
            path = os.getcwd()
        if isinstance(path, int):
            return  # it has been opened already
        text = os.fsdecode(path)
        if os.path.realpath(text) != os.devnull and not any(is_below(text, folder) for folder in readable):
            raise PermissionError(errno.EACCES, f"it is outside of {root}, the folder that this server may read", text)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            check(path)
            writes = flags & _WRITES if isinstance(flags, int) else set(mode or "") & set("wax+")
            if writes and not isinstance(path, int) and os.path.realpath(os.fsdecode(path)) != os.devnull:
                raise PermissionError(errno.EACCES, "this server writes nothing", os.fsdecode(path))
        elif event in _READS:
            check(args[0])
        elif event in _CONNECTIONS:
            raise PermissionError(errno.EACCES, "this server connects to nothing", event)
        elif event in _CHANGES or event in _ELSEWHERE:
            raise PermissionError(errno.EACCES, "this server writes nothing", str(args[0]))
        elif event in _STARTS and not may_start():
            raise PermissionError(errno.EACCES, "this server starts no programs", str(args[0]) if args else event)

    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
