"""The libraries that kernels use, and their settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from framework.kernels import onednn

__all__ = ["cuda", "cudnn", "deterministic", "onednn"]

# Set to True, kernels take only algorithms that give the same bits at every run, on the same device and libraries.
deterministic = False


@dataclass(slots=True)
class CudnnSettings:
    """How convolutions on CUDA devices choose their algorithm.

    `allow_tf32`: float32 is multiplied with 10 bits of mantissa, several times faster.
    `workspace_bytes`: the most scratch memory that an algorithm may use; for a small convolution it is less, 16 MiB or
    twice what its operands take, unless no algorithm does with that.
    `timed_plans`: how many of cuDNN's suggestions are timed when a shape is met first, and for gradients of pointwise
    convolutions as many of cuBLASLt's, unless `deterministic` is set; 1 takes cuDNN's first.
    """

    allow_tf32: bool = True
    workspace_bytes: int = 256 * 1024 * 1024
    timed_plans: int = 8

    def available(self) -> bool:
        """Whether cuDNN can be loaded here."""
        return self.why() is None

    def why(self) -> str | None:
        """Why cuDNN cannot be used, with the way out; None where it can."""
        from framework.kernels.cuda import library

        return library.why("cudnn")


@dataclass(slots=True)
class MatmulSettings:
    """How matrix products on CUDA devices are computed; `allow_tf32` as for convolutions, but off at first."""

    allow_tf32: bool = False


@dataclass(slots=True)
class CudaSettings:
    """Settings of CUDA devices beside those of cuDNN."""

    matmul: MatmulSettings = field(default_factory=MatmulSettings)


cudnn = CudnnSettings()
cuda = CudaSettings()
