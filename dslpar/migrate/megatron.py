"""Conversions for the arguments of Megatron-LM and its fork GPT-NeoX (rows: data/megatron.txt, gpt_neox.txt)."""

from __future__ import annotations

import ast
from typing import Any

from dslpar.migrate.conversions import chunks, number, on, one_dropout
from dslpar.migrate.known_arguments import SWITCH, known_arguments
from dslpar.migrate.table import Outcome, Row, View, changed, dropped, needed


def choice(value: object, view: View, row: Row) -> Outcome:
    """Convert a value by the dict in the row's argument; a value that is not in the dict needs the author."""
    known = ast.literal_eval(row.argument)
    to = known.get(value, value if value in known.values() else None) if isinstance(value, str) else None
    if to is None:
        theirs = ", ".join(map(repr, known))
        return needed(f"{value!r} is none of {theirs}, which dslpar has: leave it out, or choose one of these", row.to)
    if to == value:
        return Outcome("renamed", row.to, value)
    return changed(row.to, to, row.why or f"{value!r}, by dslpar's name")


def query_groups(value: object, view: View, row: Row) -> Outcome:
    """Keep the number of key and value heads if grouped-query attention is on."""
    return (
        row.as_is(value)
        if view.get("group_query_attention")
        else dropped("without group_query_attention there are as many as heads")
    )


@number
def kv_channels(value: float, view: View, row: Row) -> Outcome:
    """Drop the width of a head if it is hidden_size / num_attention_heads."""
    hidden, heads = view.get("hidden_size"), view.get("num_attention_heads")
    usual = type(hidden) is int and type(heads) is int and value * heads == hidden
    return dropped(row.why) if usual else needed("dslpar's heads have hidden_size / num_heads features: leave it out")


def swiglu(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of SwiGLU; without ffn_hidden_size, Megatron-LM narrows its hidden layer by a third."""
    made, hidden = on(value, view, row._replace(argument="'swiglu': three weights")), view.get("hidden_size")
    if made.fate == "changed" and type(hidden) is int and view.get("ffn_hidden_size") is None:
        return made._replace(also={"model.ffn_hidden_size": int(4 * hidden * 2 / 3) // 64 * 64})
    return made


def gelu(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that turns off the fusion of bias and GELU, which computes the approximate GELU."""
    other = next((key for key in ("swiglu", "openai_gelu", "squared_relu", "quick_geglu") if view.get(key)), "")
    if other:
        return dropped(f"{other} is the activation")
    if value is True:
        return changed(row.to, "gelu", "without the fusion, the exact GELU")
    if view.get("disable_bias_linear") is True:
        return changed(row.to, "gelu", "the exact GELU: without biases nothing is fused")
    return changed(row.to, "gelu_tanh", "the fusion of bias and GELU computes GELU's approximation by tanh")


def dropout(value: object, view: View, row: Row) -> Outcome:
    """Merge the dropout probabilities, which the row's argument names."""
    return one_dropout(value, [view.value(name) for name in row.argument.split()], row)


@number
def tensor_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of tensor parallelism. The row's argument is a dict of further keys that the size implies."""
    if value == 1:
        return dropped("1 means none")
    also = {f"parallel.tensor.{key}": item for key, item in ast.literal_eval(row.argument).items()}
    return changed(row.to, value, "Megatron-LM's tensor parallelism is mode '1d'", also)


@number
def expert_size(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of expert parallelism to the number of ranks that hold all experts.

    Megatron-LM divides each expert over as many ranks as a layer, unless expert_tensor_parallel_size says otherwise.
    dslpar's ranks hold whole experts, fewer of them.
    """
    of_one = view.any_of("expert_tensor_parallel_size", "tensor_model_parallel_size") or 1
    if type(of_one) is not int or value != int(value):
        return needed("choose the number of ranks that together hold all experts", row.to)
    if value * of_one == 1:
        return dropped("1 means none")
    factor = f"{value:g} * {of_one} ranks of one expert" if of_one > 1 else f"{value:g} ranks"
    return changed(row.to, int(value) * of_one, f"{factor}: those that together hold all experts")


def dispatcher(value: object, view: View, row: Row) -> Outcome:
    """Drop the way of tokens to experts, which parallel.expert decides."""
    if value in ("alltoall", "allgather"):
        return dropped(row.why)
    return needed(f"dslpar has no such way to experts as {value!r}: leave it out")


def load_balancing(value: object, view: View, row: Row) -> Outcome:
    """Drop the way of balancing experts by the loss that transformers' mixtures have."""
    if value == "none":
        return dropped("no balancing")
    return dropped(row.why) if value == "aux_loss" else needed(f"dslpar has 'aux_loss', not {value!r}: leave it out")


@number
def context_parallel(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of context parallelism."""
    return dropped("1 means none") if value == 1 else row.as_is(value)


def context_type(value: object, view: View, row: Row) -> Outcome:
    """Convert the communication type of context parallelism."""
    if (view.any_of("context_parallel_size") or 1) == 1:
        return dropped("without context parallelism it has no effect")
    impl = {"p2p": "ring", "a2a": "ulysses", "a2a+p2p": "hybrid"}.get(str(value))
    if impl is None:
        return needed(f"{value!r}: of dslpar's three, 'ring' sends as little as can be overlapped", row.to)
    return changed(row.to, impl, f"Megatron-LM's {value!r}")


def sequence_parallel(value: object, view: View, row: Row) -> Outcome:
    """Keep sequence parallelism if there is tensor parallelism."""
    size = view.any_of("tensor_model_parallel_size", "model_parallel_size") or 1
    return row.as_is(value) if value is True and size != 1 else dropped("without tensor parallelism it has no effect")


def pipeline_size(value: object, view: View, row: Row) -> Outcome:
    """Keep the number of stages; 1, or 0 in GPT-NeoX, means no pipeline."""
    return dropped(f"{value} means none") if value in (0, 1) else row.as_is(value)


def virtual_stages(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of virtual stages per rank of a pipeline."""
    layers, num_stages = view.get("num_layers"), _num_stages(view)
    uneven = next((key for key in _UNEVEN if view.values.get(key) not in (None, False)), None)
    known = all(type(size) is int for size in (value, layers, num_stages))
    if uneven and known and num_stages > 1 and layers < num_stages * value:
        return needed(f"{uneven} leaves a virtual stage without layers: choose those of each rank", row.to)
    return chunks(value, num_stages != 1, row)


def layers_of_virtual_stage(value: object, view: View, row: Row) -> Outcome:
    """Convert the layers per virtual stage to the number of virtual stages per rank of a pipeline."""
    layers, num_stages = view.get("num_layers"), _num_stages(view)
    sizes = (value, layers, num_stages)
    known = all(type(size) is int and size > 0 for size in sizes)
    if not known or layers % (num_stages * value):
        rule = "num_layers / pipeline_model_parallel_size / num_layers_per_virtual_pipeline_stage"
        return needed(f"each rank has {rule} of them, which is not a whole number: choose one", row.to)
    made = chunks(layers // num_stages // value, num_stages != 1, row)
    why = f"{layers} layers / {num_stages} ranks / {value}: the number of stages per rank"
    return made._replace(why=why) if made.fate == "changed" else made


_UNEVEN = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)
"""Keys that give the stages different numbers of layers, so that a virtual stage may have no layer at all."""


def _num_stages(view: View) -> Any:
    """Return the size of the pipeline, which may be `UNREAD`."""
    size = view.values.get("pipeline_model_parallel_size")
    return 1 if size is None else size


def betas(value: object, view: View, row: Row) -> Outcome:
    """Combine both betas of Adam in one value."""
    return changed(row.to, (value, view.value("adam_beta2")), "adam_beta1 and adam_beta2")


@number
def warmup(value: float, view: View, row: Row) -> Outcome:
    """Convert a fraction of the run to steps; the row's argument names the keys of the total."""
    if view.get("lr_warmup_iters"):
        return dropped("lr_warmup_iters sets the warm-up")
    key = next((key for key in row.argument.split() if view.values.get(key) is not None), "")
    total = _steps(key, view)
    if not value:
        return dropped("no warm-up, as if left out")
    if total is None:
        return needed("dslpar counts steps of warm-up: choose this fraction of train.steps", row.to)
    return changed(row.to, int(value * total), f"{value} * {total} steps")


def _steps(key: str, view: View) -> int | None:
    """Return a key's number of steps, or of samples in steps; None if it is unknown."""
    count, size = view.get(key), view.get("global_batch_size")
    if not key.endswith("_samples"):
        return count if type(count) is int else None
    known = type(count) is int and type(size) is int and size > 0 and view.values.get("rampup_batch_size") is None
    return count // size if known else None


def steps_of_samples(value: object, view: View, row: Row) -> Outcome:
    """Convert the samples of a run to steps, as Megatron-LM does: whole global batches."""
    steps = _steps(row.pattern, view)
    if steps is None:
        return needed("dslpar counts steps: choose samples // the global batch, which is not known or grows", row.to)
    return changed(row.to, steps, f"{value} samples // {view.get('global_batch_size')} per step")


def warmup_of_samples(value: object, view: View, row: Row) -> Outcome:
    """Convert the samples of the warm-up to steps."""
    return dropped("no warm-up, as if left out") if value == 0 else steps_of_samples(value, view, row)


def decay_samples(value: object, view: View, row: Row) -> Outcome:
    """Convert the samples of the decay to steps; drop them if they are the run's."""
    if value == view.get("train_samples"):
        return dropped("by default the decay ends at the last step")
    return steps_of_samples(value, view, row)


def decay_iters(value: object, view: View, row: Row) -> Outcome:
    """Drop the length of the decay if it equals the run's."""
    return dropped(row.argument) if value == view.get("train_iters") else changed(row.to, value, row.why)


def precision(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch of half precision."""
    return on(value, view, row._replace(argument=f"{row.pattern!r}: a type in place of a switch"))


def recompute(value: object, view: View, row: Row) -> Outcome:
    """Convert the granularity of activation recomputation."""
    if value == "selective":
        return dropped("scores of attention are not stored: it is fused")
    if value != "full":
        return needed("dslpar has 'full': choose N for activation_checkpoint=N, the layers per stored input", row.to)
    return changed(row.to, view.get("recompute_num_layers", 1), "'full': the number of layers per stored input")


def checkpoint_layers(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of activation checkpointing and its number of layers per checkpoint."""
    if value is not True:
        return dropped("off")
    return changed(row.to, view.get("checkpoint_num_layers", 1), "the number of layers per stored input")


def switched_on(value: object, view: View, row: Row) -> Outcome:
    """Keep a value that turns something on; the row's argument is dslpar's switch for it."""
    return changed(row.to, value, f"{row.argument} = True goes with it", {row.argument: True})


def negated(value: object, view: View, row: Row) -> Outcome:
    """Invert a switch."""
    return changed(row.to, not value, f"inverted: {row.pattern} = {value!r}")


def stage_method(value: object, view: View, row: Row) -> Outcome:
    """Convert the method that divides layers among stages."""
    if value in ("uniform", "parameters"):
        return row.as_is(value)
    if value == "type:transformer|mlp":
        return dropped("GPT-NeoX's default divides the blocks evenly, but dslpar's divides them by cost")
    return needed("it matches names of GPT-NeoX's classes: dslpar has 'cost', 'uniform' and 'parameters'", row.to)


def global_attention(value: object, view: View, row: Row) -> Outcome:
    """Drop a list of attention types if all are global."""
    kinds = (
        {kind for group in value if isinstance(group, list) for kind in group[0]}
        if isinstance(value, list)
        else {value}
    )
    return dropped("all layers are global") if kinds <= {"global", "flash"} else needed("dslpar's attention is global")


# Arguments that dslpar has no counterpart for --------------------------------------------------------------------


def unless_default(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that is Megatron-LM's own default; any other value needs the author."""
    known = known_arguments().get("--" + row.pattern.replace("_", "-"))
    if value is False or (known is not None and known.values != SWITCH and repr(value) == known.default):
        return dropped("off, as if left out")
    return needed(row.why, row.to)


def of_mixture(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of experts if the model has none.

    With the argument "converted" the value is kept, and without an argument only Megatron-LM's default is dropped.
    """
    if _num_experts(view) is None:
        return dropped("without num_experts it has no effect")
    if row.argument == "converted":
        return row.as_is(value)
    return unless_default(value, view, row)


def _num_experts(view: View) -> object | None:
    """Return the number of experts; None: an MLP for every token."""
    found = view.get("num_experts")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    return None if found in (None, 1) else found


def _of_megatron_deepspeed(view: View) -> bool:
    """Return whether an argument is one that Megatron-DeepSpeed has, and Megatron-LM not."""
    known = known_arguments()
    places = (known[name].place for key in view.values if (name := "--" + key.replace("_", "-")) in known)
    return any(place.startswith("Megatron-DeepSpeed") for place in places)


def no_biases(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch that takes out the biases of linear layers; Megatron's LayerNorm keeps its own."""
    if value is not True:
        return on(value, view, row._replace(argument="False"))
    if view.value("normalization") != "RMSNorm":
        return needed(
            "Megatron's LayerNorm keeps its bias, which model.bias=False takes out: choose RMSNorm, or biases", row.to
        )
    return changed(row.to, False, "no layer has a bias")


def number_of_experts(value: object, view: View, row: Row) -> Outcome:
    """Convert the number of experts. Megatron-LM's load-balancing loss is off unless its coefficient is given.

    Megatron-DeepSpeed's mixtures have other defaults: one expert per token, whose score is not divided by itself, in
    every second block; they drop tokens, and their load-balancing loss is on.
    """
    number = _num_experts(view)
    if number is None:
        return dropped("one MLP for every token")
    if type(number) is not int:
        return needed("choose one number of experts for all blocks that have them", row.to)
    if view.value("disable_bias_linear") is not True:
        return needed("dslpar's experts have no biases: choose --disable-bias-linear", row.to)
    also: dict[str, object] = {"model.experts.balance": 0.0}
    if _of_megatron_deepspeed(view):
        top_k = view.get("topk", 1)
        for is_other, why in (
            (view.get("disable_moe_token_dropping") is not True, "drops tokens: choose --disable-moe-token-dropping"),
            (
                view.get("moe_loss_coeff", 0.1) != 0,
                "has another load-balancing loss, on by default: --moe-loss-coeff 0",
            ),
            (
                top_k == 2 and view.get("disable_moe_top2_2nd_expert_sampling") is not True,
                "samples the second expert: choose --disable-moe-top2-2nd-expert-sampling",
            ),
        ):
            if is_other:
                return needed(f"Megatron-DeepSpeed {why}", row.to)
        also |= {} if view.get("expert_interval") is not None else {"model.experts.every": 2}
        also |= {} if view.get("topk") is not None else {"model.experts.top_k": 1}
        also |= {"model.experts.renormalize": False} if top_k == 1 else {}
    return changed(row.to, number, "the experts of each mixture", also)


def pre_softmax(value: object, view: View, row: Row) -> Outcome:
    """Convert a softmax over all experts before the choice; without it, Megatron-LM's is over the chosen ones."""
    if _num_experts(view) is None or value is not True:
        return dropped("off" if value is not True else "without num_experts it has no effect")
    if view.get("moe_router_score_function", "softmax") != "softmax":
        return dropped("the router has no softmax")
    return changed(row.to, False, "the scores of a token's experts are not divided by their sum")


def router(value: object, view: View, row: Row) -> Outcome:
    """Convert the scores of a router. A token's only sigmoid is not divided by itself."""
    if _num_experts(view) is None:
        return dropped("without num_experts it has no effect")
    alone = value == "sigmoid" and view.get("moe_router_topk", 2) == 1
    also = {"model.experts.renormalize": False} if alone else None
    return changed(row.to, value, "the scores of experts", also)


@number
def shared_experts(value: float, view: View, row: Row) -> Outcome:
    """Convert the features of all shared experts together to the number of experts that have as many."""
    if _num_experts(view) is None:
        return dropped("without num_experts it has no effect")
    each = view.any_of("moe_ffn_hidden_size", "ffn_hidden_size")
    if type(each) is not int or value % each:
        return needed("choose the number of shared experts, each with the features of the others", row.to)
    return changed(row.to, int(value) // each, f"{value:g} features / {each} of one expert")


@number
def z_loss(value: float, view: View, row: Row) -> Outcome:
    """Convert the coefficient of the z-loss, which Megatron-LM adds for each layer; dslpar's is a mean over layers."""
    if _num_experts(view) is None or value == 0:
        return dropped("0 is off" if value == 0 else "without num_experts it has no effect")
    layers = view.any_of("num_layers", "encoder_num_layers")
    if type(layers) is not int or view.get("moe_layer_freq", 1) != 1:
        return needed("choose Megatron-LM's coefficient times the number of blocks with experts", row.to)
    return changed(row.to, value * layers, f"{value:g} * {layers} layers: dslpar's z-loss is a mean over layers")


@number
def capacity(value: float, view: View, row: Row) -> Outcome:
    """Convert the capacity of experts; Megatron-LM takes a negative one for none."""
    if _num_experts(view) is None or value < 0:
        return dropped("without num_experts it has no effect" if value >= 0 else "no token is dropped")
    if value == 0:
        return needed("choose a capacity above 0", row.to)
    why = "of each sequence, where Megatron-LM takes each rank's micro-batch; and evaluation drops nothing"
    return changed(row.to, value, why)


def drop_policy(value: object, view: View, row: Row) -> Outcome:
    """Drop the policy that dslpar has too, or one without effect."""
    factor = view.get("moe_expert_capacity_factor")
    if _num_experts(view) is None or not isinstance(factor, int | float) or factor < 0:
        return dropped("without num_experts and moe_expert_capacity_factor it has no effect")
    if value == "probs":
        return dropped("dslpar drops the tokens of the smallest weights too")
    return needed("dslpar drops the tokens of the smallest weights: leave it out", row.to)


def expert_bias(value: object, view: View, row: Row) -> Outcome:
    """Convert the bias that balances experts to the step by which it moves."""
    if _num_experts(view) is None or value is not True:
        return dropped("off" if value is not True else "without num_experts it has no effect")
    rate = view.get("moe_router_bias_update_rate", 1e-3)
    return changed(row.to, rate, "the step of the bias, moe_router_bias_update_rate")


def blocks_with_experts(value: object, view: View, row: Row) -> Outcome:
    """Convert which blocks have experts: the last of so many in Megatron-DeepSpeed, the first in Megatron-LM."""
    if _num_experts(view) is None:
        return dropped("without num_experts it has no effect")
    if value == 1:
        return dropped("every block has experts")
    if row.pattern == "expert_interval" and type(value) is int:
        return changed(row.to, value, "the last of every so many blocks has experts")
    return needed("choose experts.every: with dslpar the last of every so many blocks has experts", row.to)


def of_other_optimizer(value: object, view: View, row: Row) -> Outcome:
    """Drop a setting of an optimizer that the source does not choose."""
    name = row.pattern.removeprefix("dist_").partition("_")[0]
    chosen = view.values.get("optimizer") or "adam"
    if isinstance(chosen, str) and name not in chosen:
        return dropped(f"the optimizer is {chosen!r}")
    return unless_default(value, view, row)


# Stages ----------------------------------------------------------------------------------------------------------


def stage_counts(value: object, view: View, row: Row) -> Outcome:
    """Convert the layers of the first and last stage, or what counts as a layer there, to those of each stage."""
    if value is False or value is None:
        return dropped("off")
    layers, num_stages = view.any_of("num_layers", "encoder_num_layers"), _num_stages(view)
    if num_stages == 1:
        return dropped("without a pipeline it has no effect")
    if _has_virtual_stages(view):
        return needed("choose the layers of each stage: with virtual stages, ranks have several of them", row.to)
    if type(layers) is not int or type(num_stages) is not int:
        return needed("choose the layers of each stage", row.to)
    counts = _counts(layers, num_stages, view)
    if counts is None:
        return needed("choose the layers of each stage: num_layers does not divide as this says", row.to)
    return changed(row.to, counts, "the layers of each stage")


def _has_virtual_stages(view: View) -> bool:
    return any(
        view.values.get(name) is not None
        for name in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "virtual_pipeline_model_parallel_size",
        )
    )


def _counts(layers: int, num_stages: int, view: View) -> list[int] | None:
    """Return the layers of each stage as Megatron-LM divides them; None if they do not divide."""
    first, last = (view.get(f"decoder_{which}_pipeline_num_layers") for which in ("first", "last"))
    if first is None and last is None:
        extra = [int(view.get(f"account_for_{what}_in_pipeline_split") is True) for what in ("embedding", "loss")]
        each, rest = divmod(layers + sum(extra), num_stages)
        made = [each] * num_stages
        made[0] -= extra[0]
        made[-1] -= extra[1]
    else:
        given = [count for count in (first, last) if count is not None]
        if not all(type(count) is int for count in given) or num_stages <= len(given):
            return None
        each, rest = divmod(layers - sum(given), num_stages - len(given))
        middle = [each] * (num_stages - len(given))
        made = [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
    return made if rest == 0 and min(made) >= 0 else None


# Batch and steps --------------------------------------------------------------------------------------------------


@number
def steps_of_tokens(value: float, view: View, row: Row) -> Outcome:
    """Convert tokens to steps, of which the last one reaches the number of tokens."""
    size, length = view.get("global_batch_size"), view.any_of("seq_length", "encoder_seq_length")
    known = all(type(item) is int and item > 0 for item in (size, length))
    if not known or view.values.get("rampup_batch_size") is not None:
        return needed("dslpar counts steps: choose tokens / (batch.global_size * data.seq_len)", row.to)
    return changed(row.to, -(-int(value) // (size * length)), f"{value} tokens / ({size} * {length})")


def same_as(value: object, view: View, row: Row) -> Outcome:
    """Drop a value that equals one of the keys in the row's argument; any other value needs the author."""
    names = row.argument.split()
    mine = [name for name in names if name in row.pattern] or names
    equal = value is not None and value == view.get(mine[0])
    return dropped(row.why) if equal else needed(f"{row.why}: leave it out")


# Optimizer state --------------------------------------------------------------------------------------------------

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def distributed_optimizer(value: object, view: View, row: Row) -> Outcome:
    """Convert the switch of the distributed optimizer, unless FSDP shards more."""
    if value is True and any(view.get(name) is True for name in ("use_megatron_fsdp", "use_torch_fsdp2")):
        return dropped("fully sharded data parallelism includes it")
    return on(value, view, row._replace(argument="1: a distributed optimizer is ZeRO 1"))


def fsdp(value: object, view: View, row: Row) -> Outcome:
    """Convert a switch of fully sharded data parallelism to the ZeRO stage of its strategy."""
    if value is not True:
        return dropped("off")
    strategy = view.get("data_parallel_sharding_strategy", "optim_grads_params")
    stage = 3 if row.pattern == "use_torch_fsdp2" else STRATEGIES.get(str(strategy))
    if stage is None:
        return needed(f"{strategy!r} is none of {', '.join(STRATEGIES)}: choose a ZeRO stage", row.to)
    return changed(row.to, stage, f"{strategy!r} is ZeRO {stage}" if stage != 3 else "fully sharded is ZeRO 3")


def sharding_strategy(value: object, view: View, row: Row) -> Outcome:
    """Drop the strategy, which decides the ZeRO stage of Megatron-LM's FSDP."""
    if not isinstance(value, str) or value not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        return needed(f"{value!r} is none of {names}: choose a ZeRO stage", "zero.stage")
    is_on = view.get("use_megatron_fsdp") is True
    return dropped("zero.stage has it" if is_on else "without use_megatron_fsdp it has no effect")


@number
def offload_fraction(value: float, view: View, row: Row) -> Outcome:
    """Keep the share of the optimizer's state in host memory if any of it is there."""
    if view.get("optimizer_cpu_offload") is not True:
        return dropped("without optimizer_cpu_offload it has no effect")
    return row.as_is(value)


def remote_device(value: object, view: View, row: Row) -> Outcome:
    """Convert the device of ZeRO 3's parameters."""
    if value == "cpu":
        return row.as_is(value, "the parameters are in host memory")
    return dropped("off") if value == "none" else needed("dslpar has 'cpu': leave it out", row.to)


# Data -------------------------------------------------------------------------------------------------------------


def data_path(value: object, view: View, row: Row) -> Outcome:
    """Say what to write for the data, which a config names relative to itself and a script to where it is started."""
    if isinstance(value, str) and row.pattern in ("data_path", "train_data_path"):
        path = f"with the path of {value!r}, relative to the new config"
        return needed(f"{row.why}: choose data=dict(type='tokens', path=...) {path}", row.to)
    kind = "with one part for each path and its weight"
    return needed(f"{row.why}: choose data=dict(type='blend', parts=...) {kind}", row.to)


def eval_path(value: object, view: View, row: Row) -> Outcome:
    """Say what to write for held-out data."""
    return needed(f"{row.why}: choose data.eval_path, beside data.path", row.to)


def split(value: object, view: View, row: Row) -> Outcome:
    """Convert the shares of training, validation and test data to the share that is held out."""
    try:
        shares = [float(part) for part in str(value).split(",")] + [0.0, 0.0]
    except ValueError:
        return needed("choose the share that is held out", row.to)
    total = sum(shares)
    if not total or min(shares) < 0 or shares[0] == 0:
        return needed("choose the share that is held out", row.to)
    made = round(shares[1] / total, 6)
    return changed(row.to, made, f"the second share of {value}; a share of test data is not set aside")


def load(value: object, view: View, row: Row) -> Outcome:
    """Drop the folder to load if the run saves there, so that it continues itself."""
    if value == view.get("save"):
        return dropped(row.why)
    return needed("dslpar does not read Megatron-LM's checkpoints: leave it out to begin with new weights")


# Positions and context --------------------------------------------------------------------------------------------


def no_positions(value: object, view: View, row: Row) -> Outcome:
    """Drop the switch that turns learned positions off where rotary positions take their place."""
    rotary = view.get("use_rotary_position_embeddings") is True or view.get("position_embedding_type") == "rope"
    if rotary or value is not True:
        return dropped(row.why if rotary else "off")
    return needed("dslpar's GPT has learned or rotary positions: leave it out", "model.positions")


@number
def deepspeed_sequence_parallel(value: float, view: View, row: Row) -> Outcome:
    """Convert the size of DeepSpeed's sequence parallelism."""
    if value == 1:
        return dropped("1 means none")
    return changed(row.to, value, "DeepSpeed's sequence parallelism is 'ulysses'", {"parallel.context.impl": "ulysses"})
