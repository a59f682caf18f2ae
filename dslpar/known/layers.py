"""Names of torch.nn's layers: modules that take one tensor and give one; losses and containers are none."""

from __future__ import annotations


def _names(text: str, in_1d_2d_3d: str) -> frozenset[str]:
    return frozenset((*text.split(), *(f"{name}{dim}d" for name in in_1d_2d_3d.split() for dim in (1, 2, 3))))


WITH_PARAMETERS = _names(
    """
    Embedding GroupNorm LayerNorm LazyLinear Linear PReLU RMSNorm SyncBatchNorm TransformerEncoder
    TransformerEncoderLayer
    """,
    "BatchNorm Conv ConvTranspose LazyBatchNorm LazyConv LazyConvTranspose",
)
"""Those that have something to train, unless their arguments say otherwise."""

FUNCTIONS = _names(
    """
    AlphaDropout CELU ChannelShuffle CrossMapLRN2d Dropout ELU FeatureAlphaDropout Flatten Fold FractionalMaxPool2d
    FractionalMaxPool3d GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LocalResponseNorm
    LogSigmoid LogSoftmax Mish PixelShuffle PixelUnshuffle RReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax Softmax2d Softmin
    Softplus Softshrink Softsign Tanh Tanhshrink Threshold Unflatten Unfold Upsample UpsamplingBilinear2d
    UpsamplingNearest2d
    """,
    """
    AdaptiveAvgPool AdaptiveMaxPool AvgPool CircularPad ConstantPad Dropout InstanceNorm LPPool LazyInstanceNorm MaxPool
    ReflectionPad ReplicationPad ZeroPad
    """,
)
"""Those that have nothing to train, unless their arguments say otherwise."""

LAYERS = WITH_PARAMETERS | FUNCTIONS
