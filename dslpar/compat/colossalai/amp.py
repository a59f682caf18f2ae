"""ColossalAI's `colossalai.amp`: in a config, `fp16 = dict(mode=AMP_TYPE.NAIVE)`."""

from __future__ import annotations

from enum import Enum

from dslpar.compat.missing import names_of

__all__ = ["AMP_TYPE"]


class AMP_TYPE(Enum):
    """Kinds of mixed precision. Each becomes DeepSpeed's fp16: the model in fp16, its masters in fp32."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


__path__: list[str] = []
__getattr__ = names_of(__name__)
