"""The script that sets kernels' bandwidth beside a copy's: a run on the CPU, its figures from times given by hand, what it refuses."""

from __future__ import annotations

from collections import Counter

import pytest

from suites import bandwidth
from suites.bandwidth import Moved


def test_shapes_count_as_often_as_a_step_has_them() -> None:
    copy = Moved(1, 2_000_000, 1.0)
    moved = [Moved(3, 1_000_000, 1.0), Moved(1, 6_000_000, 2.0)]
    # 9 MB in 5 ms, which a copy does in 4.5.
    assert bandwidth.row("two shapes", moved, copy) == "| two shapes | 9 | 5.000 | 2 | 0.90 |"


def test_a_run_has_a_line_for_each_kernel_and_the_bytes_that_it_has_to_move(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("framework")
    monkeypatch.setattr(bandwidth, "_COPIED_BYTES", 1 << 20)
    shapes = {False: Counter({(250, 100): 2}), True: Counter({(500, 50): 1, (125, 100): 3})}
    monkeypatch.setattr(bandwidth.resnet50, "normalisations", lambda *, residual: shapes[residual])
    monkeypatch.setattr(bandwidth.resnet50, "parameters", lambda: [[1000, 500], [500]])
    bandwidth.main("--device cpu --batch-size 1 --runs 2".split())
    head, rule, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()
    ]
    assert {len(one) for one in (head, rule, *rows)} == {5}
    assert [row[:2] for row in rows] == [
        ["a copy of 1 GiB, for comparison", "2"],
        ["BN + ReLU, N = 1, forward", "60"],
        ["BN + ReLU, N = 1, backward", "100"],
        ["BN + add + ReLU, N = 1, forward", "80"],
        ["BN + add + ReLU, N = 1, backward", "120"],
        ["SGD with momentum", "10"],
    ]
    assert all(float(row[2]) > 0 for row in rows)


def test_images_lie_as_a_networks_do() -> None:
    flow = pytest.importorskip("framework")
    images = bandwidth._drawn(flow, "cpu", (2, 4, 3, 5))
    assert images.shape == (2, 4, 3, 5)
    assert images.array.is_channels_last


@pytest.mark.parametrize("setting", ["--runs 0", "--batch-size 0", "--device tpu"])
def test_what_cannot_be_measured_is_refused(setting: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refused:
        bandwidth.main(setting.split())
    assert refused.value.code == 2
    assert setting.split()[0] in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("framework")
    monkeypatch.setattr(bandwidth, "_COPIED_BYTES", 1 << 20)
    with pytest.raises(SystemExit):
        bandwidth.main("--device cpu --batch-size 100000000 --runs 1".split())
    assert "N = 100000000 is too large: out of memory" in capsys.readouterr().err
