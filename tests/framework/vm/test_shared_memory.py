"""Training where activations, gradients and working memory share blocks computes what it computes without."""

from __future__ import annotations

import numpy as np
import pytest

import framework as flow
from framework.vm import runtime
from framework.vm.overlay import Overlay


def _losses(batch_sizes: tuple[int, ...]) -> list[float]:
    flow.manual_seed(0)
    blocks: list[flow.nn.Module] = []
    for channels, width in ((3, 16), (16, 32), (32, 64), (64, 128)):
        blocks += [flow.nn.Conv2d(channels, width, 3, stride=2, padding=1), flow.nn.BatchNorm2d(width), flow.nn.ReLU()]
    model = flow.nn.Sequential(*blocks, flow.nn.AdaptiveAvgPool2d(1), flow.nn.Flatten(), flow.nn.Linear(128, 10))
    optimizer = flow.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draw, losses = np.random.default_rng(0), []
    for batch_size in batch_sizes:
        images = flow.tensor(draw.standard_normal((batch_size, 3, 64, 64)).astype(np.float32))
        labels = flow.tensor(draw.integers(0, 10, batch_size))
        optimizer.zero_grad()
        loss = flow.nn.CrossEntropyLoss()(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_sizes = (4, 4, 4, 3, 4, 2, 4, 4)
    alone = _losses(batch_sizes)
    allocator = runtime(flow.device("cpu")).allocator
    allocator.empty_cache()
    taken = []
    take = Overlay.take
    monkeypatch.setattr(Overlay, "take", lambda overlay, block: (taken.append(block), take(overlay, block))[1])
    monkeypatch.setattr(allocator.source, "slack", 0.1, raising=False)
    monkeypatch.setattr(allocator.source, "segment_bytes", 2**18, raising=False)
    assert _losses(batch_sizes) == alone
    assert len(taken) > 20
