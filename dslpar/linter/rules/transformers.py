"""Rules about transformers models: sizes, the mesh, the config.json and weights of a folder, classes and policies.

All facts about transformers come from a table (`dslpar.schema.transformers_configs`); transformers is not imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

from dslpar.core.errors import DslparError, Finding, Severity
from dslpar.core.suggest import did_you_mean
from dslpar.layout.divisors import Condition, divisors, ranks
from dslpar.layout.sharding import inner_cuts, residual_cuts
from dslpar.layout.transformers_sizes import DECODER, beyond_masks
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule
from dslpar.schema.reader import show

if TYPE_CHECKING:
    from dslpar.linter.transformers_model import TransformersModel
    from dslpar.schema.transformers_configs import TransformersConfig

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SAVED = "choose a folder that transformers' save_pretrained wrote"


def _model(cx: Context) -> TransformersModel:
    if not cx.model.other.is_of_transformers:  # most configs end here and skip the import
        raise UnknownValueError("model")
    from dslpar.linter.transformers_model import TransformersModel

    return TransformersModel(cx)


# Sizes ------------------------------------------------------------------------------------------------------------

_OPTIONAL = ("experts", "expert_ffn", "shared_ffn", "shared_experts", "active_experts", "decoder_layers")
"""Sizes that may be 0, for a model without experts or without a decoder."""


@rule("CFG127", "size-of-transformers-out-of-range")
def size_of_transformers_out_of_range(cx: Context) -> Iterator[Problem]:
    """An invalid size of a transformers model: a string, a fraction, not positive, or 2**31 and more."""
    model = _model(cx)
    from dslpar.schema.transformers_configs import LIMIT, NAMES

    for size in NAMES if model.config.known else ():  # an unknown class may give these names another meaning
        value, given, least = model.config.values.get(model.config.own_name(size)), model.config.given(size), 1
        default = model.config.known["defaults"].get(model.config.own_name(size))
        if not given or not isinstance(value, int | float | str) or isinstance(default, list):
            continue  # None often stands for the default; some classes take a list, with a number per stage or side
        if size in _OPTIONAL:
            least = 0
        if type(value) is not int or not least <= value < LIMIT:
            wanted = f"a whole number, at least {least} (and below 2**31)"
            message = f"{model.config.key(size)} is {show(value)}, but must be {wanted}"
            yield model.problem_of_key(model.config.key(size), given, message, f"choose {wanted}")
    yield from _fields_of_images(model)
    yield from _lists_by_stage(model)


_OF_IMAGES = ("embed_dim", *DECODER)
"""Fields of image classes' configs that are sizes and have no entry in `transformers_configs.NAMES`."""


def _fields_of_images(model: TransformersModel) -> Iterator[Problem]:
    for name in _OF_IMAGES if model.config.known else ():
        if model.config.origin(name) and model.config.number(name) is None:
            yield _wanted(model, name, "a whole number, at least 1 (and below 2**31)")
    ratio = model.config.values.get("mlp_ratio")
    if model.config.known and model.config.origin("mlp_ratio") and not (_is_number(ratio) and 0 < ratio < math.inf):
        yield _wanted(model, "mlp_ratio", "a number above 0")


def _lists_by_stage(model: TransformersModel) -> Iterator[Problem]:
    """Check lists that have a number per stage of the model, such as Swin's num_heads and ResNet's depths."""
    config = model.config
    stages = config.values.get("depths")
    for name, default in config.known.get("defaults", {}).items():
        if not _has_numbers(default, least=0):
            continue
        value, least = config.values[name], 0 if 0 in default else 1
        if not _has_numbers(value, least):
            yield _wanted(model, name, f"a list of whole numbers, each at least {least}, one per stage")
        elif _has_numbers(stages, 1) and (
            len(value) < len(stages) or (name in _NO_LONGER and len(value) > len(stages))
        ):
            at = name if config.origin(name) else "depths"
            message = (
                f"{config.author_key(name)} has {len(value)} numbers, but depths has {len(stages)}: one for each stage"
            )
            yield model.problem_of_key(config.author_key(at), config.origin(at), message, "give one number per stage")


_NO_LONGER = ("hidden_sizes",)
"""Lists that must not be longer than depths, since the class uses their last number; other lists may be longer."""


def _has_numbers(value: object, least: int) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and bool(value) and all(type(x) is int and x >= least for x in value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wanted(model: TransformersModel, name: str, wanted: str) -> Problem:
    key = model.config.author_key(name)
    message = f"{key} is {show(model.config.values[name])}, but must be {wanted}"
    return model.problem_of_key(key, model.config.origin(name), message, f"choose {wanted}")


@rule("TEN131", "size-of-transformers-does-not-divide")
def size_of_transformers_does_not_divide(cx: Context) -> Iterator[Problem]:
    """A size of a transformers model does not divide over the ranks that shard it."""
    from dslpar.layout import transformers_sizes
    from dslpar.layout.nearest import multiples

    model = _model(cx)
    sizes = transformers_sizes.sizes_of(model.config)
    layout = _dividing_layout(cx, model.config) if cx.model.has_weights else ""
    roles = {size.key: role for role, size in sizes.items()}
    wrong: dict[str, Condition] = {}
    for each in transformers_sizes.conditions(model.config, cx.tensor.cuboid):
        if not each.holds:
            wrong.setdefault(each.key, each)
    for key, each in wrong.items():
        if key not in roles:  # an entry of a list, a size derived from such an entry, or a decoder's size
            given = "config" if key in model.config.keys.values() else ""
            given = given or ("file" if key in model.config.in_file.values() else "")
            what = "heads" if key.endswith("heads") else "features"
            where = "the decoder" if key.startswith("decoder") else "a stage"
            message = f"{key}: {where} has {each.value} {what}, which are not divisible by {each.why}"
            choices = " or ".join(map(str, multiples(each.value, each.by)))
            hint = layout or f"choose {choices} {what} in the model's config, or fewer tensor ranks"
            yield model.problem_of_key(key, given, message, hint)
            continue
        value = sizes[roles[key]].value
        if each.value == value:
            hint = layout or f"{key}={' or '.join(map(str, multiples(each.value, each.by)))}"
            yield model.problem(roles[key], f"is not divisible by {each.why}", hint)
        elif roles[key] in _WITH:
            message = f"and {_WITH[roles[key]]} make {each.value} features, which are not divisible by {each.why}"
            yield model.problem(roles[key], message, layout or f"choose another {key}, or fewer tensor ranks")
        else:
            hint = layout or "choose more features per head, or fewer tensor ranks"
            message = f"has {each.value} features, which are not divisible by {each.why}"
            yield model.problem(roles[key], message, hint)


def _dividing_layout(cx: Context, config: TransformersConfig) -> str:
    """Return a help for a model whose weights exist: tensor sizes over which all of its sizes divide."""
    from dslpar.layout.transformers_sizes import conditions
    from dslpar.linter.tensor_sizes import dividing

    return dividing(cx, lambda cuboid: all(each.holds for each in conditions(config, cuboid)))


_WITH = {"expert_ffn": "n_shared_experts", "kv_latent": "qk_rope_head_dim"}
"""Sizes of which, with another key, a number of features follows."""


@rule("TEN132", "heads-of-transformers-do-not-fit")
def heads_of_transformers_do_not_fit(cx: Context) -> Iterator[Problem]:
    """Heads of a transformers model do not divide its hidden size, or its key/value heads do not divide its heads."""
    from dslpar.layout.nearest import multiples

    model = _model(cx)
    given = _OF_WEIGHTS if cx.model.has_weights else ""
    heads, kv_heads = model.size("heads"), model.config.size("kv_heads")
    if kv_heads is not None and heads % kv_heads:
        near = sorted(divisors(heads), key=lambda size: abs(size - kv_heads))[:2]
        hint = given or f"{model.config.key('kv_heads')}={' or '.join(map(str, sorted(near)))}"
        yield model.problem("kv_heads", f"does not divide {model.config.key('heads')} {heads}", hint)
    hidden = model.config.size("hidden")
    has_own_size = model.config.size("head_dim") is not None or model.config.size("kv_latent") is not None
    if hidden is not None and hidden % heads and not has_own_size:
        hint = given or f"{model.config.key('hidden')}={' or '.join(map(str, multiples(hidden, heads)))}"
        yield model.problem("hidden", f"is not a multiple of {model.config.key('heads')} {heads}", hint)
    decoder_heads, decoder_hidden, _ = map(model.config.number, DECODER)
    if decoder_heads is not None and decoder_hidden is not None and decoder_hidden % decoder_heads:
        heads_key, key = map(model.config.author_key, DECODER[:2])
        message = f"{key} {decoder_hidden} is not a multiple of {heads_key} {decoder_heads}"
        hint = given or f"{key}={' or '.join(map(str, multiples(decoder_hidden, decoder_heads)))}"
        yield model.problem_of_key(key, model.config.origin(DECODER[1]), message, hint)


_OF_WEIGHTS = "choose the sizes of the weights: leave them out of model.config, and correct config.json"
"""Help for sizes that contradict each other although the weights exist."""


@rule("PERF110", "empty-places-of-experts", "warning")
def empty_places_of_experts(cx: Context) -> Iterator[Problem]:
    """The experts of a transformers model do not divide evenly over their ranks."""
    model, ranks, what = _model(cx), cx.tensor.cuboid.size, "tensor"
    if (expert := cx.spec.parallel.expert) is not None:
        ranks, what = expert.size, "expert"
    experts = model.size("experts")
    places = -(-experts // ranks) * ranks
    if places != experts:
        message = (
            f"over {ranks} {what} ranks: {places - experts} of {places} places have no expert, so their ranks wait"
        )
        yield model.problem("experts", message, f"choose {what} ranks that divide {experts}")


@rule("TEN134", "attention-beyond-context-parallelism")
def attention_beyond_context_parallelism(cx: Context) -> Iterator[Problem]:
    """Context parallelism does not support this model's attention: a soft cap, a bias, sinks, or its own scores."""
    if cx.tensor.cuboid.context == 1:
        return
    model = _model(cx)
    for key, what in beyond_masks(model.config.values):
        name = model.config.keys.get(key, key)
        given = model.config.origin(key)
        message = f"{key}={model.config.values[key]!r}: {what}, but attention over split sequences supports only masks"
        yield model.problem_of_key(name, given, message, _WHOLE[cx.spec.parallel.context is None])
    from dslpar.schema.transformers_policies import POLICIES

    policy = POLICIES.get(model.name)
    if policy and policy.own_attention and "policy" not in model.args:
        message = f"{model.name} computes attention scores from whole sequences, but context parallelism splits them"
        yield cx.problem("model.type", message, _WHOLE[cx.spec.parallel.context is None])
    elif policy and policy.head_vectors and "policy" not in model.args:
        message = f"{model.name} attends with sinks, but attention over split sequences supports only masks"
        yield cx.problem("model.type", message, _WHOLE[cx.spec.parallel.context is None])


_WHOLE = ("leave parallel.context out", "choose another tensor mode")
"""Hints for keeping sequences whole: if parallel.context splits them, and if mode 'sequence' does."""


@rule("TEN137", "attention-kernel-does-not-fit")
def attention_kernel_does_not_fit(cx: Context) -> Iterator[Problem]:
    """attn_implementation names a kernel that sharded models do not use, or one that cannot compute the attention."""
    key, kernel = _attention_kernel(cx)
    if kernel is None:
        return
    if kernel not in _KERNELS:
        message = f"attn_implementation is {show(kernel)}, but sharded models use torch's attention kernels only"
        yield cx.problem(key, message, "attn_implementation='sdpa', or 'flash_attention_2' for torch's own kernel")
    elif kernel == _FLASH and (why := _beyond_flash(cx)):
        message = f"attn_implementation is {kernel!r}, but {why}"
        yield cx.problem(key, message, "attn_implementation='sdpa'")


_FLASH = "flash_attention_2"
_KERNELS = ("sdpa", _FLASH)


def _attention_kernel(cx: Context) -> tuple[str, object]:
    """Return the key and the value of attn_implementation: the model's own key has priority over its config's."""
    model = cx.model.other
    if not model.is_of_transformers:
        raise UnknownValueError("model")
    if model.attn_implementation is not None:
        return "model.attn_implementation", model.attn_implementation
    return "model.config.attn_implementation", (model.args.get("config") or {}).get("attn_implementation")


def _beyond_flash(cx: Context) -> str:
    """Return why torch's FlashAttention kernel cannot compute the model's attention; empty if nothing is known."""
    model = _model(cx)
    from dslpar.schema.transformers_policies import POLICIES

    policy = None if "policy" in model.args else POLICIES.get(model.name)
    if policy and policy.own_attention:
        return f"{model.name} computes its scores itself, and uses no kernel"
    if policy and policy.head_vectors:
        return f"{model.name} attends with sinks, which torch's FlashAttention kernel does not support"
    if model.config.values.get("attn_logit_softcapping"):
        return f"{model.name} caps its scores, which torch's FlashAttention kernel does not support"
    if cx.tensor.cuboid.context > 1:
        return "sequences are split, and attention over split sequences has kernels of its own"
    return ""


# Classes and policies ---------------------------------------------------------------------------------------------


@rule("TEN133", "no-policy-for-class")
def no_policy_for_class(cx: Context) -> Iterator[Problem]:
    """A transformers class has no policy, so it cannot be split over several tensor ranks or stages."""
    model = cx.model.other
    if not model.is_of_transformers:
        return
    num_ranks = cx.tensor.cuboid.size * cx.pipeline.stages
    if num_ranks == 1 or "policy" in model.args:
        return
    from dslpar.schema.transformers_policies import DERIVED, POLICIES

    name, known = model.target.rpartition(".")[2], {*POLICIES, *DERIVED}
    if name not in known:
        message = f"{name} has no policy, without which it cannot be split over {num_ranks} ranks"
        hint = "choose a class of docs/transformers.md; or add policy=dict(...) (`dslpar explain TEN234`)"
        yield cx.problem("model.type", message, hint)


@rule("TEN135", "mode-does-not-fit-class")
def mode_does_not_fit_class(cx: Context) -> Iterator[Problem]:
    """The tensor mode splits something that a transformers class keeps whole: all of ResNet, sequences of Swin."""
    model = cx.model.other
    if not model.is_of_transformers:
        return
    cuboid = cx.tensor.cuboid
    if cuboid.size == 1 or "policy" in model.args:
        return
    name = model.target.rpartition(".")[2]
    from dslpar.schema.transformers_policies import POLICIES

    policy = POLICIES.get(name)
    if policy is None:
        return
    if not policy.regions:
        message = f"{name} cannot be split over {cuboid.size} tensor ranks: dslpar can split none of its layers"
        yield cx.problem(
            cx.tensor.key, message, f"{cx.tensor.key}=1: data and pipeline parallelism still work for this model"
        )
    elif policy.grid and any(ranks(cuboid, cuts(cuboid).sequence) > 1 for cuts in (residual_cuts, inner_cuts)):
        message = f"{name} arranges tokens on a grid, but this mode splits sequences"
        yield cx.problem("parallel.tensor", message, "mode='2d', or mode='1d' without sequence parallelism")


@rule("TEN136", "tokens-of-image-do-not-divide")
def tokens_of_image_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The tokens of an image in ViT or ViTMAE do not divide over the ranks that split sequences."""
    model = _model(cx)
    cuboid = cx.tensor.cuboid
    by = math.lcm(*(ranks(cuboid, cuts(cuboid).sequence) for cuts in (residual_cuts, inner_cuts)))
    for tokens, where in _tokens_of_image(model.config):
        if tokens % by:
            message = f"makes {tokens} tokens{where}, with the class token"
            message += f", and mode {cuboid.mode!r} splits them over {by} ranks"
            key = "image_size"
            given = "config" if key in model.config.keys else "file" if key in model.config.in_file else ""
            message = f"image_size {model.config.number(key)} {message}"
            other = "leave parallel.tensor.sequence out" if cuboid.mode == "1d" else f"{cx.tensor.key}=1"
            hint = other if cx.model.has_weights else f"{other}; or choose another image_size"
            yield model.problem_of_key(model.config.keys.get(key, key), given, message, hint)
            return


def _tokens_of_image(config: TransformersConfig) -> Iterator[tuple[int, str]]:
    """Yield (tokens per image, where) for ViT classes, which prepend a class token to the patches."""
    image, patch = config.number("image_size"), config.number("patch_size")
    if image is None or patch is None or not config.model.startswith("ViT"):
        return
    patches = (image // patch) ** 2
    hidden = config.values.get("mask_ratio")
    if isinstance(hidden, float) and config.model.startswith("ViTMAE"):
        yield int(patches * (1 - hidden)) + 1, " that its encoder sees"
    yield patches + 1, ""


@rule("CFG126", "policy-not-understood")
def policy_not_understood(cx: Context) -> Iterator[Problem]:
    """A policy has an unknown name or unknown keys, or lacks a required key."""
    policy = cx.model.other.args.get("policy") if cx.model.other.is_of_transformers else None
    if policy is None or policy == "derived":
        return
    from dslpar.schema.policy import as_policy
    from dslpar.schema.transformers_policies import DERIVED, POLICIES

    try:
        as_policy(policy, POLICIES, DERIVED)
    except DslparError as error:
        for found in error.findings:
            yield Problem(cx.config.at("model.policy"), found.message, found.help, "model.policy")


# The config, and the folder ---------------------------------------------------------------------------------------


@rule("CFG124", "unknown-key-of-transformers")
def unknown_key_of_transformers(cx: Context) -> Iterator[Finding]:
    """The model's transformers config class does not have a key of model.config."""
    model = _model(cx)
    known = {*model.config.known.get("defaults", ()), *model.config.other_names}
    if not known:
        return
    from dslpar.schema.transformers_configs import installed_version, table

    of_every_config, version = table()["common"], table()["version"]
    # Another version, here or on the job's hosts, may have other keys.
    severity: Severity = "error" if installed_version() == version else "warning"
    for key in model.config.keys.values():
        if key not in known and key not in of_every_config:
            message = f"{model.config.row['config']} of transformers {version} has no {key!r}, so a run would refuse it"
            hint = did_you_mean(key, known) or "leave it out"
            problem = cx.problem_of_key(f"model.config.{key}", message, hint)
            yield unknown_key_of_transformers.finding(problem)._replace(severity=severity)


@rule("DEAD129", "dtype-of-a-config", "warning")
def dtype_of_a_config(cx: Context) -> Iterator[Problem]:
    """A data type in model.config has no effect, since the section precision decides."""
    model = _model(cx)
    for key in _DTYPES:
        if key in model.config.keys:
            value = str(getattr(value := model.config.values[key], "name", value)).removeprefix("torch.")
            precision = _DTYPES[key].get(value, "...")
            message = f"{key} has no effect on a run, which computes in {cx.spec.precision.dtype}: precision decides"
            hint = f"leave {key} out; or choose precision={precision!r} in its place"
            yield cx.problem_of_key(f"model.config.{key}", message, hint)


_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES = {"dtype": _PRECISIONS, "torch_dtype": _PRECISIONS}
"""Keys of transformers' configs -> transformers' data types, and the same in `precision`."""


@rule("CFG125", "config-of-another-class")
def config_of_another_class(cx: Context) -> Iterator[Problem]:
    """The config of a transformers model has another class than the model needs."""
    model = _model(cx)
    described, wanted = (model.args.get("config") or {}).get("_target_"), model.config.row.get("config")
    name = str(getattr(described, "name", described) or "").rpartition(".")[2]
    if name and wanted and name != wanted:
        message = f"{model.name} takes a {wanted}, but this is a {name}"
        yield Problem(cx.config.at("model.config"), message, f"LazyCall({wanted})(...), or dict(...)", "model.config")


@rule("CKP101", "pretrained-not-usable")
def pretrained_not_usable(cx: Context) -> Iterator[Problem]:
    """The folder of model.pretrained lacks files, has unreadable files, or is for another class or other sizes."""
    model = _model(cx)
    from dslpar.schema.paths import visible_path

    file = model.known_file
    folder = os.path.dirname(file.path)
    if file.missing:
        if os.path.isdir(folder):  # else it may be only on the job's hosts: CKP102
            yield cx.problem("model.pretrained", f"{visible_path(folder)!r} has no config.json", _SAVED)
    elif file.problem:
        yield Problem(model.place_in_file(), f"cannot read config.json: {file.problem}", _SAVED, "model.pretrained")
    else:
        if missing := _missing_weights(folder):
            yield cx.problem("model.pretrained", missing, f"{_SAVED}, with safe_serialization")
        yield from _of_another_class(model)
        yield from _of_other_sizes(model)


def _of_other_sizes(model: TransformersModel) -> Iterator[Problem]:
    """Report keys of model.config with which the folder's weights cannot be used."""
    from dslpar.layout.transformers_costs import fields_of_other_weights
    from dslpar.schema.paths import visible_path
    from dslpar.schema.transformers_configs import TransformersConfig

    file = model.known_file
    saved = TransformersConfig(model.name, {}, file)
    for name in fields_of_other_weights(model.config, saved):
        key = model.config.keys[name]
        path, value = visible_path(file.path), show(saved.values.get(name))
        where = f"{path} has {value}" if name in saved.in_file else f"the model of {path} has {value}"
        where = where if name in saved.values else f"{path} has another number"
        message = f"{key} is {show(model.config.values[name])}, but {where}, and its weights are for that"
        yield model.problem_of_key(key, "config", message, f"leave {key} out")


def _missing_weights(folder: str) -> str:
    """Return a message about the weight files that a folder lacks; empty if it has all."""
    import json

    from dslpar.schema.paths import visible_path

    here, index = visible_path(folder), os.path.join(folder, INDEX)
    if not os.path.exists(index):
        return "" if os.path.exists(os.path.join(folder, WEIGHTS)) else f"{here!r} has neither {WEIGHTS} nor {INDEX}"
    try:
        with open(index, encoding="utf-8") as file:
            files = sorted({str(name) for name in json.load(file)["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{INDEX} of {here!r} has no weight_map that can be read"
    missing = [name for name in files if not os.path.exists(os.path.join(folder, name))]
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{here!r} lacks {missing[0]!r}{more}, of {len(files)} files of weights" if missing else ""


def _of_another_class(model: TransformersModel) -> Iterator[Problem]:
    """Report a config.json that names another class than the model's, or no class."""
    values = model.known_file.values
    classes, kind = values.get("architectures"), values.get("model_type")
    hint = f"choose a folder of a {model.name}"
    if isinstance(classes, list) and classes:
        base = f"{str(model.config.row.get('config')).removesuffix('Config').removesuffix('Text')}Model"
        if model.name in classes or base in classes:  # a base model lacks a head, which may be tied
            return
        message, key = f"this is a config of {' and '.join(map(str, classes))}", "architectures"
        hint = f"type='transformers.{classes[0]}'; or {hint}"
    elif not isinstance(kind, str):
        message, key = "config.json has neither architectures nor a model_type", ""
    elif kind != model.config.known.get("model_type", kind):
        message, key = f"this is a config of model_type {kind!r}", "model_type"
    else:
        return
    message = f"{message}, but the model's type is {model.name}"
    yield Problem(model.place_in_file(key), message, hint, "model.pretrained")


@rule("CKP102", "pretrained-not-found", "warning")
def pretrained_not_found(cx: Context) -> Iterator[Problem]:
    """The folder of model.pretrained does not exist on this machine, or is the name of a model on a hub."""
    from dslpar.schema.paths import pretrained_folder

    folder = pretrained_folder(cx.spec, cx.config.path)
    if folder is not None and folder.is_missing and folder.is_mistaken:
        message = f"{folder.message}: its files and the model's sizes are not checked"
        yield cx.problem("model.pretrained", message, folder.hint(f"{_SAVED}, by its path from the config's folder"))


RULES = (
    size_of_transformers_out_of_range,
    size_of_transformers_does_not_divide,
    heads_of_transformers_do_not_fit,
    empty_places_of_experts,
    attention_beyond_context_parallelism,
    attention_kernel_does_not_fit,
    no_policy_for_class,
    mode_does_not_fit_class,
    tokens_of_image_do_not_divide,
    policy_not_understood,
    unknown_key_of_transformers,
    dtype_of_a_config,
    config_of_another_class,
    pretrained_not_usable,
    pretrained_not_found,
)
