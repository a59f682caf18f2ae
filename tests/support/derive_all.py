"""Derive a policy for every transformers causal LM with a tensor plan, and compare it with plain transformers.

    python -m tests.support.derive_all                              # all, some minutes
    python -m tests.support.derive_all --classes LlamaForCausalLM OlmoForCausalLM
    python -m tests.support.derive_all --part 1/4                   # every fourth, from the first one on

Each class's policy is derived (`policy='derived'`) for a small model, and compared with plain transformers on forked
CPU ranks: logits, loss and every gradient in float64, with padded samples. A class must be exact in all modes, or
refused by a finding. Anything else, a crash included, is an error with exit status 1. `--page` writes
docs/derived_policies.md.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import tempfile
import textwrap
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
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.layout.modes import cuboid_of
from dslpar.models.layered import build_module
from dslpar.policies import hf_parity
from dslpar.policies.check import CLOSE, MODES
from dslpar.policies.hf_parity import Subject
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import parameters_with_sources
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks

SHOWN = ("1d 2", "1d 2 sequence", "2d 4", "3d 8", "cuboid (1, 2, 2)")
LAYOUTS: Mapping[str, TensorMesh] = {name: cuboid_of(MODES[name]) for name in SHOWN}
RANKS, TIMEOUT = 8, timedelta(days=1)
PAGE = ROOT / "docs" / "derived_policies.md"

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,  # not hidden_size / num_attention_heads, to find code that confuses them
    "vocab_size": 70,  # which every mode must pad
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "initializer_range": 0.15,  # activations are of order 1, so a lost term shows
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # multipliers of 1, the default, would hide a lost one
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
    "first_k_dense_replace": 1,
    "router_jitter_noise": 0.0,  # otherwise it is refused
}
"""Sizes of every class with the field. Sharded ones divide by two axes of 2, and no two lengths are equal."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OWN: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassForCausalLM": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "Gemma3ForCausalLM": {"attn_logit_softcapping": None},  # its attention ignores it
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    # a second table of tokens per layer is refused
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "HeliumForCausalLM": {"head_dim": 8},  # no other size computes
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "Mistral4ForCausalLM": {"head_dim": 10},  # both parts of a key; partial_rotary_factor gives rotary's share
    "Qwen4ExpForCausalLM": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 24,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1]},
}
"""Further settings by class name."""


class Row(NamedTuple):
    """The result of one class."""

    name: str
    outcome: str
    """exact, refused, wrong, or crashed."""
    worst: float
    """The largest error of any tensor in any mode, relative to the tensor's largest element."""
    why: str
    """The mode and tensor of the largest error, or the finding, or the traceback."""
    seconds: float


def classes() -> list[str]:
    """Return the names of transformers' causal LMs whose configs have a tensor plan."""
    names = [name for name in dir(transformers) if name.endswith(("ForCausalLM", "LMHeadModel"))]
    configs = {name: getattr(getattr(transformers, name), "config_class", None) for name in names}
    return [name for name in names if getattr(configs[name], "base_model_tp_plan", None)]


def miniature(name: str) -> Any:
    """Make a small config of a class, with every kind of layer of its default."""
    cls = getattr(transformers, name).config_class
    default = cls()
    known = {*vars(default), *getattr(default, "attribute_map", {})}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:  # latent attention: one key per head, and rotary's dims are head_dim
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"]}
        sizes |= {"head_dim": SIZES["qk_rope_head_dim"]} if "head_dim" in known else {}
    for key in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(vars(default).get(key) or ()))
        if len(kinds) > 1:
            sizes[key] = [kinds[number % len(kinds)] for number in range(sizes["num_hidden_layers"])]
    for key, value in vars(default).items():
        if "drop" in key and isinstance(value, float):
            sizes[key] = 0.0
    return cls(**sizes | OWN.get(name, {}))


def row(name: str) -> Row:
    """Derive and compare one class."""
    began = time.monotonic()
    try:
        outcome, worst, why = _compared(Subject(getattr(transformers, name), miniature(name), "derived"))
    except DslparError as error:
        outcome, worst, why = "refused", 0.0, _messages(error).removeprefix(f"{name}: ")
    except Exception:  # any exception of transformers' code becomes a row, and an error of this command
        outcome, worst, why = "crashed", 0.0, traceback.format_exc(limit=-3)
    return Row(name, outcome, worst, why, time.monotonic() - began)


def _messages(error: DslparError) -> str:
    return "; ".join(each.message for each in error.findings)


def _compared(subject: Subject) -> tuple[str, float, str]:
    """Return outcome, largest error and reason over all modes."""
    torch.set_default_dtype(torch.float64)
    model = HuggingFaceModel(*subject)
    # torch's SDPA lacks these features, and transformers computes them in plain torch.
    eager = getattr(subject.config, "attn_logit_softcapping", None) or not subject.cls._supports_sdpa
    plain, weights = hf_parity.plain(subject.cls, subject.config, "eager" if eager else "sdpa")
    if differs := unlike(model, plain):
        return "wrong", math.inf, f"begins otherwise: {differs}"
    batch, reference = hf_parity.reference(plain, hf_parity.make_inputs(subject.config))
    with tempfile.TemporaryDirectory(prefix="dslpar_derive_") as folder:
        cells = on_ranks(RANKS, _cells, folder, model, weights, batch, reference, init=None)
    found = {mode: [rank[mode] for rank in cells if mode in rank] for mode in LAYOUTS}
    for outcome in ("crashed", "refused"):
        whys: dict[str, list[str]] = {}
        for mode, of_ranks in found.items():
            if failed := [cell.why for cell in of_ranks if cell.outcome == outcome]:
                whys.setdefault(failed[0], []).append(mode)
        if whys:
            texts = [why if len(modes) == len(found) else f"{', '.join(modes)}: {why}" for why, modes in whys.items()]
            return outcome, 0.0, "; ".join(texts)
    worst, why = max((cell.worst, f"{mode}: {cell.why}") for mode, of_ranks in found.items() for cell in of_ranks)
    return "exact" if worst <= CLOSE else "wrong", worst, why


def unlike(model: HuggingFaceModel, plain: Any) -> str:
    """Return a parameter whose initial mean and spread differ from transformers'; "" if there is none."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fresh = dict(type(plain)._from_config(copy.deepcopy(plain.config)).named_parameters())
    module = build_module(model, Groups(Mesh()), seed=5)
    for _, p, sources in parameters_with_sources(module):
        lengths = [fresh[source.name].shape[1 if source.transposed else 0] for source in sources]
        for source, part in zip(sources, torch.split(p.detach(), lengths), strict=True):
            other = fresh[source.name].detach()
            spread, off = other.std(correction=0), 8 / math.sqrt(other.numel())
            means, spreads = part.mean() - other.mean(), part.std(correction=0) - spread
            if not (means.abs() <= off * spread + 1e-6 and spreads.abs() <= off * spread + 1e-6):
                return source.name
    return ""


class Cell(NamedTuple):
    """The result of one mode on one rank."""

    outcome: str
    worst: float
    why: str


def _cells(
    folder: str,
    model: HuggingFaceModel,
    weights: Mapping[str, torch.Tensor],
    batch: hf_parity.Batch,
    reference: Any,
) -> dict[str, Cell]:
    """Compare in every mode that includes this rank, one after the other."""
    rank, found = int(os.environ["RANK"]), {}
    for mode, tensor in LAYOUTS.items():
        if rank >= tensor.size:
            continue
        store = dist.FileStore(str(Path(folder, mode)), tensor.size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=tensor.size, timeout=TIMEOUT)
        try:
            off = hf_parity.worst(hf_parity.by_policy(model, weights, tensor, batch), reference)
            worst, name = max((math.inf if math.isnan(value) else value, name) for name, value in off.items())
            found[mode] = Cell("shown", worst, name)
        except DslparError as error:
            found[mode] = Cell("refused", 0.0, _messages(error))
        except Exception:
            found[mode] = Cell("crashed", 0.0, traceback.format_exc(limit=-4))
        dist.destroy_process_group()
    return found


def part_of(names: Sequence[str], part: str) -> list[str]:
    """Return the names of a part, such as "1/4"."""
    number, _, count = part.partition("/")
    return list(names)[int(number) - 1 :: int(count)]


def rows(names: Sequence[str]) -> Iterator[Row]:
    """Yield the result of each class."""
    transformers.logging.set_verbosity_error()
    before = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from map(row, names)
    finally:
        torch.set_default_dtype(before)


def page(found: Sequence[Row]) -> str:
    """Return docs/derived_policies.md."""
    exact = [row.name for row in found if row.outcome == "exact"]
    lines = [f"| {row.name} | {_short(row.why)} |" for row in found if row.outcome == "refused"]
    return _PAGE.format(
        number=len(found),
        version=transformers.__version__,
        num_exact=len(exact),
        exact=textwrap.fill("Exact: " + ", ".join(exact), 120, break_on_hyphens=False),
        refused="\n".join(lines),
    )


def _short(why: str) -> str:
    """Return the first problem of a refusal."""
    first, _, rest = why.partition("; ")
    return f"{first.replace('|', '/')}{'; ...' if rest else ''}"


_PAGE = """\
# Derived policies

Of {number} causal language models of transformers {version} with a tensor plan, {num_exact} need no line of a \
policy. In 1d, 1d with
`sequence=True`, 2d, 3d and a cuboid (1, 2, 2), their logits, loss and every gradient equal those of plain transformers,
to 1e-12 in float64, with padded samples. The others are refused, with a message that names the part that is not
understood. No class computes something else. (Written by `python -m tests.support.derive_all --page`; `make prove` runs
all of them again.)

{exact}

| refused | what is not understood |
|---|---|
{refused}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", metavar="CLASS")
    parser.add_argument("--part", default="1/1", metavar="N/M")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    found = []
    for each in rows(part_of(args.classes or classes(), args.part)):
        found.append(each)
        off = f"{each.worst:.1e}" if each.outcome in ("exact", "wrong") else ""
        print(f"{each.name:28}{each.outcome:9}{each.seconds:5.1f} s  {off:9}{each.why}", flush=True)
    counts = Counter(each.outcome for each in found)
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()))
    if args.page:
        PAGE.write_text(page(found))
    sys.exit(1 if counts["wrong"] + counts["crashed"] else 0)


if __name__ == "__main__":
    main()
