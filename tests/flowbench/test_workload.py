"""The work that engines share: the models' tables, weights and batches from a seed, and the comparison of losses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowbench.cell import Case, Cell
from flowbench.engine import Task
from flowbench.engine_registry import load_engine
from flowbench.errors import FlowbenchError
from flowbench.workload.data import make_batches, make_weights
from flowbench.workload.losses import TOLERANCE, allowed_difference, compare_losses
from flowbench.workload.models import check_input, describe_model, model_names

# Published: multiply-adds at 224x224 in 1e9, and parameters in 1e6.
RESNETS = {"resnet18": (1.81, 11.69), "resnet34": (3.66, 21.80), "resnet50": (4.09, 25.56), "resnet101": (7.80, 44.55),
           "resnet152": (11.51, 60.19)}  # fmt: skip


@pytest.mark.parametrize("name", RESNETS)
def test_the_tables_are_those_of_torchvision(name: str) -> None:
    model = describe_model(name, (3, 224, 224))
    learned = [entry for entry in model.parameters if entry.name.rpartition(".")[2] in ("weight", "bias")]
    assert model.multiply_adds / 1e9 == pytest.approx(RESNETS[name][0], abs=0.006)
    assert sum(math.prod(entry.shape) for entry in learned) / 1e6 == pytest.approx(RESNETS[name][1], abs=0.006)
    models = pytest.importorskip("torchvision.models")
    theirs = getattr(models, name)(weights=None).state_dict()
    assert [(entry.name, entry.shape) for entry in model.parameters] == [(k, tuple(v.shape)) for k, v in theirs.items()]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_our_pytorch_models_compute_what_torchvisions_do(name: str) -> None:
    torch, models = pytest.importorskip("torch"), pytest.importorskip("torchvision.models")
    from flowbench.engines.torch_models import build_model

    weights = make_weights(describe_model(name, (3, 64, 64)), 3)
    ours, theirs = build_model(name, {key: array.shape for key, array in weights.items()}), getattr(models, name)()
    for model in (ours, theirs):
        model.load_state_dict({key: torch.from_numpy(np.array(array)) for key, array in weights.items()})
    images = torch.from_numpy(make_batches((2, 3, 64, 64), 3, 0)[0].images)
    assert torch.equal(ours(images), theirs(images))


def test_weights_and_batches_follow_from_the_seed_alone() -> None:
    model = describe_model("resnet18", (3, 64, 64))
    one, same, other = (make_weights(model, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["conv1.weight"], other["conv1.weight"])
    assert len({id(array.base) for array in one.values() if array.dtype == np.float32}) == 1
    assert one["layer2.0.conv1.weight"].std() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)
    assert abs(one["fc.weight"]).max() == pytest.approx(1 / math.sqrt(512), rel=1e-3)
    assert set(one["bn1.weight"]) == set(one["layer1.0.bn1.weight"]) == {np.float32(1)}
    assert set(one["layer1.0.bn2.weight"]) == {np.float32(0.1)}
    batches = {rank: make_batches((2, 3, 8, 8), 5, rank) for rank in (0, 1)}
    assert np.array_equal(batches[0][0].images, make_batches((2, 3, 8, 8), 5, 0)[0].images)
    assert not np.array_equal(batches[0][0].images, batches[1][0].images)
    assert not np.array_equal(batches[0][0].images, batches[0][1].images)


def test_inputs_too_small_for_the_last_batch_norm_are_refused() -> None:
    check_input("resnet50", (2, 3, 32, 32))
    check_input("resnet50", (1, 3, 33, 32))
    check_input("linear", (1, 3, 1, 1))
    with pytest.raises(FlowbenchError, match="1 value per channel"):
        check_input("resnet50", (1, 3, 32, 32))
    for call in (lambda: check_input("lenet", (1, 3, 8, 8)), lambda: describe_model("lenet", (3, 8, 8))):
        with pytest.raises(FlowbenchError, match="unknown model"):
            call()
    assert set(model_names()) == {*RESNETS, "linear"}


@pytest.mark.parametrize(
    ("losses", "reference", "difference", "said"),
    [
        ([8.0, 4.0], [8.0, 4.0], 0.0, None),
        ([8.0, 4.00008], [8.0, 4.0], 1e-5, None),
        (
            [8.0, 4.0008],
            [8.0, 4.0],
            1e-4,
            "its loss at step 1 is 4.0008, the reference's 4: they differ by 1.0e-04 of the first",
        ),
        ([8.001, 4.0], [8.0, 4.0], 1.25e-4, "step 0"),
        ([8.0, 1e-9], [8.0, 2e-9], 1.25e-10, None),  # near 0 a relative difference would say nothing
        ([8.0, None], [8.0, 4.0], None, "its loss at step 1 is not finite"),
        ([8.0, 4.0], [8.0, None], None, "the reference's loss at step 1 is not finite"),
        ([8.0], [8.0, 4.0], None, "1 losses, the reference has 2"),
        ([0.0], [0.0], 0.0, None),
    ],
)
def test_losses_agree_or_the_first_step_that_does_not_is_named(
    losses: list, reference: list, difference: float | None, said: str | None
) -> None:
    found, reason = compare_losses(losses, reference, TOLERANCE)
    assert found == (difference if difference is None else pytest.approx(difference, rel=1e-6, abs=1e-15))
    assert reason is None if said is None else said in (reason or "")


def test_the_allowed_difference_grows_with_the_steps_as_rounding_does() -> None:
    assert [allowed_difference(step, 1.0) for step in (0, 10, 20, 55)] == [1, 1, 2, 5.5]


def losses_of(engine: str, model: str, shape: tuple[int, ...], steps: int, hook: object = None) -> list[float]:
    case = Case(model, shape, "float32", "eager", 1, False, True, True, 1)
    weights = make_weights(describe_model(model, shape[1:]), 0)
    training = load_engine(engine).build(
        Task(Cell.of(case, engine), weights, make_batches(shape, 0, 0), 1e-4, 0.9, 0, 1)
    )
    if hook is not None:
        hook(training)
    losses = []
    for index in range(steps):
        training.step(index)
        training.synchronize()
        losses.append(training.loss())
    return losses


def test_right_engines_agree_far_within_the_tolerance(toys: object) -> None:
    pytest.importorskip("torch")
    reference = losses_of("torch-eager", "linear", (4, 3, 8, 8), 30)
    assert reference[-1] < reference[0]
    for engine in ("toy", "flow-eager", "torch-channels-last"):
        difference, reason = compare_losses(losses_of(engine, "linear", (4, 3, 8, 8), 30), reference, TOLERANCE)
        assert reason is None
        assert difference is not None
        assert difference < TOLERANCE / 20


def test_on_a_residual_network_rounding_passes_and_a_lost_gradient_does_not() -> None:
    pytest.importorskip("torch")

    def lose(name: str) -> object:
        def hook(training: object) -> None:
            dict(training._model.named_parameters())[name].register_hook(lambda gradient: gradient * 0)

        return hook

    shape, steps = (2, 3, 64, 64), 6
    reference = losses_of("torch-eager", "resnet18", shape, steps)
    difference, reason = compare_losses(
        losses_of("torch-channels-last", "resnet18", shape, steps), reference, TOLERANCE
    )
    assert reason is None
    assert difference is not None
    assert difference < TOLERANCE / 10
    for name in ("layer1.0.conv1.weight", "layer4.1.conv2.weight", "fc.weight"):
        _, reason = compare_losses(losses_of("torch-eager", "resnet18", shape, steps, lose(name)), reference, TOLERANCE)
        assert reason is not None, name
