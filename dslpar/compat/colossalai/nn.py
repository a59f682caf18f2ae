"""ColossalAI's `colossalai.nn`: layers, losses, optimizers, LR schedulers and metrics.

Layers of dslpar.layers that ColossalAI does not have are here too; they take the process groups first.
"""

from __future__ import annotations

from dslpar.compat.layers import (
    Classifier,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    PatchEmbedding,
    partition_batch,
)
from dslpar.compat.lr_schedulers import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    ExponentialLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LambdaLR,
    LinearWarmupLR,
    MultiplicativeLR,
    MultiStepLR,
    MultiStepWarmupLR,
    OneCycleLR,
    PolynomialLR,
    PolynomialWarmupLR,
    StepLR,
)
from dslpar.compat.metrics import Accuracy, calc_acc
from dslpar.compat.missing import names_of
from dslpar.compat.optimizers import CPUAdam, FusedAdam, FusedSGD, HybridAdam, Lamb, Lars
from dslpar.layers import Linear1D, Linear2D, Linear2p5D, Linear3D

__all__ = [
    "Accuracy",
    "CPUAdam",
    "Classifier",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "FusedAdam",
    "FusedSGD",
    "HybridAdam",
    "Lamb",
    "LambdaLR",
    "Lars",
    "LayerNorm",
    "Linear",
    "Linear1D",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PatchEmbedding",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
    "calc_acc",
    "partition_batch",
]  # fmt: skip

__path__: list[str] = []
__getattr__ = names_of(__name__)
