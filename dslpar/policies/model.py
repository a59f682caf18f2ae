"""A transformers model as a list of layers, for every tensor mode, over stages: `type='transformers.LlamaForCausalLM'`.

    model = HuggingFaceModel(LlamaForCausalLM, LlamaConfig(...))
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module(ids), labels)

The layers are the token table, what stands before the blocks, the blocks, what stands after them, the head and what is
done to its logits; names within a block are transformers' own. Initial weights are transformers' own, too: drawn
module by module from a generator seeded by the module's name, so they depend on no layout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.distributed.groups import Groups
from dslpar.layers import cross_entropy, placement
from dslpar.layers.parameter import PlacedModule
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss
from dslpar.models.pretrained import Folder, PretrainedWeights, read_config
from dslpar.policies import attention, modules, padding, probe, skeleton
from dslpar.policies.apply import Setting, apply
from dslpar.policies.derive import derive
from dslpar.policies.errors import as_findings
from dslpar.policies.families import DERIVED, POLICIES
from dslpar.policies.initialization import TransformersInit
from dslpar.policies.lora import Adapters, as_lora
from dslpar.policies.policy import Policy, as_policy
from dslpar.policies.saved import Saved
from dslpar.policies.skeleton import Skeleton
from dslpar.schema.sections import LoRA

Ids = Tensor | tuple[Tensor, Tensor]
"""Ids [batch, sequence]; or these and which of them are tokens, bool [batch, sequence]; whole on every rank."""


class HuggingFaceModel(LayeredModel):
    """A decoder-only language model of transformers', its code as it is.

    `config` is an object, or a dict of its class's arguments. `pretrained` is a folder that transformers saved: its
    weights are those that training begins with, its config.json holds but for what `config` says. `policy` is a
    `Policy`, its fields as a dict, the name of a class that has one, or "derived": what transformers' plan tells,
    proven or not. None: that of `cls`. With `lora` (a section, or its keys) adapters are trained, and nothing else.

    Raises:
        DslparError: something of the model is not understood; a policy, or a rule, is needed.
    """

    def __init__(
        self,
        cls: type[Any],
        config: Any = None,
        policy: object = None,
        pretrained: str | None = None,
        lora: LoRA | Mapping[str, Any] | None = None,
    ) -> None:
        config = config_of(cls, config, pretrained)
        if not getattr(cls, "_supports_attention_backend", False):
            message = f"{cls.__name__}: its attention does not go through transformers' interface"
            raise_finding("TEN234", message, "a family of docs/transformers.md", key="model.type")
        with torch.device("meta"):
            self.model: Any = cls._from_config(config, attn_implementation=attention.IMPLEMENTATION)
        self.config = self.model.config
        prefix, stored = self.model.base_model_prefix, Saved(self.model).stored
        self.folder = None if pretrained is None else Folder(pretrained, prefix, stored)
        if policy is not None and policy != "derived":
            self.policy = as_policy(policy, POLICIES)
        else:
            with as_findings(f"{cls.__name__}: to derive a policy"):
                unproven = policy == "derived"
                self.policy = derive(self.model) if unproven else POLICIES.get(cls.__name__) or _derived(self.model)
        _check_settings(cls.__name__, self.config, self.policy)
        with as_findings(f"{cls.__name__}: its forward without its blocks"):
            self.skeleton = Skeleton(self.model, self.policy.blocks)
            self.mask_use = padding.mask_use(self.skeleton)
        self.is_tied = _is_tied(self.model, self.skeleton)
        given = as_lora(lora)
        self.adapters = None if given is None else Adapters(given, self.model, self.policy, is_tied=self.is_tied)
        self._context: dict[object, list[skeleton.Call]] = {}
        uncalled = self.skeleton.outline.uncalled
        if uncalled:
            message = f"{', '.join(uncalled)}: its forward over tokens never calls it, and it holds weights"
            raise DslparError([finding("TEN234", message, "train it without that part", key="model.type")])

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, before padding."""
        return int(self.model.get_submodule(self.skeleton.head).weight.shape[0])

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the table, front, blocks, back, head and logits; those that would do nothing are left out."""
        outline, cut = self.skeleton.outline, self._setting(groups)
        table = partial(self._table, groups)
        specs = [LayerSpec(name=outline.table, build=table, forward=_look_up)]
        if outline.front or not self._is_identity(self._run_front):
            build = partial(self._surroundings, cut, outline.front)
            specs.append(LayerSpec(name="front", build=build, forward=partial(self._front, groups)))
        index = 0
        for name in self.policy.blocks:
            for number in range(len(self.skeleton.lists[name])):
                specs.append(
                    LayerSpec(
                        name=f"{name}.{number}",
                        build=partial(self._block, cut, f"{name}.{number}"),
                        forward=partial(self._run_block, groups, index),
                        layer_idx=index,
                        recomputable=True,
                    )
                )
                index += 1
        if outline.back or not self._is_identity(self._run_back):
            build = partial(self._surroundings, cut, outline.back)
            specs.append(LayerSpec(name="back", build=build, forward=partial(_on_residual, self._run_back)))
        if self.is_tied:
            specs.append(LayerSpec(name=outline.head, build=table, tied=outline.table, forward=_apply_head))
        else:
            specs.append(LayerSpec(name=outline.head, build=partial(self._head, groups), forward=_apply_head))
        if not self._is_identity(self._run_logits):
            specs.append(LayerSpec(name="logits", build=partial(self._surroundings, cut, ()), forward=self._run_logits))
        return [_with_findings(spec) for spec in specs]

    def loss(self, groups: Groups) -> Loss:
        """Return cross-entropy of stored logits [batch, sequence, V]: the sum over counted tokens, by their number."""

        def loss(logits: Tensor, labels: Labels) -> Tensor:
            labels, denominator = (labels, None) if isinstance(labels, torch.Tensor) else labels
            return cross_entropy(groups, logits, labels, self.vocab_size, denominator)

        return loss

    # ---- parts ----

    def _setting(self, groups: Groups) -> Setting:
        return Setting(groups, self.policy, self.skeleton.hidden_size, self.config, self.adapters)

    def _table(self, groups: Groups) -> nn.Module:
        name = self.skeleton.table
        table = copy.deepcopy(self.model.get_submodule(name))
        skeleton.fill_buffers(self.model, table)
        factor = probe.factor_of(table)
        if factor is None:
            message = f"{name} of {type(table).__name__} does more than look rows up and scale them"
            raise DslparError([finding("TEN234", message, "report the model: it needs a rule of its own")])
        made = modules.Table(groups, table, factor, {"weight": (modules.Source(f"{name}.weight"),)})
        return self._with_init(made)

    def _head(self, groups: Groups) -> nn.Module:
        name = self.skeleton.head
        head = self.model.get_submodule(name)
        own = [own for own, _ in head.named_parameters()]
        return self._with_init(
            modules.OutputHead(groups, head, {each: (modules.Source(f"{name}.{each}"),) for each in own})
        )

    def _block(self, cut: Setting, name: str) -> nn.Module:
        part = apply(copy.deepcopy(self.model.get_submodule(name)), name, cut)
        skeleton.fill_buffers(self.model, part)
        return self._with_init(part)

    def _surroundings(self, cut: Setting, own: Sequence[str]) -> nn.Module:
        """Build the part that holds the leaves `own`, applied, and stand-ins for the rest."""
        part = self.skeleton.part(own)
        for name in own:
            part.set_submodule(name, apply(part.get_submodule(name), name, cut))
        skeleton.fill_buffers(self.model, part)
        return self._with_init(part)

    def _with_init(self, part: nn.Module) -> nn.Module:
        """Have the part's parameters begin as the folder has them, or as transformers draws them."""
        for module in part.modules():
            sources: modules.Sources = getattr(module, "sources", {})
            for name, of in sources.items():
                assert isinstance(module, PlacedModule)
                drawing = PretrainedWeights(self.folder, of) if self.folder else TransformersInit(self.model, of)
                module.set_init(name, drawing)
        if self.adapters:
            self.adapters.freeze(part)
        return part

    # ---- their forwards ----

    def _front(self, groups: Groups, module: nn.Module, x: Ids) -> Any:
        residual, mask = x if isinstance(x, tuple) else (x, None)
        return _on_residual(partial(self._run_front, length=_length(groups, residual), mask=mask), module, x)

    def _run_front(self, module: nn.Module, x: Tensor, length: int | None = None, mask: Tensor | None = None) -> Tensor:
        block: Any = module.get_submodule(f"{self.policy.blocks[0]}.0")
        if self.mask_use.positions and mask is not None:
            skeleton.run(module, x, None, mask)
        else:
            skeleton.run(module, x, _positions(x, length))
        entered: Tensor = block.input
        block.clear()
        return entered

    def _run_back(self, module: nn.Module, x: Tensor) -> Tensor:
        block: Any = module.get_submodule(f"{self.policy.blocks[-1]}.0")
        head: Any = module.get_submodule(self.skeleton.head)
        block.output, head.keeps_input = x, True
        skeleton.run(module, x, _positions(x))
        left: Tensor = head.input
        block.clear()
        head.clear()
        return left

    def _run_logits(self, module: nn.Module, logits: Tensor) -> Tensor:
        block: Any = module.get_submodule(f"{self.policy.blocks[-1]}.0")
        head: Any = module.get_submodule(self.skeleton.head)
        head.output = logits
        y = skeleton.run(module, logits, _positions(logits))
        block.clear()
        head.clear()
        return y

    def _run_block(self, groups: Groups, index: int, module: nn.Module, x: Ids) -> Ids:
        residual, padding = x if isinstance(x, tuple) else (x, None)
        call = self._calls(groups, _length(groups, residual), residual)[index]
        args = [_with_padding(value, padding) for value in call.args]
        kwargs = {name: _with_padding(value, padding) for name, value in call.kwargs.items()}
        y = module(residual, *args, **kwargs)
        y = y[0] if isinstance(y, tuple) else y
        return y if padding is None else (y, padding)

    def _calls(self, groups: Groups, length: int, like: Tensor) -> list[skeleton.Call]:
        """Return what each block is called with for sequences of `length` tokens: recorded once."""
        cuts = placement.inner_cuts(groups.tensor)
        index, _ = placement.piece(groups.tensor, groups.coord, cuts.sequence)
        key = (length, like.dtype, like.device, groups.tensor, index)
        if key not in self._context:
            lists = self.policy.blocks
            rotary = [name for name, module in self.model.named_modules() if skeleton.is_rotary(module)]
            part: Any = self.skeleton.part(rotary, num_blocks=max(len(self.skeleton.lists[name]) for name in lists))
            part.eval()  # dropout would draw from the run's generator
            skeleton.fill_buffers(self.model, part)
            part.to(like.device)
            positions = placement.take(_positions(like, length), 1, groups.tensor, groups.coord, cuts.sequence)
            x = like.new_zeros(1, 1, 1).expand(1, positions.shape[1], self.skeleton.hidden_size)
            self._context[key] = skeleton.calls(part, lists, x, positions)
        return self._context[key]

    @probe.on_cpu
    def _is_identity(self, run: Any) -> bool:
        """Whether a part without weights changes nothing: tried on random numbers."""
        x = torch.randn(1, 4, self.skeleton.hidden_size, generator=torch.Generator().manual_seed(0))
        return torch.equal(run(self.skeleton.part(()), x), x)


def _with_findings(spec: LayerSpec) -> LayerSpec:
    """Have errors of its code say which layer it is."""
    assert spec.forward is not None
    build = as_findings(f"{spec.name}: to put pieces in place")(spec.build)
    return replace(spec, build=build, forward=as_findings(f"{spec.name}, on its piece,")(spec.forward))


def config_of(cls: Any, config: Any, pretrained: str | None) -> Any:
    """Return a config of its own: the one that is given, over that of the folder.

    Raises:
        DslparError: there is neither, or the folder's is not readable.
    """
    if pretrained is not None:
        read_config(pretrained)
        if config is not None and not isinstance(config, Mapping):
            raise_finding("CFG223", "a config beside pretrained= is a dict of what differs", "dict(...)", key="model")
        return cls.config_class.from_pretrained(pretrained, local_files_only=True, **(config or {}))
    if config is None:
        raise_finding("CFG223", f"{cls.__name__} without a config", "config=dict(...), or pretrained='folder'")
    return cls.config_class(**config) if isinstance(config, Mapping) else copy.deepcopy(config)


def _check_settings(name: str, config: Any, policy: Policy) -> None:
    """Raise DslparError, with every setting of the config that the policy does not know."""
    wrong = {each: value for each, value in policy.requires.items() if getattr(config, each, value) != value}
    if wrong:
        raise DslparError(
            [
                finding(
                    "TEN234",
                    f"{name} with {each}={getattr(config, each)!r}: its policy is for {each}={value!r}",
                    f"{each}={value!r}",
                    key="model.config",
                )
                for each, value in wrong.items()
            ]
        )


def _derived(model: Any) -> Policy:
    """Return the policy of a class whose plan has been proven to tell it. Raises: DslparError: it has not."""
    name = type(model).__name__
    found = derive(model)  # first, since it may say what is not understood
    if name not in DERIVED:
        message = f"{name}: the policy that transformers' plan tells is not proven for this class"
        raise_finding("TEN234", message, "policy='derived' takes it as it is; or write one", key="model.policy")
    return found


def _is_tied(model: Any, found: Skeleton) -> bool:
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return f"{found.head}.weight" in tied


def _length(groups: Groups, residual: Tensor) -> int:
    """Return the tokens of a whole sequence, of which the residual may have a piece."""
    letters = placement.residual_cuts(groups.tensor).sequence
    return int(residual.shape[1]) * placement.piece(groups.tensor, groups.coord, letters)[1]


def _positions(like: Tensor, length: int | None = None) -> Tensor:
    return torch.arange(like.shape[1] if length is None else length, device=like.device)[None]


def _with_padding(value: Any, padding: Tensor | None) -> Any:
    return value.with_padding(padding) if isinstance(value, attention.Recipe) else value


def _look_up(module: nn.Module, x: Ids) -> Ids:
    return (module(x[0]), x[1].bool()) if isinstance(x, tuple) else module(x)


def _apply_head(module: nn.Module, x: Ids) -> Tensor:
    logits: Tensor = module(x[0] if isinstance(x, tuple) else x)
    return logits


def _on_residual(run: Any, module: nn.Module, x: Ids) -> Any:
    return (run(module, x[0]), x[1]) if isinstance(x, tuple) else run(module, x)
