"""PAR105, ZER111, ZER112, DEAD128: the axis of expert parallelism, `parallel.expert`."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.layout.divisors import divisors
from dslpar.layout.resolve import offloads
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, require
from dslpar.linter.rule import rule
from dslpar.schema.sections import ExpertParallel, Model


def _size(cx: Context) -> int:
    return require(cx.spec.parallel.expert, ExpertParallel).size


@rule("PAR105", "expert-size-does-not-fit")
def expert_size_does_not_fit(cx: Context) -> Iterator[Problem]:
    """The ranks of parallel.expert are not whole tensor groups, or the replicas are not a multiple of them."""
    size, group = _size(cx), cx.tensor.size
    ranks = f"{group} tensor ranks" if group > 1 else "the ranks"
    if size % group:
        near = [each for each in (size // group * group, (size // group + 1) * group) if each]
        message = f"expert {size} is not a multiple of the {ranks} of a tensor group"
        yield cx.problem("parallel.expert.size", message, f"parallel.expert={' or '.join(map(str, near))}")
    elif (data := cx.layout.data_size) % (size // group):
        legal = [group * count for count in divisors(data)]
        of = f"{data} replicas" + (f" * {group} tensor ranks" if group > 1 else "")
        message = f"expert {size} does not divide the {data * group} ranks of a stage ({of})"
        yield cx.problem("parallel.expert.size", message, f"parallel.expert={' or '.join(map(str, legal))}")


@rule("ZER111", "experts-with-zero-3")
def experts_with_zero_3(cx: Context) -> Iterator[Problem]:
    """ZeRO 3, or an optimizer on the host, does not work with experts that are divided over replicas."""
    if _size(cx) <= cx.tensor.size:
        return
    if cx.spec.zero.stage == 3:
        message = "ZeRO 3 shards every weight over all replicas, but replicas hold different experts"
        yield cx.problem("zero.stage", message, f"zero.stage=2, or parallel.expert={cx.tensor.size}")
    elif offloads(cx.spec, "optimizer"):
        message = "an offloaded optimizer is not supported with experts that are divided over replicas"
        key = "zero.offload_optimizer"
        yield cx.problem(key, message, f"leave offload_optimizer out, or parallel.expert={cx.tensor.size}")


@rule("ZER112", "experts-in-half-precision-without-zero")
def experts_in_half_precision_without_zero(cx: Context) -> Iterator[Problem]:
    """In half precision without ZeRO, experts cannot be divided over replicas."""
    dtype = cx.spec.precision.dtype
    if _size(cx) > cx.tensor.size and cx.spec.zero.stage == 0 and dtype != "fp32":
        message = f"without ZeRO, DeepSpeed's {dtype} optimizers average the norms of experts instead of adding them"
        yield cx.problem(("zero.stage", "parallel.expert.size"), message, "zero.stage=1")


@rule("DEAD128", "expert-without-a-mixture", "warning")
def expert_without_a_mixture(cx: Context) -> Iterator[Problem]:
    """parallel.expert is set, but the model has no experts."""
    _size(cx)
    model = cx.spec.model
    is_known = isinstance(model, Model) or model.transformers is not None
    if is_known and model.num_experts is None:
        message = "the model has no mixture of experts, so parallel.expert has no effect"
        yield cx.problem("parallel.expert", message, "leave parallel.expert out")


RULES = (
    expert_size_does_not_fit,
    experts_with_zero_3,
    experts_in_half_precision_without_zero,
    expert_without_a_mixture,
)
