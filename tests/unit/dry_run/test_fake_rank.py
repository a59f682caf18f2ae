"""Fake ranks: a process acts as a rank of an absent world, and is restored afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.dry_run.fake_rank import fake_rank
from tests.support.ranks import on_ranks

MESH = Mesh(pipe=16, data=80, tensor=TensorMesh(y=8, mode="1d"))


def test_a_rank_of_a_large_world() -> None:
    on_ranks(1, _large_world, init=None)


def _large_world() -> None:
    with fake_rank(MESH, 1023) as groups:
        assert (dist.get_rank(), dist.get_world_size(), groups.rank) == (1023, 10_240, 1023)
        assert groups.axis("y").peers == tuple(range(1016, 1024))
        assert dist.get_process_group_ranks(groups.axis("pipe").group) == list(groups.axis("pipe").peers)
    assert not dist.is_initialized()
    assert "meta" not in dist.Backend.backend_capability["fake"]


def test_a_process_that_is_a_rank_already() -> None:
    on_ranks(1, _is_a_rank)


def _is_a_rank() -> None:
    with pytest.raises(RuntimeError, match="this process already is one"), fake_rank(MESH, 0):
        pass
    assert dist.is_initialized()


PROGRAM = """
import sys
import torch
from tests.support.dry_runs import LLAMA, job_of
from dslpar.dry_run.dry_run import dry_run

job = job_of("1d", "1f1b", form=LLAMA, more="activation_checkpoint = dict(interval=1)")
first = dry_run(job, 3)
assert first.problems == [], first.problems
assert "torch._dynamo" not in sys.modules
assert not hasattr(torch.utils.checkpoint.checkpoint.__wrapped__, "__dynamo_disable")

# Who compiles afterwards has the real compiler, which passes over what it must.
module = torch.nn.Linear(4, 4)
step = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum(), backend="eager")
step(torch.ones(2, 4)).backward()
assert sys.modules["torch._dynamo"].__file__
again = dry_run(job, 3)
assert again.problems == [] and again.operations == first.operations
"""


@pytest.mark.prove  # it starts torch's compiler, and a mistake would make a dry run slow
def test_the_compiler_is_not_imported_and_works_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


FALLS_BACK = """
import sys
from dslpar.dry_run.fake_rank import eager_only

with eager_only():
    import torch._dynamo
    assert sys.modules["torch._dynamo"].__dict__.get("__file__") is None
    assert torch._dynamo.config.cache_size_limit  # asks for more than a dry run needs
    assert sys.modules["torch._dynamo"].__file__
assert sys.modules["torch._dynamo"].__file__
"""


@pytest.mark.prove
def test_who_needs_more_of_the_compiler_gets_it() -> None:
    done = subprocess.run([sys.executable, "-c", FALLS_BACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
