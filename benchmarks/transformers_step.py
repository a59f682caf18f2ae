"""Cost of a transformers model by policy: a training step against transformers alone, and against its own TP.

In one process, CPU time is compared with the same class in plain transformers. On two gloo ranks, wall and CPU time of
Llama in `1d` are compared with transformers' own tensor parallelism (`from_pretrained` with
`DistributedConfig(tp_size=2, tp_plan="auto")`). On a busy machine, wall time means less than CPU time.

Four blocks, hidden size 256, micro-batches of 4 samples of 64 tokens, fp32: forward, loss, backward, and a step of SGD.
Both sides read the same folder, and must give the same losses over some steps before anything is timed. Targets are for
the median. Mixtral has 8 experts of 256 features, two per token.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
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
"""Steps per turn."""
PROCESSES = 5
"""Number of times that each side starts anew."""
MIXTRAL = "MixtralForCausalLM"
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
    MIXTRAL: dict(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=8,
        vocab_size=VOCAB,
        max_position_embeddings=SEQUENCE,
        pad_token_id=None,
    ),
}

Step = Callable[[], float]


def ratios() -> Iterator[Ratio]:
    """Measure each class in one process, Mixtral also as dslpar's own mixture, and Llama on two ranks."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            _in_child(_save, name, folder)
            found = compare(name, folder, 1, theirs)
            target = 1.05 if name == MIXTRAL else 1.03
            yield ratio(
                f"{name}: policy / transformers, one process, CPU", [cpu for cpu, _ in found], target, strict=True
            )
            if name == MIXTRAL:
                for what, build in (("policy, tokens sent", sent), ("GPT with experts", gpt)):
                    found = compare(name, folder, 1, theirs, build)
                    label = f"{name}: {what} / transformers, one process, CPU"
                    yield ratio(label, [cpu for cpu, _ in found], target, strict=True)
            if name == "LlamaForCausalLM":
                found = compare(name, folder, 2, of_their_tp)
                yield ratio(
                    "Llama: 1d / transformers' own TP, 2 ranks, wall", [wall for _, wall in found], 0.65, strict=True
                )
                yield ratio(
                    "Llama: 1d / transformers' own TP, 2 ranks, CPU", [cpu for cpu, _ in found], 0.65, strict=True
                )


Build = Callable[[str, str], Step]


def compare(name: str, folder: str, world: int, reference: Build, own: Build | None = None) -> list[Costs]:
    """Return the ratios of turns, CPU and wall, after checking that both take the same steps.

    `own` builds dslpar's side; None: `ours`.

    The memory addresses of a process make all its steps some percent faster or slower, so each side runs several times.
    """
    own = own or ours
    with side(partial(check_same, name, folder, reference, own), world):
        pass
    found: list[Costs] = []
    for _ in range(PROCESSES):
        with (
            side(partial(own, name, folder), world, STEPS) as of_ours,
            side(partial(reference, name, folder), world, STEPS) as of_theirs,
        ):
            found += in_turns(with_wall(of_ours), with_wall(of_theirs), pairs=15)
    return found


def with_wall(run: Callable[[], Costs]) -> Callable[[], Costs]:
    """Return the same turn, with its wall time in addition."""

    def timed() -> Costs:
        began = time.perf_counter()
        (cpu,) = run()
        return cpu, time.perf_counter() - began

    return timed


def check_same(name: str, folder: str, reference: Build, own: Build) -> Step:
    """Return a step that checks the losses of three steps; fp32 sums in other orders differ by some 1e-7."""
    losses = [[step() for _ in range(3)] for step in (own(name, folder), reference(name, folder))]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert len(set(losses[0])) == 3, "no step was taken"
    return lambda: 0.0


def _in_child(run: Callable[..., None], *args: str) -> None:
    """Run in a separate process: this one must not have run threads, since ranks fork from it."""
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


def ours(name: str, folder: str, exchanges_tokens: bool = False) -> Step:
    """Build the model by policy, on all ranks."""
    import transformers

    from dslpar.policies.model import HuggingFaceModel

    world = torch.distributed.get_world_size()
    tensor = mesh.TensorMesh(y=world, mode="1d") if world > 1 else mesh.TensorMesh()
    groups = Groups(Mesh(tensor=replace(tensor, exchanges_tokens=exchanges_tokens)))
    model = HuggingFaceModel(getattr(transformers, name), pretrained=folder)
    module, loss = build_module(model, groups, seed=1), model.loss(groups)
    return training(module, lambda ids, labels: loss(module(ids), labels))


def sent(name: str, folder: str) -> Step:
    """Build a mixture by policy that sends tokens to their experts, as with `parallel.expert`."""
    return ours(name, folder, exchanges_tokens=True)


def gpt(name: str, folder: str) -> Step:
    """Build a Mixtral as a GPT with experts, from the same folder."""
    from dslpar.models.gpt import hugging_face
    from dslpar.models.gpt.model import GPT
    from dslpar.models.pretrained import read_config

    groups = Groups(Mesh(tensor=mesh.TensorMesh(exchanges_tokens=True)))
    model = GPT(**hugging_face.fields_of(read_config(folder)), pretrained=folder)
    module, loss = build_module(model, groups, seed=1), model.loss(groups)
    return training(module, lambda ids, labels: loss(module(ids), labels))


def theirs(name: str, folder: str, **how: Any) -> Step:
    """Build the model as in transformers."""
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, **how)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return training(model, loss)


def of_their_tp(name: str, folder: str) -> Step:
    """Build the model with transformers' own TP plan over both ranks."""
    from transformers import DistributedConfig

    return theirs(name, folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))


def training(module: torch.nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """Return a step of SGD on one micro-batch, the same on all ranks, which returns its loss."""
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
