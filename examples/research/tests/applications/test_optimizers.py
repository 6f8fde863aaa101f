"""Plain training, DCL or DCP by name: what is built is the wrapper itself, with its own defaults."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples.research.applications.optimizers import METHODS, build_optimizer


@pytest.fixture
def base():
    model = nn.Linear(4, 3)
    return torch.optim.SGD(model.parameters(), lr=0.1), model


def test_plain_is_the_optimizer_itself(base):
    assert build_optimizer("plain", *base, weight=1.0) is base[0]


@pytest.mark.parametrize(("method", "kind"), [("dcl", DCLOptimizer), ("dcp", DCPOptimizer)])
def test_options_reach_the_wrapper_and_none_is_its_default(base, method, kind):
    assert method in METHODS
    for options in ({"weight": 0.7}, {"alpha": 0.5}):
        chosen = build_optimizer(method, *base, **{"weight": None, "alpha": None} | options)
        assert chosen.base is base[0]
        assert repr(chosen) == repr(kind(*base, **options)) != repr(kind(*base))


def test_unknown_names_list_the_known(base):
    with pytest.raises(ValueError, match="method='sgd' is unknown; choose one of plain, dcl, dcp"):
        build_optimizer("sgd", *base)
