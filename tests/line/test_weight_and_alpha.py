"""λ and α as attributes: what was given, and what a script sets while it trains."""

import copy

import numpy as np
import pytest

from tests.helpers import assert_same, batches, linear_growth, mlp, train, wrap


def dcl(**options):
    model = mlp()
    return model, wrap(model, companion=mlp(seed=1), **options)


def test_they_are_what_was_given():
    optimizer = dcl(weight=linear_growth, alpha=1)[1]
    assert optimizer.weight is linear_growth
    assert optimizer.alpha == 1.0
    assert dcl(weight=np.float32(0.5))[1].weight == 0.5


def test_what_is_set_is_what_a_schedule_would_have_given():
    scheduled, optimizer = dcl(weight=lambda t: 0.3 if t < 4 else 2.0, alpha=lambda t: 0.5 if t < 4 else 0.0)
    train(scheduled, optimizer, batches(6))
    model, settable = dcl(weight=0.3, alpha=0.5)
    data = list(batches(6))
    train(model, settable, data[:3])
    settable.weight, settable.alpha = 2.0, lambda t: 0.0
    train(model, settable, data[3:])
    assert_same(model.state_dict(), scheduled.state_dict())
    assert_same(settable.state_dict(), optimizer.state_dict())
    assert settable.logs()["weight"] == 2.0
    assert copy.deepcopy(dcl(weight=0.7)[1]).weight == 0.7


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        ("weight", -1.0, ValueError, r"weight=-1.0 must be"),
        ("alpha", 1.5, ValueError, r"alpha=1.5 must be in \[0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(name, value, kind, message):
    optimizer = dcl(weight=0.3, alpha=0.5)[1]
    with pytest.raises(kind, match=message):
        setattr(optimizer, name, value)
    assert (optimizer.weight, optimizer.alpha) == (0.3, 0.5)
