"""Training through DeepSpeed on one device: precisions, ZeRO stages, offload, recomputation; what a step waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import torch

from benchmarks.gpu.rows import Row, holds
from benchmarks.gpu.world import engine_of, one_rank
from dslpar.core.errors import DslparError
from dslpar.engine.compiled_layers import loses_gradients
from dslpar.linter import check

STEPS = 12
CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=128, num_heads=4, vocab_size=256, max_seq_len=64, {form})
optimizer = dict(type='AdamW', lr=3e-3)
batch = dict(micro_size=4, accumulation=2)
train = dict(steps=100, clip_grad_norm=1.0{train})
"""
LLAMA = "norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, num_kv_heads=2, tie_embeddings=False"
BF16 = "precision = 'bf16'\n"
# At DeepSpeed's first loss scale, 2**16, some of the twelve steps are skipped, and not the same ones at each stage.
FP16 = "precision = dict(dtype='fp16', initial_scale_power=12)\n"
KINDS: Mapping[str, str] = {
    "fp32": "zero = 0\n",
    **{f"bf16, ZeRO {stage}": f"{BF16}zero = {stage}\n" for stage in (1, 2, 3)},
    **{f"fp16, ZeRO {stage}": f"{FP16}zero = {stage}\n" for stage in (1, 2, 3)},
    "bf16, ZeRO 2, offloaded": f"{BF16}zero = dict(stage=2, offload_optimizer='cpu')\n",
    "bf16, ZeRO 1, recomputed": f"{BF16}zero = 1\nactivation_checkpoint = 1\n",
}
REFUSED: Mapping[str, str] = {"bf16, ZeRO 0": f"{BF16}zero = 0\n", "fp16, ZeRO 0": f"{FP16}zero = 0\n"}
"""DeepSpeed's step of half precision without ZeRO is wrong: lint says so, and nothing runs."""
FORMS: Mapping[str, str] = {"GPT": "", "Llama": LLAMA}
CLOSE = 0.05
"""Relative: half precision's losses after some steps, against those of float32."""


def learns(device: torch.device) -> Iterator[Row]:
    """Losses of GPT and Llama over the same micro-batches, in each precision and at each ZeRO stage."""
    with one_rank(device):
        for form, keys in FORMS.items():
            reference = math.nan
            for kind, more in KINDS.items():
                if device.type == "cpu" and "offload" in kind:
                    continue  # there all states are on the CPU
                losses = _losses(CONFIG.format(form=keys, train="") + more)
                if kind == "fp32":
                    reference = losses[1]
                yield _fell(f"{form}, {kind}", losses, reference)
    yield from refusals()


def refusals() -> Iterator[Row]:
    """Check that lint refuses what cannot be trained; one row each, so that no stage is left out silently."""
    for (form, keys), (kind, more) in product(FORMS.items(), REFUSED.items()):
        try:
            check.resolve(check.load_text(CONFIG.format(form=keys, train="") + more, "gpu.py"), 1)
            said = "lint takes it"
        except DslparError as error:
            said = ", ".join(finding.code for finding in error.findings)
        yield holds(f"{form}, {kind}: refused, not trained", said, "PRE101", said == "PRE101")


def compiled_learns(device: torch.device) -> Iterator[Row]:
    """The same of compiled blocks, against those that are not; apart, since torch.compile takes minutes."""
    more = KINDS["bf16, ZeRO 1"]
    if loses_gradients():
        yield cannot_compile()
        return
    with one_rank(device):
        for form, keys in FORMS.items():
            reference = _losses(CONFIG.format(form=keys, train="") + more)[1]
            losses = _losses(CONFIG.format(form=keys, train=", compile=True") + more)
            yield _fell(f"{form}, bf16, ZeRO 1, compiled", losses, reference)
        losses = _losses(CONFIG.format(form="", train=", compile=True, compile_components=['loss']") + more)
        reference = _losses(CONFIG.format(form="", train="") + more)[1]
        yield _fell("bf16, ZeRO 1, the loss alone compiled", losses, reference)


def cannot_compile() -> Row:
    """Say that this torch's compiler is refused (HST233)."""
    return Row("compiled layers", "not run", f"torch {torch.__version__} loses gradients")


def _fell(name: str, losses: tuple[float, float], reference: float) -> Row:
    first, last = losses
    return holds(
        f"{name}: loss after {STEPS} steps",
        f"{first:.3f} -> {last:.3f}",
        f"within {CLOSE:.0%} of {reference:.3f}",
        abs(last - reference) <= CLOSE * reference and last < first,
    )


def _losses(config: str) -> tuple[float, float]:
    """Return the first loss and the last."""
    engine = engine_of(config)
    ids = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(3))
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * 2
    losses = [engine.train_batch(batches) for _ in range(STEPS)]
    return losses[0], losses[-1]


def step_waits(device: torch.device) -> Iterator[Row]:
    """Count a step's waits for the device: torch warns once for each."""
    import warnings

    with one_rank(device):
        engine = engine_of(CONFIG.format(form="", train="") + KINDS["bf16, ZeRO 1"])
        ids = torch.randint(256, (4, 65), device=device)
        batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * 2
        for _ in range(3):
            engine.train_batch(batches)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_batch(batches)
        torch.cuda.set_sync_debug_mode("default")
        places = [
            f"{each.filename.rpartition('/')[2]}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
        ]
        yield holds(
            "a step, accumulation 2: waits of the host",
            f"{len(places)}: {', '.join(places)}"[:60],
            "1",
            len(places) == 1,
        )
