"""SAM and its kin evaluate the model twice a step: both gradients are regularized, the forecaster learns once."""

import copy
from itertools import product

import pytest
import pytorch_optimizer
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR

from dcl_optim import DCLOptimizer
from tests.helpers import MODELS, batches, every, mlp
from tests.reference import VARIANTS, assert_same_training, by_hand, loss_of, term_of, wrap


def sam(model):
    return pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)


# ---- three ways to write SAM's loop ----------------------------------------------------------------------------------


def with_the_closure_called_before(optimizer, evaluate):
    def closure():
        optimizer.zero_grad()
        loss = evaluate()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def with_a_backward_before(optimizer, evaluate):
    def closure():
        loss = evaluate()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)
    optimizer.zero_grad()


LOOPS = (with_the_closure_called_before, with_a_backward_before)


@pytest.mark.parametrize(
    ("variant", "kind", "loop", "way"), every(5, product(VARIANTS, MODELS, LOOPS, ["line", "term"]))
)
def test_sam_is_sam_with_the_penalty_in_both_gradients(variant, kind, loop, way):
    """By hand the penalty is in the loss, and the forecaster learns from the first evaluation."""
    runs = []
    for make, its_way, run in ((wrap, way, loop), (by_hand, "term", LOOPS[0])):
        model = MODELS[kind]()
        optimizer = make(variant, model, sam(model))
        driven = [optimizer] if make is wrap else [optimizer.base.base_optimizer, getattr(optimizer, "_second", None)]
        schedulers = [StepLR(each, 3, gamma=0.3) for each in driven if each is not None]
        term = term_of(optimizer, its_way)
        torch.manual_seed(3)
        for x, y in batches(7):

            def evaluate(x=x, y=y, model=model, term=term):
                z = model(x)
                return F.cross_entropy(z, y) + term(z, y)

            run(optimizer, evaluate)
            for scheduler in schedulers:
                scheduler.step()
        runs.append(optimizer)
    assert_same_training(*runs, rtol=0, atol=1e-12)
    assert runs[0].logs()["step"] == 7


# ---- the kin ---------------------------------------------------------------------------------------------------------


def kin(name, model):
    options = {"base_optimizer": torch.optim.SGD, "rho": 0.1, "lr": 0.1, "momentum": 0.9}
    if name == "WSAM":
        return pytorch_optimizer.WSAM(model, model.parameters(), **options)
    return getattr(pytorch_optimizer, name)(model.parameters(), **options)


@pytest.mark.parametrize("name", ["WSAM", "LookSAM", "FriendlySAM"])
def test_the_kin_trains_as_with_the_penalty_by_hand(name):
    """The companion learns from the unperturbed model."""
    runs = []
    for make, way in ((wrap, "line"), (by_hand, "term")):
        model = mlp()
        optimizer = make("dcl", model, kin(name, model))
        torch.manual_seed(3)
        for batch in batches(6):

            def closure(optimizer=optimizer, batch=batch, way=way):
                optimizer.zero_grad()
                loss = loss_of(optimizer, *batch, way)
                loss.backward()
                return loss

            if name != "WSAM":
                closure()
            optimizer.step(closure)
        runs.append(optimizer)
    assert_same_training(*runs, atol=1e-12)


def test_a_refused_state_leaves_the_inner_optimizer_bound_to_the_outer_ones_groups():
    model = mlp()
    base = sam(model)
    optimizer = DCLOptimizer(base, model, companion_fraction=1)
    assert optimizer.companion is not None  # before it is made there is nothing to save
    state = copy.deepcopy(optimizer.state_dict())
    state["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["state"] = None
    before = base.param_groups, base.state, base.base_optimizer.param_groups, base.base_optimizer.state
    with pytest.raises(ValueError, match="nothing has changed"):
        optimizer.load_state_dict(state)
    after = base.param_groups, base.state, base.base_optimizer.param_groups, base.base_optimizer.state
    assert [*map(id, after)] == [*map(id, before)]
    assert base.base_optimizer.param_groups is base.param_groups
