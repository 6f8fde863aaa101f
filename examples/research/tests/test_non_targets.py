"""The paper's measures against values worked out by hand and a twin in pure Python."""

from __future__ import annotations

import math

import pytest
import torch

from examples.research import non_targets

# Class 0 names 2, 2, 1, 2; class 1 names 0; class 2 has no sample.
LOGITS = torch.tensor([[9.0, 1, 2], [0, 1, 2], [0, 5, 2], [9, -2, -1], [3, 9, 2]])
LABELS = torch.tensor([0, 0, 0, 0, 1])
MEASURES = (
    non_targets.top_non_target,
    non_targets.non_target_distribution,
    non_targets.top_non_target_consistency,
    non_targets.non_target_perplexity,
)


def twin_distribution(logits: list[list[float]], labels: list[int]) -> list[list[float]]:
    classes = len(logits[0])
    counts = [[0] * classes for _ in range(classes)]
    for row, label in zip(logits, labels, strict=True):
        best = None
        for k in range(classes):
            if k != label and (best is None or row[k] > row[best]):
                best = k
        counts[label][best] += 1
    return [[n / max(1, sum(row)) for n in row] for row in counts]


def test_by_hand():
    assert non_targets.top_non_target(LOGITS, LABELS).tolist() == [2, 2, 1, 2, 0]
    expected = torch.tensor([[0, 0.25, 0.75], [1, 0, 0], [0, 0, 0]])
    assert torch.equal(non_targets.non_target_distribution(LOGITS, LABELS), expected)
    consistency = non_targets.top_non_target_consistency(LOGITS, LABELS)
    assert consistency[:2].tolist() == [0.75, 1.0]
    perplexity = non_targets.non_target_perplexity(LOGITS, LABELS)
    assert perplexity[:2].tolist() == pytest.approx([0.25**-0.25 * 0.75**-0.75, 1.0])


def test_absent_classes_are_nan_and_left_out_of_nanmean():
    for measure in (non_targets.top_non_target_consistency, non_targets.non_target_perplexity):
        assert measure(LOGITS, LABELS).isnan().tolist() == [False, False, True]
    assert non_targets.top_non_target_consistency(LOGITS, LABELS).nanmean().item() == 0.875
    empty = non_targets.top_non_target_consistency(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    assert empty.isnan().all()


@pytest.mark.parametrize("seed", range(20))
def test_against_the_twin(seed: int):
    generator = torch.Generator().manual_seed(seed)
    samples, classes = 1 + 7 * seed, 2 + seed % 6
    # Few distinct values: ties between classes are common.
    logits = torch.randint(-3, 4, (samples, classes), generator=generator).double()
    labels = torch.randint(classes, (samples,), generator=generator)
    shares = twin_distribution(logits.tolist(), labels.tolist())
    assert torch.equal(non_targets.non_target_distribution(logits, labels), torch.tensor(shares, dtype=torch.float64))
    consistency = non_targets.top_non_target_consistency(logits, labels).tolist()
    perplexity = non_targets.non_target_perplexity(logits, labels).tolist()
    for c, row in enumerate(shares):
        if sum(row) == 0:
            assert math.isnan(consistency[c])
            assert math.isnan(perplexity[c])
            continue
        assert consistency[c] == max(row)
        assert perplexity[c] == pytest.approx(math.prod(p**-p for p in row if p > 0))
        assert 1 - 1e-12 <= perplexity[c] <= classes - 1 + 1e-12


def test_of_equal_logits_the_lowest_class_counts():
    labels = torch.tensor([0, 1, 2, 3])
    assert non_targets.top_non_target(torch.zeros(4, 4), labels).tolist() == [1, 0, 0, 0]


def test_the_label_is_never_named_even_where_all_others_are_minus_infinity():
    logits = torch.full((2, 3), -math.inf)
    logits[0, 0] = 1.0
    labels = torch.tensor([0, 1])
    assert (non_targets.top_non_target(logits, labels) != labels).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_label_dtypes(dtype: torch.dtype):
    """200 classes: label times classes overflows uint8."""
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(150, 200)
    expected = non_targets.non_target_distribution(logits, labels)
    assert torch.equal(non_targets.non_target_distribution(logits, labels.to(dtype)), expected)


def test_counts_of_batches_add_up():
    counts = sum(non_targets.top_non_target_counts(LOGITS[rows], LABELS[rows]) for rows in (slice(2), slice(2, None)))
    shares = counts / counts.sum(1, keepdim=True)
    present = torch.tensor([True, True, False])
    assert torch.equal(shares[present], non_targets.non_target_distribution(LOGITS, LABELS)[present])
    assert shares[~present].isnan().all()


def test_half_precision_is_counted_exactly():
    logits = torch.zeros(5000, 3, dtype=torch.float16)
    logits[0, 2] = 1.0
    shares = non_targets.non_target_distribution(logits, torch.zeros(5000, dtype=torch.long))
    assert shares.dtype == torch.float32
    assert shares[0, 2].item() == pytest.approx(1 / 5000)


def test_no_graph_is_kept():
    logits = LOGITS.clone().requires_grad_()
    assert not any(measure(logits, LABELS).requires_grad for measure in MEASURES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("measure", MEASURES)
def test_on_a_gpu(measure):
    measured = measure(LOGITS.cuda(), LABELS.cuda())
    assert measured.is_cuda
    torch.testing.assert_close(measured.cpu(), measure(LOGITS, LABELS), equal_nan=True)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"logits has shape \(3,\)"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), r"logits has shape \(3, 1\)"),
        (torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, dtype=torch.long), "torch.int64"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), r"labels has shape \(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3, 2), r"labels has shape \(3, 2\)"),
        (torch.zeros(3, 2), torch.zeros(3), "labels has dtype torch.float32"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "labels holds 2"),
        (torch.zeros(3, 2), torch.tensor([0, -1, 1]), "labels holds -1"),
    ],
)
def test_bad_input(measure, logits: torch.Tensor, labels: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        measure(logits, labels)
