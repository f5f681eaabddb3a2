"""Optimizers."""

from framework.optim.sgd import SGD

__all__ = ["SGD"]
