"""ColossalAI's `colossalai.zero`, `colossalai.nn.parallel` and contexts in which such models are built."""

from __future__ import annotations

from dslpar.compat.gemini import (
    BucketTensorShardStrategy,
    ColoInitContext,
    ShardedModelV2,
    ShardedOptimizerV2,
    TensorShardStrategy,
    ZeroDDP,
    ZeroInitContext,
    ZeroOptimizer,
)
from dslpar.compat.missing import names_of

__all__ = [
    "BucketTensorShardStrategy", "ColoInitContext", "ShardedModelV2", "ShardedOptimizerV2", "TensorShardStrategy",
    "ZeroDDP", "ZeroInitContext", "ZeroOptimizer",
]  # fmt: skip

__path__: list[str] = []
__getattr__ = names_of(__name__)
