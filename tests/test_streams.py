"""Streams over batches against the measures of all samples in one, a twin in pure Python, and torchmetrics itself."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import MetricCollection

from dcl_optim import metrics
from dcl_optim.streams import LogitDrift, NonTargetPerplexity, Stream, TopNonTargetConsistency, as_torchmetric
from tests.helpers import on_two_ranks

CLASSES = 4
BY_CLASS = [
    (TopNonTargetConsistency, metrics.top_non_target_consistency),
    (NonTargetPerplexity, metrics.non_target_perplexity),
]


def random_batches(sizes: list[int], seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values: ties between classes are common.
    return [
        (
            torch.randint(-3, 4, (size, CLASSES), generator=generator).to(dtype),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def in_one(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    first, second = zip(*batches, strict=True)
    return torch.cat(first), torch.cat(second)


def fed(stream: Stream, batches: list[tuple[Tensor, Tensor]]) -> Stream:
    for batch in batches:
        stream.update(*batch)
    return stream


def assert_bitwise(value: Tensor, expected: Tensor) -> None:
    assert value.dtype == expected.dtype
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)


SAMPLES = st.lists(
    st.tuples(
        st.lists(st.integers(-2, 2), min_size=CLASSES, max_size=CLASSES),
        st.integers(0, CLASSES - 1),
        st.booleans(),  # whether a batch ends after this sample
    ),
    max_size=25,
)


@settings(max_examples=100, deadline=None)
@given(SAMPLES)
def test_against_a_twin_that_counts_in_python(samples: list[tuple[list[int], int, bool]]):
    named: dict[int, list[int]] = {c: [] for c in range(CLASSES)}
    batches: list[tuple[list[list[int]], list[int]]] = [([], [])]
    for row, label, last in samples:
        named[label].append(max((k for k in range(CLASSES) if k != label), key=lambda k, row=row: (row[k], -k)))
        batches[-1][0].append(row)
        batches[-1][1].append(label)
        if last:
            batches.append(([], []))
    consistency = TopNonTargetConsistency(CLASSES, average="none")
    perplexity = NonTargetPerplexity(CLASSES, average="none")
    for rows, labels in batches:
        logits = torch.tensor(rows, dtype=torch.float64).reshape(-1, CLASSES)
        for stream in (consistency, perplexity):
            stream.update(logits, torch.tensor(labels, dtype=torch.long))
    for c, names in named.items():
        shares = [n / len(names) for n in Counter(names).values()]
        expected = max(shares, default=math.nan), math.prod(p**-p for p in shares) if names else math.nan
        actual = consistency.compute()[c].item(), perplexity.compute()[c].item()
        assert actual == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("kind", "measure"), BY_CLASS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[], [1], [0, 3], [2, 1, 1], [17, 64, 0, 5], [300, 301]])
def test_equals_the_measure_of_all_batches_in_one_to_the_last_bit(kind, measure, sizes: list[int], dtype: torch.dtype):
    batches = random_batches(sizes, seed=sum(sizes), dtype=dtype)
    expected = measure(*in_one(batches or random_batches([0], 0)))
    assert_bitwise(fed(kind(CLASSES, average="none"), batches).compute(), expected)
    assert_bitwise(fed(kind(CLASSES), batches).compute(), expected.nanmean())


@pytest.mark.parametrize("kind", [TopNonTargetConsistency, NonTargetPerplexity, LogitDrift])
def test_one_batch_in_float64_makes_the_value_float64_as_joining_them_does(kind):
    single, double = random_batches([20], 0)[0], random_batches([20], 1, torch.float64)[0]
    if kind is LogitDrift:
        stream, measure = LogitDrift(), metrics.logit_drift
        single, double = (single[0], single[0] * 0.3), (double[0], double[0] * 0.7)
    else:
        stream, measure = kind(CLASSES, average="none"), dict(BY_CLASS)[kind]
    stream.update(*single)
    assert stream.compute().dtype == torch.float32
    stream.update(*double)
    stream.update(*single)
    expected = measure(*in_one([single, double, single]))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(stream.compute(), expected, rtol=1e-12, atol=0, equal_nan=True)


def drift_batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 7, generator=generator).to(dtype), torch.randn(n, 7, generator=generator).to(dtype))
        for n in (1, 40, 3, 40)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_drift_weighs_batches_by_their_samples(dtype: torch.dtype):
    batches = drift_batches(dtype)
    value, expected = fed(LogitDrift(), batches).compute(), metrics.logit_drift(*in_one(batches))
    assert value.dtype == expected.dtype
    assert value.item() == pytest.approx(expected.item(), rel=1e-14 if dtype == torch.float64 else 3e-7)
    distances = [
        math.dist(b, a) for before, after in batches for b, a in zip(before.tolist(), after.tolist(), strict=True)
    ]
    assert value.item() == pytest.approx(math.fsum(distances) / 84, rel=1e-14 if dtype == torch.float64 else 6e-8)


def test_drift_of_many_samples_keeps_its_digits():
    """In float32 the sum would stop at 2**24 and the mean fall short."""
    stream = LogitDrift()
    stream.update(torch.zeros(1, 2), torch.tensor([[2.0**25, 0.0]]))
    for _ in range(64):
        stream.update(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    assert stream.compute().item() == pytest.approx((2**25 + 64) / 65, rel=1e-7)


def test_reset_forgets():
    for stream, batches in (
        (TopNonTargetConsistency(CLASSES), random_batches([30, 9], 0)),
        (LogitDrift(), drift_batches(torch.float64)),
    ):
        expected = fed(stream, batches[1:2]).compute()
        stream.update(*batches[0])
        assert stream.compute() != expected
        stream.reset()
        assert_bitwise(fed(stream, batches[1:2]).compute(), expected)


def test_no_graph_is_kept():
    logits = torch.randn(5, CLASSES).requires_grad_()
    for stream in (NonTargetPerplexity(CLASSES), LogitDrift()):
        stream.update(logits, logits + 1 if isinstance(stream, LogitDrift) else torch.zeros(5, dtype=torch.long))
        assert not stream.compute().requires_grad


def test_bad_input_changes_nothing():
    stream = fed(TopNonTargetConsistency(CLASSES, average="none"), random_batches([9], 0))
    before = stream.compute()
    with pytest.raises(ValueError, match="logits has 3 classes; it must have num_classes = 4"):
        stream.update(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="labels holds 4"):
        stream.update(torch.zeros(1, 4), torch.tensor([4]))
    assert_bitwise(stream.compute(), before)


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_classes is 1; it must be at least 2"):
        NonTargetPerplexity(1)
    with pytest.raises(ValueError, match="average is 'micro'; it must be one of macro, none"):
        TopNonTargetConsistency(3, average="micro")
    with pytest.raises(ValueError, match="call update before compute"):
        LogitDrift().compute()
    with pytest.raises(ValueError, match=r"logits_before has shape \(0, 2\)"):
        LogitDrift().update(torch.zeros(0, 2), torch.zeros(0, 2))


def test_no_torchmetrics_is_needed_until_one_is_asked_for():
    script = """
import sys
sys.modules["torchmetrics"] = None
import torch
from dcl_optim.streams import LogitDrift, as_torchmetric
LogitDrift().update(torch.zeros(1, 2), torch.ones(1, 2))
try:
    as_torchmetric(LogitDrift())
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'as_torchmetric needs torchmetrics: pip install "dcl-optim[integrations]"'


def collection() -> MetricCollection:
    streams = TopNonTargetConsistency(CLASSES), NonTargetPerplexity(CLASSES), LogitDrift()
    return MetricCollection([as_torchmetric(stream) for stream in streams])


def named_batches() -> list[dict[str, Tensor]]:
    drifts = drift_batches(torch.float64)
    batches = random_batches([20, 7, 20, 7], 3, torch.float64)
    return [
        {"logits": logits, "labels": labels, "logits_before": before, "logits_after": after}
        for (logits, labels), (before, after) in zip(batches, drifts, strict=True)
    ]


def expected_of(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    classed = joined["logits"], joined["labels"]
    return {
        "TopNonTargetConsistency": metrics.top_non_target_consistency(*classed).nanmean(),
        "NonTargetPerplexity": metrics.non_target_perplexity(*classed).nanmean(),
        "LogitDrift": metrics.logit_drift(joined["logits_before"], joined["logits_after"]),
    }


def assert_collected(measured: dict[str, Tensor], batches: list[dict[str, Tensor]]) -> None:
    assert measured.keys() == expected_of(batches).keys()
    for name, expected in expected_of(batches).items():
        torch.testing.assert_close(measured[name], expected, rtol=1e-14, atol=0)


def test_in_a_collection_each_takes_its_own_arguments_and_the_two_by_class_count_once():
    collected, batches = collection(), named_batches()
    for batch in batches:
        # Called, a collection gives the batch's own values and accumulates all the same.
        assert_collected(collected(**batch), [batch])
    assert_collected(collected.compute(), batches)
    collected.reset()
    for batch in batches[:2]:
        collected.update(**batch)
    assert_collected(collected.compute(), batches[:2])
    assert ["NonTargetPerplexity", "TopNonTargetConsistency"] in [sorted(g) for g in collected.compute_groups.values()]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_copied_or_pickled_metric_goes_on_alone(duplicate):
    metric, batches = as_torchmetric(LogitDrift()), drift_batches(torch.float64)
    metric.update(*batches[0])
    twin = duplicate(metric)
    twin.update(*batches[1])
    assert (metric.update_count, twin.update_count) == (1, 2)
    assert twin.compute().item() == pytest.approx(metrics.logit_drift(*in_one(batches[:2])).item(), rel=1e-14)
    assert metric.compute().item() == pytest.approx(metrics.logit_drift(*batches[0]).item(), rel=1e-14)


def test_a_metric_leaves_the_stream_alone():
    stream = LogitDrift()
    as_torchmetric(stream).update(torch.zeros(1, 2), torch.ones(1, 2))
    assert stream.sums["samples"] == 0


def measure_on_rank(rank: int, folder: Path) -> None:
    collected = collection()
    for batch in named_batches()[rank::2]:
        collected.update(**batch)
    torch.save(collected.compute(), folder / f"{rank}.pt")


def test_two_processes_measure_all_their_samples(tmp_path: Path):
    assert dist.is_gloo_available()
    on_two_ranks(measure_on_rank, tmp_path)
    for rank in range(2):
        assert_collected(torch.load(tmp_path / f"{rank}.pt"), named_batches())
