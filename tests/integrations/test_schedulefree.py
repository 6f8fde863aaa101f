"""Schedule-Free optimizers: train() and eval() through the wrapper move both networks between y and x."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import schedulefree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.helpers import CLASSES, assert_same, batch_norm_net, batches, mlp, train

WEIGHT = 0.4
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (schedulefree.SGDScheduleFree, {"lr": 0.3, "warmup_steps": 3, "weight_decay": 1e-3}),
    "sgd, one by one": (schedulefree.SGDScheduleFree, {"lr": 0.3, "foreach": False}),
    "adamw": (schedulefree.AdamWScheduleFree, {"lr": 0.02, "warmup_steps": 4, "weight_decay": 1e-2, "r": 1.0}),
    "radam": (schedulefree.RAdamScheduleFree, {"lr": 0.02}),
    "sgd, reference": (schedulefree.SGDScheduleFreeReference, {"lr": 0.3}),
    "adamw, reference": (schedulefree.AdamWScheduleFreeReference, {"lr": 0.02}),
}
PER_NAME = pytest.mark.parametrize("name", SETTINGS)


def make(name: str, parameters: Any) -> Any:
    optimizer_class, options = SETTINGS[name]
    return optimizer_class(parameters, **options)


class ByHand:
    """Two Schedule-Free optimizers in the plain algorithm, each called as schedulefree's documentation says."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.model, self.companion = model, copy.deepcopy(model)
        self.base, self.second = make(name, model.parameters()), make(name, self.companion.parameters())
        self.train()

    def train(self) -> None:
        self.base.train()
        self.second.train()

    def eval(self) -> None:
        self.base.eval()
        self.second.eval()

    def run(self, data: Any) -> None:
        for x, y in data:
            dcl_step(self.model, self.companion, self.base, self.second, x, y, F.cross_entropy, mse, weight=WEIGHT)


@PER_NAME
@pytest.mark.parametrize("network", [mlp, batch_norm_net])
def test_the_trajectory_is_that_of_two_schedule_free_optimizers_written_out(name: str, network: Any) -> None:
    hand, model = ByHand(name, network()), network()
    optimizer = DCLOptimizer(make(name, model.parameters()), model, weight=WEIGHT)
    optimizer.train()
    hand.run(batches(9))
    train(model, optimizer, batches(9))
    assert_same(hand.model, model, atol=1e-8)
    assert_same(hand.companion, optimizer.companion, atol=1e-8)
    at_y = copy.deepcopy(optimizer.companion)
    hand.eval()
    optimizer.eval()
    assert_same(hand.model, model, atol=1e-8)
    assert_same(hand.companion, optimizer.companion, atol=1e-8)
    assert not torch.equal(at_y[0].weight, optimizer.companion[0].weight)


@PER_NAME
def test_with_weight_zero_the_run_is_schedulefrees_bit_for_bit(name: str) -> None:
    plain, model = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    base, optimizer = (
        make(name, plain.parameters()),
        DCLOptimizer(make(name, model.parameters()), model, weight=0.0),
    )
    for trained, stepping in ((plain, base), (model, optimizer)):
        stepping.train()
        train(trained, stepping, batches(5, dtype=torch.float32))
        stepping.eval()
    assert_same(plain, model)
    assert_same(base.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])


@PER_NAME
def test_an_evaluation_in_the_middle_leaves_the_training_as_it_was(name: str) -> None:
    straight, model = mlp(), mlp()
    uninterrupted = DCLOptimizer(make(name, straight.parameters()), straight, weight=WEIGHT)
    optimizer = DCLOptimizer(make(name, model.parameters()), model, weight=WEIGHT)
    uninterrupted.train()
    train(straight, uninterrupted, batches(8))
    for part in (list(batches(8))[:4], list(batches(8))[4:]):
        optimizer.train()
        train(model, optimizer, part)
        optimizer.eval()
        model.eval()
        model(part[0][0])
        model.train()
    optimizer.train()
    assert_same(straight, model, atol=1e-8)
    assert_same(uninterrupted.companion, optimizer.companion, atol=1e-8)


@PER_NAME
def test_a_run_resumed_from_a_checkpoint_in_eval_mode_is_the_uninterrupted_one_bit_for_bit(name: str) -> None:
    model, resumed = mlp(), mlp(seed=5)
    optimizer, data = (
        DCLOptimizer(make(name, model.parameters()), model, weight=WEIGHT),
        list(batches(8)),
    )
    optimizer.train()
    train(model, optimizer, data[:4])
    optimizer.eval()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    optimizer.train()
    train(model, optimizer, data[4:])

    second = DCLOptimizer(make(name, resumed.parameters()), resumed, weight=WEIGHT)
    state = torch.load(file, weights_only=True)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    second.train()
    train(resumed, second, data[4:])
    assert_same(model, resumed)
    assert_same(optimizer.companion, second.companion)
    assert_same(optimizer.companion_optimizer.state_dict(), second.companion_optimizer.state_dict())


def test_a_learning_rate_set_before_train_reaches_the_companion() -> None:
    hand, model = ByHand("sgd", mlp()), mlp()
    optimizer = DCLOptimizer(make("sgd", model.parameters()), model, weight=WEIGHT)
    optimizer.train()
    hand.run(list(batches(6))[:3])
    train(model, optimizer, list(batches(6))[:3])
    for each in (hand.base, hand.second, optimizer):
        each.param_groups[0]["lr"] = 0.05
    for each in (hand, optimizer):
        each.eval()
        each.train()
    hand.run(list(batches(6))[3:])
    train(model, optimizer, list(batches(6))[3:])
    assert_same(hand.model, model, atol=1e-8)
    assert_same(hand.companion, optimizer.companion, atol=1e-8)


@PER_NAME
def test_prototypes_go_beside_a_schedule_free_optimizer(name: str) -> None:
    """With an evaluation in between; equal to a training in which labels and classes are given."""
    trained = []
    for given in (False, True):
        model = mlp()
        optimizer = DCPOptimizer(make(name, model.parameters()), model, CLASSES if given else None, weight=1.0)
        for x, y in batches(6):
            optimizer.train()
            if given:
                optimizer.set_targets(y)
            train(model, optimizer, [(x, y)])
            optimizer.eval()
        trained.append((model, optimizer))
    assert_same(trained[0][0], trained[1][0])
    assert_same(trained[0][1].state_dict(), trained[1][1].state_dict())
    assert int(trained[0][1].param_groups[0]["k"]) == 6
    assert trained[0][1].penalty > 0


def test_a_step_in_eval_mode_raises_schedulefrees_own_error_and_moves_nothing() -> None:
    model = mlp()
    optimizer = DCLOptimizer(make("sgd", model.parameters()), model, weight=1.0)
    x, y = next(batches(1))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()
    assert_same(model, mlp())
    assert_same(optimizer.companion, mlp())


def test_train_and_eval_are_there_only_where_the_base_has_them() -> None:
    model = mlp()
    assert not hasattr(DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, weight=1.0), "train")


@pytest.mark.parametrize("wrapper", [schedulefree.ScheduleFreeWrapper, schedulefree.ScheduleFreeWrapperReference])
def test_schedulefrees_wrapper_is_no_optimizer_and_is_refused(wrapper: Any) -> None:
    model = mlp()
    base = wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer instance, got ScheduleFreeWrapper"):
        DCLOptimizer(base, model, weight=1.0)


CLOSURES = {
    "sgd": (schedulefree.SGDScheduleFreeClosure, schedulefree.SGDScheduleFree, 0.3),
    "adamw": (schedulefree.AdamWScheduleFreeClosure, schedulefree.AdamWScheduleFree, 0.02),
    "radam": (schedulefree.RAdamScheduleFreeClosure, schedulefree.RAdamScheduleFree, 0.02),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_a_variant_that_steps_with_a_closure_only_is_refused_with_the_mend(name: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"steps with a closure only.*pass\s+companion_optimizer="):
        DCLOptimizer(CLOSURES[name][0](model.parameters()), model, weight=1.0)


@pytest.mark.parametrize("name", CLOSURES)
def test_the_mend_regularises_the_gradient_at_y_as_written_out(name: str) -> None:
    with_closure, without, lr = CLOSURES[name]

    def companions(weights: Any) -> Any:
        second = without(weights, lr=lr)
        second.train()
        return second

    hand, model = mlp(), mlp()
    companion = copy.deepcopy(hand)
    base, second = with_closure(hand.parameters(), lr=lr), companions(companion.parameters())
    optimizer = DCLOptimizer(
        with_closure(model.parameters(), lr=lr), model, weight=WEIGHT, companion_optimizer=companions
    )
    for x, y in batches(6):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            base.zero_grad()
            second.zero_grad()
            z, c = hand(x), companion(x)
            loss = F.cross_entropy(z, y)
            (loss + WEIGHT * mse(z, c.detach())).backward()
            mse(c, c.detach() + 0.4 * (z - c).detach()).backward()
            return loss

        base.step(closure)
        second.step()
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    assert_same(hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)
