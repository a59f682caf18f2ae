"""Training step of a transformers model under a policy, against transformers' own step and its own tensor parallelism.

In one process, the reference is the same class in plain transformers, by CPU time. On two ranks over gloo, Llama in
`1d` is compared with transformers' own tensor parallelism (`from_pretrained` with `DistributedConfig(tp_size=2,
tp_plan="auto")`), by wall and CPU time. Wall time is less reliable if ranks wait for the cores of a busy machine.

Four blocks, hidden size 256, micro-batches of 4 samples of 64 tokens, fp32: forward, loss, backward, and a step of SGD.
Both sides read the same folder, and before anything is timed they must give the same losses over some steps. Targets
are for the median.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import Costs, Ratio, in_turns, ratio
from benchmarks.sides import FORK, side
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.models import build_module

HIDDEN, LAYERS, HEADS, MICRO, SEQUENCE, VOCAB = 256, 4, 4, 4, 64, 1024
STEPS = 3
"""Steps a turn."""
PROCESSES = 5
"""How often each side starts anew."""
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": dict(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
    ),
    "GPT2LMHeadModel": dict(
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        vocab_size=VOCAB,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=1,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
}

Step = Callable[[], float]


def ratios() -> Iterator[Ratio]:
    """Each class in one process; Llama on two ranks."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            _in_child(_save, name, folder)
            found = compare(name, folder, 1, theirs)
            yield ratio(
                f"{name}: policy / transformers, one process, CPU", [cpu for cpu, _ in found], 1.03, strict=True
            )
            if name == "LlamaForCausalLM":
                found = compare(name, folder, 2, of_their_tp)
                yield ratio(
                    "Llama: 1d / transformers' own TP, 2 ranks, wall", [wall for _, wall in found], 0.65, strict=True
                )
                yield ratio(
                    "Llama: 1d / transformers' own TP, 2 ranks, CPU", [cpu for cpu, _ in found], 0.65, strict=True
                )


Build = Callable[[str, str], Step]


def compare(name: str, folder: str, world: int, reference: Build) -> list[Costs]:
    """The ratios of turns, CPU and wall; first, that both take the same steps.

    Where a process happens to lie in memory makes all its steps some percent faster or slower: so several of each side.
    """
    with side(partial(check_same, name, folder, reference), world):
        pass
    found: list[Costs] = []
    for _ in range(PROCESSES):
        with (
            side(partial(ours, name, folder), world, STEPS) as of_ours,
            side(partial(reference, name, folder), world, STEPS) as of_theirs,
        ):
            found += in_turns(with_wall(of_ours), with_wall(of_theirs), pairs=15)
    return found


def with_wall(run: Callable[[], Costs]) -> Callable[[], Costs]:
    """The same turn, with its wall time besides."""

    def timed() -> Costs:
        began = time.perf_counter()
        (cpu,) = run()
        return cpu, time.perf_counter() - began

    return timed


def check_same(name: str, folder: str, reference: Build) -> Step:
    """The losses of three steps; fp32 sums in other orders are some 1e-7 apart."""
    losses = [[step() for _ in range(3)] for step in (ours(name, folder), reference(name, folder))]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert len(set(losses[0])) == 3, "no step was taken"
    return lambda: 0.0


def _in_child(run: Callable[..., None], *args: str) -> None:
    """Run in a process of its own: this one must not have run threads, since ranks fork from it."""
    child = FORK.Process(target=run, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


def _save(name: str, folder: str) -> None:
    import transformers

    torch.manual_seed(1)
    cls = getattr(transformers, name)
    cls(cls.config_class(**CONFIGS[name])).save_pretrained(folder)


# The sides ------------------------------------------------------------------------------------------------------


def ours(name: str, folder: str) -> Step:
    """By policy, on as many ranks as there are."""
    import transformers

    from dslpar.policies.model import HuggingFaceModel

    world = torch.distributed.get_world_size()
    groups = Groups(Mesh(tensor=mesh.Tensor(y=world, mode="1d") if world > 1 else mesh.Tensor()))
    model = HuggingFaceModel(getattr(transformers, name), pretrained=folder)
    module, loss = build_module(model, groups, seed=1), model.loss(groups)
    return training(module, lambda ids, labels: loss(module(ids), labels))


def theirs(name: str, folder: str, **how: Any) -> Step:
    """As transformers has it."""
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, **how)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return training(model, loss)


def of_their_tp(name: str, folder: str) -> Step:
    """With transformers' own plan over both ranks."""
    from transformers import DistributedConfig

    return theirs(name, folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))


def training(module: torch.nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Steps of SGD on one micro-batch, the same on all ranks; each returns its loss."""
    module.train()
    tokens = torch.randint(VOCAB, (MICRO, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(ids, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
