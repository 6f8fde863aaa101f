"""What a newcomer gets wrong is said: once, in three lines at most, with the cause that was seen and the fix."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer, _sync
from tests.helpers import CLASSES, FEATURES, assert_same, backward, batches, mlp, one, sgd, train

WRAPPERS = [DCLOptimizer, DCPOptimizer]


def is_short(message: str) -> bool:
    lines = message.splitlines()
    return len(lines) <= 3 and max(map(len, lines)) <= 200


# ---- the base optimizer is stepped -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_second_step_of_the_base_itself_is_an_error(wrapper: Any, to_none: bool) -> None:
    model = mlp()
    base = sgd(model)
    optimizer = wrapper(base, model)

    def step() -> None:
        base.zero_grad(to_none)
        backward(model, *one())
        base.step()

    step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=rf"{wrapper.__name__}.*SGD.*stepped.*\n  Fix: .*step\(\)") as caught:
        step()
    assert_same(model.state_dict(), before)
    assert is_short(str(caught.value))
    assert optimizer.logs()["step"] == 0


def test_a_step_of_the_wrapper_between_them_forgives_one_of_the_base() -> None:
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    for _ in range(3):
        for stepped in (optimizer.base, optimizer):
            optimizer.zero_grad()
            backward(model, *one())
            stepped.step()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_base_may_be_stepped_after_detach_and_where_strict_is_off(wrapper: Any) -> None:
    model = mlp()
    base = sgd(model)
    optimizer = wrapper(base, model)
    backward(model, *one())
    optimizer.detach()
    train(model, base, batches(3))
    permissive = wrapper(base, model, strict=False)
    train(model, base, batches(3))
    again = wrapper(base, model)  # the one before makes way
    train(model, again, batches(3))
    assert (permissive.logs()["step"], again.logs()["step"]) == (0, 3)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_is_gone_leaves_the_base_alone(wrapper: Any) -> None:
    model = mlp()
    base = sgd(model)
    wrapper(base, model)
    train(model, base, batches(3))
    assert not base._optimizer_step_pre_hooks


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_closures_schedulers_scalers_and_copies_step_the_base_as_they_do(wrapper: Any) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = wrapper(sgd(model), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    data = list(batches(6, dtype=torch.float32))
    for x, y in data[:3]:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    for x, y in data[3:]:
        optimizer.step(lambda: F.cross_entropy(model(x), y))  # noqa: B023
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        train(copied.model, copied, data[:3])
        assert copied.logs()["step"] == 9


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_copies_refuse_steps_of_their_base_too(wrapper: Any) -> None:
    model = mlp()
    optimizer = wrapper(sgd(model), model)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(RuntimeError, match="was stepped twice"):
            train(copied.model, copied.base, batches(3))
    train(model, optimizer.base, batches(1))  # the steps of the copies' bases are not this one's


class PicklesAllOfIt(torch.optim.SGD):
    """Saves its hooks too, unlike torch.optim.Optimizer."""

    def __getstate__(self) -> Any:
        return self.__dict__


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_base_that_pickles_its_hooks_can_be_copied(wrapper: Any) -> None:
    model = mlp()
    base = PicklesAllOfIt(model.parameters(), lr=0.1)
    optimizer = wrapper(base, model)
    for copied in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        backward(model, *one())
        copied.step()
        copied.step()  # nobody wraps the copy
    copied = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="was stepped twice"):
        train(copied.model, copied.base, batches(3))


# ---- batches that are skipped ----------------------------------------------------------------------------------------


def squares(z: Tensor, y: Tensor) -> Tensor:
    return z.square().sum(1).mean()


@pytest.mark.parametrize(("reads_each_step", "said"), [(True, (1, 51)), (False, (70,))])
def test_the_logs_count_skipped_batches_and_warnings_say_how_many(
    reads_each_step: bool, said: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads_each_step:  # as on a device
        monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: _sync.is_sync_step(step))
    model = mlp()
    optimizer = DCPOptimizer(sgd(model, lr=0.01, momentum=0.0), model)
    train(model, optimizer, batches(130))
    found = [optimizer.logs()["skipped"]]

    def train_unreadable() -> None:
        for number in range(170):
            train(model, optimizer, [one(number)], squares)
            found.append(optimizer.logs()["skipped"])

    with pytest.warns(UserWarning, match="got no penalty") as caught:
        train_unreadable()
    assert found == list(range(171))
    messages = [str(warning.message) for warning in caught]
    assert [int(message.split()[0]) for message in messages] == list(said)
    for message in messages:
        assert " of the last 100 batches got no penalty" in message
        assert is_short(message)
    assert "skipped" not in DCLOptimizer(sgd(model), model).logs()


@pytest.mark.parametrize("start", [1, 3, 5])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_after_a_batch_of_nan_the_penalty_is_nan_also_where_values_are_not_read(
    wrapper: Any, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sync, "may_sync", lambda step, tensor: _sync.is_sync_step(step))
    model = mlp()
    optimizer = wrapper(sgd(model), model)
    data = list(batches(9))
    train(model, optimizer, data[: start - 1])
    found = []

    def train_on_nan() -> None:
        for x, y in data[start - 1 :]:
            train(model, optimizer, [(x * torch.nan, y)])
            found.append(optimizer.penalty)

    with pytest.warns(UserWarning, match="non-finite"):
        train_on_nan()
    assert all(map(math.isnan, found))


# ---- softmax before the loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_softmax_layer_before_cross_entropy_is_said_once(wrapper: Any) -> None:
    model = mlp().append(nn.Softmax(1))
    optimizer = wrapper(sgd(model), model)
    with pytest.warns(UserWarning, match=r"probabilities.*softmax.*\n  Fix: ") as caught:
        train(model, optimizer, batches(3))
    assert len(caught) == 1
    assert is_short(str(caught[0].message))


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Sigmoid(), nn.ReLU()])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_layers_before_it_are_not(wrapper: Any, last: nn.Module) -> None:
    model = mlp().append(last)
    train(model, wrapper(sgd(model), model), batches(3))


# ---- losses that cannot be read --------------------------------------------------------------------------------------


def one_hot(z: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, z.shape[1]).to(z)


def binary(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, one_hot(z, y))


def scaled(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z / 2, y)


def mixed(z: Tensor, y: Tensor) -> Tensor:
    return 0.6 * F.cross_entropy(z, y) + 0.4 * F.cross_entropy(z, y.flip(0))


def with_spread(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + z.std(1).mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Module], str, str]] = {
    "sigmoid": (binary, [], "not sum to 0.*sigmoid", "DCLOptimizer"),
    "regression": (lambda z, y: F.mse_loss(z, one_hot(z, y)), [], "not sum to 0.*regression", "DCLOptimizer"),
    "one logit": (
        lambda z, y: F.mse_loss(z[:, 0], y.double()),
        [nn.Linear(5, 1).double()],
        "one logit",
        "DCLOptimizer",
    ),
    "nll": (F.nll_loss, [], "one entry.*nll_loss", "log_softmax"),
    "softmax": (lambda z, y: F.nll_loss(z.log(), y), [nn.Softmax(1)], "probabilities", "softmax layer"),
    "scaled": (scaled, [], "one negative entry", "loss_scale=1"),
    "mixed": (mixed, [nn.Linear(5, 3).double()], "two negative entries.*mixup", r"set_targets\(soft_labels\)"),
    "two classes": (mixed, [nn.Linear(5, 2).double()], "two classes, with mixed labels", r"set_targets"),
    "sum": (with_spread, [], "more negative entries.*sum", "set_targets.*targets="),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_cannot_be_read_is_an_error_with_the_cause_that_was_seen(name: str) -> None:
    loss, layers, seen, fix = LOSSES[name]
    torch.manual_seed(0)
    model = mlp().extend(layers)
    optimizer = DCPOptimizer(sgd(model), model)
    x, y = one()
    expected = rf"labels of this batch cannot be read.*\n  Seen: .*{seen}.*\n  Fix: .*{fix}.*See docs/losses.md"
    with pytest.raises(RuntimeError, match=expected) as caught:
        loss(model(x), y % min(3, model(x).shape[1])).backward()
    assert is_short(str(caught.value))
    assert optimizer.logs()["step"] == 0


# ---- a step without a backward pass ----------------------------------------------------------------------------------


def stepped_twice(model: Any, optimizer: Any) -> None:
    train(model, optimizer, batches(1))
    optimizer.step()


def in_eval_mode(model: Any, optimizer: Any) -> None:
    train(model.eval(), optimizer, batches(1))


def forward_called(model: Any, optimizer: Any) -> None:
    train(model.forward, optimizer, batches(1))


def second_gradient(model: Any, optimizer: Any) -> None:
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, model.parameters(), create_graph=True), strict=True
    ):
        parameter.grad = gradient.detach()
    optimizer.step()


def other_logits(model: Any, optimizer: Any) -> None:
    x, y = one()
    model(x)
    backward(nn.Sequential(*model), x, y)
    optimizer.step()


@pytest.mark.parametrize(
    ("misuse", "cause"),
    [
        (stepped_twice, "Seen: step was called twice"),
        (in_eval_mode, "eval mode.*count_eval=True"),
        (forward_called, "Seen: model.forward, another method"),
        (second_gradient, "create_graph=True"),
        (other_logits, "gradient did not come through.*logits="),
    ],
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_without_a_regularized_gradient_says_what_was_seen(wrapper: Any, misuse: Any, cause: str) -> None:
    model = mlp()
    optimizer = wrapper(sgd(model), model)
    with pytest.raises(RuntimeError, match=rf"(?s)no backward.*training forward.*{cause}") as caught:
        misuse(model, optimizer)
    assert is_short(str(caught.value))


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "name", "hint"),
    [
        (DCPOptimizer, "companion", "DCLOptimizer has.*optimizer.prototypes"),
        (DCLOptimizer, "prototypes", "DCPOptimizer has.*optimizer.companion"),
        (DCLOptimizer, "set_targets", "DCPOptimizer has.*needs no labels"),
        (DCPOptimizer, "log", "did you mean 'logs'"),
        (DCPOptimizer, "set_target", "did you mean 'set_targets'"),
        (DCLOptimizer, "lr", "param_groups"),
    ],
)
def test_a_name_that_is_not_there_has_a_hint(wrapper: Any, name: str, hint: str) -> None:
    model = mlp()
    optimizer = wrapper(sgd(model), model)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*{hint}"):
        getattr(optimizer, name)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not hasattr(copied, name)


def test_a_class_for_the_companion_has_a_hint() -> None:
    model = mlp()
    with pytest.raises(TypeError, match=r"companion=Linear.* cannot be called without arguments.*lambda: Linear\("):
        DCLOptimizer(sgd(model), model, companion=nn.Linear)

    class Ready(nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, CLASSES, dtype=torch.float64)

    train(model, DCLOptimizer(sgd(model), model, companion=Ready), batches(2))


# ---- weights in float16 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_in_float16_train_as_those_in_float32_do(wrapper: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.float16):
        model = mlp(dtype=torch.float32).to(dtype)
        optimizer = wrapper(sgd(model, momentum=0.0), model, weight=1.0)
        train(model, optimizer, batches(10, dtype=dtype))
        assert optimizer.penalty > 0
        learned = optimizer.prototypes if wrapper is DCPOptimizer else optimizer.companion[2].weight
        found.append([*model.float().parameters(), learned.float()])
    plain = mlp(dtype=torch.float32)
    train(plain, sgd(plain, momentum=0.0), batches(10, dtype=torch.float32))
    assert_same(*found, rtol=0.0, atol=5e-3)
    assert max((a - b).abs().max() for a, b in zip(found[0], plain.parameters(), strict=False)) > 1e-2


def test_a_name_may_be_asked_for_before_the_constructor() -> None:
    class Flagged(DCPOptimizer):
        def __init__(self, *arguments: Any) -> None:
            self.had_flag = hasattr(self, "flag")
            super().__init__(*arguments)

    model = mlp()
    assert not Flagged(sgd(model), model).had_flag


# ---- labels that are given too late, or no longer --------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}])
def test_labels_that_are_given_after_the_forward_pass_are_an_error(options: dict[str, Any]) -> None:
    """They would be those of the next batch, silently."""
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, **options)
    x, y = one()
    z = model(x)
    optimizer.set_targets(y)
    with pytest.raises(RuntimeError, match="set_targets was called after the forward pass of this batch"):
        F.cross_entropy(z, y).backward()


def test_labels_that_are_given_for_the_first_batch_alone_are_missed_in_the_second() -> None:
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model)
    (x, y), other = batches(2)
    optimizer.set_targets(y)
    train(model, optimizer, [(x, y)], scaled)
    with pytest.raises(RuntimeError, match="labels of this batch cannot be read"):
        train(model, optimizer, [other], scaled)
