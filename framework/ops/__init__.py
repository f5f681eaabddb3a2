"""Operations: each in one place, with its forward, its backward and its public function."""

from framework.ops import methods as _methods  # noqa: F401  (installs Tensor's operators)
from framework.ops.convolution import conv2d
from framework.ops.convolution_norm import conv2d_batch_norm
from framework.ops.convolution_norm_sum import Branch, conv2d_batch_norm_sum
from framework.ops.elementwise import add, divide, equal, exp, log, multiply, negative, relu, sqrt, subtract
from framework.ops.linear import linear, matmul
from framework.ops.loss import cross_entropy
from framework.ops.normalization import batch_norm
from framework.ops.pooling import global_avg_pool2d, max_pool2d
from framework.ops.reduction import argmax, mean, sum
from framework.ops.view import clone, contiguous, expand, flatten, permute, reshape, transpose

__all__ = [
    "Branch",
    "add",
    "argmax",
    "batch_norm",
    "clone",
    "contiguous",
    "conv2d",
    "conv2d_batch_norm",
    "conv2d_batch_norm_sum",
    "cross_entropy",
    "divide",
    "equal",
    "exp",
    "expand",
    "flatten",
    "global_avg_pool2d",
    "linear",
    "log",
    "matmul",
    "max_pool2d",
    "mean",
    "multiply",
    "negative",
    "permute",
    "relu",
    "reshape",
    "sqrt",
    "subtract",
    "sum",
    "transpose",
]
