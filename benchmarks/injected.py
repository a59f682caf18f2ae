"""Inject faults from outside of dslpar: a `sitecustomize` in PYTHONPATH wraps `Engine.train_batch` when its module is
imported.

injected.write(folder, "hang", rank=2, step=3)      # the same under every launcher that takes PYTHONPATH along
"""

from __future__ import annotations

import json
from pathlib import Path

_SITECUSTOMIZE = """\
import importlib.abc, importlib.machinery, json, os, pathlib, signal, sys, time

FAULT = json.loads(pathlib.Path(__file__).with_name("fault.json").read_text())

class Inject(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "dslpar.engine.engine":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            wrap(module.Engine)
        spec.loader.exec_module = exec_module
        return spec

def wrap(Engine):
    train_batch = Engine.train_batch
    def failing(self, batches):
        if self.groups.rank == FAULT["rank"] and self.steps_done + 1 >= FAULT["step"]:
            meet_fault(self)
        return train_batch(self, batches)
    Engine.train_batch = failing

def meet_fault(engine):
    at = pathlib.Path(FAULT["at"])
    if not at.exists():
        at.with_suffix(".part").write_text(repr(time.time()))
        at.with_suffix(".part").rename(at)
    if FAULT["fault"] == "exception":
        raise RuntimeError("this rank broke")
    if FAULT["fault"] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["fault"] == "hang":
        time.sleep(3600)
    if FAULT["fault"] == "NaN":
        next(p for p in engine.module.parameters() if p.is_floating_point()).data.fill_(float("nan"))
    if FAULT["fault"] == "out of memory":
        import torch
        torch.empty(1 << 60, dtype=torch.uint8)

sys.meta_path.insert(0, Inject())
"""


def write(folder: Path, fault: str, rank: int, step: int) -> None:
    """Write files into `folder` that cause a fault of a rank in that step. `folder`/at then has the time since the
    epoch.

    The rank itself causes "exception", "SIGKILL", "hang", "NaN" (in its weights) and "out of memory". The caller must
    inject any other fault once `at` exists.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    fault_of_rank = {"fault": fault, "rank": rank, "step": step, "at": str(folder / "at")}
    (folder / "fault.json").write_text(json.dumps(fault_of_rank))
