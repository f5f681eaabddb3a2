"""Automatic differentiation in reverse: recording operations, and walking back through them."""

from framework.autograd.mode import enable_grad, is_grad_enabled, no_grad

__all__ = ["enable_grad", "is_grad_enabled", "no_grad"]
