"""Mutants of mixtures whose tokens are sent to their experts, and of the engine's sums over experts."""

from __future__ import annotations

from tests.support.maths_mutants.table import of_module

_MANY = "self._axis.size > 1"

EXCHANGE = of_module(
    "layers.token_exchange",
    [
        (
            "weights-left-out",
            "scale",
            "TokenExchange._run_part",
            "(y * weights.unsqueeze(-1).to(y.dtype)).sum(1)",
            "y.sum(1)",
            "the outputs of a token's experts are added without their weights",
        ),
        (
            "rows-of-other-experts",
            "order",
            "TokenExchange._run_part",
            "experts(_reorder(rows, route.by_expert), route.counts)",
            "experts(rows, route.counts)",
            "received rows run through experts in the order in which they came",
            _MANY,
        ),
        (
            "outputs-of-other-tokens",
            "order",
            "TokenExchange._run_part",
            "_put_back(y, route.sending).view",
            "y.view",
            "outputs come back in the order of experts",
        ),
        (
            "rows-of-other-tokens",
            "slice",
            "_ToPairs.forward",
            "x[order.forth // k]",
            "x[order.forth % max(len(x), 1)]",
            "a choice sends another token's features",
        ),
        (
            "gradients-in-order-of-experts",
            "order",
            "_Permute.backward",
            "return grads[0][back], None",
            "return grads[0], None",
            "rows get the gradients of other rows",
        ),
        (
            "gradients-of-other-tokens",
            "order",
            "_ToPairs.backward",
            "grads[0][back].view",
            "grads[0].view",
            "tokens get the gradients of other tokens' choices",
        ),
        (
            "experts-of-sender",
            "axis",
            "TokenExchange._route",
            "arriving.sum(0), sent",
            "counts.sum(0), sent",
            "each expert gets as many rows as this rank sent to others",
            "ranks > 1 and bool((arriving.sum(0) != counts.sum(0)).any())",
        ),
    ],
)
CAPACITY = of_module(
    "layers.expert_capacity",
    [
        (
            "first-choices-are-kept",
            "order",
            "first_of_each",
            "weights.argsort(dim=1, descending=True, stable=True)",
            "torch.zeros_like(weights).argsort(dim=1, stable=True)",
            "the first tokens of a sequence are kept, not those of the largest weights",
        ),
        (
            "own-part-of-sequence",
            "axis",
            "ExpertCapacity.kept",
            "table[place] = self._gathered(functional.pad(each, (0, 0, 0, missing)))",
            "table[own] = each",
            "the tokens of other ranks do not compete",
            "self._groups.axis('tensor').size > 1",
        ),
        (
            "stored-order",
            "slice",
            "ExpertCapacity.kept",
            "return first_of_each(chosen, by, most, self._num_experts).view(len(number), -1)[own]",
            "return first_of_each(chosen, by, most, self._num_experts).view(len(number), -1)[: len(own)]",
            "every rank drops what the first rank's tokens drop",
            "self._groups.axis('tensor').size > 1",
        ),
    ],
)
DISTINCT = of_module(
    "layers.distinct_tokens",
    [
        (
            "first-rank-s-tokens",
            "slice",
            "DistinctTokens.take",
            "collectives.scatter_to_group(x, self._groups.axis(letter), 0)",
            "x.chunk(self._groups.axis(letter).size, 0)[0]",
            "all ranks route the first rank's tokens",
            "bool(self._sliced)",
        ),
        (
            "padding-is-routed",
            "mask",
            "DistinctTokens.take",
            "return x[: self._own(tokens)]",
            "return x",
            "padding takes part in the mixture: in its statistics, if nowhere else",
            "self._own(tokens) < len(x)",
        ),
        (
            "features-in-other-order",
            "order",
            "DistinctTokens.__init__",
            "for letter in reversed(cuts.features)",
            "for letter in cuts.features",
            "pieces of features are joined in the wrong order",
            "sum(sizes[letter] > 1 for letter in cuts.features) > 1",
        ),
    ],
)
MARKS = of_module(
    "engine.expert_parallelism",
    [
        (
            "experts-as-other-weights",
            "axis",
            "register_experts",
            "p.allreduce, p.group_name = False, name",
            "p.group_name = name",
            "gradients of different experts are averaged",
            "bool(experts)",
        ),
    ],
)
AXES = of_module(
    "distributed.group_axes",
    [
        (
            "experts-over-all-replicas",
            "axis",
            "GroupAxes.__getitem__",
            "self._expert_data if self.is_expert(group) else self.data",
            "self.data",
            "gradients of different experts are summed",
            "self.is_expert(group) and self._expert_data.size < self.data.size",
        ),
    ],
)
NORMS = of_module(
    "distributed.deepspeed_patches.norms",
    [
        (
            "own-experts-alone",
            "reduction",
            "owned_square_norm",
            "collectives.all_reduce(_square_norm(experts, device), expert_axis)",
            "_square_norm(experts, device)",
            "the norm counts this rank's experts alone",
            "expert_axis is not None",
        ),
    ],
)
