"""pytest-benchmark's view of a step, method by method: ``pytest benchmarks --benchmark-only``.

It times one method after the other, so that a machine that slows down meanwhile favours the first ones. Ratios between
methods come from ``python -m benchmarks``, which interleaves them.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.methods import METHODS, start
from benchmarks.workloads import WORKLOADS


@pytest.mark.benchmark(disable_gc=True)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workload", ["mlp", "cnn"])
def test_step(benchmark: BenchmarkFixture, workload: str, method: str) -> None:
    row, work = METHODS[method], WORKLOADS[workload]
    if row.package:
        pytest.importorskip(row.package)
    training = start(row, work)
    benchmark.group = f"{work.title}, batch {work.batch_size}"
    benchmark.extra_info.update(
        model=work.title,
        method=method,
        batch_size=work.batch_size,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        parameters=sum(p.numel() for p in training.model.parameters()),
        parameters_added=training.parameters_added(),
        state_bytes=training.state_bytes(),
    )
    benchmark.pedantic(training.step, rounds=50, warmup_rounds=2)
