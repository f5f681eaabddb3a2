"""What Flow says where it is asked for a name that it has not, such as one of PyTorch's: what is there, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial, partialmethod
from types import ModuleType
from typing import Any

_MOST_NAMES = 20
_NO_OPTIMIZER = "flow.optim.SGD is the one optimizer"
_NUMPY = "draw them by NumPy and pass them to flow.tensor()"
_PICKLE = "pickle.dump() and pickle.load() keep what state_dict() gives"
_WAYS_OUT = {
    "flow.as_tensor": "flow.tensor() copies",
    "flow.bool": "flow.bool_ is the element type",
    "flow.compile": "leave it out",
    "flow.cuda.manual_seed": "flow.manual_seed() is for all devices",
    "flow.cuda.manual_seed_all": "flow.manual_seed() is for all devices",
    "flow.distributed.DistributedSampler": "take every get_world_size()-th index, from get_rank() on",
    "flow.distributed.is_available": "flow.distributed is there on every machine",
    "flow.double": "flow.float64 is the element type",
    "flow.float": "flow.float32 is the element type",
    "flow.float16": "flow.bfloat16 is the half-precision type, on GPUs",
    "flow.half": "flow.bfloat16 is the half-precision type, on GPUs",
    "flow.inference_mode": "flow.no_grad() does it",
    "flow.int": "flow.int32 is the element type",
    "flow.load": _PICKLE,
    "flow.long": "flow.int64 is the element type",
    "flow.multiprocessing": "`python -m framework.distributed.launch --nproc-per-node N script.py` starts ranks",
    "flow.nn.DataParallel": "flow.nn.parallel.DistributedDataParallel takes a rank for each GPU",
    "flow.nn.MSELoss": "((a - b) * (a - b)).mean() is the same",
    "flow.nn.functional.adaptive_avg_pool2d": "flow.nn.functional.global_avg_pool2d gives images of 1×1",
    "flow.nn.functional.mse_loss": "((a - b) * (a - b)).mean() is the same",
    "flow.nn.init.ones_": "flow.nn.init.constant_(tensor, 1) does it",
    "flow.nn.init.zeros_": "flow.nn.init.constant_(tensor, 0) does it",
    "flow.ones_like": "flow.ones(*a.shape, dtype=a.dtype, device=a.device) does it",
    "flow.nn.utils": "a gradient is clipped by `parameter.grad.mul_(factor)`",
    "flow.optim.Adam": _NO_OPTIMIZER,
    "flow.optim.AdamW": _NO_OPTIMIZER,
    "flow.optim.lr_scheduler": "a schedule sets `optimizer.lr`",
    "flow.randint": _NUMPY,
    "flow.randperm": _NUMPY,
    "flow.save": _PICKLE,
    "flow.set_grad_enabled": "flow.no_grad() and flow.enable_grad() are contexts and decorators",
    "flow.set_float32_matmul_precision": "flow.backends.cuda.matmul.allow_tf32 is the setting",
    "flow.use_deterministic_algorithms": "flow.backends.deterministic is the setting",
    "flow.utils": "batches come from any loop; what gives NumPy arrays, such as PyTorch's DataLoader with a collate_fn, serves",
}

TENSOR = {
    "T": "a.transpose(0, 1) does it",
    "add": "a + b does it",
    "bool": "a.to(flow.bool_) does it",
    "data": "a.detach() shares its memory, and `with flow.no_grad(): a.copy_(b)` writes it",
    "div": "a / b does it",
    "grad_fn": "a.is_leaf says whether no operation made it",
    "half": "flow.bfloat16 is the half-precision type, on GPUs",
    "int": "a.to(flow.int32) does it",
    "is_cuda": "a.device.type says it",
    "max": "a.detach().cpu().numpy().max() finds it",
    "min": "a.detach().cpu().numpy().min() finds it",
    "mul": "a * b does it",
    "neg": "-a does it",
    "nelement": "a.numel() says it",
    "norm": "(a * a).sum().sqrt() is the same",
    "normal_": "flow.nn.init.normal_(a) does it",
    "pow": "a * a is its square",
    "sigmoid": "1 / (1 + (-a).exp()) is the same",
    "sub": "a - b does it",
    "t": "a.transpose(0, 1) does it",
    "uniform_": "flow.nn.init.uniform_(a) does it",
    "unsqueeze": "a[None] and a[:, None] do it",
}
_IN_ORDER = "which is larger is asked of numbers, a.item(), or of arrays, a.detach().cpu().numpy()"
_NO_REMAINDER = "a / b divides; the rest is done by arrays, a.detach().cpu().numpy()"
OPERATORS = {
    "__lt__": ("<", _IN_ORDER),
    "__le__": ("<=", _IN_ORDER),
    "__gt__": (">", _IN_ORDER),
    "__ge__": (">=", _IN_ORDER),
    "__pow__": ("**", "a * a is the square of a, a.sqrt() its root"),
    "__rpow__": ("**", "(a * log(b)).exp() is b to the power of a"),
    "__floordiv__": ("//", _NO_REMAINDER),
    "__mod__": ("%", _NO_REMAINDER),
    "__abs__": ("abs()", "(a * a).sqrt() is the same, but for its gradient at 0"),
}
CUDNN = {
    "benchmark": "leave it out: algorithms are timed, as many as flow.backends.cudnn.timed_plans says",
    "deterministic": "flow.backends.deterministic is the setting, of all kernels",
    "enabled": "leave it out: convolutions on GPUs need cuDNN",
}
OPTIMIZER = {
    "add_param_group": "make one optimizer for each group of parameters",
    "param_groups": "there is one group: `optimizer.lr` and its like are its settings, `optimizer.params` what it moves",
}


def explain(root: ModuleType, rooms: Iterable[ModuleType]) -> None:
    """Lets a package and public modules of it say more than Python does of a name that they have not.

    Set from outside: a `__getattr__` that stands in a module would let type checkers believe that it has every name.
    """
    for room in (root, *rooms):
        where = "flow" + room.__name__.removeprefix(root.__name__)
        vars(room)["__getattr__"] = partial(_refuse, where, room)


class _Absent:
    """Stands in a class for a member that it has not, and says the way out; `hasattr` still finds none."""

    def __init__(self, owner: str, name: str, way_out: str) -> None:
        self._said = f"{owner} has no {name!r}: {way_out}"

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._said)

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(self._said)


def explain_members(kind: type, ways_out: Mapping[str, str]) -> None:
    """Lets a class say the way out of members that it has not.

    One by one: a `__getattr__` in the class would make those that it has slow to read.
    """
    for name, way_out in ways_out.items():
        setattr(kind, name, _Absent(kind.__name__, name, way_out))


def explain_operators(kind: type) -> None:
    """Lets a class say the way out of operators that it has not, of which Python alone says that they are not supported."""
    for method, (operator, way_out) in OPERATORS.items():
        setattr(kind, method, partialmethod(_no_operator, operator, way_out))


def _no_operator(a: object, operator: str, way_out: str, *_: object) -> Any:
    raise TypeError(f"{type(a).__name__} has no {operator}: {way_out}")


def _refuse(where: str, room: ModuleType, name: str) -> Any:
    way_out = _WAYS_OUT.get(f"{where}.{name}")
    if way_out is not None:
        raise AttributeError(f"{where} has no {name!r}: {way_out}")
    names = [public for public in getattr(room, "__all__", dir(room)) if not public.startswith("_")]
    there = ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} names that dir({where}) lists"
    raise AttributeError(f"{where} has no {name!r}; it has {there}")
