"""With weight 0 the model's trajectory is the base optimizer's, bit for bit, whatever the base."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, every, seen, wrap
from tests.reference import term_of

SGD = partial(torch.optim.SGD, lr=0.05)
DENSE = {
    name: partial(getattr(torch.optim, name), lr=0.01)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
} | {
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "SGD": SGD,
    "SGD nesterov": partial(SGD, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=4),
    "LBFGS strong Wolfe": partial(torch.optim.LBFGS, lr=1.0, max_iter=4, line_search_fn="strong_wolfe"),
}
if hasattr(torch.optim, "Muon"):
    DENSE["Muon"] = partial(torch.optim.Muon, lr=0.01)


def test_the_table_misses_no_dense_optimizer():
    available = {
        name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name not in ("Optimizer",)
    }
    assert available - {"SparseAdam"} <= {name.split()[0] for name in DENSE}


def network():
    """Matrices only, as Muon demands; batch-norm statistics and dropout disturb what can be disturbed."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12, affine=False)
    layers = (nn.Linear(FEATURES, 12, bias=False), norm, nn.Dropout(0.2), nn.Linear(12, CLASSES, bias=False))
    return nn.Sequential(*layers)


def losses(model, optimizer, loop, way="line"):
    torch.manual_seed(3)
    term = term_of(optimizer, way)
    for x, y in batches(12, dtype=torch.float32):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            z = model(x)
            loss = F.cross_entropy(z, y) + term(z, y)
            loss.backward()
            return loss

        if loop == "closure":
            yield float(optimizer.step(closure).detach())
        else:
            yield float(closure().detach())
            optimizer.step()


def takes_only_closures(name):
    return name.startswith("LBFGS")


@pytest.mark.parametrize(
    ("name", "variant", "loop", "way"),
    every(
        17,
        [
            cell
            for cell in product(DENSE, ["dcl", "dcp"], ["plain", "closure"], ["line", "term"])
            if cell[2:] == ("closure", "term") or not takes_only_closures(cell[0])
        ],
    ),
)
def test_zero_weight_is_the_base_optimizer(name, variant, loop, way):
    model = network()
    alone = copy.deepcopy(model)
    expected = list(losses(alone, DENSE[name](alone.parameters()), loop))
    base = DENSE[name](model.parameters())
    if variant == "dcl":
        second = SGD if takes_only_closures(name) else None
        optimizer = wrap(model, base, weight=0.0, companion_optimizer=second)
    else:
        optimizer = DCPOptimizer(base, model, weight=0.0)
    assert list(losses(model, optimizer, loop, way)) == expected
    assert_same(model, alone)
    if variant == "dcl":
        assert not torch.equal(optimizer.companion[0].weight, network()[0].weight), "the companion learns all the same"
    else:
        assert seen(optimizer).all(), "the prototypes learn all the same"


class Langevin(torch.optim.SGD):
    """Adds noise to each step."""

    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        return loss


def test_the_script_does_not_notice_what_the_companions_optimizer_draws():
    model = network()
    alone = copy.deepcopy(model)
    expected = list(losses(alone, Langevin(alone.parameters(), lr=0.05), "plain"))
    optimizer = wrap(model, Langevin(model.parameters(), lr=0.05), weight=0.0)
    assert list(losses(model, optimizer, "plain")) == expected


def test_every_optimizer_trains_a_companion_of_its_own_class():
    for name, make in DENSE.items():
        if takes_only_closures(name):
            continue
        model = network()
        optimizer = wrap(model, make(model.parameters()), weight=0.5)
        list(losses(model, optimizer, "plain"))
        assert type(optimizer.companion_optimizer) is type(optimizer.base)
        for key, value in optimizer.param_groups[0].items():
            if key != "params":
                assert optimizer.companion_optimizer.param_groups[0][key] == value, (name, key)
