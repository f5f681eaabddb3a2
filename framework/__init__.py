"""Flow: a small eager deep-learning framework. Use it as `import framework as flow`."""

import sys

from framework import absent, backends, cpu, cuda, distributed, models, nn, optim
from framework.autograd import enable_grad, is_grad_enabled, no_grad
from framework.creation import arange, empty, from_numpy, full, ones, rand, randn, tensor, zeros, zeros_like
from framework.device import Device as device
from framework.dtype import bfloat16, bool_, float32, float64, int32, int64, uint8
from framework.ops import (
    add,
    argmax,
    clone,
    divide,
    equal,
    exp,
    flatten,
    log,
    matmul,
    mean,
    multiply,
    permute,
    relu,
    reshape,
    sqrt,
    subtract,
    sum,
    transpose,
)
from framework.random import Generator, manual_seed
from framework.tensor import Tensor
from framework.threads import get_num_threads, set_num_threads
from framework.vm import OutOfMemoryError

__version__ = "0.1.0"

__all__ = [
    "Generator",
    "OutOfMemoryError",
    "Tensor",
    "__version__",
    "add",
    "arange",
    "argmax",
    "backends",
    "bfloat16",
    "bool_",
    "clone",
    "cpu",
    "cuda",
    "device",
    "distributed",
    "divide",
    "empty",
    "enable_grad",
    "equal",
    "exp",
    "flatten",
    "float32",
    "float64",
    "from_numpy",
    "full",
    "get_num_threads",
    "int32",
    "int64",
    "is_grad_enabled",
    "log",
    "manual_seed",
    "matmul",
    "mean",
    "models",
    "multiply",
    "nn",
    "no_grad",
    "ones",
    "optim",
    "permute",
    "rand",
    "randn",
    "relu",
    "reshape",
    "set_num_threads",
    "sqrt",
    "subtract",
    "sum",
    "tensor",
    "transpose",
    "uint8",
    "zeros",
    "zeros_like",
]

_rooms = (backends, cpu, cuda, distributed, models, nn, nn.functional, nn.init, nn.parallel, optim)
absent.explain(sys.modules[__name__], _rooms)
absent.explain_members(Tensor, absent.TENSOR)
absent.explain_operators(Tensor)
absent.explain_members(backends.CudnnSettings, absent.CUDNN)
absent.explain_members(optim.SGD, absent.OPTIMIZER)
