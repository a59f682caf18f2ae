"""Names of torch.nn's layers: modules that take one tensor and give one; losses and containers are none."""

from __future__ import annotations

from typing import NamedTuple


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


class Arguments(NamedTuple):
    """What a layer's class takes, by name."""

    required: tuple[str, ...]
    optional: tuple[str, ...]


def arguments_of(name: str) -> Arguments | None:
    """Of one of LAYERS; None: it takes whatever it is given."""
    for row in _joined(_ARGUMENTS):
        names, _, taken = row.partition(":")
        if name in names.split():
            required, _, optional = taken.partition("|")
            return Arguments(tuple(required.split()), tuple(optional.split()))
    return None


def _joined(table: str) -> list[str]:
    """The rows; one that goes on in the next line is indented there."""
    return table.replace("\n        ", " ").strip().splitlines()


_ARGUMENTS = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d: output_size
    AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d: output_size | return_indices
    AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout:  | p inplace
    AvgPool1d: kernel_size | stride padding ceil_mode count_include_pad
    AvgPool2d AvgPool3d: kernel_size | stride padding ceil_mode count_include_pad divisor_override
    BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d: num_features | eps
        momentum affine track_running_stats device dtype bias
    CELU ELU:  | alpha inplace
    ChannelShuffle: groups
    CircularPad1d CircularPad2d CircularPad3d ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d
        ReplicationPad2d ReplicationPad3d ZeroPad1d ZeroPad2d ZeroPad3d: padding
    ConstantPad1d ConstantPad2d ConstantPad3d: padding value
    Conv1d Conv2d Conv3d: in_channels out_channels kernel_size | stride padding dilation groups bias
        padding_mode device dtype
    ConvTranspose1d ConvTranspose2d ConvTranspose3d: in_channels out_channels kernel_size | stride padding
        output_padding groups bias dilation padding_mode device dtype
    CrossMapLRN2d LocalResponseNorm: size | alpha beta k
    Embedding: num_embeddings embedding_dim | padding_idx max_norm norm_type scale_grad_by_freq sparse _weight
        _freeze device dtype
    Flatten:  | start_dim end_dim
    Fold: output_size kernel_size | dilation padding stride
    FractionalMaxPool2d FractionalMaxPool3d: kernel_size | output_size output_ratio return_indices
        _random_samples
    GELU:  | approximate
    GLU LogSoftmax Softmax Softmin:  | dim
    GroupNorm: num_groups num_channels | eps affine device dtype bias
    Hardshrink Softshrink:  | lambd
    Hardsigmoid Hardswish Mish ReLU ReLU6 SELU SiLU:  | inplace
    Hardtanh:  | min_val max_val inplace min_value max_value
    LPPool1d LPPool2d LPPool3d: norm_type kernel_size | stride ceil_mode
    LayerNorm: normalized_shape | eps elementwise_affine bias device dtype
    LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d:  |
        eps momentum affine track_running_stats device dtype bias
    LazyConv1d LazyConv2d LazyConv3d: out_channels kernel_size | stride padding dilation groups bias
        padding_mode device dtype
    LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d: out_channels kernel_size | stride padding
        output_padding groups bias dilation padding_mode device dtype
    LazyLinear: out_features | bias device dtype
    LeakyReLU:  | negative_slope inplace
    Linear: in_features out_features | bias device dtype
    MaxPool1d MaxPool2d MaxPool3d: kernel_size | stride padding dilation return_indices ceil_mode
    PReLU:  | num_parameters init device dtype
    PixelShuffle: upscale_factor
    PixelUnshuffle: downscale_factor
    RMSNorm: normalized_shape | eps elementwise_affine device dtype
    RReLU:  | lower upper inplace
    Softplus:  | beta threshold
    SyncBatchNorm: num_features | eps momentum affine track_running_stats process_group device dtype bias
    Threshold: threshold value | inplace
    TransformerEncoder: encoder_layer num_layers | norm enable_nested_tensor mask_check
    TransformerEncoderLayer: d_model nhead | dim_feedforward dropout activation layer_norm_eps batch_first
        norm_first bias device dtype
    Unflatten: dim unflattened_size
    Unfold: kernel_size | dilation padding stride
    Upsample:  | size scale_factor mode align_corners recompute_scale_factor
    UpsamplingBilinear2d UpsamplingNearest2d:  | size scale_factor
"""
"""Classes that take the same, and what that is: `names: required | optional`."""
