"""TEN201 and on: the model's sizes against what the cuboid cuts them by; `dslpar.layout.divisors` is the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dslpar.core.mesh import Tensor
from dslpar.layout import divisors
from dslpar.layout.divisors import Condition, multiples
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule


@rule("TEN201", "heads-do-not-divide")
def heads_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The attention heads do not divide over the ranks that share them.

    What it does:
        Checks num_heads against y (against y * z if inner activations are kept by heads), and for Ulysses num_heads / y
        against x.

    Why:
        A rank computes whole heads.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=6, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=4, mode='1d'))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    yield from _of_gpt(cx, "TEN201", "num_heads")


@rule("TEN202", "hidden-does-not-divide")
def hidden_does_not_divide(cx: Context) -> Iterator[Problem]:
    """hidden_size does not divide over the ranks that cut it.

    What it does:
        Checks hidden_size against z * q and y * q, against z * y if the residual is kept by hidden, and against y * z
        if inner activations are kept by heads.

    Why:
        Every piece of a weight and of the residual stream has the same size.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=38, num_heads=2, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=8, mode='3d'))
        batch = dict(micro_size=4)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=40, num_heads=2, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=8, mode='3d'))
        batch = dict(micro_size=4)
    """
    yield from _of_gpt(cx, "TEN202", "hidden_size")


@rule("TEN203", "ffn-does-not-divide")
def ffn_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The MLP's hidden size does not divide over the ranks that cut it.

    What it does:
        Checks ffn_hidden_size against y * q, and against y * z if inner activations are kept by heads.

    Why:
        Every piece of a weight has the same size.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     ffn_hidden_size=90)
        parallel = dict(tensor=dict(size=4, mode='1d'))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     ffn_hidden_size=96)
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    ffn, found = cx.gpt.ffn_hidden_size, list(divisors.ffn(cx.gpt, cx.cuboid))
    wrong = _wrong(found, "TEN203")
    if ffn is not None and wrong:
        fix = "nearest legal: " + _either(multiples(ffn, divisors.common(found)))
        yield cx.problem("model.ffn_hidden_size", _said(cx, "model.ffn_hidden_size", wrong), fix)


@rule("TEN204", "sequence-does-not-divide")
def sequence_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The sequence does not divide over the ranks that split it.

    What it does:
        Checks the tokens of a sample against y where the residual is kept by sequence, and against x in mode
        'sequence'.

    Why:
        Every rank holds the same number of tokens.

    Example:
        parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))
        data = dict(seq_len=30)

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))
        data = dict(seq_len=32)
    """
    length, longest = cx.spec.data.seq_len or cx.gpt.max_seq_len, cx.gpt.max_seq_len
    found = list(divisors.sequence(length, cx.cuboid))
    if not _wrong(found, "TEN204"):
        return
    by = divisors.common(found)
    legal = [size for size in multiples(length, by) if not cx.spec.data.seq_len or size <= longest]
    fix = "nearest legal: " + _either(legal) if legal else f"nearest legal: seq_len={by} with max_seq_len={by}"
    message = f"sequences of {length} tokens do not divide over {by} ranks"
    yield cx.problem(("data.seq_len", "model.max_seq_len"), message, fix)


@rule("TEN205", "heads-do-not-divide-hidden")
def heads_do_not_divide_hidden(cx: Context) -> Iterator[Problem]:
    """hidden_size is no multiple of num_heads.

    What it does:
        Checks that a head has a whole number of features.

    Why:
        Attention cuts hidden_size into num_heads equal heads.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=50, num_heads=4, vocab_size=256, max_seq_len=64)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=52, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    hidden, heads = cx.gpt.hidden_size, cx.gpt.num_heads
    if hidden % heads:
        yield cx.problem("model.hidden_size", f"hidden_size {hidden} is not a multiple of num_heads {heads}", _fix(cx))


@rule("TEN206", "kv-heads-do-not-divide")
def kv_heads_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The heads of keys and values do not divide over the ranks that share them.

    What it does:
        Checks num_kv_heads against what num_heads is checked against: y (y * z if inner activations are kept by heads),
        and y * x for Ulysses.

    Why:
        A rank computes whole heads, and has the keys and values of its own queries; none are copied.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=2)
        parallel = dict(tensor=dict(size=4, mode='1d'))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=4)
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    yield from _of_gpt(cx, "TEN206", "num_kv_heads")


@rule("TEN207", "kv-heads-do-not-divide-heads")
def kv_heads_do_not_divide_heads(cx: Context) -> Iterator[Problem]:
    """num_heads is no multiple of num_kv_heads.

    What it does:
        Checks that each head of keys and values serves a whole number of queries' heads.

    Why:
        Grouped-query attention shares each key and value among num_heads / num_kv_heads queries.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=3)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=4)
    """
    heads, kv_heads = cx.gpt.num_heads, cx.gpt.num_kv_heads
    if kv_heads is not None and heads % kv_heads:
        message = f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}"
        yield cx.problem("model.num_kv_heads", message, _fix(cx))


@rule("TEN208", "kv-features-do-not-divide")
def kv_features_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The features of keys and values do not divide over the ranks that cut their weights.

    What it does:
        Checks num_kv_heads * hidden_size / num_heads against y * q.

    Why:
        The weights of queries, keys and values are blocks of one weight, each cut by itself into equal pieces. Of many
        queries a key, the block of the keys is the small one.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=40, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=2)
        parallel = dict(tensor=dict(size=16, mode='cuboid', shape=(8, 2, 1)))
        batch = dict(micro_size=8)  # a world of 16

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=64,
                     num_kv_heads=2)
        parallel = dict(tensor=dict(size=8, mode='cuboid', shape=(4, 2, 1)))
        batch = dict(micro_size=4)
    """
    if any(not each.holds for each in divisors.heads(cx.gpt, cx.cuboid)) or cx.gpt.hidden_size % cx.gpt.num_heads:
        return
    if _wrong(divisors.hidden(cx.gpt, cx.cuboid), "TEN208"):
        cut, features = cx.cuboid.y * cx.cuboid.q, cx.gpt.kv_heads * (cx.gpt.hidden_size // cx.gpt.num_heads)
        message = f"num_kv_heads {cx.gpt.num_kv_heads} are {features} features, which do not divide by y * q = {cut}"
        yield cx.problem("model.num_kv_heads", f"{message} of mode {cx.cuboid.mode!r}", _fix(cx))


@rule("TEN209", "odd-head")
def odd_head(cx: Context) -> Iterator[Problem]:
    """Rotary positions, and a head has an odd number of features.

    What it does:
        Checks that hidden_size / num_heads is even where positions='rotary'.

    Why:
        Rotary positions turn pairs of features.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=36, num_heads=4, vocab_size=256, max_seq_len=64,
                     positions='rotary')

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=40, num_heads=4, vocab_size=256, max_seq_len=64,
                     positions='rotary')
    """
    hidden, heads = cx.gpt.hidden_size, cx.gpt.num_heads
    if cx.gpt.positions == "rotary" and hidden % heads == 0 and hidden // heads % 2:
        message = f"a head has {hidden // heads} features, and rotary positions turn pairs of them"
        yield cx.problem("model.hidden_size", message, _fix(cx))


def _of_gpt(cx: Context, code: str, field: str) -> Iterator[Problem]:
    """What the table says under `code`."""
    wrong = _wrong((*divisors.heads(cx.gpt, cx.cuboid), *divisors.hidden(cx.gpt, cx.cuboid)), code)
    if wrong:
        yield cx.problem(f"model.{field}", _said(cx, f"model.{field}", wrong), _fix(cx))


def _wrong(found: Iterable[Condition], code: str) -> list[Condition]:
    return [each for each in found if each.code == code and not each.holds]


def _said(cx: Context, key: str, wrong: list[Condition]) -> str:
    words = " and by ".join(each.why for each in wrong)
    return f"{_name(cx, key)} {wrong[0].value} does not divide by {words} of mode {cx.cuboid.mode!r}"


def _fix(cx: Context) -> str:
    """Sizes that are legal together: all rules about heads and hidden_size name the same."""
    choices = divisors.nearest(cx.gpt, _cuboid_or_one(cx))
    if not choices:
        return "a smaller tensor size"
    names = {key: _name(cx, f"model.{key}") for key in choices[0]}
    if len(names) == 1:
        ((key, name),) = names.items()
        return f"nearest legal: {name}=" + _either([choice[key] for choice in choices])
    return "nearest legal: " + " with ".join(f"{name}={choices[0][key]}" for key, name in names.items())


def _cuboid_or_one(cx: Context) -> Tensor:
    """The cuboid; where another rule has to say that it is none, one rank."""
    try:
        return cx.cuboid
    except UnknownValueError:
        return Tensor()


def _name(cx: Context, key: str) -> str:
    return cx.source_key(key).rpartition(".")[2]


def _either(sizes: Iterable[int]) -> str:
    return " or ".join(map(str, sizes))


RULES = (
    heads_do_not_divide,
    hidden_does_not_divide,
    ffn_does_not_divide,
    sequence_does_not_divide,
    heads_do_not_divide_hidden,
    kv_heads_do_not_divide,
    kv_heads_do_not_divide_heads,
    kv_features_do_not_divide,
    odd_head,
)
