"""How errors name what they were given."""

from __future__ import annotations

# Libraries whose classes have names like ours: of a bare `Tensor` nobody could tell whose it is.
_WITH_OUR_NAMES = ("torch", "tensorflow", "oneflow", "paddle", "jax", "cupy")


def kind_of(given: object) -> str:
    """The name of its class, with its library's where that has classes named like ours: `torch's Tensor`."""
    kind = type(given)
    library = kind.__module__.partition(".")[0]
    return f"{library}'s {kind.__name__}" if library in _WITH_OUR_NAMES else kind.__name__
