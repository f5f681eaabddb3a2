"""PyTorch's side of the suites of single operations, with its defaults: the functions of `flow_operations.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from flowbench.operation import Prepared
from suites.operation_values import draw, labels

_place = {"device": "cpu"}


def start(device: str, threads: int) -> None:
    """Uses a device, and so many threads on the CPU."""
    torch.set_num_threads(threads)
    _place["device"] = device


def convolution(direction: str, x: list[int], weight: list[int], stride: int) -> Prepared:
    """A convolution's forward pass, its data gradient or its weight gradient, alone."""
    images, kernel = _tensor(draw(1, x)), _tensor(draw(2, weight))
    padding = weight[-1] // 2
    if direction == "forward":
        return _forward(lambda: F.conv2d(images, kernel, stride=stride, padding=padding))
    wanted = images if direction == "data gradient" else kernel
    wanted.requires_grad_()
    return _backward(F.conv2d(images, kernel, stride=stride, padding=padding), [wanted])


def batch_norm(direction: str, x: list[int], residual: bool, relu: bool) -> Prepared:
    """Batch normalisation in training, with a residual and a ReLU in place, as torchvision's ResNets have them."""
    images, channels = _tensor(draw(1, x)), x[1]
    added = _tensor(draw(2, x)) if residual else None
    weight, bias = _tensor(1 + 0.1 * draw(3, [channels])), _tensor(draw(4, [channels]))
    mean, var = torch.zeros(channels, device=_place["device"]), torch.ones(channels, device=_place["device"])

    def run() -> torch.Tensor:
        y = F.batch_norm(images, mean, var, weight, bias, training=True)
        if added is not None:
            y += added
        return F.relu_(y) if relu else y

    if direction == "forward":
        return _forward(run)
    wanted = [t.requires_grad_() for t in (images, weight, bias, added) if t is not None]
    return _backward(run(), wanted)


def max_pool(direction: str, x: list[int]) -> Prepared:
    """The 3×3 maximum with stride 2 behind a ResNet's first convolution."""
    images = _tensor(draw(1, x))
    if direction == "forward":
        return _forward(lambda: F.max_pool2d(images, 3, 2, 1))
    return _backward(F.max_pool2d(images.requires_grad_(), 3, 2, 1), [images])


def linear(direction: str, rows: int, features: int, classes: int) -> Prepared:
    """A linear layer."""
    x, weight, bias = (_tensor(draw(i, s)) for i, s in enumerate([[rows, features], [classes, features], [classes]]))
    if direction == "forward":
        return _forward(lambda: F.linear(x, weight, bias))
    wanted = [t.requires_grad_() for t in (x, weight, bias)]
    return _backward(F.linear(*wanted), wanted)


def cross_entropy(direction: str, rows: int, classes: int) -> Prepared:
    """The mean cross-entropy of a batch."""
    logits, target = _tensor(draw(1, [rows, classes])), _tensor(labels(rows, classes))
    if direction == "forward":
        return _forward(lambda: F.cross_entropy(logits, target))
    return _backward(F.cross_entropy(logits.requires_grad_(), target), [logits])


def sgd(shapes: list[list[int]], momentum: float) -> Prepared:
    """A step of SGD over parameters of these shapes."""
    parameters = [_tensor(draw(i, shape)) for i, shape in enumerate(shapes)]
    for i, parameter in enumerate(parameters):
        parameter.grad = _tensor(draw(1000 + i, parameter.shape))
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    return Prepared(optimizer.step, lambda: [_host(p) for p in parameters], _synchronize)


def allocator(pattern: str, shapes: list[list[int]]) -> Prepared:
    """Tensors without values: one after the other, all at once given up newest first, or all at once oldest first."""
    device, held = _place["device"], []

    def run() -> None:
        for shape in shapes:
            held.append(torch.empty(shape, device=device))
            if pattern == "one at a time":
                held.clear()
        while held:
            held.pop(-1 if pattern == "newest first" else 0)

    return Prepared(run, lambda: [np.array(shape) for shape in shapes], _synchronize)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(_place["device"])


def _forward(call: Callable[[], torch.Tensor]) -> Prepared:
    last: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            last[:] = [call()]

    return Prepared(run, lambda: [_host(last[0])], _synchronize)


def _backward(y: torch.Tensor, wanted: Sequence[torch.Tensor]) -> Prepared:
    """The backward pass of the operation that made y, to these leaves."""
    gradient = _tensor(draw(99, y.shape))

    def run() -> None:
        for leaf in wanted:
            leaf.grad = None
        y.backward(gradient, retain_graph=True)

    return Prepared(run, lambda: [_host(leaf.grad) for leaf in wanted], _synchronize)


def _host(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().cpu().numpy()


def _synchronize() -> None:
    if _place["device"] != "cpu":
        torch.cuda.synchronize()
