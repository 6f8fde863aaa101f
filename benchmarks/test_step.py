"""pytest-benchmark's view of a step, method by method: ``pytest benchmarks --benchmark-only``.

It times one method after the other, so that a machine that slows down meanwhile favors the first ones. Ratios between
methods come from ``python -m benchmarks``, which interleaves them.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.methods import METHODS, start
from benchmarks.workloads import WORKLOADS, Setting


@pytest.mark.benchmark(disable_gc=True)
@pytest.mark.parametrize("method", METHODS)
def test_step(benchmark: BenchmarkFixture, method: str) -> None:
    work = WORKLOADS["mlp"]
    training = start(METHODS[method], work, Setting())
    benchmark.group = f"{work.title}, batch {work.batch_size}"
    benchmark.extra_info.update(method=method, threads=torch.get_num_threads(), torch=str(torch.__version__))
    benchmark.pedantic(training.step, rounds=50, warmup_rounds=2)
