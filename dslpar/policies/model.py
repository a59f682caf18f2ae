"""Turn a transformers model into layers for any tensor mode and pipeline: `type='transformers.LlamaForCausalLM'`.

    model = HuggingFaceModel(LlamaForCausalLM, LlamaConfig(...))
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module(ids), labels)

The layers are the token table, the code before the blocks, the blocks, the code after the blocks, the head, and the
code on the head's logits. Parameters within a block keep transformers' names. Initial weights are drawn as in
transformers, by a generator seeded for each module by its name. So they do not depend on the layout.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils.generic import ModelOutput

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed.groups import Groups
from dslpar.layers import from_inner, placement
from dslpar.layers.parameter import PlacedModule
from dslpar.models.layered import LayeredModel, LayerSpec, Loss, VocabularyHead
from dslpar.models.pretrained import Folder, PretrainedWeights
from dslpar.policies import attention, probe, tables
from dslpar.policies import replacement_modules as modules
from dslpar.policies.apply import Setting, apply, make_whole
from dslpar.policies.balance_loss import SETTING, balance_of
from dslpar.policies.chain import Chain
from dslpar.policies.config import check_settings, check_table, config_of, lists_of_blocks, proven_policy
from dslpar.policies.constructed import fill_buffers
from dslpar.policies.derive import derive, plan_of
from dslpar.policies.draft import missing_counts
from dslpar.policies.errors import NEEDS_OWN_CODE, OF_ITSELF, UNSPLIT, as_findings
from dslpar.policies.initialization import TransformersInit
from dslpar.policies.lora import Adapters, as_lora
from dslpar.policies.loss import ModelLoss, OwnLoss, vocabulary_loss, whole_loss
from dslpar.policies.model_inputs import check_inputs
from dslpar.policies.pretrained_files import Saved
from dslpar.policies.skeleton import Piece, Skeleton
from dslpar.schema.policy import DECODER_INPUTS, PlanOf, Policy, as_policy
from dslpar.schema.sections import LoRA
from dslpar.schema.transformers_policies import DERIVED, POLICIES

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""Global variable with transformers' attention registry, in the Python modules of models that use the registry."""


class HuggingFaceModel(LayeredModel):
    """A transformers model whose code runs unchanged, as layers.

    - `config`: a transformers config, or a dict of its arguments.
    - `pretrained`: a folder written by `save_pretrained`. Training begins with its weights, and `config` overrides
      values of its config.json.
    - `policy`: a `Policy`, a dict of its fields, the name of a class with a policy, or "derived" (from transformers'
      tensor plan, even if it is not tested for this class). None: the policy of `cls`, or else a tested derived one.
    - `lora`: a LoRA section, or a dict of its keys: only adapters are trained.
    - `attn_implementation`: the attention kernel; None: that of `config`, or else "sdpa".

    Raises:
        DslparError: dslpar does not know how to run or shard a part of the model.
    """

    def __init__(
        self,
        cls: type[Any],
        config: Any = None,
        policy: object = None,
        pretrained: str | None = None,
        lora: LoRA | Mapping[str, Any] | None = None,
        attn_implementation: str | None = None,
    ) -> None:
        config = config_of(cls, config, pretrained)
        named = as_policy(policy, POLICIES, DERIVED) if policy not in (None, "derived") else None
        written = named if isinstance(named, Policy) else POLICIES.get(cls.__name__) if policy is None else None
        if written is None:
            check_inputs(cls)
        has_door = getattr(cls, "_supports_attention_backend", False) or _REGISTRY in vars(sys.modules[cls.__module__])
        if not has_door and not (written and (written.own_attention or not written.regions)):
            message = f"{cls.__name__}: its attention does not go through transformers' interface"
            raise_finding("TEN234", message, UNSPLIT, key="model.type")
        self.attention = attention.implementation_of(config, attn_implementation)
        if self.attention == attention.FLASH and written and written.own_attention:
            message = f"{cls.__name__} computes its scores itself, and uses no kernel"
            raise_finding("TEN235", message, "leave attn_implementation out", key="model.attn_implementation")
        with torch.device("meta"), as_findings(f"{cls.__name__}: building it", OF_ITSELF):
            self.model: Any = cls._from_config(config, attn_implementation=attention.IMPLEMENTATION)
        self.config = self.model.config
        if getattr(self.config, SETTING, False):
            # dslpar computes the load-balancing loss, and transformers' forward around the blocks must not.
            self.config = copy.copy(self.config)
            setattr(self.model.config, SETTING, False)
        prefix, stored = self.model.base_model_prefix, Saved(self.model).stored
        self.folder = None if pretrained is None else Folder(pretrained, prefix, stored)
        with as_findings(f"{cls.__name__}: deriving a policy"):
            self.policy = written or _derived(self.model, named or policy)
        self.policy = replace(self.policy, blocks=lists_of_blocks(self.model, self.policy.blocks))
        check_settings(cls.__name__, self.config, self.policy)
        with as_findings(f"{cls.__name__}: its token table"):
            check_table(self.model, self.policy)
        self.balance = balance_of(self.model, self.config, self.policy)
        with as_findings(f"{cls.__name__}: its forward without its blocks"):
            self.skeleton = Skeleton(self.model, self.policy)
            self.chain = Chain(self.skeleton, self.balance)
        given = as_lora(lora)
        is_tied = self.skeleton.is_tied
        self.adapters = None if given is None else Adapters(given, self.model, self.policy, is_tied=is_tied)
        uncalled = self.skeleton.outline.uncalled
        if uncalled:
            message = f"{', '.join(uncalled)}: the model's forward never calls it, but it holds weights"
            held = {
                f"{name}.{own}" for name in uncalled for own, _ in self.model.get_submodule(name).named_parameters()
            }
            # An uncalled weight may be one that is called only if it is tied, as the bias of BERT's head.
            is_untied = not held.isdisjoint((getattr(self.model, "_tied_weights_keys", None) or {}).values())
            hint = "tie_word_embeddings=True" if is_untied else "train it without that part"
            raise DslparError([finding("TEN234", message, hint, key="model.config" if is_untied else "model.type")])

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits, without padding; for a model without a vocabulary, the number of classes."""
        if not self.skeleton.head:
            return int(self.config.num_labels)
        return int(self.model.get_submodule(self.skeleton.head).weight.shape[0])

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the layers in the order in which they run; pieces of code that change nothing are left out.

        Raises:
            DslparError: the model does not support the tensor mode.
        """
        self._check_mode(groups)
        skeleton, chain, blocks = self.skeleton, self.chain, self.policy.blocks
        specs: list[LayerSpec] = []
        index = 0
        for number, piece in enumerate(skeleton.outline.pieces):
            hidden, shared = skeleton.hidden_size(number), (self.config, self.adapters, self.attention)
            setting = Setting(groups, self.policy, hidden, *shared)
            for leaf, _ in piece.lookups:
                # The first token table owns the weight, under its name in transformers' files.
                name, tied = (leaf, skeleton.table) if specs else (skeleton.table, None)
                run = partial(chain.look_up, number, leaf)
                specs.append(LayerSpec(name=name, build=partial(self._table, groups), tied=tied, forward=run))
            if piece.leaves or not self._changes_nothing(partial(chain.run_alone, number)):
                name = piece.place if piece.place != "between" or number == 1 else f"between_{number}"
                build, run = partial(self._piece, setting, piece), partial(chain.run_piece, groups, number)
                specs.append(LayerSpec(name=name, modules=(*piece.leaves,), build=build, forward=run))
            if piece.place == "back":
                break
            for block in range(len(skeleton.lists[blocks[number]])):
                name = f"{blocks[number]}.{block}"
                specs.append(
                    LayerSpec(
                        name=name,
                        build=partial(self._block, setting, name),
                        forward=partial(chain.run_block, groups, number, block),
                        layer_idx=index,
                        recomputable=bool(self.policy.regions),  # recomputed batch norms would count batches twice
                    )
                )
                index += 1
        specs += self._head_layers(groups) if skeleton.head else []
        return [_with_findings(spec, self._hint_of_shards) for spec in specs]

    def _hint_of_shards(self) -> str:
        """Return the help if code fails on a shard: the counts of heads that the policy lacks are the usual reason."""
        counts = missing_counts(self.model, self.policy)
        if not counts:
            return NEEDS_OWN_CODE
        return f"{counts} in its policy, if these count heads or their features; or {UNSPLIT}"

    def _head_layers(self, groups: Groups) -> list[LayerSpec]:
        skeleton, chain = self.skeleton, self.chain
        head = self.model.get_submodule(skeleton.head)
        build, tied = partial(self._head, groups), None
        if skeleton.is_tied:
            build, tied = partial(self._table, groups), skeleton.table
        run = partial(chain.apply_head, groups)
        specs = [LayerSpec(name=skeleton.head, build=build, tied=tied, forward=run)]
        if skeleton.is_tied and head.bias is not None:
            build = partial(self._logit_bias, groups)
            specs.append(LayerSpec(name="logit_bias", modules=(), build=build, forward=_on_first))
        if not self._changes_nothing(chain.run_logits):
            build = partial(skeleton.part, ())
            specs.append(LayerSpec(name="logits", modules=(), build=build, forward=chain.run_logits))
        return specs

    @property
    def vocabulary_head(self) -> VocabularyHead | None:  # type: ignore[override]
        """The head, if the model is a decoder whose only output is logits over the vocabulary; else None."""
        skeleton = self.skeleton
        if not skeleton.head or skeleton.outline.outputs or self.policy.loss or self.policy.inputs != DECODER_INPUTS:
            return None
        return VocabularyHead(skeleton.head, self.vocab_size, self._with_balance)

    def loss(self, groups: Groups) -> Loss:
        """Return the loss: cross-entropy averaged over labels that are not ignored, or a loss that the policy names.

        Logits over a vocabulary [batch, sequence, V] are sharded, as ranks store them. Other logits, [batch, classes]
        or [batch, sequence, classes], are full. A model with two outputs has two label tensors, and its loss is the sum
        of two cross-entropies. The load-balancing loss of a mixture is added, if the config enables it.
        """
        outputs = self.skeleton.outline.outputs
        if self.policy.loss:
            return OwnLoss(self.model, self.policy.loss, outputs)
        of_first: Loss = partial(vocabulary_loss, groups, self.vocab_size) if self.skeleton.head else whole_loss
        return self._with_balance(groups, ModelLoss(of_first, len(outputs) + bool(self.skeleton.head)))

    def _with_balance(self, groups: Groups, loss: Loss) -> Loss:
        """Return a loss of the model's logits, with the load-balancing loss added if the config enables it."""
        return loss if self.balance is None else self.balance.added_to(groups, loss)

    @property
    def takes_statistics(self) -> bool:  # type: ignore[override]
        """Return whether the loss includes the load-balancing loss."""
        return self.balance is not None

    def for_inference(self) -> HuggingFaceModel:
        """Return the model without the load-balancing loss, whose output is the logits alone."""
        if self.balance is None:
            return self
        model = copy.copy(self)
        model.balance, model.chain = None, Chain(self.skeleton)
        return model

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Return the full logits on every rank, under transformers' names.

        If the config enables the load-balancing loss, `aux_loss` is this data rank's share of it, without its
        coefficient; the mean of the shares is the loss. All data ranks must then call it together.
        """
        first, *others = output if isinstance(output, tuple) else (output,)
        beside: dict[str, Any] = {}
        if self.balance is not None:
            beside["aux_loss"] = self.balance.loss(groups, others.pop())
        if self.skeleton.head:
            first = from_inner(groups, first)[..., : self.vocab_size]
        names = [*([self.skeleton.outline.head_output] if self.skeleton.head else []), *self.skeleton.outline.outputs]
        return ModelOutput({**dict(zip(names, (first, *others), strict=True)), **beside})  # type: ignore[no-untyped-call]

    def _check_mode(self, groups: Groups) -> None:
        """Raise DslparError if the model does not support the tensor mode."""
        name, tensor = type(self.model).__name__, groups.tensor
        sizes = [
            placement.piece(tensor, groups.coord, cuts(tensor).sequence)[1]
            for cuts in (placement.residual_cuts, placement.inner_cuts)
        ]
        if not self.policy.regions and tensor.size > 1:
            message = f"no layer of {name} can be sharded, but parallel.tensor gives it {tensor.size} ranks"
            raise_finding("TEN235", message, "use data and pipeline parallelism instead", key="parallel.tensor")
        if self.policy.grid and max(sizes) > 1:
            message = f"{name} arranges tokens on a grid, but mode {tensor.mode!r} with these settings splits sequences"
            raise_finding("TEN235", message, "use a tensor mode that keeps sequences whole", key="parallel.tensor")

    # ---- parts ----

    def _table(self, groups: Groups) -> nn.Module:
        name = self.skeleton.table
        table = copy.deepcopy(self.model.get_submodule(name))
        fill_buffers(self.model, table, name)
        factor = probe.factor_of(table)
        if factor is None:
            message = f"{name} of {type(table).__name__} does more than look rows up and scale them"
            raise DslparError([finding("TEN234", message, NEEDS_OWN_CODE)])
        made = tables.Table(groups, table, factor, {"weight": (modules.Source(f"{name}.weight"),)})
        return self._with_init(made)

    def _head(self, groups: Groups) -> nn.Module:
        name = self.skeleton.head
        head = self.model.get_submodule(name)
        own = [own for own, _ in head.named_parameters()]
        return self._with_init(
            tables.OutputHead(groups, head, {each: (modules.Source(f"{name}.{each}"),) for each in own})
        )

    def _logit_bias(self, groups: Groups) -> nn.Module:
        """Build the bias of a head whose weight is tied to the table, under its name in transformers' files."""
        bias = self.model.get_submodule(self.skeleton.head).bias
        name = next(name for name, p in self.model.named_parameters() if p is bias)
        return self._with_init(tables.LogitBias(groups, len(bias), {"bias": (modules.Source(name),)}))

    def _block(self, cut: Setting, name: str) -> nn.Module:
        part = copy.deepcopy(self.model.get_submodule(name))
        self._fill_buffers(part, name)
        routers = self.balance.routers(part) if self.balance else []
        if self.policy.regions:
            part = apply(part, name, cut)
        else:
            make_whole(cut.groups, part, name)
        if self.balance:
            self.balance.watch(part, routers, cut.groups)
        return self._with_init(part)

    def _piece(self, setting: Setting, piece: Piece) -> nn.Module:
        """Build a piece around the lists of blocks: its own modules, sharded or full, and stand-ins for all others."""
        part = self.skeleton.part((*piece.leaves, *piece.around))
        self._fill_buffers(part)
        is_whole = piece.place in self.policy.whole
        for name in piece.around:
            if not is_whole:
                message = f"{name}, which contains blocks, also has its own parameters, which the policy does not shard"
                raise_finding("TEN234", message, f"whole=[{piece.place!r}] in a policy", key="model.policy")
            make_whole(setting.groups, part.get_submodule(name), name, recurse=False)
        for name in piece.leaves:
            own = part.get_submodule(name)
            if is_whole:
                make_whole(setting.groups, own, name)
            else:
                part.set_submodule(name, apply(own, name, setting))
        return self._with_init(part)

    def _fill_buffers(self, part: nn.Module, prefix: str = "") -> None:
        """Fill buffers. Persistent buffers (a router's bias) are read from the pretrained folder, if there is one."""
        fill_buffers(self.model, part, prefix)
        for name, module in part.named_modules() if self.folder else ():
            for own, buffer in list(module.named_buffers(recurse=False)):
                full = ".".join(filter(None, (prefix, name, own)))
                if self.folder and own not in module._non_persistent_buffers_set and self.folder.has(full):
                    module._buffers[own] = self.folder.slice(full)[...].to(buffer.dtype)

    def _with_init(self, part: nn.Module) -> nn.Module:
        """Set the initialization of the part's parameters: from the pretrained folder, or as in transformers."""
        for module in part.modules():
            sources: modules.Sources = getattr(module, "sources", {})
            for name, of in sources.items():
                drawing = PretrainedWeights(self.folder, of) if self.folder else TransformersInit(self.model, of)
                if isinstance(module, PlacedModule):
                    module.set_init(name, drawing)
                else:
                    module.get_parameter(name).init = drawing  # type: ignore[attr-defined]
        if self.adapters:
            self.adapters.freeze(part)
        return part

    @probe.on_cpu
    def _changes_nothing(self, run: Any) -> bool:
        """Return whether a piece without weights is the identity: a decoder's piece is run on random numbers.

        For another model, only the code on its logits counts as the identity, without a test.
        """
        if not self.chain.is_decoder:
            return bool(run == self.chain.run_logits)
        x = torch.randn(1, 4, self.skeleton.hidden_size(0), generator=torch.Generator().manual_seed(0))
        return torch.equal(run(self.skeleton.part(()), x), x)


def _derived(model: Any, policy: object) -> Policy:
    """Return the policy derived from the plan of the class that `policy` names, or of the model's own."""
    if isinstance(policy, PlanOf):
        return derive(model, plan_of(getattr(transformers, policy), model.base_model_prefix))
    return derive(model) if policy == "derived" else proven_policy(model)


def _with_findings(spec: LayerSpec, hint: Callable[[], str]) -> LayerSpec:
    """Return the layer with `build` and `forward` whose errors become findings that name the layer."""
    assert spec.forward is not None
    build = as_findings(f"{spec.name}: sharding the layer")(spec.build)
    forward = as_findings(f"{spec.name}, on its shard,", hint)(spec.forward)
    return replace(spec, build=build, forward=forward, skips_init=True)


def _on_first(module: nn.Module, value: Any) -> Any:
    return (module(value[0]), *value[1:]) if isinstance(value, tuple) else module(value)
