"""Probabilities in place of logits: what the model returns, and what the term gets."""

import pytest
import torch
from torch import nn

from tests.helpers import batches, fit, mlp, train
from tests.reference import EACH, wrap


@EACH
def test_a_softmax_layer_before_cross_entropy_is_said_once(variant):
    model = mlp().append(nn.Softmax(1))
    optimizer = wrap(variant, model)
    with pytest.warns(UserWarning, match=r"probabilities.*softmax.*\n  Fix: .*See docs/troubleshooting\.md") as caught:
        fit(optimizer, batches(3))
    assert len(caught) == 1


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Sigmoid(), nn.ReLU()])
@EACH
def test_other_layers_before_it_are_not(variant, last):
    model = mlp().append(last)
    train(model, wrap(variant, model), batches(3))


def test_probabilities_in_the_term_of_dcl_are_said_once():
    """DCL takes any output, so they are no error."""
    optimizer = wrap("dcl", mlp().append(nn.Softmax(1)))
    with pytest.warns(UserWarning, match=r"logits has rows that are probabilities.*hardly any effect") as caught:
        fit(optimizer, batches(3), lambda z, y: z.square().mean() + optimizer.penalty(z))
    assert len(caught) == 1


LOGITS = {
    "softmax": (lambda z: z.softmax(1), True),
    "softmax in bfloat16": (lambda z: z.bfloat16().softmax(1), True),
    "softmax that underflows": (lambda z: (1e4 * z).softmax(1), True),
    "log_softmax": (lambda z: z.log_softmax(1), False),
    "sigmoid": (lambda z: z.sigmoid(), True),
    "a multiple of a sigmoid": (lambda z: 9 * z.sigmoid(), False),
    "numbers from 0 to 1, as of a model that has just begun": (lambda z: 0.1 + 0.01 * z, False),
    "a sum of 1 with negative entries": (lambda z: z - z.mean(1, keepdim=True) + 0.2, False),
    "another sum": (lambda z: 1.001 * z.softmax(1), False),
}


@pytest.mark.parametrize("dense_too", [False, True])
@pytest.mark.parametrize("what", LOGITS)
def test_probabilities_in_place_of_logits_are_refused_each_time(what, dense_too):
    logits_of, refuses = LOGITS[what]
    optimizer, (x, y) = wrap("dcp", mlp()), next(batches(1))
    for _ in range(2):
        z, labels = logits_of(optimizer.model(x)), y
        if dense_too:
            z, labels = z[:, :, None], y[:, None]
        if refuses:
            with pytest.raises(ValueError, match=r"(?s)^logits.*probabilities.*before softmax"):
                optimizer.penalty(z, labels)
        else:
            optimizer.penalty(z, labels[: len(z)])
    assert refuses == (optimizer.prototypes.shape == (0, 0))


@pytest.mark.parametrize("ends_as_logits", [False, True])
def test_few_rows_may_sum_to_one_by_chance_until_eight_were_seen(ends_as_logits):
    optimizer, (x, y) = wrap("dcp", mlp()), next(batches(1))
    for rows in torch.arange(len(x)).split(3)[:2]:
        optimizer.penalty(optimizer.model(x[rows]).softmax(1), y[rows])
    if ends_as_logits:
        optimizer.penalty(optimizer.model(x[:1]), y[:1])
        optimizer.penalty(optimizer.model(x).softmax(1), y)
        return
    with pytest.raises(ValueError, match="probabilities"):
        optimizer.penalty(optimizer.model(x[6:8]).softmax(1), y[6:8])
