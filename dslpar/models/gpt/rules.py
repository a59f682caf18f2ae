"""Lint rules about GPT's keys: the divisors of its sizes, experts, the vocabulary, positions, pretrained weights.

The divisors are in the table `dslpar.layout.divisors`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator

from dslpar.core.errors import DslparError
from dslpar.core.mesh import TensorMesh
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition
from dslpar.layout.nearest import describe, multiples, nearest_attention
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError, require
from dslpar.linter.rule import rule
from dslpar.linter.rules.batch import BYTES
from dslpar.models.gpt.layout import SHARED_FFN, attention_sizes, conditions, kv_features, shared_ffn
from dslpar.models.gpt.section import GPT
from dslpar.schema.datasets import TextData
from dslpar.schema.sections import Experts

_MOST_PADDING = 0.05
"""Largest share of padding rows without a warning."""


def _gpt(cx: Context) -> GPT:
    return cx.model.of(GPT)


@rule("TEN201", "heads-do-not-divide")
def heads_do_not_divide(cx: Context) -> Iterator[Problem]:
    """num_heads is not a multiple of the number of ranks that share the attention heads."""
    yield from _attention(cx, "TEN201", "num_heads")


@rule("TEN202", "hidden-does-not-divide")
def hidden_does_not_divide(cx: Context) -> Iterator[Problem]:
    """hidden_size is not a multiple of the number of ranks that shard it."""
    yield from _attention(cx, "TEN202", "hidden_size")


@rule("TEN203", "ffn-does-not-divide")
def ffn_does_not_divide(cx: Context) -> Iterator[Problem]:
    """ffn_hidden_size is not a multiple of the number of ranks that shard it."""
    found = [each for each in conditions(_gpt(cx), cx.tensor.cuboid, 0) if each.code == "TEN203"]
    ffn, of_mlp = _gpt(cx).ffn_hidden_size, [each for each in found if each.key != SHARED_FFN]
    broken = _broken(of_mlp, "TEN203")
    if ffn is not None and broken:
        hint = "nearest legal: " + " or ".join(map(str, multiples(ffn, divisors.common(of_mlp))))
        hint = _dividing_layout(cx) if cx.model.has_weights else hint
        yield cx.problem("model.ffn_hidden_size", _message(cx, "model.ffn_hidden_size", broken), hint)
    experts, of_shared = _gpt(cx).experts, [each for each in found if each.key == SHARED_FFN]
    broken = _broken(of_shared, "TEN203")
    if experts is not None and broken:
        by = divisors.common(of_shared)
        by //= math.gcd(by, experts.shared)
        message = (
            f"the shared experts have {shared_ffn(_gpt(cx))} features ({experts.shared} * {_gpt(cx).expert_ffn_size}),"
            f" not a multiple of {' or of '.join(each.why for each in broken)} in {cx.tensor.mode_name}"
        )
        hint = "nearest legal: " + " or ".join(map(str, multiples(_gpt(cx).expert_ffn_size, by)))
        yield cx.problem(("model.experts.ffn_hidden_size", "model.experts.shared"), message, hint)


@rule("TEN205", "heads-do-not-divide-hidden")
def heads_do_not_divide_hidden(cx: Context) -> Iterator[Problem]:
    """hidden_size is not a multiple of num_heads."""
    hidden, heads = _gpt(cx).hidden_size, _gpt(cx).num_heads
    if hidden % heads:
        message = f"hidden_size {hidden} is not a multiple of num_heads {heads}"
        yield cx.problem("model.hidden_size", message, _nearest_legal(cx))


@rule("TEN206", "kv-heads-do-not-divide")
def kv_heads_do_not_divide(cx: Context) -> Iterator[Problem]:
    """num_kv_heads is not a multiple of the number of ranks that share the attention heads."""
    yield from _attention(cx, "TEN206", "num_kv_heads")


@rule("TEN207", "kv-heads-do-not-divide-heads")
def kv_heads_do_not_divide_heads(cx: Context) -> Iterator[Problem]:
    """num_heads is not a multiple of num_kv_heads."""
    heads, kv_heads = _gpt(cx).num_heads, _gpt(cx).num_kv_heads
    if kv_heads is not None and heads % kv_heads:
        message = f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}"
        yield cx.problem("model.num_kv_heads", message, _nearest_legal(cx))


@rule("TEN208", "kv-features-do-not-divide")
def kv_features_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The features of keys and values are not a multiple of the number of ranks that shard their weights."""
    sizes = attention_sizes(_gpt(cx))
    cuboid = cx.tensor.cuboid
    if not all(each.holds for each in divisors.heads(sizes, cuboid)) or sizes.hidden_size % sizes.num_heads:
        return  # the features of fractional heads are unknown; other rules report those
    if _broken(divisors.hidden(sizes, cuboid), "TEN208"):
        by, features = cuboid.y * cuboid.q, kv_features(_gpt(cx))
        message = f"num_kv_heads {sizes.num_kv_heads} has {features} features, not a multiple of y * q = {by}"
        yield cx.problem("model.num_kv_heads", f"{message} in {cx.tensor.mode_name}", _nearest_legal(cx))


@rule("TEN209", "odd-head")
def odd_head(cx: Context) -> Iterator[Problem]:
    """Rotary positions need an even number of features per head, and this model has an odd one."""
    hidden, heads = _gpt(cx).hidden_size, _gpt(cx).num_heads
    if _gpt(cx).positions == "rotary" and hidden % heads == 0 and hidden // heads % 2:
        message = f"a head has {hidden // heads} features, and rotary positions rotate pairs of them"
        yield cx.problem("model.hidden_size", message, _nearest_legal(cx))


# Experts ------------------------------------------------------------------------------------------------------------


def _experts(cx: Context) -> Experts:
    return require(_gpt(cx).experts, Experts)


@rule("TEN138", "more-choices-than-experts")
def more_choices_than_experts(cx: Context) -> Iterator[Problem]:
    """experts.top_k is larger than the number of experts."""
    top_k, num = _experts(cx).top_k, _experts(cx).num
    if top_k > num:
        message = f"each token visits top_k {top_k} experts, but there are {num}"
        key = "model.experts.top_k" if cx.source.given("model.experts.top_k") else "model.experts.num"
        yield cx.problem(key, message, f"top_k={num}; or num={top_k}")


@rule("DEAD130", "experts-without-a-block", "warning")
def experts_without_a_block(cx: Context) -> Iterator[Problem]:
    """experts.every is larger than the number of blocks, so no block has a mixture of experts."""
    every, blocks = _experts(cx).every, _gpt(cx).num_layers
    if every > blocks:
        message = f"the last of every {every} blocks has a mixture, but there are {blocks} blocks: all have an MLP"
        yield cx.problem("model.experts.every", message, f"every={blocks}; or leave model.experts out")


@rule("DEAD131", "router-without-a-gradient", "warning")
def router_without_a_gradient(cx: Context) -> Iterator[Problem]:
    """With top_k=1, renormalized scores are always 1, so the cross-entropy gives the router no gradient."""
    experts = _experts(cx)
    if experts.top_k == 1 and experts.renormalize:
        message = "a token's only score divided by itself is 1, so the cross-entropy does not train the router"
        key = ("model.experts.renormalize", "model.experts.top_k")
        yield cx.problem(key, message, "renormalize=False; or top_k=2")


@rule("DEAD132", "capacity-without-effect", "warning")
def capacity_without_effect(cx: Context) -> Iterator[Problem]:
    """capacity_factor is so large that an expert may take all tokens of a sequence."""
    experts = _experts(cx)
    factor, enough = experts.capacity_factor, experts.num / experts.top_k
    if factor is not None and factor >= enough:
        message = f"capacity_factor {factor:g} drops nothing: with {enough:g} an expert may take every token"
        less = "" if enough <= 1.25 else "; or capacity_factor=1.25"
        yield cx.problem("model.experts.capacity_factor", message, f"leave it out{less}")


@rule("TEN139", "capacity-of-chunks")
def capacity_of_chunks(cx: Context) -> Iterator[Problem]:
    """With mlp_chunks a mixture sees parts of a sequence, but capacity_factor selects among all its tokens."""
    factor, checkpointing = _experts(cx).capacity_factor, cx.spec.activation_checkpoint
    if factor is not None and checkpointing is not None and checkpointing.mlp_chunks > 1:
        message = "with mlp_chunks a mixture sees parts of a sequence, but capacity_factor selects among all its tokens"
        key = ("activation_checkpoint.mlp_chunks", "model.experts.capacity_factor")
        yield cx.problem(key, message, "leave mlp_chunks out; or leave model.experts.capacity_factor out")


def _attention(cx: Context, code: str, field: str) -> Iterator[Problem]:
    """Report the conditions on heads and hidden_size that have that code and do not hold."""
    broken = _broken(divisors.attention(attention_sizes(_gpt(cx)), cx.tensor.cuboid), code)
    if broken:
        yield cx.problem(f"model.{field}", _message(cx, f"model.{field}", broken), _nearest_legal(cx))


def _broken(found: Iterable[Condition], code: str) -> list[Condition]:
    return [each for each in found if each.code == code and not each.holds]


def _message(cx: Context, key: str, broken: list[Condition]) -> str:
    factors = " or of ".join(each.why for each in broken)
    return f"{_name(cx, key)} {broken[0].value} is not a multiple of {factors} in {cx.tensor.mode_name}"


def _nearest_legal(cx: Context) -> str:
    """Suggest sizes that are legal together. All rules about heads and hidden_size suggest the same sizes."""
    try:
        cuboid = cx.tensor.cuboid
    except UnknownValueError:  # another rule reports it; assume one rank, which has the fewest conditions
        cuboid = TensorMesh()

    sizes = attention_sizes(_gpt(cx))
    if cx.model.has_weights:
        of_one = divisors.attention(sizes, TensorMesh())
        return _dividing_layout(cx) if all(each.holds for each in of_one) else _OF_WEIGHTS
    choices = nearest_attention(sizes, cuboid)
    return describe(choices, lambda key: _name(cx, f"model.{key}"))


def _dividing_layout(cx: Context) -> str:
    """Return a help for a model whose weights exist: tensor sizes over which all of its sizes divide."""
    from dslpar.linter.tensor_sizes import dividing

    return dividing(cx, lambda cuboid: all(each.holds for each in conditions(_gpt(cx), cuboid, 0)))


_OF_WEIGHTS = "choose the sizes that the config.json in model.pretrained has"
"""Help for sizes that contradict each other although the weights exist."""


def _name(cx: Context, key: str) -> str:
    return cx.source.key(key).rpartition(".")[2]


# Vocabulary and positions ------------------------------------------------------------------------------------------


@rule("DEAD119", "vocabulary-beyond-bytes", "warning")
def vocabulary_beyond_bytes(cx: Context) -> Iterator[Problem]:
    """Most of the vocabulary is tokens that never occur in byte-level text."""
    vocabulary = _gpt(cx).vocab_size
    is_bytes = isinstance(cx.spec.data, TextData) and cx.spec.data.tokenizer is None
    if cx.source.given("data") and is_bytes and vocabulary > 2 * BYTES:
        message = (
            f"vocab_size is {vocabulary}, but byte-level text has {BYTES} tokens: the other rows are never trained"
        )
        hint = f"choose data.tokenizer, a tokenizer.json of about {vocabulary} tokens"
        bytes_alone = "" if cx.model.has_weights else f"; or vocab_size={BYTES} (for a model that reads bytes)"
        yield cx.problem("model.vocab_size", message, hint + bytes_alone)


@rule("PERF107", "padded-vocabulary", "warning")
def padded_vocabulary(cx: Context) -> Iterator[Problem]:
    """More than 5 % of the vocabulary's rows are padding."""
    rows = _gpt(cx).vocab_size
    _, padded, by, *_ = divisors.vocabulary(rows, cx.tensor.cuboid)
    share = (padded - rows) / padded
    if share > _MOST_PADDING:
        percent = f"{100 * share:.1f}".removesuffix(".0")
        message = f"vocab_size {rows} is padded to {padded}: {percent} % of the rows have no token"
        legal = [str(size) for size in (padded - by, padded) if size >= BYTES]
        hint = f"{' or '.join(legal)}: multiples of {by}; or choose a tensor size that divides {rows}"
        if cx.model.has_weights:
            hint = f"choose a tensor size that divides {rows}"
        yield cx.problem("model.vocab_size", message, hint)


@rule("DEAD108", "wavelength-without-rotary", "warning")
def wavelength_without_rotary(cx: Context) -> Iterator[Problem]:
    """rope_theta is set without rotary positions."""
    if cx.source.given("model.rope_theta") and _gpt(cx).positions != "rotary":
        message = f"rope_theta has no effect with positions={_gpt(cx).positions!r}"
        rotary = "" if cx.model.has_weights else "positions='rotary', or "
        yield cx.problem("model.rope_theta", message, f"{rotary}leave it out")


# Pretrained weights -----------------------------------------------------------------------------------------------


@rule("CKP103", "pretrained-of-another-gpt")
def pretrained_of_another_gpt(cx: Context) -> Iterator[Problem]:
    """The folder of a GPT's pretrained weights cannot be used, or has a model with other sizes."""
    folder = _gpt(cx).pretrained
    if folder is None or not os.path.isdir(folder):  # it may exist only on the job's hosts
        return
    import json

    from dslpar.models.gpt import hugging_face

    saved = "choose a folder that transformers' save_pretrained wrote"
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        found = hugging_face.differences(_gpt(cx), config if isinstance(config, dict) else {})
    except (OSError, ValueError) as error:
        why = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        yield cx.problem("model.pretrained", f"cannot read its config.json: {why}", saved)
    except DslparError as error:
        yield cx.problem("model.pretrained", f"its {error.findings[0].message}", saved)
    else:
        for name, (own, value) in found.items():
            of, written = hugging_face.shown(own), hugging_face.shown(value)
            message = f"{_name(cx, f'model.{name}')} is {of}, but the weights in model.pretrained have {written}"
            yield cx.problem(f"model.{name}", message, f"model.{name}={written}")


RULES = (
    heads_do_not_divide,
    hidden_does_not_divide,
    ffn_does_not_divide,
    more_choices_than_experts,
    experts_without_a_block,
    router_without_a_gradient,
    capacity_of_chunks,
    capacity_without_effect,
    heads_do_not_divide_hidden,
    kv_heads_do_not_divide,
    kv_heads_do_not_divide_heads,
    kv_features_do_not_divide,
    odd_head,
    vocabulary_beyond_bytes,
    padded_vocabulary,
    wavelength_without_rotary,
    pretrained_of_another_gpt,
)
