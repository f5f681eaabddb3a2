"""ResNets: torchvision's names, shapes and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.models import resnet
from tests.framework.block_ends import assert_same_bits, force_apart, issued, trained

MILLIONS = {
    "resnet18": 11.689512,
    "resnet34": 21.797672,
    "resnet50": 25.557032,
    "resnet101": 44.549160,
    "resnet152": 60.192808,
}


@pytest.fixture(scope="module", params=MILLIONS)
def named(request: pytest.FixtureRequest) -> tuple[str, flow.nn.Module]:
    """Each model under its name, made once."""
    return request.param, getattr(flow.models, request.param)()


def test_number_of_parameters(named: tuple[str, flow.nn.Module]) -> None:
    name, model = named
    assert sum(p.numel() for p in model.parameters()) == round(MILLIONS[name] * 1e6)


def test_names_and_shapes_are_torchvisions(named: tuple[str, flow.nn.Module]) -> None:
    models = pytest.importorskip("torchvision.models", reason="compares with torchvision's models")
    torch = pytest.importorskip("torch")
    name, mine = named
    with torch.device("meta"):
        theirs = getattr(models, name)()
    expected = [(key, tuple(value.shape)) for key, value in theirs.state_dict().items()]
    assert [(key, value.shape) for key, value in mine.state_dict().items()] == expected
    assert [key for key, _ in mine.named_parameters()] == [key for key, _ in theirs.named_parameters()]


@pytest.mark.parametrize(("name", "classes"), [("resnet18", 10), ("resnet50", 7)])
def test_torchvisions_weights_load_and_give_its_outputs(name: str, classes: int) -> None:
    models = pytest.importorskip("torchvision.models", reason="loads torchvision's weights")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = getattr(models, name)(num_classes=classes).double().eval()
    for key, value in theirs.state_dict().items():
        # Running figures as after training: a model fresh from its constructor would hide their being left out.
        if key.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
    mine = getattr(flow.models, name)(num_classes=classes).to(flow.float64).eval()
    mine.load_state_dict({key: value.numpy() for key, value in theirs.state_dict().items()})
    images = np.random.default_rng(1).standard_normal((2, 3, 64, 48))
    with torch.no_grad():
        expected = theirs(torch.tensor(images)).numpy()
    with flow.no_grad():
        got = mine(flow.from_numpy(images)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_a_torch_tensor_loads_as_it_is() -> None:
    torch = pytest.importorskip("torch")
    layer = flow.nn.Linear(2, 3)
    theirs = torch.nn.Linear(2, 3)
    layer.load_state_dict({key: value.detach() for key, value in theirs.state_dict().items()})
    np.testing.assert_array_equal(layer.weight.detach().numpy(), theirs.weight.detach().numpy())


def test_trained_weights_are_asked_of_torchvision() -> None:
    assert flow.models.resnet18(10, weights=None).fc.weight.shape == (10, 512)
    with pytest.raises(
        ValueError, match=r"weights='DEFAULT': Flow brings no trained weights; load_state_dict\(\) takes"
    ):
        flow.models.resnet50(weights="DEFAULT")


@pytest.mark.parametrize("place", ["Identity", "Sequential"])
def test_any_module_may_stand_in_the_place_of_a_normalisation(place: str) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    torchvision = pytest.importorskip("torchvision", reason="compares with torchvision")
    flow.manual_seed(4)
    model, theirs = flow.models.resnet18(num_classes=3), torchvision.models.resnet18(num_classes=3)
    for net, nn in (model, flow.nn), (theirs, torch.nn):
        net.layer1[1].bn2 = getattr(nn, place)()
        net.layer2[0].bn2 = getattr(nn, place)()
        net.bn1 = getattr(nn, place)()
    theirs.load_state_dict({name: torch.from_numpy(held.numpy()) for name, held in model.state_dict().items()})
    images = flow.randn(2, 3, 32, 32).double()
    logits, wanted = model.double()(images), theirs.double()(torch.from_numpy(images.numpy()))
    np.testing.assert_allclose(logits.detach().numpy(), wanted.detach().numpy(), rtol=1e-6)
    logits.sum().backward()
    wanted.sum().backward()
    grad, wanted_grad = model.conv1.weight.grad.numpy(), theirs.conv1.weight.grad.numpy()
    assert np.linalg.norm(grad - wanted_grad) < 1e-6 * np.linalg.norm(wanted_grad)


def test_convolutions_start_as_he_et_al_have_it_and_normalisation_as_the_identity() -> None:
    flow.manual_seed(5)
    model = flow.models.resnet18()
    weight = model.layer2[0].conv1.weight.detach().numpy()
    assert abs(weight.var() / (2 / (128 * 9)) - 1) < 5 * np.sqrt(2 / weight.size)
    assert abs(weight.mean()) < 5 * weight.std() / np.sqrt(weight.size)
    assert model.bn1.weight.tolist() == [1.0] * 64
    assert model.bn1.bias.tolist() == [0.0] * 64


def test_every_weight_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from framework.random import default_generator

    drawn: list[int] = []
    for name in ("uniform", "normal"):
        draw = getattr(default_generator, name)
        monkeypatch.setattr(
            default_generator, name, lambda array, *given, draw=draw: (drawn.append(array.size), draw(array, *given))
        )
    model = flow.models.resnet18()
    norms = [m for m in model.modules() if isinstance(m, flow.nn.BatchNorm2d)]
    constant = sum(m.weight.numel() + m.bias.numel() for m in norms)
    assert sum(drawn) == sum(p.numel() for p in model.parameters()) - constant


def test_the_same_seed_gives_the_same_bits() -> None:
    def trained(seed: int) -> list[Any]:
        flow.manual_seed(seed)
        model = flow.models.ResNet(flow.models.resnet.Bottleneck, (1, 1, 1, 1), num_classes=4)
        optimizer = flow.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images, target = flow.randn(2, 3, 32, 32), flow.tensor([1, 3])
        losses = []
        for _ in range(2):
            loss = flow.nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [losses, *[p.detach().numpy().tobytes() for p in model.parameters()]]

    first = trained(7)
    assert first == trained(7)
    assert first[0] != trained(8)[0]


@pytest.mark.parametrize("dtype", [flow.float32, flow.float64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("block", [resnet.BasicBlock, resnet.Bottleneck])
def test_blocks_that_end_as_one_operation_train_to_the_bits_of_their_parts(block: Any, dtype: Any) -> None:
    found = []
    for apart in (False, True):
        flow.manual_seed(5)
        model = resnet.ResNet(block, (2, 1, 2, 1), num_classes=4)
        if apart:
            force_apart(model)
        kernels = issued(lambda model=model: found.append(trained(model, dtype=dtype)))
        shortcuts = sum(m.downsample is not None for m in model.modules() if isinstance(m, block))
        assert kernels.count("batch_norm_sum_train") == (0 if apart else 3 * shortcuts)
        assert shortcuts == (4 if block is resnet.Bottleneck else 3)
    assert_same_bits(*found)


def test_a_model_that_was_trained_as_one_operation_is_saved_and_evaluated_as_ever() -> None:
    flow.manual_seed(5)
    model = resnet.ResNet(resnet.Bottleneck, (1, 1, 1, 1), num_classes=4)
    x = flow.randn(2, 3, 32, 32)
    model(x).sum().backward()
    assert {int(m.num_batches_tracked) for m in model.modules() if isinstance(m, flow.nn.BatchNorm2d)} == {1}
    again = resnet.ResNet(resnet.Bottleneck, (1, 1, 1, 1), num_classes=4)
    again.load_state_dict(model.state_dict())
    assert issued(lambda: model.eval()(x)).count("batch_norm_eval") == 1 + 4 * 4
    np.testing.assert_array_equal(again.eval()(x).detach(), model(x).detach())
