"""ResNet50's training step (forward, cross-entropy, backward, SGD): a group per batch size, a row per engine."""

import pytest


@pytest.mark.flowbench(models=["resnet50"], batch_sizes=[4, 2, 1], image_shape=(3, 224, 224))
def test_training_step(measured) -> None:
    measured.replay()
