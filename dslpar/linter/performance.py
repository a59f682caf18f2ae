"""PERF103 and on: legal, but slow: what a layout sends against what another would (plan/traffic.py has the counts).

That 1d on many ranks sends more than another mode would is no finding: given a micro-batch that is large enough, every
1d group does, and its four all-reduces within a host are often the faster choice all the same; `show` has the numbers.
A mode that sends more than 1d has no excuse but memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dslpar.job import seq_len_of
from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, rule
from dslpar.plan.divisors import conditions, least_micro_size

if TYPE_CHECKING:
    from dslpar.plan.traffic import BreakEven


@rule("PERF103", "below-break-even", "warning")
def below_break_even(cx: Context) -> Iterator[Problem]:
    """The mode of tensor parallelism sends more than '1d' would, for micro-batches of this size.

    What it does:
        Counts the elements that a rank sends for one transformer layer, forward and backward, in this mode and in '1d'
        on as many ranks, and from how many tokens on this mode sends less.

    Why:
        All modes but '1d' send weights besides activations. Weights are sent once a micro-batch, however small it is;
        in return less is sent a token. Below the break-even, '1d' sends less.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=96, num_heads=4, vocab_size=256, max_seq_len=96)
        parallel = dict(tensor=dict(size=4, mode='2d'))
        batch = dict(micro_size=2)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=96, num_heads=4, vocab_size=256, max_seq_len=96)
        parallel = dict(tensor=dict(size=4, mode='2d'))
        batch = dict(micro_size=4)
    """
    cuboid, model = cx.cuboid, cx.gpt
    if cuboid.x == cuboid.z == 1:
        return  # it is 1d, by whatever name
    seq_len = seq_len_of(cx.spec)
    if not all(each.holds for each in conditions(model, cuboid, seq_len, cx.batch.micro_size)):
        return  # what is not legal is not slow
    from dslpar.plan.traffic import break_even  # here: most configs need none of it

    found = break_even(cuboid, model, cx.batch.micro_size * seq_len)
    fixes = list(_fixes(cx, found, seq_len))
    if found.sent > found.sent_in_1d and fixes:
        said = (
            f"mode {cuboid.mode!r} sends {_rounded(found.sent)} elements a rank and layer for a micro-batch of"
            f" {found.tokens} tokens, and '1d' {_rounded(found.sent_in_1d)}: {_words(found)}"
        )
        yield cx.problem("parallel.tensor.mode", said, " or ".join(fixes))


def _fixes(cx: Context, found: BreakEven, seq_len: int) -> Iterator[str]:
    if found.needed is not None:
        least = least_micro_size(cx.cuboid)
        samples = -(-found.needed // seq_len)
        yield f"batch.micro_size at least {-(-samples // least) * least}"
    if _fits_1d(cx.gpt, cx.cuboid.size):
        yield "mode '1d'"


def _words(found: BreakEven) -> str:
    if found.needed is None:
        return "it never sends less"
    return f"it sends less from {found.needed} tokens on"


def _fits_1d(model: Any, size: int) -> bool:
    return not any(count % size for count in (model.num_heads, model.kv_heads, model.hidden_size, model.ffn_size))


def _rounded(elements: Any) -> str:
    return f"{round(elements):,}"


RULES = (below_break_even,)
