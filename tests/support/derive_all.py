"""Every causal language model of transformers that has a tensor plan: is what its plan tells exact, in every mode?

    python -m tests.support.derive_all                              # all, some minutes
    python -m tests.support.derive_all --classes LlamaForCausalLM OlmoForCausalLM
    python -m tests.support.derive_all --part 1/4                   # every fourth, from the first one on

Each class's policy is derived (`policy='derived'`) in miniature, and compared on forked CPU ranks with plain
transformers: logits, loss and every gradient in float64, samples padded. A class is exact in all modes, or refused by a
finding; anything else, a crash among it, is an error: exit status 1. `--json FILE` writes what was seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Tensor
from dslpar.layout.modes import cuboid_of
from dslpar.policies import compare
from dslpar.policies.check import CLOSE, MODES
from dslpar.policies.compare import Subject
from dslpar.policies.model import HuggingFaceModel
from tests.support.ranks import RankError, on_ranks

SHOWN = ("1d 2", "1d 2 sequence", "2d 4", "3d 8", "cuboid (1, 2, 2)")
LAYOUTS: Mapping[str, Tensor] = {name: cuboid_of(MODES[name]) for name in SHOWN}
RANKS = 8

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,  # not hidden_size / num_attention_heads: who confuses them is found
    "vocab_size": 70,  # which every mode must pad
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "initializer_range": 0.15,  # so that activations are of order 1, and a lost term shows
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # multipliers that are 1 by default would hide that they are lost
    "embedding_multiplier": 1.3,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.7,
    "logit_scale": 0.3,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 5,
    # latent attention
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    # experts
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "n_shared_experts": 1,
}
"""Of all that have a field of the name; what divides by 2 d of 2, and nothing equal to another length."""

OWN: Mapping[str, Mapping[str, Any]] = {
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1]},
}
"""What a class needs besides, by its name."""


class Row(NamedTuple):
    """What a class has shown."""

    name: str
    outcome: str
    """exact, refused, wrong, or crashed."""
    worst: float
    """How far the farthest tensor of all modes is off, relative to its largest element."""
    why: str
    """The mode and the tensor that are farthest; the finding; or the error."""
    seconds: float


def classes() -> list[str]:
    """Names of transformers' causal language models whose configs have a tensor plan."""
    names = [name for name in dir(transformers) if name.endswith(("ForCausalLM", "LMHeadModel"))]
    configs = {name: getattr(getattr(transformers, name), "config_class", None) for name in names}
    return [name for name in names if getattr(configs[name], "base_model_tp_plan", None)]


def miniature(name: str) -> Any:
    """Make a config of a class: small, with every kind of layer that its default has."""
    cls = getattr(transformers, name).config_class
    default = cls()
    known = {*vars(default), *getattr(default, "attribute_map", {})}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    sizes |= {key: None for key in ("layer_types", "mlp_layer_types") if key in known}
    for key in ("layer_types",):
        kinds = list(dict.fromkeys(getattr(default, key, None) or ()))
        if len(kinds) > 1:
            sizes[key] = [kinds[number % len(kinds)] for number in range(sizes["num_hidden_layers"])]
    for key, value in vars(default).items():
        if "drop" in key and isinstance(value, float):
            sizes[key] = 0.0
    return cls(**sizes | OWN.get(name, {}))


def shown(name: str) -> Row:
    """Derive and compare one class."""
    began = time.monotonic()
    try:
        outcome, worst, why = _compared(Subject(getattr(transformers, name), miniature(name), "derived"))
    except DslparError as error:
        outcome, worst, why = "refused", 0.0, "; ".join(each.message for each in error.findings)
    except RankError as error:
        outcome, worst, why = "crashed", 0.0, str(error)[-600:]
    except Exception:  # whatever transformers' code raises is a row of the table, and an error of it
        outcome, worst, why = "crashed", 0.0, traceback.format_exc(limit=-3)
    return Row(name, outcome, worst, why, time.monotonic() - began)


def _compared(subject: Subject) -> tuple[str, float, str]:
    torch.set_default_dtype(torch.float64)
    model = HuggingFaceModel(*subject)
    model.layers  # noqa: B018
    cls, config = subject.cls, subject.config
    eager = getattr(config, "attn_logit_softcapping", None) or not cls._supports_sdpa
    plain, weights = compare.plain(cls, config, "eager" if eager else "sdpa")
    batch = compare.batch(config.vocab_size)
    reference = compare.reference(plain, batch, padded=True)
    with tempfile.TemporaryDirectory(prefix="dslpar_derive_") as folder:
        ranks = on_ranks(RANKS, _rank, folder, model, weights, batch, reference, init=None)
    found = {mode: [rank[mode] for rank in ranks if mode in rank] for mode in LAYOUTS}
    worst, why = 0.0, ""
    refused = {}
    for mode, results in found.items():
        for each in results:
            if isinstance(each, str) and not each.startswith("refused"):
                return "crashed", 0.0, f"{mode}: {each}"
            if isinstance(each, str):
                refused[mode] = each.removeprefix("refused: ")
            elif not each[0] <= worst:
                worst, why = each[0], f"{mode}: {each[1]}"
    if worst > CLOSE:
        return "wrong", worst, why
    if refused:
        return "refused", worst, "; ".join(f"{mode}: {text}" for mode, text in refused.items())
    return "exact", worst, why


def _rank(
    folder: str, model: HuggingFaceModel, weights: Mapping[str, torch.Tensor], batch: compare.Batch, reference: Any
) -> dict[str, tuple[float, str] | str]:
    """Compare in every mode whose ranks this one is among: how far the farthest tensor is off, or why it failed."""
    import os

    rank = int(os.environ["RANK"])
    found: dict[str, tuple[float, str] | str] = {}
    for number, (mode, tensor) in enumerate(LAYOUTS.items()):
        if rank >= tensor.size:
            continue
        store = dist.FileStore(str(Path(folder, f"store{number}")), tensor.size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=tensor.size, timeout=timedelta(seconds=30)
        )
        try:
            result = compare.by_policy(model, weights, tensor, batch, padded=True)
            off = compare.worst(result, reference)
            name = max(off, key=lambda each: float("inf") if off[each] != off[each] else off[each])
            found[mode] = (off[name], name)
        except DslparError as error:
            found[mode] = "refused: " + "; ".join(each.message for each in error.findings)
        except Exception:
            found[mode] = traceback.format_exc(limit=-4)
        dist.destroy_process_group()
    return found


def part_of(names: Sequence[str], part: str) -> list[str]:
    """Return the names of part "1/4"."""
    number, _, count = part.partition("/")
    return list(names)[int(number) - 1 :: int(count)]


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Yield what each class has shown."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for name in names:
        yield shown(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", metavar="CLASS")
    parser.add_argument("--part", default="1/1", metavar="N/M")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = []
    for row in rows(part_of(args.classes or classes(), args.part)):
        found.append(row)
        off = f"{row.worst:.1e}" if row.outcome in ("exact", "wrong") else ""
        print(f"{row.name:28}{row.outcome:9}{row.seconds:5.1f} s  {off:9}{row.why}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([row._asdict() for row in found], indent=1) + "\n")
    counts = Counter(row.outcome for row in found)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    sys.exit(1 if counts["wrong"] + counts["crashed"] else 0)


if __name__ == "__main__":
    main()
