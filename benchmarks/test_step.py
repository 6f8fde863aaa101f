"""pytest-benchmark's view of the same steps: ``pytest benchmarks --benchmark-only``.

It times one method after the other, so that a machine that slows down meanwhile favours the first ones. Ratios between
methods come from ``python -m benchmarks``, which interleaves them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.methods import METHODS, start
from benchmarks.models import WORKLOADS

THREADS = 2


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.benchmark(disable_gc=True)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_step(benchmark: BenchmarkFixture, workload: str, method: str) -> None:
    if workload == "resnet18":
        pytest.importorskip("torchvision")
    work = WORKLOADS[workload]
    training = start(method, work.model(), work.batches())
    benchmark.group = f"{work.title}, batch {work.batch_size}"
    benchmark.extra_info.update(
        model=work.title,
        method=method,
        batch_size=work.batch_size,
        threads=THREADS,
        torch=str(torch.__version__),
        parameters=sum(p.numel() for p in training.model.parameters()),
        **training.memory(),
    )
    benchmark.pedantic(training.step, rounds=10 if workload == "resnet18" else 50, warmup_rounds=2)
