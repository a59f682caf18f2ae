"""Choose small sizes of a model that divide over the axes of a small world.

    small = small_model(job.spec.model, [cuboid], num_layers=3, seq_len=12)

Each size begins at a small number that shares few divisors with the others. It grows until every condition of
`dslpar.layout.family_interface.conditions` holds, which lint also uses. Everything that determines the maths is kept:
tied weights, shared key heads, experts and their number per token, norms, activations, positions, layers of several
types. Dropout rates become 0, since each rank draws masks for its own piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.layout import family_interface
from dslpar.layout.divisors import Condition
from dslpar.schema.sections import Experts, Model, OtherModel
from dslpar.schema.transformers_configs import TransformersConfig

Sized = Model | OtherModel


class Change(NamedTuple):
    """A config key whose value differs in the small run."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


class SmallModel(NamedTuple):
    """A model in miniature."""

    model: Sized
    changes: tuple[Change, ...]
    """Changed sizes and dropout rates."""
    not_proven: tuple[str, ...]
    """Parts of the model that the small run cannot cover."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def without_dropout(model: Sized) -> SmallModel:
    """Return the model at its own size with dropout rates of 0: masks depend on the replica and the micro-batch."""
    if isinstance(model, Model):
        rates = _dropout_rates({item.name: getattr(model, item.name) for item in fields(type(model))})
        changes = tuple(Change(f"model.{name}", getattr(model, name), 0.0) for name in rates)
        return SmallModel(replace(model, **rates), changes, ())
    config = model.transformers
    rates = _dropout_rates(config.values) if config is not None else {}
    if config is None or not rates:
        return _without_dropout_of_adapters(SmallModel(model, (), ()))
    own_names = {config.other_names.get(name, name): name for name in model.args.get("config") or {}}
    written = {**(model.args.get("config") or {}), **{own_names.get(name, name): 0.0 for name in rates}}
    changes = tuple(Change(f"model.config.{config.keys.get(name, name)}", config.values[name], 0.0) for name in rates)
    made = SmallModel(replace(model, args={**model.args, "config": written}), changes, ())
    return _without_dropout_of_adapters(made)


def _dropout_rates(values: Mapping[str, Any]) -> dict[str, float]:
    """Return 0 for each nonzero dropout rate among the values."""
    return {name: 0.0 for name, value in values.items() if "drop" in name and isinstance(value, float) and value}


# ---- dslpar's own families ----

_FIELDS: Mapping[str, int] = {
    "hidden_size": 24,
    "width": 24,
    "num_heads": 4,
    "ffn_hidden_size": 40,
    "vocab_size": 53,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 3,
    "num_classes": 7,
    "projection_size": 20,
    "projection_hidden_size": 28,
}
"""Initial small value of each size in a family's section."""


def small_model(
    model: Sized, cuboids: Sequence[TensorMesh], num_layers: int | None, seq_len: int, at_least: int = 1
) -> SmallModel:
    """Return the model in miniature, with `num_layers` layers and sizes that divide on all cuboids.

    `num_layers` is None if the config's key for the number of layers is unknown. The miniature then has at least
    `at_least` blocks, if the config lists its blocks.
    """
    if isinstance(model, OtherModel):
        made = SmallModel(model, (), ())
        if model.transformers is not None:
            made = _small_transformers(model, model.transformers, cuboids, num_layers, seq_len, at_least)
        return _without_dropout_of_adapters(made)
    return _small_family(model, cuboids, num_layers, seq_len)


def _without_dropout_of_adapters(made: SmallModel) -> SmallModel:
    model = made.model
    if not isinstance(model, OtherModel) or model.lora is None or not model.lora.lora_dropout:
        return made
    change = Change("model.lora.lora_dropout", model.lora.lora_dropout, 0.0)
    model = replace(model, lora=replace(model.lora, lora_dropout=0.0))
    return SmallModel(model, (*made.changes, change), made.not_proven)


def _small_family(model: Model, cuboids: Sequence[TensorMesh], num_layers: int | None, seq_len: int) -> SmallModel:
    known = {item.name: getattr(model, item.name) for item in fields(type(model))}
    sizes: dict[str, Any] = {name: min(known[name], small) for name, small in _FIELDS.items() if known.get(name)}
    if num_layers is not None:
        sizes["num_layers"] = num_layers
    if "max_seq_len" in known:
        sizes["max_seq_len"] = seq_len
    if known.get("num_kv_heads"):
        sizes["num_kv_heads"] = _kv_heads(known["num_heads"], known["num_kv_heads"], sizes["num_heads"])
    if "patch_size" in sizes and "image_size" in sizes:
        sizes["image_size"] = sizes["patch_size"] * min(4, known["image_size"] // known["patch_size"])
    sizes |= _dropout_rates(known)
    if known.get("pretrained"):
        sizes["pretrained"] = None
    if isinstance(experts := known.get("experts"), Experts):
        known |= {f"experts.{item.name}": getattr(experts, item.name) for item in fields(experts)}
        sizes |= _small_experts(experts, sizes.get("num_layers", model.num_layers))
    step = {"image_size": sizes.get("patch_size", 1)}

    def made(sizes: Mapping[str, Any]) -> Model:
        of_experts = {name.partition(".")[2]: value for name, value in sizes.items() if name.startswith("experts.")}
        own = {name: value for name, value in sizes.items() if not name.startswith("experts.")}
        return replace(model, **own, **({"experts": replace(known["experts"], **of_experts)} if of_experts else {}))

    def conditions(sizes: Mapping[str, Any]) -> Sequence[Condition]:
        small = made(sizes)
        return [each for cuboid in cuboids for each in family_interface.conditions(small, cuboid, small.longest_sample)]

    grown = _grow(sizes, conditions, lambda key: step.get(key, 1), lambda key: key.removeprefix("model."))
    changes = tuple(
        Change(f"model.{name}", known[name], value) for name, value in grown.items() if known[name] != value
    )
    lost = ("the weights of model.pretrained: random weights are used",) if known.get("pretrained") else ()
    return SmallModel(made(grown), changes, lost)


_BIAS_UPDATE = 0.1
"""Least step of a router's bias in a miniature, so that a wrong one changes choices within a few steps."""


def _small_experts(experts: Experts, num_layers: int) -> dict[str, Any]:
    """Return small sizes of a mixture, by the names of a family's fields; at least one block keeps a mixture."""
    num = min(experts.num, 6)
    moves = {"experts.bias_update": max(experts.bias_update, _BIAS_UPDATE)} if experts.bias_update else {}
    if experts.capacity_factor is not None:  # with few experts, a larger one never drops a token
        moves["experts.capacity_factor"] = min(experts.capacity_factor, 1.0)
    return moves | {
        "experts.num": num,
        "experts.top_k": min(experts.top_k, num, 2),
        "experts.ffn_hidden_size": min(experts.ffn_hidden_size or 20, 20),
        "experts.shared": min(experts.shared, 2),
        "experts.every": min(experts.every, num_layers),
    }


def _kv_heads(heads: int, kv_heads: int, small_heads: int) -> int:
    """Return a small number of key heads: `small_heads` without grouped queries, 1 if it was 1, else half of them."""
    if kv_heads == heads:
        return small_heads
    return 1 if kv_heads == 1 else max(2, small_heads // 2)


_MOST_GROWTH = 4096


def _grow(
    sizes: dict[str, Any],
    conditions: Callable[[Mapping[str, Any]], Sequence[Condition]],
    step: Callable[[str], int],
    field_of: Callable[[str], str],
) -> dict[str, Any]:
    """Return the sizes, each grown until all conditions hold.

    Numbers of heads grow before other sizes, since features depend on them.
    """
    order = ("num_kv_heads", "num_key_value_heads", "num_heads", "num_attention_heads", "n_head")
    grown = dict(sizes)
    for _ in range(_MOST_GROWTH):
        failing = [each for each in conditions(grown) if not each.holds and field_of(each.key) in grown]
        if not failing:
            break
        names = sorted({field_of(each.key) for each in failing}, key=lambda name: (name not in order, name))
        grown[names[0]] = _next(grown[names[0]], step(names[0]))
    return grown


def _next(size: Any, step: int) -> Any:
    """Return the next larger size. A list has one number per stage, each twice the previous one."""
    return [(size[0] + step) << stage for stage in range(len(size))] if isinstance(size, list) else size + step


# ---- transformers models ----

_ROLES: Mapping[str, int] = {
    "hidden": 24,
    "heads": 4,
    "head_dim": 8,
    "ffn": 40,
    "experts": 6,
    "expert_ffn": 20,
    "shared_ffn": 28,
    "shared_experts": 2,
    "q_latent": 18,
    "kv_latent": 14,
    "rotary_dim": 6,
    "plain_dim": 10,
    "value_dim": 14,
    "vocab": 61,
    "image": 16,
    "patch": 4,
    "channels": 3,
}
"""Initial small values of sizes, by their names in `transformers_configs.NAMES`."""
_FIELDS_OF_CONFIGS: Mapping[str, Any] = {
    "depths": [2, 1],
    "hidden_sizes": [8, 16],
    "embedding_size": 8,
    "embed_dim": 16,
    "num_labels": 5,
    "window_size": 2,
    "sliding_window": 5,
    "max_window_layers": 1,
    "decoder_hidden_size": 24,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 40,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "type_vocab_size": 2,
}
"""Initial small values of other fields, by their names in transformers' configs; a list has one value per stage."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")


def _small_transformers(
    model: OtherModel,
    config: TransformersConfig,
    cuboids: Sequence[TensorMesh],
    num_layers: int | None,
    seq_len: int,
    at_least: int,
) -> SmallModel:
    values, sizes = dict(config.values), dict[str, Any]()

    def put(role: str, value: int) -> None:
        if name := config.own_name(role):
            own = config.size(role)
            if own is not None:
                sizes[name] = min(own, value)

    for role, value in _ROLES.items():
        put(role, value)
    if (heads := config.size("heads")) and (kv_heads := config.size("kv_heads")):
        put("kv_heads", _kv_heads(heads, kv_heads, sizes[config.own_name("heads")]))
    if active := config.size("active_experts"):
        put("active_experts", min(active, 2, sizes.get(config.own_name("experts"), 2)))
    layers = num_layers or max(2, at_least)
    lists = [name for name in config.row.get("blocks", {}).values() if config.number(name)]
    for at, name in enumerate(lists):
        sizes[name] = max(1, layers // len(lists) + (at < layers % len(lists)))
    if not lists:
        put("layers", layers)
    put("positions", seq_len + config.unused_positions)
    for name, value in _FIELDS_OF_CONFIGS.items():
        given = values.get(name)
        if isinstance(value, list) and isinstance(given, (list, tuple)):
            sizes[name] = list(value[: max(1, len(given))])
        elif type(value) is int and type(given) is int and given > 0:
            sizes[name] = min(given, value)
    if "depths" in sizes:
        sizes["depths"][0] = max(sizes["depths"][0], at_least)
    if isinstance(values.get("num_heads"), (list, tuple)):  # one number per stage of Swin
        sizes["num_heads"] = [2, 4][: len(sizes.get("depths", [2, 1]))]
    if isinstance(types := values.get("layer_types"), (list, tuple)):
        sizes["layer_types"] = _of_each_type(types, sum(sizes.get(name, 0) for name in lists) or layers)
    if "word_embed_proj_dim" in values:
        sizes["word_embed_proj_dim"] = sizes[config.own_name("hidden")]
    for place, name in enumerate(_IDS):
        if type(values.get(name)) is int and values[name] >= place:
            sizes[name] = 0 if name == "decoder_start_token_id" else place if place < 3 else 1
    sizes |= _dropout_rates(values)

    def conditions(sizes: Mapping[str, Any]) -> Sequence[Condition]:
        small = _with_config(model, config, sizes)
        found = [
            each for cuboid in cuboids for each in family_interface.transformers_conditions(small, cuboid, seq_len)
        ]
        hidden, heads = (sizes.get(config.own_name(role)) for role in ("hidden", "heads"))
        if config.size("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
            # transformers' own condition, with a factor of 2, since rotary positions rotate pairs of a head's features.
            found.append(Condition(config.own_name("hidden"), hidden, 2 * heads, "2 * heads", "TEN131"))
        experts, groups_of_experts = sizes.get(config.own_name("experts")), sizes.get("n_group")
        if isinstance(experts, int) and isinstance(groups_of_experts, int):
            found.append(Condition(config.own_name("experts"), experts, groups_of_experts, "n_group", "TEN131"))
        width = sizes.get("embed_dim")
        if isinstance(heads, list) and isinstance(width, int):  # heads have the same number of features in all stages
            found.append(Condition("embed_dim", width, 2 * heads[0], "2 * heads", "TEN131"))
        return found

    def field_of(key: str) -> str:
        name = key.removeprefix("model.config.")
        return config.other_names.get(name, name)

    grown = _grow(sizes, conditions, lambda key: 1, field_of)
    if (hidden := config.own_name("hidden")) and "word_embed_proj_dim" in grown:
        grown["word_embed_proj_dim"] = grown[hidden]
    small = _with_config(model, config, grown)
    changes = tuple(
        Change(f"model.config.{config.keys.get(name, name)}", values.get(name), value)
        for name, value in grown.items()
        if values.get(name) != value
    )
    lost = ("the weights of model.pretrained: random weights are used",) if "pretrained" in model.args else ()
    return SmallModel(small, changes, lost)


def _of_each_type(types: Sequence[Any], count: int) -> list[Any]:
    """Return the types of `count` layers, in the model's order, with each type included if there are enough layers."""
    first = [types.index(kind) for kind in dict.fromkeys(types)]
    rest = [at for at in range(len(types)) if at not in first]
    return [types[at] for at in sorted((first + rest)[:count])]


_NOT_OF_THE_MODEL = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "model_type")
"""Keys of config.json that describe the file, not the model's maths."""


def _with_config(model: OtherModel, config: TransformersConfig, sizes: Mapping[str, Any]) -> OtherModel:
    """Return the model with these fields of its config; other fields are as in config.json and the author's config."""
    of_file = config.file.values if config.file else {}
    written = {name: value for name, value in of_file.items() if name not in _NOT_OF_THE_MODEL}
    written |= dict(model.args.get("config") or {})
    own_names = {config.other_names.get(name, name): name for name in written}
    written |= {own_names.get(name, name): value for name, value in sizes.items()}
    args = {name: value for name, value in model.args.items() if name != "pretrained"}
    return replace(model, args={**args, "config": written})
