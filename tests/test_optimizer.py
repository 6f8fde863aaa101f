"""The contract of a torch.optim citizen, and how forwards, backwards and steps are matched."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, assert_same, batch_norm_net, batches, dropout_net, mlp, train


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def wrap(model, **options):
    return DCLOptimizer(sgd(model), model, **options)


def one(x_seed=1):
    return next(iter(batches(1, seed=x_seed)))


def backward(model, x, y):
    F.cross_entropy(model(x), y).backward()


# ---- groups, state, hooks -------------------------------------------------------------------------------------------


def test_is_an_optimizer_and_shares_the_bases_objects():
    model = mlp()
    base = sgd(model)
    optimizer = DCLOptimizer(base, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    optimizer.load_state_dict(optimizer.state_dict())  # torch rebinds the base's lists here
    assert optimizer.param_groups is base.param_groups
    optimizer.param_groups = list(base.param_groups)
    assert base.param_groups is optimizer.param_groups
    optimizer.state = copy.copy(base.state)
    assert base.state is optimizer.state
    optimizer.defaults = dict(base.defaults)
    assert base.defaults is optimizer.defaults


def test_step_and_state_hooks_fire_once_and_may_replace_the_state():
    model, calls = mlp(), []
    optimizer = wrap(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"note": "kept"})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    backward(model, *one())
    optimizer.step()
    state = optimizer.state_dict()
    assert state["note"] == "kept"
    optimizer.load_state_dict(state_dict=state)
    assert calls == ["pre", "post", "save", "loaded"]


def test_repr_shows_method_and_base():
    model = mlp()
    assert repr(wrap(model)).startswith("DCLOptimizer(weight=1, alpha=0.6, model=Sequential)\nSGD (")


def test_zero_grad_both_ways():
    model = mlp()
    optimizer = wrap(model)
    backward(model, *one())
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model[0].weight.grad is None


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_both_learning_rates_and_momenta(name):
    model = mlp()
    optimizer = wrap(model, companion_lr_scale=2.0)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for x, y in batches(8):
        optimizer.zero_grad()
        backward(model, x, y)
        rate, momentum = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        optimizer.step()
        mirrored = optimizer.companion_optimizer.param_groups[0]
        assert mirrored["lr"] == 2.0 * rate
        assert mirrored["momentum"] == momentum
        scheduler.step()
        rates.append(rate)
    assert len(set(rates)) > 1


def test_reduce_on_plateau():
    model = mlp()
    optimizer = wrap(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for value in (1.0, 2.0, 2.0):
        optimizer.zero_grad()
        backward(model, *one())
        optimizer.step()
        scheduler.step(value)
    assert optimizer.companion_optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_several_groups_are_mirrored_by_name():
    model = mlp()
    groups = [{"params": [model[2].weight, model[2].bias], "lr": 0.5}, {"params": model[0].parameters(), "lr": 0.01}]
    optimizer = DCLOptimizer(torch.optim.SGD(groups, momentum=0.9), model)
    mirrored = optimizer.companion_optimizer.param_groups
    assert [group["lr"] for group in mirrored] == [0.5, 0.01]
    assert {id(p) for p in mirrored[0]["params"]} == {id(p) for p in optimizer.companion[2].parameters()}
    assert {id(p) for p in mirrored[1]["params"]} == {id(p) for p in optimizer.companion[0].parameters()}
    optimizer.param_groups[1]["lr"] = 0.0
    before = copy.deepcopy(optimizer.companion)
    train(model, optimizer, batches(3))
    assert_same(optimizer.companion[0], before[0])
    assert not torch.equal(optimizer.companion[2].weight, before[2].weight)


def test_add_param_group_unfreezes_in_both():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
    assert optimizer.companion[0].weight is model[0].weight
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.03})
    own = optimizer.companion[0].weight
    assert own is not model[0].weight
    assert torch.equal(own, model[0].weight)
    before = own.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(optimizer.companion[0].weight, before)
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.1, 0.03]


def test_add_param_group_with_a_new_module():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = nn.Linear(FEATURES, CLASSES), None

        def forward(self, x):
            return self.body(x) if self.extra is None else self.extra(self.body(x))

    model = Grows().double()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    model.extra = nn.Linear(CLASSES, CLASSES).double()
    optimizer.add_param_group({"params": model.extra.parameters()})
    before = model.extra.weight.detach().clone()
    train(model, optimizer, batches(3))
    assert not torch.equal(optimizer.companion.extra.weight, before)
    assert not torch.equal(optimizer.companion.extra.weight, model.extra.weight)


# ---- which forwards count -------------------------------------------------------------------------------------------


def test_evaluation_is_left_alone():
    model = batch_norm_net()
    optimizer = wrap(model)
    companion = copy.deepcopy(optimizer.companion.state_dict())
    x, _ = one()
    stream = torch.get_rng_state()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), stream)
    assert_same(optimizer.companion.state_dict(), companion)
    assert optimizer._regularizer.counted == 0


def test_forward_without_backward_never_trains_the_companion_and_frees_its_memory():
    with_extra = []
    for use in (False, True):
        model = mlp()
        optimizer = wrap(model)
        for x, y in batches(5):
            optimizer.zero_grad()
            if use:
                extra = model(x + 1.0)  # training mode, never followed by a backward
                forward = optimizer._regularizer._outstanding[-1]
                graph = weakref.ref(forward().forecast)
                del extra
                assert forward() is None
                assert graph() is None
            backward(model, x, y)
            optimizer.step()
        with_extra.append([*model.parameters(), *optimizer.companion.parameters()])
    assert_same([p.detach() for p in with_extra[0]], [p.detach() for p in with_extra[1]])


def test_zero_grad_between_forward_and_backward():
    """Lightning's order: the same result as zero_grad first."""
    results = []
    for between in (False, True):
        model = mlp()
        optimizer = wrap(model)
        for x, y in batches(5):
            if not between:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if between:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


@pytest.mark.parametrize("clear", ["optimizer first", "optimizer between", "model"])
def test_a_step_that_never_came_is_dropped_when_the_next_accumulation_begins(clear):
    results = []
    for skipped in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3))  # apart from the model, so that every batch pulls at it
        data = list(batches(6))
        if skipped:
            backward(model, *one(99))  # a gradient scaler found an infinity: no step
        for x, y in data:
            if clear == "optimizer first":
                optimizer.zero_grad()
            elif clear == "model":
                model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if clear == "optimizer between":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


def test_two_backwards_of_one_forward_add_the_penalty_once():
    results = []
    for split in (False, True):
        model = mlp()
        optimizer = wrap(model, loss_scale=1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            first, second = F.cross_entropy(z, y), z.square().mean()
            if split:
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1], rtol=1e-10, atol=1e-12)


def test_gradients_inside_the_loss_are_left_alone():
    """A gradient penalty asks for d loss / d x with create_graph; only the outer backward is regularised."""
    model = mlp()
    optimizer = wrap(model, weight=5.0, companion=mlp(seed=3))
    x, y = one()
    x.requires_grad_()
    z = model(x)
    (inner,) = torch.autograd.grad(F.cross_entropy(z, y), x, create_graph=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), y), x)
    assert_same(inner.detach(), expected, rtol=1e-12, atol=1e-14)
    assert optimizer._regularizer.counted == 0
    (F.cross_entropy(z, y) + inner.square().sum()).backward()
    assert optimizer._regularizer.counted == 1


def test_in_place_edits_of_the_logits():
    results = []
    for in_place in (False, True):
        model = mlp()
        optimizer = wrap(model, companion=mlp(seed=3), loss_scale=1.0)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            z = z.div_(2.0) if in_place else z / 2.0
            F.cross_entropy(z, y).backward()
            optimizer.step()
        results.append([p.detach() for m in (model, optimizer.companion) for p in m.parameters()])
    assert_same(results[0], results[1])


def test_inputs_that_need_gradients_get_only_the_models():
    model, x = mlp(), torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=True)
    optimizer = wrap(model, weight=0.0, companion=mlp(seed=3))
    backward(model, x, torch.arange(4))
    optimizer.step()
    (expected,) = torch.autograd.grad(F.cross_entropy(mlp()(x), torch.arange(4)), x)
    assert_same(x.grad, expected)


def test_step_without_a_training_forward_is_an_error_that_changes_nothing():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    model.eval()
    backward(model, x, y)
    before = copy.deepcopy(model.state_dict())
    message = r"DCLOptimizer.step found gradients, but no backward through a training forward.*strict=False"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(lambda: F.cross_entropy(model(x), y).backward())
    assert_same(model.state_dict(), before)
    optimizer.zero_grad()
    optimizer.step()  # nothing to step on: as in torch.optim

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    backward(model, x, y)
    optimizer.step()  # a dry step, as torch.distributed.checkpoint takes


def test_strict_false_allows_unregularised_steps():
    model = mlp().eval()
    alone = copy.deepcopy(model)
    train(model, wrap(model, strict=False), batches(3))
    train(alone, sgd(alone), batches(3))
    assert_same(model, alone)


def test_penalty_reaches_the_step_whoever_calls_backward():
    """create_graph is the one backward that is not regularised, and the step says so."""
    model = mlp()
    optimizer = wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(model(one()[0]), one()[1]).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        optimizer.step()


# ---- closures -------------------------------------------------------------------------------------------------------


def test_step_returns_the_loss_without_the_penalty():
    model = mlp()
    optimizer = wrap(model, companion=mlp(seed=3), weight=10.0)
    x, y = one()
    expected = F.cross_entropy(mlp()(x), y).item()
    assert optimizer.step(lambda: F.cross_entropy(model(x), y)).item() == pytest.approx(expected, abs=1e-12)


def test_exception_in_the_closure_leaves_everything_usable():
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    before = [p.detach().clone() for m in (model, optimizer.companion) for p in m.parameters()]

    def fails():
        optimizer.zero_grad()
        backward(model, *one())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    assert_same([p.detach() for m in (model, optimizer.companion) for p in m.parameters()], before)

    other = mlp()
    calm = wrap(other)
    train(other, calm, batches(2))
    for m, o in ((model, optimizer), (other, calm)):
        train(m, o, batches(2, seed=5))
    assert_same(model, other)
    assert_same(optimizer.companion, calm.companion)


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_deepcopy_with_the_model_goes_on_independently():
    model = batch_norm_net()
    optimizer = wrap(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # leaves a patched step on the instance
    train(model, optimizer, batches(3))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, batches(3, seed=2))
    train(twin, twin_optimizer, batches(3, seed=2))
    assert_same(model, twin)
    assert_same(optimizer.companion, twin_optimizer.companion)
    assert twin_optimizer.model is twin
    assert len(twin._forward_hooks) == 1


def test_pickle_and_pickled_model():
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, batches(3))
    again = pickle.loads(pickle.dumps(optimizer))
    for m, o in ((model, optimizer), (again.model, again)):
        train(m, o, batches(3, seed=2))
    assert_same(model, again.model)
    assert_same(optimizer.companion, again.companion)

    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=False)
    backward(saved, *one())  # the hook went along and is inert
    assert optimizer._regularizer.counted == 0


def test_copied_model_is_not_tapped():
    model = mlp()
    optimizer = wrap(model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.train()
    backward(ema, *one())
    assert optimizer._regularizer.counted == 0
    DCLOptimizer(sgd(ema), ema)  # and may be wrapped itself


# ---- on and off -----------------------------------------------------------------------------------------------------


def hooks(model):
    tables = (model._forward_hooks, model._forward_pre_hooks)
    return [dict(table) for table in tables] + [
        dict(model._forward_hooks_with_kwargs), dict(model._forward_pre_hooks_with_kwargs)
    ]  # fmt: skip


def test_detach_restores_the_modules_and_allows_wrapping_again():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    before = hooks(model), hooks(criterion)
    optimizer = DCPOptimizer(sgd(model), model, CLASSES, criterion=criterion)
    optimizer.detach()
    assert (hooks(model), hooks(criterion)) == before
    alone = copy.deepcopy(model)
    train(model, optimizer, batches(3))  # goes on as the base optimizer
    train(alone, sgd(alone), batches(3))
    assert_same(model, alone)
    wrap(model)
    gc.collect()


def test_a_copy_of_a_detached_optimizer_stays_detached():
    optimizer = wrap(mlp())
    optimizer.detach()
    twin = copy.deepcopy(optimizer)
    assert not twin.model._forward_hooks
    train(twin.model, twin, batches(2))
    twin.detach()


def test_a_dead_optimizer_leaves_no_hook():
    model = mlp()
    before = hooks(model)
    optimizer = wrap(model)
    del optimizer
    assert hooks(model) == before, "no reference cycle keeps the optimizer alive"
    wrap(model)


def test_no_references_are_left_by_training():
    """Memory after many steps equals memory after few: nothing is kept from step to step."""
    model = mlp(dtype=torch.float32)
    optimizer = wrap(model)

    def live():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    train(model, optimizer, batches(5, dtype=torch.float32))
    first = live()
    train(model, optimizer, batches(50, dtype=torch.float32))
    assert live() == first


# ---- views ----------------------------------------------------------------------------------------------------------


def test_logs():
    model = mlp()
    optimizer = wrap(model, weight=lambda t: 0.1 * t, alpha=0.25, companion=mlp(seed=3))
    assert optimizer.logs() == {"step": 0.0}
    assert optimizer.penalty != optimizer.penalty  # nan before the first
    x, y = one()
    expected = F.mse_loss(model(x), optimizer.companion(x)).item()
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()
    logs = optimizer.logs()
    assert logs["penalty"] == optimizer.penalty == pytest.approx(expected, abs=1e-12)
    assert (logs["step"], logs["weight"], logs["alpha"]) == (1.0, 0.1, 0.25)
    assert logs["loss_scale"] == pytest.approx(1.0)


def test_non_finite_values_behave_as_in_plain_torch_and_show_in_the_logs():
    model, alone = mlp(), mlp()
    optimizer, base = wrap(model), sgd(alone)
    x, y = one()
    x[0, 0] = float("nan")
    for m, o in ((model, optimizer), (alone, base)):
        backward(m, x, y)
        o.step()
    assert torch.isnan(alone[2].weight).all()
    assert torch.equal(torch.isnan(model[2].weight), torch.isnan(alone[2].weight))
    assert optimizer.penalty != optimizer.penalty
    assert optimizer.logs()["penalty"] != optimizer.logs()["penalty"]


def test_random_streams_are_left_as_without_the_companion():
    model = dropout_net()
    wrap(model)
    alone = dropout_net()
    x, _ = one()
    torch.manual_seed(4)
    alone(x)
    expected = torch.get_rng_state()
    torch.manual_seed(4)
    model(x)
    assert torch.equal(torch.get_rng_state(), expected)


def test_companion_replays_the_models_draws():
    model = dropout_net()
    optimizer = wrap(model)
    x, y = one()
    backward(model, x, y)
    assert optimizer.penalty == 0.0, "same weights and same masks give the same logits"
