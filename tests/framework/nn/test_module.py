"""Modules: what is filed under which name, and what happens to all of it at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import framework as flow
from framework import nn
from framework.vm import scope


class Branch(nn.Module):
    """A module with one of each: parameter, buffer, modules, and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(flow.ones(2))
        self.register_buffer("seen", flow.zeros(1))
        self.register_buffer("absent", None)
        self.first = nn.Linear(2, 3)
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(3, 2, bias=False))
        self.setting = 5

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.rest(self.first(x * self.scale))


def test_names_in_order() -> None:
    module = Branch()
    assert [name for name, _ in module.named_parameters()] == ["scale", "first.weight", "first.bias", "rest.1.weight"]
    assert [name for name, _ in module.named_buffers()] == ["seen"]
    assert [name for name, _ in module.named_modules()] == ["", "first", "rest", "rest.0", "rest.1"]
    assert list(module.state_dict()) == ["scale", "seen", "first.weight", "first.bias", "rest.1.weight"]
    assert len(list(module.parameters())) == 4
    assert [type(m).__name__ for m in module.children()] == ["Linear", "Sequential"]


def test_a_shared_parameter_comes_once_and_is_saved_under_both_names() -> None:
    module = Branch()
    module.rest[1].weight = module.scale
    assert [name for name, _ in module.named_parameters()] == ["scale", "first.weight", "first.bias"]
    assert "rest.1.weight" in module.state_dict()


def test_a_shared_module_comes_once_and_is_saved_under_both_names() -> None:
    shared = nn.Linear(2, 2, bias=False)
    module = nn.Sequential(shared, nn.ReLU(), shared)
    assert [name for name, _ in module.named_modules("net")] == ["net", "net.0", "net.1"]
    assert [name for name, _ in module.named_modules(remove_duplicate=False)] == ["", "0", "1", "2"]
    assert sum(m is shared for m in module.modules()) == 1
    assert list(module.state_dict()) == ["0.weight", "2.weight"]
    other = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    other.load_state_dict(module.state_dict())
    assert other[2].weight.tolist() == shared.weight.tolist()


def test_to_takes_a_device_and_a_type_as_pytorch_spells_them() -> None:
    for module in (
        Branch().to("cpu", flow.float64),
        Branch().to(dtype=flow.float64, device="cpu", non_blocking=True),
        Branch().to(flow.ones(1, dtype=flow.float64)),
        Branch().double(),
    ):
        assert {held.dtype for held in module.state_dict().values()} == {flow.float64}
        assert module.float() is module
        assert {held.dtype for held in module.state_dict().values()} == {flow.float32}
    norm = nn.BatchNorm2d(2).to(flow.float64)
    assert norm.num_batches_tracked.dtype is flow.int64
    with pytest.raises(TypeError, match=r"another floating-point type, not flow\.int64"):
        norm.to(flow.int64)


def test_what_is_registered_is_of_its_kind_and_has_a_name_that_is_free() -> None:
    module = Branch()
    for register, given, said in (
        (module.register_buffer, 3, r"register_buffer\(\) takes a Tensor as mask; got int"),
        (module.register_parameter, flow.ones(1), r"register_parameter\(\) takes a Parameter as mask; got Tensor"),
        (module.add_module, None, r"add_module\(\) takes a Module as mask; got NoneType"),
    ):
        with pytest.raises(TypeError, match=said):
            register("mask", given)
    for name in ("", "a.b", "setting", "scale", "forward"):
        with pytest.raises(ValueError, match=f"Branch cannot have a tensor called '{name}': give a name that is free"):
            module.register_buffer(name, flow.ones(1))
    assert list(module.state_dict()) == list(Branch().state_dict())
    module.register_buffer("seen", None)
    module.register_buffer("seen", flow.ones(3))
    assert module.state_dict()["seen"].shape == (3,)


def test_gradients_are_dropped_or_filled_with_zeros() -> None:
    module = nn.Linear(2, 1)
    for set_to_none in (False, True):
        module(flow.ones(1, 2)).sum().backward()
        held = module.weight.grad
        module.zero_grad(set_to_none=set_to_none)
        assert module.weight.grad is (None if set_to_none else held)
    assert held.tolist() == [[1, 1]]
    module(flow.ones(1, 2)).sum().backward()
    module.weight.grad, kept = None, module.bias.grad
    module.zero_grad(set_to_none=False)
    assert (module.weight.grad, module.bias.grad is kept, kept.tolist()) == (None, True, [0])


def test_what_is_replaced_is_filed_anew() -> None:
    module = Branch()
    module.first = None
    assert "first.weight" not in module.state_dict()
    assert module.first is None
    module.first = nn.Parameter(flow.ones(1))
    assert "first" in dict(module.named_parameters())
    module.first = nn.Linear(2, 2)
    assert [n for n, _ in module.named_parameters()] == ["scale", "rest.1.weight", "first.weight", "first.bias"]
    module.seen = flow.ones(1)
    assert module.state_dict()["seen"].tolist() == [1]
    del module.rest
    assert "rest.1.weight" not in module.state_dict()


def test_a_parameter_is_only_replaced_by_one() -> None:
    module = Branch()
    with pytest.raises(TypeError, match="scale is a parameter; it takes a Parameter or None, not Tensor"):
        module.scale = flow.ones(2)
    module.scale = None
    assert "scale" not in module.state_dict()


def test_modes() -> None:
    module = Branch()
    assert module.eval() is module
    assert not any(m.training for m in module.modules())
    module.train()
    assert all(m.training for m in module.modules())


def test_gradients_of_all() -> None:
    module = Branch()
    module(flow.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    module.zero_grad()
    assert all(p.grad is None for p in module.parameters())
    module.requires_grad_(False)
    assert not module(flow.ones(1, 2)).requires_grad


def test_conversion_keeps_the_parameters_themselves() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    before = list(module.parameters())
    module(flow.ones(2, 1, 2, 2)).sum().backward()
    assert module.to(flow.float64) is module
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
    assert {name: t.dtype for name, t in module.state_dict().items()} == {
        "0.weight": flow.float64, "0.bias": flow.float64, "1.weight": flow.float64, "1.bias": flow.float64,
        "1.running_mean": flow.float64, "1.running_var": flow.float64, "1.num_batches_tracked": flow.int64,
    }  # fmt: skip
    assert all(p.grad is None and p.is_leaf and p.requires_grad for p in module.parameters())
    module(flow.ones(2, 1, 2, 2, dtype=flow.float64)).sum().backward()
    assert before[0].grad.dtype is flow.float64
    # Where nothing changes the gradients stay.
    assert all(p.grad is not None for p in module.to("cpu").to(flow.float64).parameters())


def test_saved_and_loaded() -> None:
    one, other = Branch(), Branch()
    state = one.state_dict()
    assert all(not t.requires_grad for t in state.values())
    other.load_state_dict(state)
    for name, tensor in other.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), state[name].numpy())
    # Copied, not shared; while the state itself shares memory with its module.
    with flow.no_grad():
        other.scale.fill_(7.0)
        one.scale.fill_(3.0)
    assert state["scale"].tolist() == [3, 3]
    assert other.scale.tolist() == [7, 7]
    other.load_state_dict({name: tensor.numpy().astype(np.float64) for name, tensor in state.items()})
    assert other.scale.dtype is flow.float32
    assert other.scale.tolist() == [3, 3]
    assert other.scale.requires_grad


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    module = Branch()
    state = {name: tensor.numpy() + 1 for name, tensor in module.state_dict().items()}
    before = module.scale.tolist()
    with pytest.raises(
        ValueError, match=r"the state does not fit Branch: first\.weight has shape \[3, 3\], expected \[3, 2\]"
    ):
        module.load_state_dict({**state, "first.weight": np.ones((3, 3))})
    with pytest.raises(ValueError, match=r"missing first\.bias; unknown module\.scale"):
        module.load_state_dict({**{k: v for k, v in state.items() if k != "first.bias"}, "module.scale": np.ones(2)})
    with pytest.raises(ValueError, match=r"missing scale, seen, first\.weight and 2 more"):
        module.load_state_dict({})
    for given, kind in ((None, "NoneType"), ("weights.npz", "str"), ([1], "list")):
        with pytest.raises(TypeError, match=rf"takes tensors or arrays by their names, .*; got {kind}"):
            module.load_state_dict(given)  # type: ignore[arg-type]
    assert module.scale.tolist() == before
    module.load_state_dict({"scale": np.array([5.0, 6.0]), "more": np.ones(1)}, strict=False)
    assert module.scale.tolist() == [5, 6]


def test_a_state_without_the_counter_of_batches_loads() -> None:
    module = nn.BatchNorm2d(2)
    state = {name: t for name, t in module.state_dict().items() if name != "num_batches_tracked"}
    module.load_state_dict({**state, "weight": np.array([3.0, 4.0], np.float32)})
    assert module.weight.tolist() == [3, 4]
    assert module.state_dict()["num_batches_tracked"].item() == 0


def test_apply_goes_inside_first() -> None:
    seen = []
    module = nn.Sequential(nn.Sequential(nn.ReLU()))
    module.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["ReLU", "Sequential", "Sequential"]


def test_sequential() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Flatten())
    assert len(module) == 2
    assert isinstance(module[1], nn.Flatten)
    assert isinstance(module[-1], nn.Flatten)
    assert module(flow.tensor([[[-1.0, 2.0]]])).tolist() == [[0, 2]]


def test_a_module_list_takes_modules_alone() -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert list(layers.state_dict())[::2] == ["0.weight", "1.weight", "2.weight"]
    assert type(layers[1:]) is nn.ModuleList
    assert [*layers[1:]] == [*layers][1:] == [layers[1], layers[-1]]
    assert list(layers[1:].state_dict())[::2] == ["0.weight", "1.weight"]
    with pytest.raises(TypeError, match="ModuleList takes modules; got function as 3"):
        layers.append(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ModuleList takes modules; got NoneType as 0"):
        layers[0] = None  # type: ignore[assignment]
    assert len(layers) == 3
    assert len(nn.ModuleList()) == 0


def test_modules_in_a_list_are_found_by_its_name() -> None:
    seen: list[str | None] = []

    class Seeing(nn.Module):
        def forward(self) -> None:
            seen.append(scope.path(scope.current))

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Seeing(), nn.ModuleList([Seeing()])])
            self.layers[1].append(Seeing())

        def forward(self) -> None:
            for module in [self.layers[0], *self.layers[1], *self.layers[2:]]:
                module()

    names = ["layers.0", "layers.1.0", "layers.1.1"]
    model = Listed()
    model.layers[0], inner = Seeing(), model.layers[1]
    assert [m._name for m in (model.layers[0], *inner)] == names
    model.layers.append(Seeing())
    for called in (model, copy.deepcopy(model)):
        assert [m._name for m in called.layers[:1]] == ["layers.0"]
        called()
    assert seen == [*names, "layers.2"] * 2


def test_a_module_is_added_under_a_name_that_is_free() -> None:
    module = Branch()
    module.add_module("last", nn.Linear(2, 2, bias=False))
    module.add_module("first", nn.ReLU())
    assert list(module.state_dict()) == ["scale", "seen", "rest.1.weight", "last.weight"]
    assert module.last is dict(module.named_children())["last"]
    for name in ("forward", "scale", "seen", "setting", "a.b", ""):
        with pytest.raises(ValueError, match=f"Branch cannot have a module called '{name}': give a name that is free"):
            module.add_module(name, nn.ReLU())
    with pytest.raises(TypeError, match=r"add_module\(\) takes a Module as more; got NoneType"):
        module.add_module("more", None)  # type: ignore[arg-type]
    assert module.setting == 5


def test_a_module_that_is_there_twice_is_one_child_and_runs_twice() -> None:
    double = nn.Linear(1, 1, bias=False)
    nn.init.constant_(double.weight, 2.0)
    module = nn.Sequential(double, double)
    assert list(module.named_children()) == [("0", double)]
    assert list(module.children()) == [double]
    assert (len(module), list(module)) == (2, [double, double])
    assert module(flow.ones(1, 1)).item() == 4


def test_a_module_without_forward_says_so() -> None:
    with pytest.raises(TypeError, match=r"Module defines no forward\(\)"):
        nn.Module()(1)


def test_the_place_is_left_also_by_an_error() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="linear takes"):
        module(flow.ones(3))
    assert scope.current is None


def test_repr_shows_the_tree() -> None:
    text = repr(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.Linear(8, 2)))
    assert text.splitlines() == [
        "Sequential(",
        "  0: Conv2d(weight=[8, 3, 3, 3], stride=(2, 2), padding=(0, 0))",
        "  1: BatchNorm2d(8, eps=1e-05, momentum=0.1)",
        "  2: Linear(8 -> 2)",
        ")",
    ]


def test_a_subclass_that_forgets_the_base_is_told_so() -> None:
    class Forgetful(nn.Module):
        def __init__(self, part: object) -> None:
            self.part = part

    for part in (nn.ReLU(), nn.Parameter(flow.ones(1)), 5):
        with pytest.raises(AttributeError, match=r"Forgetful.__init__\(\) has to call super\(\).__init__\(\)"):
            Forgetful(part)
    with pytest.raises(AttributeError, match="'ReLU' object has no attribute 'weight'"):
        _ = nn.ReLU().weight


def test_a_subclass_that_forgets_the_base_and_sets_nothing_is_told_so_when_it_is_called() -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            pass

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return x

    with pytest.raises(AttributeError, match=r"Forgetful.__init__\(\) has to call super\(\).__init__\(\)"):
        Forgetful()(flow.ones(1))


def test_a_subclass_may_look_up_attributes_itself_and_leave_the_rest_to_the_base() -> None:
    class Renamed(nn.Module):
        def __getattr__(self, name: str) -> object:
            return self.setting if name == "old" else super().__getattr__(name)

    class Mixin:
        def __getattr__(self, name: str) -> object:
            return 7 if name == "mixed" else super().__getattr__(name)

    class Both(Mixin, Branch, Renamed):
        pass

    class Forgetful(Renamed):
        def __init__(self) -> None:
            self.part = nn.ReLU()

    module = Both()
    assert (module.old, module.mixed, module.setting) == (5, 7, 5)
    np.testing.assert_array_equal(copy.deepcopy(module).scale.detach().numpy(), [1, 1])
    for kind in (Renamed, Both):
        with pytest.raises(AttributeError, match=f"{kind.__name__!r} object has no attribute 'missing'"):
            _ = kind().missing
    with pytest.raises(AttributeError, match=r"Forgetful.__init__\(\) has to call super\(\).__init__\(\)"):
        Forgetful()


def test_an_element_type_by_name_is_refused() -> None:
    for held in (nn.Linear(2, 2), flow.ones(2)):
        with pytest.raises(TypeError, match=r"pass flow\.float64, not 'float64'"):
            held.to("float64")
