"""GPT-2 or Llama, depending on the fields: embeddings, pre-norm blocks, norm and head as a list of layers.

    model = GPT(num_layers=8, hidden_size=256, num_heads=8, vocab_size=256, max_seq_len=128)
    module = build_module(model, groups, seed=1234)
    loss = model.loss(groups)(module(ids), labels)

As in GPT-2, initial weights are N(0, init_std), those of projections that add to the residual are N(0, init_std /
sqrt(2 num_layers)), and biases are zero. The blocks are those of nanoGPT. Llama (arXiv 2302.13971) has norm="rmsnorm",
activation="swiglu", positions="rotary", bias=False, tie_embeddings=False, and in later versions num_kv_heads.
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
    PositionEmbedding,
    Rotary,
    cross_entropy,
    from_inner,
    normal,
)
from dslpar.layers.block import Activation, Norm
from dslpar.layers.parameter import PlacedModule, Shared
from dslpar.models.gpt import hugging_face, section
from dslpar.models.layered import Labels, LayeredModel, LayerSpec, Loss, VocabularyHead
from dslpar.models.pretrained import CONFIG, Folder, PretrainedWeights, Source, read_config


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
        block = partial(self._block, groups)
        if self.tie_embeddings:
            # Table and head are the same shard, so a tied head is the embedding used a second time.
            head = LayerSpec(name="head", build=tokens, tied="embedding.tokens")
        else:
            head = LayerSpec(name="head", build=partial(Head, groups, self.hidden_size, self.vocab_size, init=init))
        specs = [
            LayerSpec(name="embedding.tokens", build=tokens),
            after_tokens,
            *(
                LayerSpec(name=f"blocks.{index}", build=block, layer_idx=index, recomputable=True)
                for index in range(self.num_layers)
            ),
            LayerSpec(name="norm", build=partial(self._form.make_norm, groups, self.hidden_size, self.layernorm_eps)),
            head,
        ]
        specs = [replace(spec, forward=_FORWARDS.get(spec.name, _run_block), skips_init=True) for spec in specs]
        if self.pretrained is None:
            return specs
        hugging_face.check_fits(self, read_config(self.pretrained), f"{self.pretrained}/{CONFIG}")
        folder = Folder(self.pretrained, hugging_face.base_prefix(self))
        return [replace(spec, build=partial(self._pretrained, folder, spec.owner, spec.build)) for spec in specs]

    @property
    def vocabulary_head(self) -> VocabularyHead:  # type: ignore[override]
        """The head, which has its own weight or the token table's."""
        return VocabularyHead("head", self.vocab_size)

    def loss(self, groups: Groups) -> Loss:
        """Return the mean cross-entropy over counted tokens as a function of (logits [batch, sequence, V], labels).

        Labels are whole on every rank. If `labels[1]` is given, the sum is divided by it instead of the number of
        tokens.
        """

        def loss(logits: Tensor, labels: Labels) -> Tensor:
            labels, denominator = (labels, None) if isinstance(labels, torch.Tensor) else labels
            return cross_entropy(groups, logits, labels, self.vocab_size, denominator)

        return loss

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Return the logits [batch, sequence, vocab_size], whole on every rank."""
        return from_inner(groups, output)[..., : self.vocab_size]

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
        return Block(
            groups,
            self.hidden_size,
            self.num_heads,
            form=self._form,
            ffn_hidden_size=self.ffn_size,
            dropout=self.dropout,
            eps=self.layernorm_eps,
            init=normal(self.init_std),
            init_out=normal(self.out_std),
        )


Value = Tensor | tuple[Tensor, Tensor]
"""Values between layers: ids, then the residual; for packed samples with the documents' mask (see `Attention`)."""


def _run_before_blocks(module: nn.Module, value: Value) -> Value:
    return (module(value[0]), value[1]) if isinstance(value, tuple) else module(value)


def _run_positions(module: nn.Module, value: Value) -> Value:
    if isinstance(value, tuple):
        message = (
            "samples of several documents need rotary positions: a table counts positions from the start of the row"
        )
        raise_finding("TEN223", message, "positions='rotary', or one document per sample", key="model.positions")
    return _run_before_blocks(module, value)


def _run_block(block: nn.Module, value: Value) -> Value:
    return (block(*value), value[1]) if isinstance(value, tuple) else block(value)


def _run_after_blocks(module: nn.Module, value: Value) -> Tensor:
    y: Tensor = module(value[0] if isinstance(value, tuple) else value)
    return y


_FORWARDS: Mapping[str, Callable[[nn.Module, Any], Any]] = {
    "embedding.tokens": _run_before_blocks,
    "embedding.dropout": _run_before_blocks,
    "embedding.positions": _run_positions,
    "norm": _run_after_blocks,
    "head": _run_after_blocks,
}


class _Positions(PositionEmbedding):
    """Position table and the dropout after both embeddings, on the stored residual [batch, sequence, H]."""

    def __init__(self, groups: Groups, model: section.GPT) -> None:
        super().__init__(groups, model.max_seq_len, model.hidden_size, init=normal(model.init_std))
        self.dropout = Dropout(groups, model.dropout)

    def forward(self, x: Tensor, shared: Shared | None = None) -> Tensor:
        return self.dropout(super().forward(x, shared))
