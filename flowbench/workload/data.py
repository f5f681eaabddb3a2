"""Weights and batches from a seed, the same for every engine: made with NumPy, so that no framework's generator matters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from flowbench.engine import Batch
from flowbench.workload.models import CLASSES, Model, Parameter

# Two batches in turn: enough that a step depends on the step before on other data, small enough to be held by all.
BATCHES = 2

# The scale of the last batch norm of each residual branch. At 1, PyTorch's own two memory formats drift apart by tens of per
# cent within five steps of ResNet50, and no comparison of losses could tell a wrong engine from rounding.
DAMPING = 0.1


def make_weights(model: Model, seed: int) -> Mapping[str, np.ndarray]:
    """The model's starting state by name, float32 but for counts (int64).

    Convolutions: normal with variance 2 / fan_in (He et al., "Delving Deep into Rectifiers", eq. 10). Linear layers: uniform
    in ±1 / sqrt(fan_in). All float arrays are views of one buffer, so that letting go of them gives the memory back whole.
    """
    floats = [parameter for parameter in model.parameters if parameter.kind != "count"]
    buffer = np.empty(sum(math.prod(parameter.shape) for parameter in floats), np.float32)
    generator = np.random.Generator(np.random.PCG64([seed, 0]))
    weights: dict[str, np.ndarray] = {}
    start = 0
    for parameter in model.parameters:
        if parameter.kind == "count":
            weights[parameter.name] = np.zeros(parameter.shape, np.int64)
            continue
        end = start + math.prod(parameter.shape)
        _fill(buffer[start:end], parameter, generator)
        weights[parameter.name] = buffer[start:end].reshape(parameter.shape)
        start = end
    return weights


def make_batches(input_shape: tuple[int, ...], seed: int, rank: int) -> tuple[Batch, ...]:
    """The batches of one rank: standard normal images, labels uniform over the classes."""
    generator = np.random.Generator(np.random.PCG64([seed, 1, rank]))
    return tuple(
        Batch(generator.standard_normal(input_shape, np.float32), generator.integers(0, CLASSES, input_shape[0]))
        for _ in range(BATCHES)
    )


def _fill(view: np.ndarray, parameter: Parameter, generator: np.random.Generator) -> None:
    if parameter.kind == "convolution":
        generator.standard_normal(out=view, dtype=np.float32)
        view *= np.float32(math.sqrt(2 / parameter.fan_in))
    elif parameter.kind in ("linear", "bias"):
        bound = 1 / math.sqrt(parameter.fan_in)
        generator.random(out=view, dtype=np.float32)
        view *= np.float32(2 * bound)
        view -= np.float32(bound)
    else:
        view.fill({"one": 1.0, "damped": DAMPING, "zero": 0.0}[parameter.kind])
