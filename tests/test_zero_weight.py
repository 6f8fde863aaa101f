"""With weight 0 the model's trajectory is the base optimizer's, bit for bit, whatever the base."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batches, cells

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


def network() -> nn.Module:
    """Matrices only, as Muon demands; batch-norm statistics and dropout disturb what can be disturbed."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12, affine=False)
    layers = (nn.Linear(FEATURES, 12, bias=False), norm, nn.Dropout(0.2), nn.Linear(12, CLASSES, bias=False))
    return nn.Sequential(*layers)


def losses(model, optimizer, loop):
    torch.manual_seed(3)
    for x, y in batches(12, dtype=torch.float32):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
    ("name", "variant", "loop"),
    cells(
        [
            cell
            for cell in product(DENSE, ["dcl", "dcp"], ["plain", "closure"])
            if cell[2] == "closure" or not takes_only_closures(cell[0])
        ],
        ("SGD nesterov", "dcl", "plain"),
        ("AdamW fused", "dcl", "closure"),
        ("Rprop", "dcl", "plain"),  # by signs
        ("ASGD", "dcp", "closure"),  # a learning rate in its state
        ("Adafactor", "dcl", "closure"),  # by the parameters' own size
        ("LBFGS", "dcp", "closure"),
        ("LBFGS strong Wolfe", "dcl", "closure"),
        *([("Muon", "dcl", "plain")] if "Muon" in DENSE else []),  # orthogonalized
    ),
)
def test_zero_weight_is_the_base_optimizer(name, variant, loop):
    model = network()
    alone = copy.deepcopy(model)
    expected = list(losses(alone, DENSE[name](alone.parameters()), loop))
    base = DENSE[name](model.parameters())
    if variant == "dcl":
        second = SGD if takes_only_closures(name) else None
        optimizer = DCLOptimizer(base, model, weight=0.0, companion_optimizer=second)
    else:
        optimizer = DCPOptimizer(
            base, model, CLASSES, weight=0.0, targets=lambda args, kwargs: (args[0][:, 0] > 0).long(), alpha=0.6
        )
    assert list(losses(model, optimizer, loop)) == expected
    assert_same(model, alone)
    if variant == "dcl":
        assert not torch.equal(optimizer.companion[0].weight, network()[0].weight), "the companion learns all the same"


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
    optimizer = DCLOptimizer(Langevin(model.parameters(), lr=0.05), model, weight=0.0)
    assert list(losses(model, optimizer, "plain")) == expected


def test_every_optimizer_trains_a_companion_of_its_own_class():
    for name, make in DENSE.items():
        if takes_only_closures(name):
            continue
        model = network()
        optimizer = DCLOptimizer(make(model.parameters()), model, weight=0.5)
        list(losses(model, optimizer, "plain"))
        assert type(optimizer.companion_optimizer) is type(optimizer.base)
        for key, value in optimizer.param_groups[0].items():
            if key != "params":
                assert optimizer.companion_optimizer.param_groups[0][key] == value, (name, key)


def test_lbfgs_needs_another_optimizer_for_the_companion():
    model = network()
    with pytest.raises(ValueError, match=r"LBFGS cannot train the companion.*companion_optimizer="):
        DCLOptimizer(torch.optim.LBFGS(model.parameters()), model, weight=1.0)


def test_lbfgs_minimizes_loss_plus_penalty_at_a_fixed_companion():
    """With a line search the value and the gradient must belong together: compare with the sum written out."""
    model, x = nn.Linear(3, 4).double(), torch.randn(20, 3, dtype=torch.float64)
    y = torch.arange(20) % 4
    alone, companion = copy.deepcopy(model), nn.Linear(3, 4).double()
    fixed = copy.deepcopy(companion)

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=1.0, max_iter=8, line_search_fn="strong_wolfe")

    optimizer = DCLOptimizer(make(model.parameters()), model, weight=2.0, companion=companion, companion_optimizer=SGD)
    base = make(alone.parameters())

    def task():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def regularized():
        base.zero_grad()
        z = alone(x)
        loss = F.cross_entropy(z, y) + 2.0 * F.mse_loss(z, fixed(x).detach())
        loss.backward()
        return loss

    start = F.cross_entropy(alone(x), y).item()
    chased = copy.deepcopy(fixed)
    distance = F.mse_loss(chased(x), 0.6 * fixed(x).detach() + 0.4 * alone(x).detach())
    returned = optimizer.step(task)
    base.step(regularized)
    assert_same(model, alone, rtol=1e-7, atol=1e-9)
    assert returned.item() == pytest.approx(start, abs=1e-12), "the task's loss at the start, without the penalty"

    distance.backward()  # the companion learns once, from the first evaluation
    SGD(chased.parameters()).step()
    assert_same(companion, chased, rtol=1e-12, atol=1e-12)


def test_lbfgs_with_a_closure_that_returns_a_number():
    """As torch types it: the same run as with a tensor."""
    models = []
    for convert in (Tensor.item, Tensor.detach):
        model, criterion = network().double(), nn.CrossEntropyLoss()
        model[2].p = 0.0
        base = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe")
        optimizer = DCPOptimizer(base, model, CLASSES)
        for x, y in batches(3, dtype=torch.float64):

            def closure(x=x, y=y, model=model, optimizer=optimizer, criterion=criterion, convert=convert):
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                return convert(loss)

            optimizer.step(closure)
        models.append(model.state_dict())
    assert_same(*models)
