"""The torchmetrics over batches against the functions of all samples in one, and against a twin in pure Python."""

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
from torchmetrics import Metric, MetricCollection

from dcl_optim import metrics
from dcl_optim.metrics.streaming import LogitDrift, NonTargetPerplexity, TopNonTargetConsistency
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


def fed(metric: Metric, batches: list[tuple[Tensor, Tensor]]) -> Metric:
    for batch in batches:
        metric.update(*batch)
    return metric


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


@settings(max_examples=100)
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
        for metric in (consistency, perplexity):
            metric.update(logits, torch.tensor(labels, dtype=torch.long))
    for c, names in named.items():
        shares = [n / len(names) for n in Counter(names).values()]
        expected = max(shares, default=math.nan), math.prod(p**-p for p in shares) if names else math.nan
        actual = consistency.compute()[c].item(), perplexity.compute()[c].item()
        assert actual == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(("kind", "measure"), BY_CLASS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ([0], torch.float32),
        ([1], torch.float16),
        ([0, 3], torch.float64),
        ([2, 1, 1], torch.bfloat16),
        ([17, 64, 0, 5], torch.float16),
        ([300, 301], torch.float32),
    ],
)
def test_equals_the_measure_of_all_batches_in_one_to_the_last_bit(kind, measure, sizes: list[int], dtype: torch.dtype):
    batches = random_batches(sizes, seed=sum(sizes), dtype=dtype)
    expected = measure(*in_one(batches))
    assert_bitwise(fed(kind(CLASSES, average="none"), batches).compute(), expected)
    assert_bitwise(fed(kind(CLASSES), batches).compute(), expected.nanmean())


@pytest.mark.parametrize("kind", [TopNonTargetConsistency, NonTargetPerplexity, LogitDrift])
def test_one_batch_in_float64_makes_the_value_float64_as_joining_them_does(kind):
    single, double = random_batches([20], 0)[0], random_batches([20], 1, torch.float64)[0]
    if kind is LogitDrift:
        metric, measure = LogitDrift(), metrics.logit_drift
        single, double = (single[0], single[0] * 0.3), (double[0], double[0] * 0.7)
    else:
        metric, measure = kind(CLASSES, average="none"), dict(BY_CLASS)[kind]
    metric.update(*single)
    assert metric.compute().dtype == torch.float32
    metric.update(*double)
    metric.update(*single)
    expected = measure(*in_one([single, double, single]))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=0, equal_nan=True)


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
    metric = LogitDrift()
    metric.update(torch.zeros(1, 2), torch.tensor([[2.0**25, 0.0]]))
    for _ in range(64):
        metric.update(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    assert metric.compute().item() == pytest.approx((2**25 + 64) / 65, rel=1e-7)


def test_reset_forgets():
    for metric, batches in (
        (TopNonTargetConsistency(CLASSES), random_batches([30, 9], 0)),
        (LogitDrift(), drift_batches(torch.float64)),
    ):
        expected = fed(metric, batches[1:2]).compute()
        metric.update(*batches[0])
        assert metric.compute() != expected
        metric.reset()
        assert_bitwise(fed(metric, batches[1:2]).compute(), expected)


def test_no_graph_is_kept():
    logits = torch.randn(5, CLASSES).requires_grad_()
    for metric in (NonTargetPerplexity(CLASSES), LogitDrift()):
        metric.update(logits, logits + 1 if isinstance(metric, LogitDrift) else torch.zeros(5, dtype=torch.long))
        assert not metric.compute().requires_grad
        assert not any(state.requires_grad for state in metric.metric_state.values())


@pytest.mark.parametrize("metric", [TopNonTargetConsistency(CLASSES), NonTargetPerplexity(CLASSES), LogitDrift()])
def test_without_a_batch_the_value_is_nan_and_torchmetrics_warns(metric: Metric):
    with pytest.warns(UserWarning, match="was called before"):
        assert metric.compute().isnan()


def test_bad_input_changes_nothing():
    metric = fed(TopNonTargetConsistency(CLASSES, average="none"), random_batches([9], 0))
    before = metric.compute()
    with pytest.raises(ValueError, match="logits has 3 classes; it must have num_classes = 4"):
        metric.update(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="labels holds 4"):
        metric.update(torch.zeros(1, 4), torch.tensor([4]))
    assert_bitwise(metric.compute(), before)
    with pytest.raises(ValueError, match=r"logits_before has shape \(0, 2\)"):
        LogitDrift().update(torch.zeros(0, 2), torch.zeros(0, 2))


@pytest.mark.parametrize("num_classes", [1, -2, 3.0, "3", None])
def test_bad_num_classes(num_classes):
    with pytest.raises(ValueError, match=f"num_classes is {num_classes!r}; it must be an integer of at least 2"):
        NonTargetPerplexity(num_classes)


def test_bad_arguments():
    with pytest.raises(ValueError, match="average is 'micro'; it must be one of macro, none"):
        TopNonTargetConsistency(3, average="micro")
    for make in (lambda: TopNonTargetConsistency(3, unknown=1), lambda: LogitDrift(unknown=1)):
        with pytest.raises(ValueError, match="unknown"):
            make()


def test_torchmetrics_is_needed_by_the_streaming_module_only():
    script = """
import sys
sys.modules["torchmetrics"] = None
import torch
from dcl_optim import metrics
print(metrics.logit_drift(torch.zeros(1, 2), torch.ones(1, 2)).item())
try:
    from dcl_optim.metrics.streaming import LogitDrift
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    value, told = done.stdout.splitlines()
    assert float(value) == pytest.approx(2**0.5)
    assert told == 'dcl_optim.metrics.streaming needs torchmetrics: pip install "dcl-optim[metrics]"'


# ---- as torchmetrics has it ------------------------------------------------------------------------------------------


def collection() -> MetricCollection:
    return MetricCollection([TopNonTargetConsistency(CLASSES), NonTargetPerplexity(CLASSES), LogitDrift()])


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


def test_a_call_gives_the_batchs_value_and_adds_the_batch():
    metric, batches = NonTargetPerplexity(CLASSES), random_batches([20, 7], 3)
    for batch in batches:
        assert_bitwise(metric(*batch), metrics.non_target_perplexity(*batch).nanmean())
    assert_bitwise(metric.compute(), metrics.non_target_perplexity(*in_one(batches)).nanmean())


def unpickled(metric: Metric) -> Metric:
    return pickle.loads(pickle.dumps(metric))


def reloaded(metric: Metric) -> Metric:
    """By way of a state_dict."""
    other = copy.deepcopy(metric)
    other.reset()
    metric.persistent(True)
    other.load_state_dict(metric.state_dict())
    return other


@pytest.mark.parametrize("duplicate", [copy.deepcopy, unpickled, reloaded])
def test_a_copied_pickled_or_loaded_metric_goes_on_alone(duplicate):
    pairs = [
        (TopNonTargetConsistency(CLASSES), random_batches([20, 9], 0)),
        (LogitDrift(), drift_batches(torch.float64)),
    ]
    for metric, (first, second, *_) in pairs:
        expected = fed(copy.deepcopy(metric), [first]).compute()
        in_all = fed(copy.deepcopy(metric), [first, second]).compute()
        metric.update(*first)
        twin = duplicate(metric)
        twin.update(*second)
        assert_bitwise(twin.compute(), in_all)
        assert_bitwise(metric.compute(), expected)


DTYPE_MOVES = {
    "double": lambda metric: metric.double(),
    "half": lambda metric: metric.half(),
    "to half": lambda metric: metric.to(torch.float16),
    "set_dtype half": lambda metric: metric.set_dtype(torch.float16),
    "in a model of half precision": lambda metric: torch.nn.Sequential(metric).half()[0],
}


@pytest.mark.parametrize("move", DTYPE_MOVES.values(), ids=DTYPE_MOVES)
@pytest.mark.parametrize("reset", [False, True])
def test_no_dtype_that_a_metric_is_moved_to_loses_a_sample(move, reset: bool):
    """Half precision cannot tell 3000 from 3001."""
    batches = random_batches([12000, 1, 1, 1], 0)
    expected = metrics.top_non_target_consistency(*in_one(batches))
    moved = move(TopNonTargetConsistency(CLASSES, average="none"))
    if reset:
        fed(moved, batches[:1]).reset()
    assert_bitwise(fed(moved, batches).compute(), expected)
    drifts = [(torch.zeros(size, 1), torch.ones(size, 1)) for size in (3000, 1, 1, 1)]
    moved = move(LogitDrift())
    if reset:
        fed(moved, drifts[:1]).reset()
    moved = fed(moved, drifts)
    assert (moved.distances.item(), moved.samples.item(), moved.compute().item()) == (3003, 3003, 1)


@pytest.mark.gpu
def test_on_a_gpu():
    for batch in named_batches():
        collected = collection().to("cuda")
        collected.update(**{name: tensor.cuda() for name, tensor in batch.items()})
        measured = collected.compute()
        assert {value.device.type for value in measured.values()} == {"cuda"}
        assert_collected({name: value.cpu() for name, value in measured.items()}, [batch])
        assert_collected(collected.to("cpu").compute(), [batch])


def test_states_move_with_a_model():
    moved = torch.nn.ModuleList([TopNonTargetConsistency(CLASSES), LogitDrift()]).to("meta")
    assert {state.device.type for metric in moved for state in metric.metric_state.values()} == {"meta"}


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
