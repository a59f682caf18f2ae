"""After a start is killed while it compiles an op, every later start waits forever.

What happens: `OpBuilder.jit_load` calls `torch.utils.cpp_extension.load`, whose lock is a file that its owner removes.
If the owner is killed (by a scheduler, or for memory), the file stays. Every later start waits in
`FileBaton.wait` for an owner that no longer lives, and prints nothing.

Expected: the next start compiles the op. A lock by `fcntl.flock`, taken around `load`, ends with its owner, and whoever
has it may remove torch's file.

Versions: DeepSpeed 0.19.8, torch 2.13, Python 3.11, Linux, CPU; g++ and ninja.
Run: python m19_build_lock.py
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START = """
import faulthandler
from deepspeed.ops.op_builder import CPUAdamBuilder

faulthandler.dump_traceback_later(1, repeat=True)  # shows where it waits
CPUAdamBuilder().load()
"""
WAITS, COMPILES = "file_baton.py", "in _run_ninja_build"


def start(folder):
    """Begin to compile the op in a folder of its own."""
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": folder}
    command = [sys.executable, "-c", START]
    return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        first = start(folder)
        while first.poll() is None and not Path(folder, "cpu_adam", "lock").exists():
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGTERM)
        second = start(folder)
        found = next((word for line in second.stderr for word in (WAITS, COMPILES) if word in line), "neither")
        os.killpg(second.pid, signal.SIGTERM)
    says = {WAITS: "reproduced", COMPILES: "fixed"}.get(found, "unclear")
    print(f"the stack of the second start shows {found!r}, expected {COMPILES!r}: {says}")
    sys.exit({"reproduced": 0, "fixed": 1}.get(says, 2))
