"""The temperature of probabilities: values by hand, another solver, and where there is none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dcl_optim.metrics import fit_temperature


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_by_hand(dtype):
    """Logits (d, 0), right in 4 of 5 rows: the softmax is to give 4/5, that is d/T = log 4."""
    logits = torch.tensor([[3.0, 0.0]] * 5)
    labels = torch.tensor([0, 0, 0, 0, 1], dtype=dtype)
    assert fit_temperature(logits, labels) == pytest.approx(3.0 / math.log(4.0), rel=1e-9)


@given(st.integers(0, 10**6), st.integers(2, 7), st.floats(1e-3, 1e3))
def test_no_other_temperature_fits_better(seed, classes, size):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((2.0 * logits).softmax(1), 1, generator=generator)[:, 0]
    labels[0] = logits[0].argmin()  # one is wrong
    found = fit_temperature(size * logits, labels)
    least = F.cross_entropy(size * logits / found, labels)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert F.cross_entropy(size * logits / (found * factor), labels) > least


def test_the_size_of_the_logits_is_the_size_of_the_temperature_and_masked_classes_do_not_count():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 4, generator=generator), torch.randint(4, (50,), generator=generator)
    logits[torch.arange(50), labels] += 1.0
    found = fit_temperature(logits, labels)
    assert fit_temperature(100 * logits, labels) == pytest.approx(100 * found, rel=1e-6)
    assert fit_temperature(logits + 7.0, labels) == pytest.approx(found, rel=1e-5)
    masked = F.pad(logits, (0, 2), value=-math.inf)
    assert fit_temperature(masked, labels) == pytest.approx(found, rel=1e-9)
    assert fit_temperature(logits.bfloat16(), labels) == pytest.approx(found, rel=0.02)


ZEROS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), r"shapes \(3, 2\) and \(2,\)"),
        (torch.zeros(3), ZEROS, "shapes"),
        (torch.zeros(0, 2), ZEROS[:0], "shapes"),
        (torch.zeros(3, 2), ZEROS - 100, "class indices from 0 to 1"),
        (torch.zeros(3, 2), ZEROS + 2, "class indices from 0 to 1"),
        (torch.zeros(3, 2), torch.zeros(3), "class indices"),
        (torch.zeros(3, 2), ZEROS > 0, "class indices"),
        (torch.full((3, 2), math.nan), ZEROS, "finite"),
        (torch.tensor([[-math.inf, 0.0]] * 3), ZEROS, "minus infinity at no label"),
        (torch.tensor([[1.0, 0.0]] * 3), ZEROS, "every prediction is right"),
        (torch.tensor([[0.0, 1.0]] * 3), ZEROS, "than chance"),
        (torch.tensor([[2.0, 2.0], [1.0, 1.0]]), torch.tensor([0, 1]), "than chance"),
        (torch.tensor([[1.0, 0.0]] * 4), torch.tensor([0, 1, 0, 1]), "than chance"),
    ],
)
def test_what_has_no_temperature(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(logits, labels)
