"""GPT-2 or Llama, depending on the fields: embeddings, pre-norm blocks, norm and head as a list of layers.

    model = GPT(num_layers=8, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=128)
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module(ids), labels)

As in GPT-2, initial weights are N(0, init_std), those of projections that add to the residual are N(0, init_std /
sqrt(2 num_layers)), and biases are zero. The blocks are those of nanoGPT. Llama (arXiv 2302.13971) has norm="rmsnorm",
activation="swiglu", positions="rotary", bias=False, tie_embeddings=False, and in later versions num_kv_heads. `experts`
puts a mixture of experts in place of the MLP of all blocks or of some (`dslpar.layers.mixture`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    Block,
    Dropout,
    Embedding,
    Form,
    Head,
    Mixture,
    MixtureBlock,
    PositionEmbedding,
    Rotary,
    cross_entropy,
    from_inner,
    normal,
)
from dslpar.layers.block import Activation, Norm
from dslpar.layers.mixture import Router
from dslpar.layers.parameter import PlacedModule, Shared
from dslpar.models.gpt import hugging_face, section
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss, VocabularyHead
from dslpar.models.pretrained import CONFIG, Folder, PretrainedWeights, Source, StoredPart, read_config
from dslpar.models.router_losses import BalancedLoss, no_sums


class GPT(section.GPT, LayeredModel):
    """Decoder-only transformer; its fields are those of `dslpar.models.gpt.section.GPT`."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return embedding.tokens, embedding.positions (rotary: embedding.dropout), blocks.0 ..., norm, head.

        Raises:
            DslparError: `pretrained` is not the folder of such a model.
        """
        init = normal(self.init_std)
        tokens = partial(Embedding, groups, self.vocab_size, self.hidden_size, init=init)
        # A tied table's layer can have nothing else, since DeepSpeed ties exactly one attribute of a module.
        if self.positions == "rotary":
            after_tokens = LayerSpec(name="embedding.dropout", build=partial(Dropout, groups, self.dropout))
        else:
            after_tokens = LayerSpec(name="embedding.positions", build=partial(_Positions, groups, self))
        # The same object for all blocks that are alike, by which a dry run knows them.
        block, mixture_block = partial(self._block, groups), partial(self._mixture_block, groups)
        if self.tie_embeddings:
            # Table and head are the same shard, so a tied head is the embedding used a second time.
            head = LayerSpec(name="head", build=tokens, tied="embedding.tokens")
        else:
            head = LayerSpec(name="head", build=partial(Head, groups, self.hidden_size, self.vocab_size, init=init))
        specs = [
            LayerSpec(name="embedding.tokens", build=tokens),
            after_tokens,
            *(
                LayerSpec(
                    name=f"blocks.{index}",
                    build=mixture_block if self.has_mixture(index) else block,
                    layer_idx=index,
                    recomputable=True,
                )
                for index in range(self.num_layers)
            ),
            LayerSpec(name="norm", build=partial(self._form.make_norm, groups, self.hidden_size, self.layernorm_eps)),
            head,
        ]
        forwards, run_block = self._forwards, partial(_run_block, int(self.router_sums is not None))
        specs = [replace(spec, forward=forwards.get(spec.name, run_block), skips_init=True) for spec in specs]
        if self.pretrained is None:
            return specs
        hugging_face.check_fits(self, read_config(self.pretrained), f"{self.pretrained}/{CONFIG}")
        folder = Folder(self.pretrained, hugging_face.base_prefix(self), self._stored)
        return [replace(spec, build=partial(self._pretrained, folder, spec.owner, spec.build)) for spec in specs]

    @property
    def vocabulary_head(self) -> VocabularyHead:  # type: ignore[override]
        """The head, which has its own weight or the token table's."""
        return VocabularyHead("head", self.vocab_size, self._with_balance)

    @property
    def takes_statistics(self) -> bool:  # type: ignore[override]
        """Return whether the loss includes the load-balancing loss."""
        return self.is_balanced

    def for_inference(self) -> LayeredModel:
        """Return the model without losses of its routers, whose output is the logits alone."""
        if self.experts is None or self.router_sums is None:
            return self
        return replace(self, experts=replace(self.experts, balance=0.0, z_loss=0.0))

    @property
    def changes_after_step(self) -> bool:
        """Return whether routers have a bias, which moves after each step."""
        return self.experts is not None and bool(self.experts.bias_update)

    def after_step(self, module: nn.Module, progress: float) -> None:
        """Move the biases of all routers towards an even load of their experts."""
        rate = self.experts.bias_update if self.experts is not None else None
        for part in module.modules():
            if rate and isinstance(part, Mixture):
                part.update_bias(rate)

    def loss(self, groups: Groups) -> Loss:
        """Return the mean cross-entropy over counted tokens as a function of (logits [batch, sequence, V], labels).

        Labels are whole on every rank. If `labels[1]` is given, the sum is divided by it instead of the number of
        tokens. With a load-balancing loss, the first argument is (logits, the routers' sums), and the result includes
        it.
        """

        def loss(logits: Tensor, labels: Labels) -> Tensor:
            labels, denominator = (labels, None) if isinstance(labels, torch.Tensor) else labels
            return cross_entropy(groups, logits, labels, self.vocab_size, denominator)

        return self._with_balance(groups, loss)

    def complete_criterion(self, groups: Groups, criterion: Loss) -> Loss:
        """Add the losses of routers to a program's own criterion."""
        return self._with_balance(groups, criterion)

    def _with_balance(self, groups: Groups, loss: Loss) -> Loss:
        """Return a loss of the logits, with the losses of routers added if the config has them."""
        experts = self.experts
        if experts is None or self.router_sums is None:
            return loss
        return BalancedLoss(
            groups, loss, coefficient=experts.balance, top_k=experts.top_k, z_coefficient=experts.z_loss
        )

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Return the logits [batch, sequence, vocab_size], whole on every rank."""
        output = output[0] if isinstance(output, tuple) else output
        return from_inner(groups, output)[..., : self.vocab_size]

    def _stored(self) -> Mapping[str, list[StoredPart]]:
        """Return the tensors in the pretrained folder that form a mixture's weights."""
        return {name: [StoredPart(*part) for part in parts] for name, parts in hugging_face.stored(self).items()}

    @property
    def _form(self) -> Form:
        return Form(
            norm=cast("Norm", self.norm),
            activation=cast("Activation", self.activation),
            num_kv_heads=self.num_kv_heads,
            rotary=Rotary(self.rope_theta) if self.positions == "rotary" else None,
            bias=self.bias,
        )

    def _pretrained(self, folder: Folder, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a layer whose parameters are initialized from the folder."""
        layer = build()
        for path, module in layer.named_modules():
            for own, _ in module.named_parameters(recurse=False):
                assert isinstance(module, PlacedModule)
                tensors = hugging_face.tensors_of(self, ".".join(filter(None, (name, path, own))))
                module.set_init(own, PretrainedWeights(folder, tuple(Source(*tensor) for tensor in tensors)))
        return layer

    def _block(self, groups: Groups) -> Block:
        return Block(ffn_hidden_size=self.ffn_size, **self._of_block(groups))

    def _mixture_block(self, groups: Groups) -> MixtureBlock:
        experts = self.experts
        assert experts is not None, "a block with a mixture"
        mixture = Mixture(
            groups,
            self.hidden_size,
            self.expert_ffn_size,
            num_experts=experts.num,
            top_k=experts.top_k,
            router=cast("Router", experts.router),
            renormalize=experts.renormalize,
            with_bias=experts.bias_update is not None,
            with_squares=experts.z_loss > 0,
            capacity_factor=experts.capacity_factor,
            activation=cast("Activation", self.activation),
            shared_ffn_hidden_size=experts.shared * self.expert_ffn_size or None,
            init=normal(self.init_std),
            init_out=normal(self.out_std),
        )
        return MixtureBlock(mixture=mixture, **self._of_block(groups))

    def _of_block(self, groups: Groups) -> dict[str, Any]:
        """Return the arguments that all blocks have."""
        return {
            "groups": groups,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "form": self._form,
            "dropout": self.dropout,
            "eps": self.layernorm_eps,
            "init": normal(self.init_std),
            "init_out": normal(self.out_std),
        }

    @property
    def _forwards(self) -> Mapping[str, Callable[[nn.Module, Any], Any]]:
        """Forwards of all layers but blocks, by name."""
        num_sums = int(self.router_sums is not None)
        return {
            "embedding.tokens": partial(_look_up, self.router_sums) if self.router_sums is not None else _run_alone,
            "embedding.dropout": _run_alone,
            "embedding.positions": partial(_run_positions, num_sums),
            "norm": partial(_run_after_blocks, num_sums),
            "head": _run_alone,
        }


Value = Tensor | tuple[Tensor, ...]
"""Values between layers: ids, then the residual; beside it the routers' sums (`router_sums`) if the model has losses
of them; and then, for packed samples, the documents' mask (see `Attention`). `num_sums` below is 1 or 0."""


def _unpack(value: Value) -> tuple[Tensor, list[Tensor]]:
    first, *others = value if isinstance(value, tuple) else (value,)
    return first, others


def _pack(first: Tensor, *others: Tensor) -> Value:
    return (first, *others) if others else first


def _look_up(sums: tuple[int, int], module: nn.Module, value: Value) -> Value:
    """Look up ids, and begin the routers' sums."""
    ids, mask = _unpack(value)
    return _pack(module(ids), no_sums(sums, ids.device), *mask)


def _run_alone(module: nn.Module, value: Value) -> Value:
    """Run a layer on the first tensor, and pass the others on."""
    x, others = _unpack(value)
    return _pack(module(x), *others)


def _run_positions(num_sums: int, module: nn.Module, value: Value) -> Value:
    if len(_unpack(value)[1]) > num_sums:
        message = (
            "samples of several documents need rotary positions: a table counts positions from the start of the row"
        )
        raise_finding("TEN223", message, "positions='rotary', or one document per sample", key="model.positions")
    return _run_alone(module, value)


def _run_block(num_sums: int, block: nn.Module, value: Value) -> Value:
    x, others = _unpack(value)
    sums, mask = others[:num_sums], others[num_sums:]
    x, own = _unpack(block(x, *mask))
    if own and sums:  # a mixture's block returns its own sums, an MLP's none
        sums = [sums[0] + own[0]]
    return _pack(x, *sums, *mask)


def _run_after_blocks(num_sums: int, module: nn.Module, value: Value) -> Value:
    x, others = _unpack(value)
    return _pack(module(x), *others[:num_sums])


class _Positions(PositionEmbedding):
    """Position table and the dropout after both embeddings, on the stored residual [batch, sequence, H]."""

    def __init__(self, groups: Groups, model: section.GPT) -> None:
        super().__init__(groups, model.max_seq_len, model.hidden_size, init=normal(model.init_std))
        self.dropout = Dropout(groups, model.dropout)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        return self.dropout(super().forward(x, shared))
