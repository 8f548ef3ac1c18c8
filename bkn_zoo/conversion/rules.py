"""What the planner knows of functions, methods and layers, by their names: whatever else there is, it guesses."""

MOVES = {
    "cat", "concat", "concatenate", "stack", "chunk", "split", "tensor_split", "split_with_sizes", "unbind",
    "narrow", "select", "index_select", "getitem", "view", "reshape", "flatten", "unflatten", "transpose",
    "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze", "squeeze", "expand", "expand_as",
    "view_as", "reshape_as", "repeat", "tile", "flip", "roll", "t", "contiguous", "channel_shuffle",
    "native_channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "getattr", "size", "dim", "numel", "stride", "len",
}  # fmt: skip
"""Move channels or ask for sizes: done to the channels' numbers as to the features."""

SUMS = {
    "add", "iadd", "sub", "isub", "rsub", "maximum", "minimum",
}  # fmt: skip
"""Take the belief of the main branch, which is the deeper one."""

PRODUCTS = {
    "mul", "imul", "multiply", "div", "truediv", "itruediv", "matmul", "bmm", "einsum",
}  # fmt: skip
"""Take the belief about what is not the gate; attention weights are a gate too."""

GATES = {
    "sigmoid", "hardsigmoid", "softmax", "tanh",
}  # fmt: skip
"""Make a gate."""

REDUCTIONS = {
    "mean", "sum", "amax", "amin", "std", "var", "norm", "prod", "logsumexp", "nanmean", "nansum",
}  # fmt: skip
"""Drop dimensions."""

TWOFOLD = {
    "max", "min", "median", "nanmedian", "std_mean", "var_mean",
}  # fmt: skip
"""Drop dimensions, and return two tensors."""

SORTS = {
    "sort", "topk",
}  # fmt: skip
"""Return two tensors, and keep channels where they are."""

PASSES = {
    "relu", "relu6", "leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "hardswish", "hardtanh", "mish",
    "softplus", "threshold", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
    "alpha_dropout", "stochastic_depth", "drop_path", "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d",
    "max_pool2d", "max_pool3d", "lp_pool2d", "interpolate", "upsample", "pad", "clamp", "clip", "to", "float",
    "half", "bfloat16", "type", "type_as", "clone", "detach", "neg", "exp", "log", "sqrt", "rsqrt", "square", "abs",
    "pow", "ipow", "where", "masked_fill", "normalize", "layer_norm", "group_norm", "instance_norm", "batch_norm",
}  # fmt: skip
"""Keep channels where they are: elementwise operations, pooling, dropout, other norms."""

POOLS_TO_SIZE = {f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)}

PASSING_LAYERS = {
    f"torch.nn.modules.{kind}"
    for kind in (
        "activation", "pooling", "dropout", "padding", "upsampling", "normalization", "instancenorm", "batchnorm",
    )
}  # fmt: skip
"""PyTorch's own, by the module that they are in."""
