"""Train your own model over dslpar.layers on the config's text: every tensor mode gives the same weights and losses.

deepspeed --num_gpus 4 examples/own_model.py --config examples/configs/text.py

On a cube of 8 ranks: --num_gpus 8, and at the end parallel.tensor.size=8 parallel.tensor.mode=3d
"""

from __future__ import annotations

from torch import Tensor, nn

import dslpar
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Embedding, Head, LayerNorm, cross_entropy

VOCAB_SIZE = 256
WIDTH = 64


def language_model(groups: Groups) -> nn.Sequential:
    """Return two transformer blocks between an embedding and a head: [batch, sequence] ids to stored logits."""
    return nn.Sequential(
        Embedding(groups, VOCAB_SIZE, WIDTH),
        Block(groups, WIDTH, 4),
        Block(groups, WIDTH, 4),
        LayerNorm(groups, WIDTH),
        Head(groups, WIDTH, VOCAB_SIZE),
    )


def main() -> None:
    """Train on the config's text, in the config's layout."""
    args = dslpar.arguments()
    run = dslpar.start(args.config, args.overrides, args.trust)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(run.groups, logits, labels, VOCAB_SIZE)

    engine, train_data, eval_data, _ = dslpar.initialize(run, model=language_model(run.groups), criterion=loss)
    dslpar.fit(run, engine, train_data, eval_data, resume=args.resume, eval_only=args.eval_only, dry_run=args.dry_run)


if __name__ == "__main__":
    main()
