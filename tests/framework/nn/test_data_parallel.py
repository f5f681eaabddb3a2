"""DistributedDataParallel on ranks that are real processes, which communicate through shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.framework.distributed.ranks import finish, run, start

# A small network with everything that matters: convolutions, batch norm, a linear layer. `data(rank, n, step)` is what a
# rank trains on, `same(tensors)` fails where they are not the same bits on every rank.
NETWORK = """
dist.init_process_group(timeout=30)
rank, size = dist.get_rank(), dist.get_world_size()
nn = flow.nn
DDP = nn.parallel.DistributedDataParallel

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 5)

    def forward(self, x):
        x = self.bn1(self.conv1(x), relu=True)
        x = self.bn2(self.conv2(x), residual=x, relu=True)
        return self.fc(flow.nn.functional.global_avg_pool2d(x).flatten(1))

def net(seed=0, **options):
    flow.manual_seed(seed)
    return Net(**options).to(flow.float64)

def data(rank, n=2, step=0):
    drawn = np.random.default_rng([7, step])
    images, labels = drawn.standard_normal((8, 3, 6, 6)), drawn.integers(0, 5, 8)
    return flow.tensor(images[rank * n : rank * n + n]), flow.tensor(labels[rank * n : rank * n + n])

def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def same(tensors):
    for name, tensor in tensors:
        values = np.ascontiguousarray(np.array(tensor.detach().tolist()))
        everyone = dist.all_gather_object(values.tobytes().hex())
        assert len(set(everyone)) == 1, f"{name} differs between ranks"

def whole(model):
    return [*model.named_parameters(), *model.named_buffers()]

def gradients(model):
    return {name: None if p.grad is None else np.array(p.grad.tolist()) for name, p in model.named_parameters()}

def mean_gradients(model, ranks=range(2), **options):
    # What each rank's data gives alone, averaged over all.
    parts = []
    for r in ranks:
        model.zero_grad()
        loss_of(model, data(r, **options)).backward()
        parts.append(gradients(model))
    model.zero_grad()
    return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}

def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert (ours[name] is None) == (values is None), name
        if values is not None:
            np.testing.assert_allclose(ours[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
"""


def on_two_ranks(code: str) -> list[str]:
    """Runs `code` behind NETWORK on two ranks; each has to come to its end."""
    said = run(NETWORK + code + "\nprint('well')\ndist.destroy_process_group()\n", 2)
    assert all(text.endswith("well\n") for text in said), said
    return said


def test_two_ranks_with_half_the_batch_train_as_one_with_all_of_it() -> None:
    on_two_ranks("""
alone, model = net(), net(seed=rank)
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model), bucket_cap_mb=0.001)
assert len(model.reducer.buckets) > 2
close({n: np.array(t.tolist()) for n, t in whole(model.module)}, {n: np.array(t.tolist()) for n, t in whole(alone)})
optimizers = [flow.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (alone, model)]
for step in range(6):
    n = 3 if step % 2 else 4
    for optimizer in optimizers:
        optimizer.zero_grad()
    expected = loss_of(alone, data(0, 2 * n, step))
    loss = loss_of(model, data(rank, n, step))
    expected.backward(), loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    mean = flow.tensor([loss.item()], dtype=flow.float64)
    dist.all_reduce(mean, "avg")
    assert abs(mean.item() - expected.item()) < 1e-5, (step, mean.item(), expected.item())
    same(whole(model))
close({n: np.array(t.tolist()) for n, t in whole(model.module)}, {n: np.array(t.tolist()) for n, t in whole(alone)})
""")


def test_gradients_are_averaged_once_and_lie_in_buckets() -> None:
    on_two_ranks("""
expected = mean_gradients(net())
for options in ({}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 0.0001}, {"broadcast_buffers": False}):
    model = DDP(net(), **options)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, data(rank)).backward()
        close(gradients(model.module), expected)
        same((n, p.grad) for n, p in model.named_parameters())
        in_bucket = {p.grad.array.storage for p in model.parameters()} <= {b.flat.storage for b in model.reducer.buckets}
        assert in_bucket == options.get("gradient_as_bucket_view", True)
# A second backward adds the average of what it finds.
loss_of(model, data(rank)).backward()
close(gradients(model.module), {name: 2 * value for name, value in expected.items()})
# Gradients of the user's own, and such that are filled with zeros, serve as well.
for p in model.parameters():
    p.grad = flow.zeros(*p.shape, dtype=flow.float64)
loss_of(model, data(rank)).backward()
close(gradients(model.module), expected)
flow.optim.SGD(model.parameters(), lr=1).zero_grad(set_to_none=False)
loss_of(model, data(rank)).backward()
close(gradients(model.module), expected)
""")


def test_every_rank_sends_the_same_buckets_in_the_same_order_during_backward() -> None:
    on_two_ranks("""
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        # Backward reaches the branches in an order that differs from rank to rank.
        first, second = (self.a, self.b) if rank else (self.b, self.a)
        return first(x) + second(x)

model = DDP(Branches(), bucket_cap_mb=0.00001)
sent, reached_end = [], []
from framework.distributed.collectives import Repeated
plain = Repeated.issue
def spy(call):
    if call._kernel.__name__ == "_all_reduce":
        sent.append(call._operands[0].size)
    return plain(call)
Repeated.issue = spy
x = flow.ones(1, 3, requires_grad=True)
x.register_hook(lambda gradient: reached_end.append(len(sent)))
model(x).sum().backward()
assert sent == [b.flat.size for b in model.reducer.buckets], sent
assert len(sent) == 4
same((n, p.grad) for n, p in model.named_parameters())

# In a chain, the first buckets are on their way before the last gradient is made.
model = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), bucket_cap_mb=0.00001)
sent.clear()
at_first_layer = []
model.module._modules["0"].weight.register_hook(lambda gradient: at_first_layer.append(len(sent)))
model(flow.ones(1, 3)).sum().backward()
assert at_first_layer[0] >= 3, at_first_layer
""")


def test_parameters_that_are_not_used() -> None:
    on_two_ranks("""
class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, which):
        return getattr(self, which)(x)

for as_view, cap in ((True, 25), (False, 25), (True, 0.00001), (False, 0.00001)):
    model = DDP(Choice(), gradient_as_bucket_view=as_view, bucket_cap_mb=cap)
    model(flow.ones(1, 3) * (rank + 1), "ab"[rank]).sum().backward()
    got = gradients(model.module)
    assert got["never.weight"] is None and got["never.bias"] is None
    np.testing.assert_array_equal(got["a.weight"], np.full((2, 3), 0.5))
    np.testing.assert_array_equal(got["b.weight"], np.full((2, 3), 1.0))
    np.testing.assert_array_equal(got["b.bias"], np.full(2, 0.5))
    same((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    # What the last average left behind is no gradient.
    model.zero_grad()
    model(flow.ones(1, 3) * (rank + 1), "ba"[rank]).sum().backward()
    got = gradients(model.module)
    np.testing.assert_array_equal(got["a.weight"], np.full((2, 3), 1.0))
    np.testing.assert_array_equal(got["b.weight"], np.full((2, 3), 0.5))
    # One rank's backward reaches no parameter at all.
    model.zero_grad()
    x = flow.ones(1, 3, requires_grad=True)
    (model(x, "a").sum() if rank else (model(x, "a") * 0 + x.sum()).sum()).backward()
    np.testing.assert_array_equal(gradients(model.module)["a.weight"], np.full((2, 3), 0.5))
    same((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
""")


def test_whether_parameters_are_used_is_sent_with_the_last_bucket_whatever_the_others_hold() -> None:
    on_two_ranks("""
from framework.vm import machine

class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.single, self.double = nn.Linear(3, 2), nn.Linear(3, 2).to(flow.float64)
        self.other, self.never = nn.Linear(3, 2), nn.Linear(3, 2).to(flow.float64)

    def forward(self, names):
        return sum(getattr(self, n)(flow.ones(1, 3, dtype=getattr(self, n).weight.dtype)).sum().to(flow.float64) for n in names)

def fills(model, names):
    seen = []
    def observe(instruction, run):
        if instruction.kernel.__name__ == "fill":
            seen.extend(instruction.writes)
        run()
    with machine.observed(observe):
        model(names).backward()
    flats = [b.flat for b in model.reducer.buckets]
    return [(index, a.size) for a in seen for index, flat in enumerate(flats) if a.storage is flat.storage]

every = ["single", "double", "other", "never"]
for cap in (25, 0.00001):
    model = DDP(Choice(), bucket_cap_mb=cap)
    last = len(model.reducer.buckets) - 1
    assert last == (1 if cap == 25 else 7)
    for _ in range(2):
        model.zero_grad()
        # One instruction for all of them.
        assert fills(model, every) == [(last, 8)]
        assert all(set(p.grad.numpy().ravel()) == {1.0} for p in model.parameters())
    # What was used before, and what only the other rank uses.
    for names in (["single", "double"], ["single", "other"]), (["other"], ["double", "single"]):
        model.zero_grad()
        model(names[rank]).backward()
        for name in every:
            uses = (name in names[0]) + (name in names[1])
            for p in getattr(model.module, name).parameters():
                assert (p.grad is not None) == (uses > 0), (name, names)
                assert not uses or set(p.grad.numpy().ravel()) == {uses / 2}, (name, p.grad)
""")


def test_frozen_parameters_are_left_out_and_come_in_when_they_are_unfrozen() -> None:
    on_two_ranks("""
plain = net()
plain.conv1.requires_grad_(False), plain.bn1.requires_grad_(False)
model = DDP(plain)
names = {slot.name for bucket in model.reducer.buckets for slot in bucket.slots}
assert names == {"conv2.weight", "conv2.bias", "bn2.weight", "bn2.bias", "fc.weight", "fc.bias"}, names
loss_of(model, data(rank)).backward()
assert model.module.conv1.weight.grad is None
plain.requires_grad_(True)
model.zero_grad()
loss_of(model, data(rank)).backward()
close(gradients(model.module), mean_gradients(net()))
plain.fc.requires_grad_(False)
model.zero_grad()
loss_of(model, data(rank)).backward()
assert plain.fc.weight.grad is None and plain.fc.weight.home is None
same((n, p.grad) for n, p in model.named_parameters() if p.requires_grad)
""")


def test_several_forwards_before_a_backward_and_shared_parameters() -> None:
    on_two_ranks("""
plain, model = net(), DDP(net(), broadcast_buffers=False)
def twice(model, r):
    return loss_of(model, data(r)) + loss_of(model, data(r, step=1))
parts = []
for r in range(2):
    plain.zero_grad()
    twice(plain, r).backward()
    parts.append(gradients(plain))
twice(model, rank).backward()
close(gradients(model.module), {n: (parts[0][n] + parts[1][n]) / 2 for n in parts[0]})

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = self.one

    def forward(self, x):
        return self.two(self.one(x))

model = DDP(Shared())
model(flow.ones(1, 3)).sum().backward()
first = np.array(model.module.one.weight.grad.tolist())
alone = Shared()
alone.load_state_dict(model.state_dict())
alone(flow.ones(1, 3)).sum().backward()
np.testing.assert_allclose(first, np.array(alone.one.weight.grad.tolist()), rtol=1e-6)
""")


def test_accumulation_without_averaging_in_between() -> None:
    on_two_ranks("""
plain, model = net(), DDP(net(), broadcast_buffers=False)
sent = []
from framework.distributed.collectives import Repeated
every = Repeated.issue
Repeated.issue = lambda call: (sent.append(1), every(call))[1]
with model.no_sync():
    loss_of(model, data(rank)).backward()
assert not sent
local = gradients(model.module)
loss_of(model, data(rank, step=1)).backward()
assert sent
parts = []
for r in range(2):
    plain.zero_grad()
    loss_of(plain, data(r)).backward()
    if r == rank:
        close(local, gradients(plain))
    loss_of(plain, data(r, step=1)).backward()
    parts.append(gradients(plain))
close(gradients(model.module), {n: (parts[0][n] + parts[1][n]) / 2 for n in parts[0]})
""")


def test_a_backward_inside_another_is_refused_by_name() -> None:
    on_two_ranks("""
model = DDP(net(), broadcast_buffers=False)
first, second = loss_of(model, data(rank)), loss_of(model, data(rank, step=1))
nested = [second]
model.module.conv2.weight.register_hook(lambda gradient: nested and nested.pop().backward())
try:
    first.backward()
except RuntimeError as refused:
    assert "parameter fc." in str(refused) and "got a gradient twice in one backward" in str(refused), refused
else:
    raise AssertionError("went through")
""")


def test_uneven_inputs() -> None:
    on_two_ranks("""
steps = (2, 5)[rank]
model = DDP(net())
optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
with model.join():
    for step in range(steps):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync():
                loss_of(model, data(rank, step=9)).backward()
        loss_of(model, data(rank, step=step)).backward()
        optimizer.step()
same(whole(model))

# The same by hand: a rank without data gives zeros.
alone = net()
optimizer = flow.optim.SGD(alone.parameters(), lr=0.1)
for step in range(5):
    parts, before = [], {n: np.array(b.tolist()) for n, b in alone.named_buffers()}
    for r in range(2):
        if step >= (2, 5)[r]:
            continue
        alone.zero_grad()
        alone.load_state_dict({**alone.state_dict(), **{n: flow.tensor(b) for n, b in before.items()}})
        if step == 1:
            loss_of(alone, data(r, step=9)).backward()
        loss_of(alone, data(r, step=step)).backward()
        parts.append(gradients(alone))
        if r == 0 or step >= 2:
            kept = {n: np.array(b.tolist()) for n, b in alone.named_buffers()}
    for n, p in alone.named_parameters():
        p.grad = flow.tensor(sum(part[n] for part in parts) / 2)
    optimizer.step()
close({n: np.array(p.tolist()) for n, p in model.module.named_parameters()},
      {n: np.array(p.tolist()) for n, p in alone.named_parameters()})
assert model.module.bn1.num_batches_tracked.item() == 6  # of the rank that went on

try:
    DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net())).join()
except ValueError as refused:
    assert "bn1" in str(refused)
else:
    raise AssertionError("join() with SyncBatchNorm went through")
""")


def test_buffers_are_those_of_the_first_rank_and_weights_load_under_both_names() -> None:
    on_two_ranks("""
model = DDP(net(seed=rank))
same(whole(model))
for step in range(2):
    loss_of(model, data(rank, step=step)).backward()
mine = model.module.bn1.running_mean.tolist()
assert dist.all_gather_object(mine)[0] != dist.all_gather_object(mine)[1]  # each saw data of its own since
loss_of(model, data(0)).backward()  # begins with those of rank 0, and all see the same data
same(model.named_buffers())
apart = DDP(net(seed=rank), broadcast_buffers=False)
for step in range(2):
    loss_of(apart, data(rank, step=step)).backward()
assert len({str(m) for m in dist.all_gather_object(apart.module.bn1.running_mean.tolist())}) == 2

# Evaluation on one rank waits for no other, whatever it does.
if rank == 0:
    model.eval()
    with flow.no_grad():
        loss_of(model, data(0))
    model.train()

state = {n: flow.tensor(np.array(t.tolist())) for n, t in net(seed=5).state_dict().items()}
for names in ("", "module."):
    for target in (DDP(net()), net()):
        target.load_state_dict({names + n: t for n, t in state.items()})
        loaded = getattr(target, "module", target).state_dict()
        close({n: np.array(t.tolist()) for n, t in loaded.items()}, {n: np.array(t.tolist()) for n, t in state.items()})
loss_of(model, data(rank)).backward()
model.module.to(flow.float32)  # converted behind its back
flow.nn.functional.cross_entropy(model(data(rank)[0].to(flow.float32)), data(rank)[1]).backward()
same((n, p.grad) for n, p in model.named_parameters())
assert model.module.fc.weight.grad.dtype is flow.float32
""")


def test_gradients_that_are_not_numbers_come_to_all_ranks_alike() -> None:
    on_two_ranks("""
model = DDP(net())
optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
images, labels = data(rank)
if rank == 1:
    images = images * float("nan")
loss_of(model, (images, labels)).backward()
same((n, p.grad) for n, p in model.named_parameters())
assert all(np.isnan(g).all() for g in gradients(model.module).values())
optimizer.step()
same(model.named_parameters())
""")


def test_ranks_with_different_models_are_told_so_by_name() -> None:
    said = run(
        NETWORK
        + """
def refused(model):
    try:
        DDP(model)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("went through")

refused(net(width=4 + rank))
refused(nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * rank))
odd = net()
odd.fc.requires_grad_(rank == 0)
refused(odd)
refused(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to((flow.float32, flow.float64)[rank])))
DDP(net())  # and those that agree go on
dist.destroy_process_group()
""",
        2,
    )
    for text in said:
        lines = text.splitlines()
        assert len(lines) == 4, text
        assert "rank 1 has as parameter 0 conv1.weight [5, 3, 3, 3] of float64" in lines[0]
        assert "rank 0 has as parameter 0 conv1.weight [4, 3, 3, 3] of float64" in lines[0]
        assert "rank 1 has as parameter 2 1.weight [2, 2] of float32, rank 0 has only 2 parameters" in lines[1]
        assert "fc.weight" in lines[2]
        assert "frozen" in lines[2]
        assert "of float64" in lines[3]


def test_a_rank_killed_in_forward_or_backward_is_named_by_the_others() -> None:
    for where in ("forward", "backward"):
        code = f"""
import signal
model = DDP(net())
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
for step in range(3):
    if rank == 1 and step == 1:
        if "{where}" == "forward":
            model.module.fc.forward = die
        else:
            model.module.conv2.weight.register_hook(die)
    loss_of(model, data(rank, step=step)).backward()
"""
        survivor, killed = finish(start(NETWORK + code, 2))
        assert killed.status == -9
        assert survivor.status == 1, survivor.text
        assert re.search(r"CollectiveError.*rank 1", survivor.text), survivor.text


def test_a_users_exception_in_backward_leaves_a_model_that_can_go_on() -> None:
    on_two_ranks("""
model = DDP(net(), bucket_cap_mb=0.0001)
def breaks(gradient):
    raise KeyError("as it may happen")
remove = model.module.conv2.weight.register_hook(breaks)
try:
    loss_of(model, data(rank)).backward()
except KeyError:
    pass
remove()
model.zero_grad()
loss_of(model, data(rank)).backward()
close(gradients(model.module), mean_gradients(net()))
""")


def test_ranks_that_disagree_later_are_refused_until_they_agree() -> None:
    on_two_ranks("""
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
x = flow.ones(3, 4)
odd = model.module[rank]
def refused():
    try:
        model(x)
    except ValueError as error:
        assert "different models" in str(error), error
    else:
        raise AssertionError("went through")
odd.requires_grad_(False)
for _ in range(3):
    refused()
# All ask again, although only one of them is not as it was made.
odd.requires_grad_(rank == 0)
refused()
odd.requires_grad_(True)
for _ in range(2):
    model.zero_grad()
    (model(x) * (rank + 1)).sum().backward()
    same((name, p.grad) for name, p in model.named_parameters())
""")


def test_a_module_goes_on_after_a_failed_backward_without_what_averaged_it() -> None:
    on_two_ranks("""
def breaks(gradient):
    raise KeyboardInterrupt
def fail():
    remove = model.module.conv2.weight.register_hook(breaks)
    try:
        loss_of(model, data(rank)).backward()
    except KeyboardInterrupt as error:
        return error
    finally:
        remove()
        model.zero_grad()

alone = net()
loss_of(alone, data(rank)).backward()
model = DDP(net(), bucket_cap_mb=0.0001)
# What was interrupted is kept, as an interactive session does.
error = fail()
bare = model.module
loss_of(bare, data(rank)).backward()
close(gradients(bare), mean_gradients(net()))
error = fail()
del model, error
bare.zero_grad()
loss_of(bare, data(rank)).backward()
close(gradients(bare), gradients(alone))
assert not any(p._post_hooks or p.home for p in bare.parameters())
bare.zero_grad()
loss_of(DDP(bare), data(rank)).backward()
close(gradients(bare), mean_gradients(net()))
""")


def test_conversion_lets_the_old_parameters_go() -> None:
    on_two_ranks("""
model = DDP(nn.Sequential(nn.Linear(500, 500)))
x = flow.ones(2, 500)
for _ in range(2):
    model(x).sum().backward()
model.zero_grad()
old = flow.cpu.memory_allocated()
model.to(flow.float64).to(flow.float32)
assert flow.cpu.memory_allocated() <= old, (flow.cpu.memory_allocated(), old)
# There and back, gradients are soon made where they are averaged again; before that, they are of the new type.
model(x).sum().backward()
weight = model.module[0].weight
assert weight.home.array is weight.grad.array
model.to(flow.float64).eval()
with model.no_sync():
    model(x.to(flow.float64)).sum().backward()
assert weight.grad.dtype is flow.float64, weight.grad.dtype
""")


def test_batch_norm_over_all_ranks_with_different_numbers_of_images() -> None:
    on_two_ranks("""
drawn = np.random.default_rng(3)
images = 100 + drawn.standard_normal((4, 3, 2, 2))
weights = drawn.standard_normal((4, 3, 2, 2))
mine = slice(0, 1) if rank == 0 else slice(1, 4)

def through(norm, part):
    norm.to(flow.float64)
    with flow.no_grad():
        norm.weight.copy_(flow.tensor([1.0, 2.0, -1.0], dtype=flow.float64))
    x = flow.tensor(images[part], requires_grad=True)
    residual = flow.tensor(weights[part])
    y = norm(x, residual=residual, relu=True)
    (y * flow.tensor(weights[part])).sum().backward()
    return y.detach().numpy(), x.grad.numpy(), norm

y, grad, norm = through(nn.SyncBatchNorm(3), mine)
y_all, grad_all, norm_all = through(nn.BatchNorm2d(3), slice(0, 4))
np.testing.assert_allclose(y, y_all[mine], rtol=1e-9, atol=1e-11)
np.testing.assert_allclose(grad, grad_all[mine], rtol=1e-7, atol=1e-9)
for name, held in norm_all.state_dict().items():
    np.testing.assert_allclose(norm.state_dict()[name].numpy(), held.numpy(), rtol=1e-9)
for name in ("weight", "bias"):
    total = getattr(norm, name).grad
    dist.all_reduce(total, "sum")
    np.testing.assert_allclose(total.numpy(), getattr(norm_all, name).grad.numpy(), rtol=1e-9)
# Outside training it needs no other rank.
if rank == 0:
    evaluated = [one.eval()(flow.tensor(images)).detach().numpy() for one in (norm, norm_all)]
    np.testing.assert_allclose(*evaluated, rtol=1e-9)
    norm.train()
# One value per channel on each rank is enough, since all together have two.
norm(flow.tensor(images[rank : rank + 1, :, :1, :1]))
""")


@pytest.mark.parametrize(("without", "tracks"), [(("weight",), True), (("bias",), False), (("weight", "bias"), True)])
def test_batch_norm_over_all_ranks_without_its_parameters_is_pytorchs_of_all_images(
    without: tuple[str, ...], tracks: bool, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    drawn = np.random.default_rng(3)
    known = {"images": 10 + drawn.standard_normal((4, 3, 2, 5)), "slopes": drawn.standard_normal((4, 3, 2, 5))}
    theirs = torch.nn.BatchNorm2d(3, track_running_stats=tracks).double()
    for name in ("weight", "bias"):
        if name in without:
            setattr(theirs, name, None)
        else:
            known[f"before.{name}"] = drawn.standard_normal(3)
            getattr(theirs, name).data.copy_(torch.tensor(known[f"before.{name}"]))
    x = torch.tensor(known["images"], requires_grad=True)
    y = theirs(x)
    (y * torch.tensor(known["slopes"])).sum().backward()
    known |= {"y": y.detach().numpy(), "grad": x.grad.numpy()}
    known |= {f"after.{name}": held.numpy() for name, held in theirs.state_dict().items()}
    known |= {f"grad.{name}": parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    np.savez(tmp_path / "known.npz", **known)
    on_two_ranks(f"""
known = np.load({str(tmp_path / "known.npz")!r})
plain = nn.BatchNorm2d(3, affine={len(without) < 2}, track_running_stats={tracks})
for name in {without}:
    setattr(plain, name, None)
norm = nn.SyncBatchNorm.convert_sync_batchnorm(plain).to(flow.float64)
assert type(norm) is nn.SyncBatchNorm
for name, parameter in norm.named_parameters():
    with flow.no_grad():
        parameter.copy_(flow.tensor(known["before." + name]))
mine = slice(0, 1) if rank == 0 else slice(1, 4)
x = flow.tensor(known["images"][mine], requires_grad=True)
y = norm(x)
(y * flow.tensor(known["slopes"][mine])).sum().backward()
np.testing.assert_allclose(y.detach().numpy(), known["y"][mine], rtol=1e-9)
np.testing.assert_allclose(x.grad.numpy(), known["grad"][mine], rtol=1e-7, atol=1e-9)
assert {{"after." + name for name in norm.state_dict()}} == {{n for n in known if n.startswith("after.")}}
for name, held in norm.state_dict().items():
    np.testing.assert_allclose(held.numpy(), known["after." + name], rtol=1e-9, err_msg=name)
for name, parameter in norm.named_parameters():
    dist.all_reduce(parameter.grad, "sum")
    np.testing.assert_allclose(parameter.grad.numpy(), known["grad." + name], rtol=1e-9, err_msg=name)
""")


def test_backward_writes_gradients_where_they_are_averaged() -> None:
    on_two_ranks("""
from framework.vm import machine

def copies(model):
    seen = []
    def observe(instruction, run):
        if instruction.kernel.__name__ in ("copy", "add"):
            seen.extend(a.storage for a in instruction.writes)
        run()
    with machine.observed(observe):
        loss_of(model, data(rank)).backward()
    flats = {id(b.flat.storage) for b in model.reducer.buckets}
    return sum(id(storage) in flats for storage in seen)

model = DDP(net())
loss_of(model, data(rank)).backward()
model.zero_grad()
assert copies(model) == 0
assert copies(model) == len(list(model.parameters()))  # added to what is there
model.zero_grad()
# What a hook sees may be kept, so it is not what the next step writes over.
kept = []
remove = model.module.fc.weight.register_hook(lambda gradient: kept.append(gradient))
assert copies(model) == 1
before = kept[0].tolist()
remove()
model.zero_grad()
loss_of(model, data(rank, step=1)).backward()
assert kept[0].tolist() == before
""")


def test_a_model_that_is_let_go_gives_its_memory_back_at_once() -> None:
    on_two_ranks("""
import gc
gc.collect()
gc.disable()
before = flow.cpu.memory_allocated()
model = DDP(net())
optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(2):
    optimizer.zero_grad()
    loss = loss_of(model, data(rank, step=step))
    loss.backward()
    optimizer.step()
assert flow.cpu.memory_allocated() > before
del model, optimizer, loss
assert flow.cpu.memory_allocated() <= before, (flow.cpu.memory_allocated(), before)
""")


def test_parameters_that_change_before_an_evaluation_are_averaged_by_its_backward_alone() -> None:
    on_two_ranks("""
def averaged(change, *, frozen=False):
    layer = nn.Linear(4, 2)
    layer.bias.requires_grad_(not frozen)
    model = DDP(layer)
    model(flow.ones(3, 4)).sum().backward()
    model.zero_grad()
    change(layer)
    model.eval()
    x = flow.ones(3, 4, dtype=layer.weight.dtype)
    if rank == 0:
        model(x)  # it may look at its own data alone
    outputs = {"first": model(x), "second": model(x)}
    ((outputs["first"] + outputs["second"]) * (rank + 1)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype is layer.weight.dtype
        assert set(parameter.grad.numpy().ravel()) == {9.0}, parameter.grad

averaged(lambda layer: layer.to(flow.float64))
averaged(lambda layer: layer.to(flow.float64).to(flow.float32))
averaged(lambda layer: layer.bias.requires_grad_(True), frozen=True)
""")


def test_a_conversion_within_join_is_shared_by_ranks_without_data_or_refused() -> None:
    code = """
model = DDP(nn.Linear(4, 2))
with model.join():
    for step in range(3 if rank == 0 else 2):
        if step == STEP:
            model.to(flow.float64)
        model(flow.ones(3, 4, dtype=model.module.weight.dtype)).sum().backward()
same(whole(model))
"""
    on_two_ranks(code.replace("STEP", "1"))
    late = finish(start(NETWORK + code.replace("STEP", "2"), 2))
    assert [one.status for one in late] == [1, 1]
    # One of the two may end before the other has heard why.
    assert any("ranks have different models: rank 1 has as parameter 0 weight" in one.text for one in late), late


def test_replaced_buffers_are_broadcast_and_replaced_parameters_refused() -> None:
    on_two_ranks("""
model = DDP(net())
norm = model.module.bn1
norm.momentum = 0.0
for value in (5.0, 7.0):
    # The second time others are already broadcast.
    norm.running_mean = flow.full((4,), value + rank, dtype=flow.float64)
    loss_of(model, data(rank)).backward()
    assert norm.running_mean.tolist() == [value] * 4
norm.running_mean.fill_(value + rank)
model.broadcast_buffers_from(1)
assert norm.running_mean.tolist() == [8.0] * 4
model.module.fc.weight = nn.Parameter(flow.ones(5, 4, dtype=flow.float64))
for mode in (True, False):
    try:
        model.train(mode)(data(rank)[0])
    except RuntimeError as error:
        assert "parameter fc.weight came into the module after DistributedDataParallel was made" in str(error), error
    else:
        raise AssertionError("went through")
""")
