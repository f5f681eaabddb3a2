"""ResNet-50 on a CUDA device against PyTorch: the error to float64 is no larger than PyTorch's own, and losses agree."""

from __future__ import annotations

import numpy as np
import pytest

import framework as flow

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

pytestmark = pytest.mark.gpu

BATCH, SIZE = 4, 128


@pytest.fixture(scope="module")
def task():
    """Weights, images and labels, and what PyTorch makes of them in float64."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    random = np.random.default_rng(0)
    images = random.standard_normal((BATCH, 3, SIZE, SIZE)).astype(np.float32)
    labels = random.integers(0, 1000, BATCH)
    weights = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return weights, images, labels, _torch_gradients(weights, images, labels, torch.float64)


def _torch_gradients(weights, images, labels, dtype):
    model = torchvision.models.resnet50()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    model = model.to("cuda", dtype)
    logits = model(torch.from_numpy(images).to("cuda", dtype))
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).to("cuda")).backward()
    gradients = {name: p.grad.double().cpu().numpy() for name, p in model.named_parameters()}
    return logits.detach().double().cpu().numpy(), gradients


def _flow_gradients(weights, images, labels):
    model = flow.models.resnet50()
    model.load_state_dict(weights)
    model.to("cuda")
    logits = model(flow.tensor(images, device="cuda"))
    loss = flow.nn.CrossEntropyLoss()(logits, flow.tensor(labels, device="cuda"))
    loss.backward()
    gradients = {name: p.grad.to("cpu").numpy().astype(np.float64) for name, p in model.named_parameters()}
    return loss.item(), logits.detach().to("cpu").numpy().astype(np.float64), gradients


@pytest.mark.parametrize("tf32", [False, True])
def test_logits_and_gradients_are_as_near_to_float64_as_those_of_pytorch(settings, task, tf32):
    weights, images, labels, (exact_logits, exact) = task
    settings.cudnn.allow_tf32 = tf32
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        torch_logits, theirs = _torch_gradients(weights, images, labels, torch.float32)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    loss, logits, mine = _flow_gradients(weights, images, labels)
    assert np.linalg.norm(logits - exact_logits) < 1.2 * np.linalg.norm(torch_logits - exact_logits)
    # One loss tells nothing of the distance: its error is one number, which may be near 0 by chance. Logits are thousands.
    of_these = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
    assert loss == pytest.approx(of_these, rel=1e-6)

    def error(gradients, name):
        return np.linalg.norm(gradients[name] - exact[name]) / max(np.linalg.norm(exact[name]), 1e-12)

    ratios = [error(mine, name) / max(error(theirs, name), 1e-9) for name in exact]
    assert np.median(ratios) < 1.2


def test_fifty_steps_give_pytorchs_losses():
    torch.manual_seed(1)
    theirs = torchvision.models.resnet18(num_classes=10)
    weights = {name: value.numpy().copy() for name, value in theirs.state_dict().items()}
    theirs = theirs.cuda()
    mine = flow.models.resnet18(num_classes=10)
    mine.load_state_dict(weights)
    mine.to("cuda")
    random = np.random.default_rng(1)
    images = random.standard_normal((16, 3, 64, 64)).astype(np.float32)
    labels = random.integers(0, 10, 16)
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    optimizer, torch_optimizer = (
        flow.optim.SGD(mine.parameters(), **settings),
        torch.optim.SGD(theirs.parameters(), **settings),
    )
    x, t = flow.tensor(images, device="cuda"), flow.tensor(labels, device="cuda")
    torch_x, torch_t = torch.from_numpy(images).cuda(), torch.from_numpy(labels).cuda()
    losses, torch_losses = [], []
    for _ in range(50):
        loss = flow.nn.CrossEntropyLoss()(mine(x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        torch_loss = torch.nn.functional.cross_entropy(theirs(torch_x), torch_t)
        torch_optimizer.zero_grad()
        torch_loss.backward()
        torch_optimizer.step()
        torch_losses.append(torch_loss.item())
    assert np.allclose([loss.item() for loss in losses], torch_losses, rtol=0.05, atol=0.02)
