"""Faults from outside of dslpar: a `sitecustomize` in PYTHONPATH wraps `Engine.train_batch` as its module is imported.

injected.write(folder, "hang", rank=2, step=3)      # the same under every launcher that takes PYTHONPATH along
"""

from __future__ import annotations

import json
from pathlib import Path

_SITECUSTOMIZE = """\
import importlib.abc, importlib.machinery, json, os, pathlib, signal, sys, time

ASKED = json.loads(pathlib.Path(__file__).with_name("asked.json").read_text())

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
        if self.groups.rank == ASKED["rank"] and self.steps_done + 1 >= ASKED["step"]:
            befall(self)
        return train_batch(self, batches)
    Engine.train_batch = failing

def befall(engine):
    at = pathlib.Path(ASKED["at"])
    if not at.exists():
        at.with_suffix(".part").write_text(repr(time.time()))
        at.with_suffix(".part").rename(at)
    if ASKED["fault"] == "exception":
        raise RuntimeError("this rank broke")
    if ASKED["fault"] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if ASKED["fault"] == "hang":
        time.sleep(3600)
    if ASKED["fault"] == "NaN":
        next(p for p in engine.module.parameters() if p.is_floating_point()).data.fill_(float("nan"))
    if ASKED["fault"] == "out of memory":
        import torch
        torch.empty(1 << 60, dtype=torch.uint8)

sys.meta_path.insert(0, Inject())
"""


def write(folder: Path, fault: str, rank: int, step: int) -> None:
    """Files in `folder` by which a rank meets a fault in that step. `folder`/at then holds the time, since the epoch.

    "exception", "SIGKILL", "hang", "NaN" (in its weights) and "out of memory" it does to itself; at any other it goes
    on, and somebody else is to strike.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    asked = {"fault": fault, "rank": rank, "step": step, "at": str(folder / "at")}
    (folder / "asked.json").write_text(json.dumps(asked))
