"""Layers: what they keep between calls, and how their parameters start."""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

import numpy as np
import pytest

import framework as flow
from framework import nn
from framework.nn import init
from framework.vm import machine


def test_batch_norm_keeps_running_figures_in_training_alone() -> None:
    layer = nn.BatchNorm2d(2, momentum=0.25)
    x = flow.tensor(
        np.array([1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 4.0, 4.0], np.float32).reshape(2, 2, 1, 2).transpose(1, 0, 2, 3).copy()
    )
    layer(x)
    np.testing.assert_allclose(layer.running_mean.numpy(), [0.25 * x.numpy()[:, c].mean() for c in (0, 1)])
    unbiased = [x.numpy()[:, c].var(ddof=1) for c in (0, 1)]
    np.testing.assert_allclose(layer.running_var.numpy(), [0.75 + 0.25 * v for v in unbiased], rtol=1e-6)
    assert layer.num_batches_tracked.item() == 1
    layer.eval()
    before = layer.running_mean.tolist()
    layer(x * 5)
    assert layer.running_mean.tolist() == before
    assert layer.num_batches_tracked.item() == 1


def test_batch_norm_with_residual_and_relu_is_the_same_in_steps() -> None:
    layer = nn.BatchNorm2d(3)
    with flow.no_grad():
        init.normal_(layer.weight)
        init.normal_(layer.bias)
    x, residual = flow.randn(4, 3, 5, 5), flow.randn(4, 3, 5, 5)
    fused = layer(x, residual=residual, relu=True)
    steps = (layer(x) + residual).relu()
    np.testing.assert_allclose(fused.detach().numpy(), steps.detach().numpy(), atol=2e-6)


def test_batch_norm_takes_numbers_of_numpy_as_settings() -> None:
    x = flow.randn(4, 3, 5, 5)
    plain, numpys = (nn.BatchNorm2d(3, eps=kind(1e-3), momentum=kind(0.25)) for kind in (float, np.asarray))
    for _ in ("training", "evaluation"):
        np.testing.assert_array_equal(numpys(x).detach().numpy(), plain(x).detach().numpy())
        np.testing.assert_array_equal(numpys.running_var.numpy(), plain.running_var.numpy())
        numpys.eval()
        plain.eval()


@pytest.mark.parametrize("without", [(), ("weight",), ("bias",), ("weight", "bias")], ids=" ".join)
@pytest.mark.parametrize("tracks", [True, False])
def test_batch_norm_without_its_parameters_or_running_figures_is_pytorchs(
    without: tuple[str, ...], tracks: bool
) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    drawn = np.random.default_rng(0)
    images, slopes = drawn.standard_normal((4, 3, 2, 5)), drawn.standard_normal((4, 3, 2, 5))
    # By place, as PyTorch's arguments are often given.
    settings = (3, 1e-3, 0.25, len(without) < 2, tracks)
    theirs, ours = torch.nn.BatchNorm2d(*settings).double(), nn.BatchNorm2d(*settings).to(flow.float64)
    for name in {"weight", "bias"} - set(without):
        values = drawn.standard_normal(3)
        getattr(theirs, name).data.copy_(torch.tensor(values))
        with flow.no_grad():
            getattr(ours, name).copy_(flow.tensor(values))
    for name in without:
        setattr(theirs, name, None)
        setattr(ours, name, None)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for _ in ("training", "evaluation"):
        x, y = flow.tensor(images, requires_grad=True), torch.tensor(images, requires_grad=True)
        out, expected = ours(x), theirs(y)
        (out * flow.tensor(slopes)).sum().backward()
        (expected * torch.tensor(slopes)).sum().backward()
        np.testing.assert_allclose(out.detach().numpy(), expected.detach().numpy(), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(x.grad.numpy(), y.grad.numpy(), rtol=1e-9, atol=1e-12)
        for name, held in theirs.state_dict().items():
            np.testing.assert_allclose(ours.state_dict()[name].numpy(), held.numpy(), rtol=1e-9)
        for (name, mine), parameter in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            np.testing.assert_allclose(mine.grad.numpy(), parameter.grad.numpy(), rtol=1e-9, err_msg=name)
        ours.eval()
        theirs.eval()


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_batch_norm_says_what_it_is_without(kind: type[nn.BatchNorm2d]) -> None:
    bare = kind(3, affine=False, track_running_stats=False)
    assert repr(bare) == f"{kind.__name__}(3, eps=1e-05, momentum=0.1, affine=False, track_running_stats=False)"
    layer = kind(3)
    layer.weight = None
    assert repr(layer) == f"{kind.__name__}(3, eps=1e-05, momentum=0.1)"  # it still has its bias
    with pytest.raises(ValueError, match="running figures that are plain averages, its None, are not there"):
        kind(3, momentum=None)


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 32, 3), nn.Linear(144, 32)], ids=["conv", "linear"])
def test_weights_and_biases_start_uniform_within_the_root_of_the_fan_in(layer: nn.Module) -> None:
    bound = 1 / sqrt(144)
    for values in (layer.weight.detach().numpy(), layer.bias.detach().numpy()):
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.8 * bound
    # Uniform: a third of the bound squared, within five standard errors.
    count = layer.weight.numel()
    assert abs(np.mean(layer.weight.detach().numpy() ** 2) / (bound**2 / 3) - 1) < 5 * sqrt(4 / 5 / count)


def test_kaiming_normal_has_the_variance_that_it_should() -> None:
    for mode, fan in (("fan_in", 16 * 9), ("fan_out", 64 * 9)):
        weight = init.kaiming_normal_(flow.empty(64, 16, 3, 3), mode=mode).numpy()
        assert abs(weight.var() / (2 / fan) - 1) < 5 * sqrt(2 / weight.size)
    with pytest.raises(ValueError, match="mode is fan_in or fan_out, not 'fan'"):
        init.kaiming_normal_(flow.empty(2, 2), mode="fan")
    with pytest.raises(ValueError, match=r"at least two dimensions; got shape \[3\]"):
        init.kaiming_uniform_(flow.empty(3))
    assert init.constant_(flow.empty(3), 2.5).tolist() == [2.5] * 3
    for fill in (init.uniform_, init.normal_, init.kaiming_normal_, lambda array: init.constant_(array, 0.0)):
        with pytest.raises(TypeError, match="takes tensors; got ndarray"):
            fill(np.ones((2, 2)))
        with nn.init.skipped(), pytest.raises(TypeError, match="takes tensors; got ndarray"):
            fill(np.ones((2, 2)))


def test_drawing_can_be_left_out_where_weights_are_loaded_next() -> None:
    given = flow.models.resnet18(num_classes=5).state_dict()
    flow.manual_seed(3)
    expected = nn.Linear(7, 5).weight.detach().numpy()
    flow.manual_seed(3)
    with nn.init.skipped():
        model = flow.models.resnet18(num_classes=5)
        with pytest.raises(ValueError, match="mode is fan_in or fan_out"):
            init.kaiming_normal_(flow.empty(2, 2), mode="fan")
    # Nothing was drawn meanwhile, and what comes behind it is drawn again.
    np.testing.assert_array_equal(nn.Linear(7, 5).weight.detach().numpy(), expected)
    model.load_state_dict(given)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), given[name].numpy())


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="groups must divide both channel numbers; got 3 for 4 and 6"):
        nn.Conv2d(4, 6, 3, groups=3)
    with pytest.raises(ValueError, match="kernel_size is one integer >= 1, or two; got 0"):
        nn.Conv2d(4, 6, 0)
    with pytest.raises(ValueError, match=r"AdaptiveAvgPool2d gives 1×1 images; \(2, 2\) is not supported"):
        nn.AdaptiveAvgPool2d((2, 2))


def test_arguments_may_be_given_by_place_as_in_pytorch() -> None:
    layer = nn.Conv2d(4, 6, 3, 2, 1, 1, 2, False)
    assert (layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias) == ((2, 2), (1, 1), (1, 1), 2, None)
    assert nn.Linear(4, 2, False).bias is None
    x, w = flow.randn(2, 4, 5, 5), flow.randn(6, 2, 3, 3)
    named = nn.functional.conv2d(x, w, stride=2, padding=1, groups=2)
    np.testing.assert_array_equal(nn.functional.conv2d(x, w, None, 2, 1, 1, 2).numpy(), named.numpy())
    named = nn.functional.batch_norm(x, None, None, training=True, eps=1e-2)
    np.testing.assert_array_equal(
        nn.functional.batch_norm(x, None, None, None, None, True, 0.1, 1e-2).numpy(), named.numpy()
    )


def test_a_sequence_takes_named_modules_and_nothing_else() -> None:
    net = nn.Sequential(OrderedDict(first=nn.Linear(4, 2), then=nn.ReLU()))
    assert [name for name, _ in net.named_parameters()] == ["first.weight", "first.bias"]
    assert net(flow.ones(1, 4)).shape == (1, 2)
    with pytest.raises(TypeError, match="Sequential takes modules; got builtin_function_or_method as 1"):
        nn.Sequential(nn.ReLU(), abs)
    with pytest.raises(TypeError, match="Sequential takes modules; got list as 0"):
        nn.Sequential([nn.ReLU()])


def test_a_part_of_a_sequence_is_a_sequence_and_a_place_takes_another_module() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    end = net[1:]
    assert isinstance(end, nn.Sequential)
    assert [name for name, _ in end.named_parameters()] == ["2.weight", "2.bias"]
    assert end[-1] is net[2]
    assert end(flow.ones(1, 3)).shape == (1, 2)
    assert len(net[3:]) == 0
    net[-1] = nn.Linear(3, 5)
    assert net(flow.ones(1, 4)).shape == (1, 5)
    assert len(net) == 3
    with pytest.raises(TypeError, match="Sequential takes modules; got NoneType as 0"):
        net[0] = None  # type: ignore[assignment]
    with pytest.raises(IndexError):
        net[3] = nn.ReLU()


def test_settings_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Identity takes no settings here; got inplace"):
        nn.Identity(inplace=True)
    with pytest.raises(TypeError, match="CrossEntropyLoss takes no settings here; got None, label_smoothing"):
        nn.CrossEntropyLoss(None, label_smoothing=0.1)
    with pytest.raises(TypeError, match=r"Parameter takes a tensor; got ndarray, which flow.tensor\(\) converts"):
        nn.Parameter(np.zeros(3))


def test_layers_without_bias_name_none() -> None:
    layer = nn.Conv2d(4, 6, 3, bias=False)
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight"]
    assert layer(flow.ones(1, 4, 5, 5)).shape == (1, 6, 3, 3)


def test_images_come_out_in_nhwc() -> None:
    layer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    y = layer(flow.randn(2, 3, 8, 8))
    assert y.shape == (2, 8, 4, 4)
    assert y.stride() == (128, 1, 32, 8)
    y.sum().backward()


def test_loss_layer() -> None:
    loss = nn.CrossEntropyLoss()(flow.zeros(2, 4), flow.tensor([1, 3]))
    assert loss.item() == pytest.approx(np.log(4), rel=1e-6)
    assert loss.shape == ()


def test_an_empty_batch_goes_through_a_network_in_evaluation() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()
    assert model(flow.zeros(0, 3, 10, 10)).shape == (0, 5)


def test_batches_are_counted_without_an_instruction_and_seen_by_all_who_look() -> None:
    layer = flow.nn.BatchNorm2d(2)
    x = flow.randn(3, 2, 4, 4)
    issued = []
    with machine.observed(lambda instruction, run: (issued.append(instruction.kernel.__name__), run())):
        layer(x)
        layer(x)
    assert issued == ["batch_norm_train"] * 2
    state = layer.state_dict()
    assert state["num_batches_tracked"].item() == 2
    assert state["num_batches_tracked"].dtype is flow.int64
    layer(x)
    layer.load_state_dict(state)
    layer(x)
    assert layer.num_batches_tracked.item() == 4
    layer.to(flow.float64)
    layer.num_batches_tracked.zero_()
    layer(x.to(flow.float64))
    assert [buffer.item() for name, buffer in layer.named_buffers() if name == "num_batches_tracked"] == [1]


def test_a_refused_batch_is_not_counted() -> None:
    layer = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(flow.ones(1, 3, 1, 1))
    assert layer.num_batches_tracked.item() == 0
    layer(flow.ones(2, 3, 1, 1))
    assert layer.num_batches_tracked.item() == 1


def test_settings_that_scripts_for_pytorch_give_are_taken_where_they_are_so() -> None:
    x = flow.randn(2, 3, 2, 2)
    values = x.tolist()
    assert nn.ReLU(inplace=True)(x).tolist() == nn.ReLU()(x).tolist()
    assert x.tolist() == values
    assert [nn.Flatten(start)(x).shape for start in (0, 1, 2)] == [(24,), (2, 12), (2, 3, 4)]
    weights = []
    for settings in ({}, {"nonlinearity": "relu"}):
        flow.manual_seed(3)
        weights.append(init.kaiming_normal_(flow.empty(4, 3), **settings).tolist())
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match="for layers with nonlinearity 'relu'; got 'tanh'"):
        init.kaiming_normal_(flow.empty(4, 3), nonlinearity="tanh")


def test_a_convolution_has_channels() -> None:
    for channels in ((3, 0), (0, 3)):
        with pytest.raises(ValueError, match=f"channels are integers from 1; got {channels[0]} and {channels[1]}"):
            nn.Conv2d(*channels, 3)


def test_modules_of_another_framework_are_refused_as_such() -> None:
    torch = pytest.importorskip("torch", reason="gives PyTorch's")
    with pytest.raises(TypeError, match="Sequential takes modules; got torch's Linear as 0"):
        nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="convert_sync_batchnorm takes a Module; got torch's Linear"):
        nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"such as model\.parameters\(\); got torch's Parameter"):
        flow.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


ARRAY_REFUSERS = [
    nn.Conv2d(3, 4, 1), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2),
]  # fmt: skip


@pytest.mark.parametrize("layer", ARRAY_REFUSERS, ids=lambda layer: type(layer).__name__)
def test_an_array_is_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"takes tensors; got ndarray, which flow.tensor\(\) converts"):
        layer(np.ones((2, 3, 2, 2), np.float32))


def test_a_loss_of_lists_is_refused_by_name() -> None:
    for logits, target in (([[1.0]], flow.tensor([0])), (flow.ones(1, 1), [0])):
        with pytest.raises(TypeError, match="cross_entropy takes tensors; got list"):
            nn.CrossEntropyLoss()(logits, target)
