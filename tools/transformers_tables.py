"""Write dslpar/schema/data/transformers.json: the config fields and the parameters of transformers' models.

python tools/transformers_tables.py            # writes the file anew
python tools/transformers_tables.py --check    # compares; exits 1, with the difference, where they differ

A config class is a dataclass, whose fields are read. A model's parameters are found by trying: the model is built on
the meta device with sizes that no sum or product confuses, and each dim of each parameter is named by the size that it
equals. Then each switch of the config is toggled, to see what it adds. Models for which this fails have only their
config in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from dslpar.schema.transformers_configs import GATED, NAMES
from dslpar.schema.transformers_policies import DERIVED, POLICIES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "dslpar" / "schema" / "data" / "transformers.json"

MORE = ("ViTMAEForPreTraining",)
"""Models in addition to those with a policy, and the causal language models that transformers lists."""
LEFT_OUT = {
    "BailingHybridForCausalLM": "its layers of linear attention differ from the others",
    "DogeForCausalLM": "the square of the number of its experts is a size",
    "StableLmForCausalLM": "it has a norm a head, which looks like a size",
    "XLNetLMHeadModel": "its size of heads follows from others, and is refused where it does not",
}
"""Models whose analysis succeeds, but is wrong for other sizes: tests/unit/layout/test_transformers_costs.py."""
SIZES: Mapping[str, int] = {
    "heads": 77,
    "kv_heads": 7,
    "head_dim": 34,
    "hidden": 77 * 46,
    "ffn": 4099,
    "expert_ffn": 577,
    "shared_ffn": 4513,
    "experts": 13,
    "shared_experts": 19,
    "q_latent": 389,
    "kv_latent": 271,
    "rotary_dim": 62,
    "plain_dim": 106,
    "value_dim": 146,
    "vocab": 5003,
    "positions": 6007,
    "image": 11 * 29,
    "patch": 11,
    "channels": 5,
}
"""Sizes to try: no two of them are equal, nor small multiples or sums that a weight may have."""
NUM_LAYERS, NUM_LABELS = 3, 23
DENSE = "first_k_dense_replace"
"""Field with the number of blocks, from the first on, that have an MLP instead of experts."""
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TO_BUILD: Mapping[str, Mapping[str, Any]] = {
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
}
"""Settings that a model needs in addition to sizes."""
CONSTANTS = 16
"""Dims up to this may be constants of the code."""
KNOWN = {*DERIVED, *POLICIES}
"""Classes with a policy, for which lint needs at least the blocks."""
OF_EVERY_CONFIG = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
OLDER = {"torch_dtype", "rope_scaling", "rope_theta", "num_labels", "attn_implementation", "experts_implementation"}
OLDER |= {"name_or_path", "out_features", "out_indices"}
OLDER |= {"pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "output_attentions"}
"""Further keys that each config class accepts, or that older files have under another name."""
SAME_MODEL = OF_EVERY_CONFIG - {"tie_word_embeddings"} | {"use_cache", "is_decoder"}
"""Switches that do not change a trained model."""


class NotUnderstoodError(Exception):
    """A model's parameters are not sums of products of sizes."""


def main() -> int:
    """Write or compare the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--verbose", action="store_true", help="say why a model has its config alone")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    text = as_json(*tables(verbose=args.verbose))
    if not args.check:
        TARGET.write_text(text)
        return 0
    before = TARGET.read_text().splitlines()
    difference = [*difflib.unified_diff(before, text.splitlines(), "in the file", "installed", lineterm="")]
    print("\n".join(difference))
    return 1 if difference else 0


def tables(*, verbose: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of config classes, and the rows of models."""
    configs: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name in sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *KNOWN, *MORE} - {*LEFT_OUT}):
        cls = getattr(transformers, name)
        config = cls.config_class
        try:
            models[name] = {"config": config.__name__} | row_of(cls)
            configs[config.__name__] = config_row(config, models[name])
        except NotUnderstoodError as error:
            if verbose:
                print(f"{name}: {error}")
            if name in KNOWN:
                models[name] = {"config": config.__name__, "blocks": lists_of(cls)}
                configs[config.__name__] = config_row(config, {})
    return dict(sorted(configs.items())), models


def lists_of(cls: Any) -> dict[str, str]:
    """Return only the lists of blocks, or nothing for a class without the tried sizes."""
    try:
        return Probe(cls, takes_head_dim=True).lists()
    except (NotUnderstoodError, AttributeError):  # AttributeError: one more block makes other lists
        return {}


def as_json(configs: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the file's text, with a line per row."""
    parts = []
    for name, rows in (("configs", configs), ("models", models)):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    common = sorted(OF_EVERY_CONFIG | OLDER)
    head = f' "version": {json.dumps(transformers.__version__)},\n "common": {json.dumps(common)},\n'
    return "{\n" + head + ",\n".join(parts) + "\n}\n"


# Configs ----------------------------------------------------------------------------------------------------------


def config_row(config: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their defaults, and their other names."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.name in OF_EVERY_CONFIG and field.name != "tie_word_embeddings":
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if isinstance(default, tuple):
            default = list(default)
        if not isinstance(default, str | int | float | list | None):
            default = None
        defaults[field.name] = default
    if not {*NAMES["head_dim"]} & {*defaults} and any(
        re.search(r"\bq\b", terms) for terms in model.get("parts", {}).values()
    ):
        defaults.setdefault("head_dim", None)  # some models read it, although their config does not declare it
    row: dict[str, Any] = {"model_type": config.model_type, "defaults": defaults}
    names = {name: own for name, own in config.attribute_map.items() if own in defaults and name not in defaults}
    return row | ({"names": names} if names else {})


# Models -----------------------------------------------------------------------------------------------------------


def row_of(cls: Any) -> dict[str, Any]:
    """Return a model's parameters. Raises: NotUnderstoodError."""
    try:
        return Probe(cls, takes_head_dim=True).row()
    except NotUnderstoodError:  # its heads have size hidden / heads
        return Probe(cls, takes_head_dim=False).row()


class Probe:
    """A model that is built repeatedly with other sizes and switches."""

    def __init__(self, cls: Any, *, takes_head_dim: bool) -> None:
        self.cls = cls
        self.fields = {field.name: field for field in dataclasses.fields(cls.config_class)}
        found = {size: next((name for name in names if name in self.fields), "") for size, names in NAMES.items()}
        self.own = {size: name for size, name in found.items() if name}
        self.sizes = dict(SIZES)
        if takes_head_dim:
            self.own.setdefault("head_dim", "head_dim")
        else:
            self.own.pop("head_dim", None)
            self.sizes["hidden"] = SIZES["heads"] * SIZES["head_dim"]
        if "kv_heads" not in self.own:
            self.sizes["kv_heads"] = SIZES["heads"]
        self.dims = dict(self._dims())

    def row(self) -> dict[str, Any]:
        """Return the model's parameters. Raises: NotUnderstoodError."""
        if "layers" not in self.own or "hidden" not in self.own:
            raise NotUnderstoodError("no number of layers, or no hidden size")
        model = self.build({})
        lists = self._lists(model)
        found = self._parts(model, lists)
        switches = {}
        for name, value in self._switches():
            try:
                changed = self._parts(self.build({name: value}), lists)
            except (NotUnderstoodError, AttributeError):
                continue
            if more := _difference(changed, found):
                switches[name] = more
        row: dict[str, Any] = {"blocks": lists, "parts": {part: _text(terms) for part, terms in found.items()}}
        head = model.get_output_embeddings()
        if head is not None:
            row["head"] = _text(self._terms(head.weight.shape))
        return row | ({"switches": switches} if switches else {})

    def _switches(self) -> Iterator[tuple[str, object]]:
        for name, field in self.fields.items():
            if isinstance(field.default, bool) and name not in SAME_MODEL:
                yield name, not field.default
        if "feed_forward_proj" in self.fields:
            yield "feed_forward_proj", GATED

    def build(self, changes: Mapping[str, Any]) -> Any:
        """Build it on the meta device."""
        given = {self.own[size]: value for size, value in self.sizes.items() if size in self.own}
        given |= dict.fromkeys(self._counts(), NUM_LAYERS)
        if DENSE in self.fields:
            given[DENSE] = 1
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if name in self.fields:
                given[name] = 1
        try:
            given |= TO_BUILD.get(self.cls.__name__, {})
            config = self.cls.config_class(**(given | {"num_labels": NUM_LABELS} | dict(changes)))
            with torch.device("meta"):
                model = self.cls._from_config(config)
            model.tie_weights()
            return model
        except Exception as error:  # noqa: BLE001 - of any of two hundred models' code
            raise NotUnderstoodError(f"{type(error).__name__}: {str(error)[:200]}") from None

    def _counts(self) -> list[str]:
        """Return the fields that count blocks."""
        return [name for name in self.fields if name in {*NAMES["layers"], *NAMES["decoder_layers"]}]

    def lists(self) -> dict[str, str]:
        """Return only the lists of blocks, for a model whose blocks differ."""
        return self._lists(self.build({}))

    def _lists(self, model: Any) -> dict[str, str]:
        """Return the outermost lists of blocks, each with the field of its length."""
        found: dict[str, str] = {}
        for name, module in model.named_modules():
            is_inner = any(name.startswith(f"{other}.") for other in found)
            if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters()) and not is_inner:
                found[name] = ""
        for own in self._counts():
            more = self.build({own: NUM_LAYERS + 1})
            for name in found:
                if len(more.get_submodule(name)) == len(model.get_submodule(name)) + 1:
                    found[name] = own
        if not found or not all(found.values()):
            raise NotUnderstoodError(f"what the lists {', '.join(found)} hold is not counted")
        return found

    def _parts(self, model: Any, lists: Mapping[str, str]) -> dict[str, Counter[str]]:
        """Return the parameters in the table, before, in and after the blocks, and in the head."""
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        parts: dict[str, Counter[str]] = {}
        seen: set[int] = set()
        seen_blocks = False
        for module_name, module in model.named_modules():
            for name, p in module.named_parameters(recurse=False):
                if id(p) in seen:
                    continue
                seen.add(id(p))
                full = f"{module_name}.{name}"
                inside = next((each for each in lists if full.startswith(f"{each}.")), None)
                terms = self._terms(p.shape)
                if inside is not None:
                    seen_blocks = True
                    part = ".".join([inside, full.removeprefix(f"{inside}.").partition(".")[0]])
                elif module is table and name == "weight":
                    part = "table"
                elif module is head:
                    part = "head"
                else:
                    positions = any("positions" in term for term in terms)
                    part = "back" if seen_blocks and not positions else "front"
                parts.setdefault(part, Counter()).update(terms)
        for name in lists:
            blocks = [parts.pop(f"{name}.{number}", Counter()) for number in range(NUM_LAYERS)]
            if any(block != blocks[1] for block in blocks[2:]):
                raise NotUnderstoodError(f"blocks of {name} differ")
            parts[name] = blocks[1]
            if more := _minus(blocks[0], blocks[1]):
                parts[f"{name}.dense" if DENSE in self.fields else f"{name}.0"] = more
        return parts

    # ---- dims ----

    def _dims(self) -> Iterator[tuple[int, Counter[str]]]:
        """Yield candidates for a dim: a sum of sizes, with its value; the last of equal ones wins."""
        sizes = {size: value for size, value in self.sizes.items() if size in self.own}
        others = [field for field in self.fields.values() if field.name not in self.own.values()]
        numbers = Counter(field.default for field in others if type(field.default) is int)
        for field in others:  # such as relative_attention_num_buckets
            if numbers[field.default] == 1 and type(field.default) is int and field.default > CONSTANTS:
                yield field.default, Counter({field.name: 1})
        yield NUM_LABELS, Counter({"labels": 1})
        if "image" in sizes:
            yield (sizes["image"] // sizes["patch"]) ** 2 + 1, Counter({"patches": 1, "": 1})
            yield sizes["patch"] ** 2 * sizes["channels"], Counter({"pixels": 1})
        sizes |= {"head_dim": self.sizes["head_dim"], "q": self.sizes["heads"] * self.sizes["head_dim"]}
        if "kv_heads" in self.own:
            sizes["kv"] = self.sizes["kv_heads"] * self.sizes["head_dim"]
            yield sizes["q"] + 2 * sizes["kv"], Counter({"q": 1, "kv": 2})
        if "kv_latent" in sizes and "q_latent" in sizes:  # latent attention
            heads, rotary, plain, value = (
                self.sizes[each] for each in ("heads", "rotary_dim", "plain_dim", "value_dim")
            )
            yield sizes["kv_latent"] + rotary, Counter({"kv_latent": 1, "rotary_dim": 1})
            yield heads * (plain + rotary), Counter({"heads*plain_dim": 1, "heads*rotary_dim": 1})
            yield heads * (plain + value), Counter({"heads*plain_dim": 1, "heads*value_dim": 1})
            yield heads * value, Counter({"heads*value_dim": 1})
        if "shared_experts" in sizes and "expert_ffn" in sizes:
            yield sizes["shared_experts"] * sizes["expert_ffn"], Counter({"expert_ffn*shared_experts": 1})
        if "positions" in sizes:  # the tables of OPT and RoBERTa have two more rows
            yield sizes["positions"] + 2, Counter({"positions": 1, "": 2})
        for size in sorted(sizes, key="hidden".__eq__):  # a size that equals q is called hidden
            yield from ((times * sizes[size], Counter({size: times})) for times in (8, 6, 4, 3, 2, 1))

    def _terms(self, shape: tuple[int, ...]) -> Counter[str]:
        """Return the product of a parameter's dims, as a sum of terms."""
        terms: Counter[tuple[str, ...]] = Counter({(): 1})
        for dim in shape:
            sums = self.dims.get(dim) or (Counter({"": dim}) if dim <= CONSTANTS else None)
            if sums is None:
                raise NotUnderstoodError(f"a parameter of shape {tuple(shape)}")
            product: Counter[tuple[str, ...]] = Counter()
            for names, times in terms.items():
                for name, more in sums.items():
                    product[tuple(sorted((*names, *([name] if name else []))))] += times * more
            terms = product
        return Counter({_factors(names): times for names, times in terms.items()})


def _factors(names: tuple[str, ...]) -> str:
    names = tuple(sorted(part for name in names for part in name.split("*")))
    for whole, parts in (("q", ("head_dim", "heads")), ("kv", ("head_dim", "kv_heads"))):
        if all(part in names for part in parts):
            names = tuple(sorted([*(name for name in names if name not in parts), whole]))
    return "*".join(names) or "1"


def _difference(new: Mapping[str, Counter[str]], old: Mapping[str, Counter[str]]) -> dict[str, str]:
    found = {part: _minus(new.get(part, Counter()), old.get(part, Counter())) for part in {**new, **old}}
    return {part: _text(terms) for part, terms in found.items() if terms}


def _minus(a: Counter[str], b: Counter[str]) -> Counter[str]:
    found = Counter(a)
    found.subtract(b)
    return Counter({term: count for term, count in found.items() if count})


def _text(terms: Counter[str]) -> str:
    """Return terms as text, such as "2 hidden + 3 hidden*ffn"."""
    return " + ".join(f"{count} {term}" if count != 1 else term for term, count in sorted(terms.items()))


if __name__ == "__main__":
    sys.exit(main())
