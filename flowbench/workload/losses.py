"""Whether two engines trained alike: their losses at each step, from the same weights and data."""

from __future__ import annotations

from collections.abc import Sequence

# Measured with PyTorch's two memory formats on damped residual networks (ResNet-18, -50, -152; N = 1, 2, 4), in units of the
# first loss: rounding drifts by less than 1e-6 over 20 steps and by 1.2e-5 over 55. One of ResNet50's layers without its
# gradient shows as 4e-5 after five steps, all gradients 10 % too small as 3e-3. With a larger learning rate rounding grows
# faster than faults.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
TOLERANCE = 2e-5
TOLERANCE_STEPS = 10

# On a GPU convolutions round what they multiply to TF32's 10 bits, and more drifts apart. On an H200, PyTorch's two memory
# formats, its autotuning, its float32 and Flow differ by up to 1.5e-5 over 25 steps of ResNet-50 (N = 1, 4, 16), and by 3.5e-5
# within 10 steps of ResNet-18 on 64x64. All gradients 10 % too small show as 7e-5 after three steps, and as 8e-4 after ten, at
# least; one middle layer of ResNet-50 without its gradient, 4e-5 after 25 steps at most, does not show here.
GPU_TOLERANCE = 5e-5


def allowed_difference(step: int, tolerance: float = TOLERANCE) -> float:
    """How far apart the losses of two right engines may be at `step`: rounding is amplified from step to step."""
    return tolerance * max(1.0, step / TOLERANCE_STEPS)


def compare_losses(
    losses: Sequence[float | None], reference: Sequence[float | None], tolerance: float
) -> tuple[float | None, str | None]:
    """The largest difference in units of the reference's first loss, and why it is too large (None where it is not).

    Null stands for a loss that was not finite. The first loss is the unit because later ones go to 0.
    """
    if len(losses) != len(reference):
        return None, f"{len(losses)} losses, the reference has {len(reference)}"
    pairs: list[tuple[float, float]] = []
    for step, (ours, theirs) in enumerate(zip(losses, reference, strict=True)):
        if ours is None or theirs is None:
            whose = "its" if ours is None else "the reference's"
            return None, f"{whose} loss at step {step} is not finite"
        pairs.append((ours, theirs))
    unit = abs(pairs[0][1]) or 1.0
    differences = [abs(ours - theirs) / unit for ours, theirs in pairs]
    for step, difference in enumerate(differences):
        if difference > allowed_difference(step, tolerance):
            return max(differences), (
                f"its loss at step {step} is {pairs[step][0]:.6g}, the reference's {pairs[step][1]:.6g}: they differ by "
                f"{difference:.1e} of the first loss, allowed is {allowed_difference(step, tolerance):.0e}"
            )
    return max(differences), None
