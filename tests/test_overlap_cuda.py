"""overlap=True on a GPU: a stream of its own gives the serial numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, snapshot

pytestmark = pytest.mark.gpu
WIDTH, STEPS = 512, 12


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def network():
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).cuda()


def trained(overlap, parts, dtype=None, **options):
    model = network()
    base = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DCLOptimizer(base, model, overlap=overlap, loss_scale=1 / parts, **{"weight": 1.0} | options)
    torch.manual_seed(7)
    for x, y in batches(STEPS, size=96, dtype=torch.float32):
        optimizer.zero_grad()
        for rows, labels in zip(x.cuda().chunk(parts), y.cuda().chunk(parts), strict=True):
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(rows), labels) / parts
            loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return snapshot(optimizer) | {"device random": torch.cuda.get_rng_state()}


@pytest.mark.parametrize(
    ("dtype", "parts", "options"),
    [
        (None, 1, {}),
        (torch.bfloat16, 3, {}),
        (None, 3, {"companion_fraction": 0.25}),
        (torch.bfloat16, 1, {"companion_every": 3}),
    ],
    ids=str,
)
def test_a_stream_of_its_own_changes_nothing(dtype, parts, options):
    expected = trained(False, parts, dtype, **options)
    for _ in range(3):  # what reads too early reads something else now and then
        assert_same(trained(True, parts, dtype, **options), expected)


def test_the_companions_kernels_run_on_another_stream():
    streams = []
    model = network()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True, weight=1.0)
    for module in (model, optimizer.companion):
        module[2].register_forward_hook(lambda *_: streams.append(torch.cuda.current_stream()))
    for x, y in batches(3, dtype=torch.float32):
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert sorted(stream == torch.cuda.default_stream() for stream in streams) == [False] * 3 + [True] * 3
