"""The libraries that kernels use, and their settings."""

from framework.kernels import onednn

__all__ = ["onednn"]
