"""The companion is copied when the first training forward begins, and that forward shows what the copy needs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    batch_norm_net,
    batches,
    dropout_net,
    mlp,
    sgd,
    train,
    wrap,
)

DATA = list(batches(5))


# ---- what a script does between wrapping and the first forward -------------------------------------------------------


def load_weights(model: nn.Sequential, optimizer: Any) -> None:
    """As every ``--resume`` that loads weights only."""
    model.load_state_dict(mlp(seed=7).state_dict())


def initialise(model: nn.Sequential, optimizer: Any) -> None:
    torch.manual_seed(3)
    model.apply(lambda layer: nn.init.xavier_uniform_(layer.weight) if isinstance(layer, nn.Linear) else None)


def to_float32(model: nn.Sequential, optimizer: Any) -> None:
    model.float()


def patch_forward(model: nn.Sequential, optimizer: Any) -> None:
    """By a function that takes the module, as Accelerate does."""
    inner = type(model).forward
    model.forward = (lambda self, x: inner(self, x) * 2).__get__(model)


def parametrise(model: nn.Sequential, optimizer: Any) -> None:
    """The parameter stays the very object that the base optimizer has."""
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())


def set_attribute(model: nn.Sequential, optimizer: Any) -> None:
    model[1] = nn.Softsign()


def register_hook(model: nn.Sequential, optimizer: Any) -> None:
    model[0].register_forward_hook(lambda module, inputs, output: output * 3)


def register_pre_hook_on_the_model(model: nn.Sequential, optimizer: Any) -> None:
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))


def unfreeze(model: nn.Sequential, optimizer: Any) -> None:
    model[2].requires_grad_(True)


def freeze(model: nn.Sequential, optimizer: Any) -> None:
    model[0].requires_grad_(False)


def add_layer(model: nn.Sequential, optimizer: Any) -> None:
    torch.manual_seed(4)
    model.append(nn.Linear(CLASSES, CLASSES).double())
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.3})


def evaluate(model: nn.Sequential, optimizer: Any) -> None:
    """With gradients on, as those do who look at the first loss."""
    model.eval()
    F.cross_entropy(model(DATA[0][0]), DATA[0][1]).backward()
    optimizer.zero_grad()
    model.train()


def save_and_load(model: nn.Sequential, optimizer: Any) -> None:
    """As Accelerate's ``prepare`` does to move the state, before the weights are there."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    load_weights(model, optimizer)


def a_step_of_nothing(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.step()
    load_weights(model, optimizer)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


BETWEEN = [
    load_weights, initialise, to_float32, patch_forward, parametrise, set_attribute, register_hook,
    register_pre_hook_on_the_model, unfreeze, freeze, add_layer, evaluate, save_and_load, a_step_of_nothing,
]  # fmt: skip


def run(change: Callable[[Any, Any], None], wrapped_first: bool) -> Any:
    model = mlp()
    if change is unfreeze:
        model[2].requires_grad_(False)
    base = sgd(model)
    if wrapped_first:
        optimizer = DCLOptimizer(base, model, weight=1.0)
        change(model, optimizer)
    else:
        change(model, base)
        optimizer = DCLOptimizer(base, model, weight=1.0)
    train(model, optimizer, [(x.to(model[0].bias.dtype), y) for x, y in DATA])
    assert optimizer.penalty > 0
    return model, optimizer


@pytest.mark.parametrize("change", BETWEEN)
def test_what_is_done_after_wrapping_is_as_if_it_had_been_done_before(change: Any) -> None:
    (model, optimizer), (expected, other) = (run(change, first) for first in (True, False))
    assert_same(model, expected)
    assert_same(optimizer.companion, other.companion)
    assert_same(optimizer.companion_optimizer.state_dict(), other.companion_optimizer.state_dict())


@pytest.mark.parametrize("how", ["companion", "companion_optimizer", "state"])
def test_the_copy_is_made_earlier_where_it_is_asked_for(how: str) -> None:
    model = mlp()
    optimizer = wrap(model)
    if how == "state":
        trained = wrap(mlp(seed=2))
        train(trained.model, trained, DATA)
        optimizer.load_state_dict(trained.state_dict())
        expected = copy.deepcopy(trained.companion)
    else:
        getattr(optimizer, how)
        expected = copy.deepcopy(model)
    load_weights(model, optimizer)
    assert_same(optimizer.companion, expected)


def test_the_copy_draws_nothing_from_the_scripts_generators() -> None:
    class Drawing(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr)
            torch.rand(3)

    states, models = [], []
    for weight in (0.0, None):
        model = dropout_net()
        torch.manual_seed(5)
        base = Drawing(model.parameters())
        train(model, base if weight is None else DCLOptimizer(base, model, weight=weight), DATA)
        states.append(torch.get_rng_state())
        models.append(model)
    assert_same(*models)
    assert torch.equal(*states)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_of_an_optimizer_before_its_first_forward_makes_its_own_companion(copied: Any) -> None:
    model = batch_norm_net()
    both = (model, wrap(model))
    twin, twin_optimizer = copied(both)
    train(*both, DATA)
    train(twin, twin_optimizer, DATA)
    assert_same(twin, model)
    assert_same(twin_optimizer.companion, both[1].companion)
    assert twin_optimizer.companion is not both[1].companion


def test_a_state_that_was_saved_before_the_first_forward_resumes_exactly() -> None:
    model = mlp()
    optimizer = wrap(model)
    stream = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), stream)
    stream.seek(0)
    weights, state = torch.load(stream, weights_only=True)
    train(model, optimizer, DATA)
    again = mlp(seed=8)
    other = wrap(again)
    train(again, other, DATA[:1])  # it has a companion by now
    again.load_state_dict(weights)
    other.load_state_dict(state)
    train(again, other, DATA)
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)


def test_a_state_that_is_refused_makes_no_copy() -> None:
    model, wide = mlp(), mlp(width=13)
    optimizer, other = wrap(model), wrap(wide)
    assert other.companion is not None
    with pytest.raises(ValueError, match="state of the companion has shape"):
        optimizer.load_state_dict(other.state_dict())
    load_weights(model, optimizer)
    assert_same(optimizer.companion, model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_a_copy_that_is_asked_for_inside_a_mode_trains_all_the_same(mode: Any) -> None:
    model, expected = mlp(), mlp()
    optimizer, other = wrap(model), wrap(expected)
    with mode():
        assert optimizer.companion is not None
    train(model, optimizer, DATA)
    train(expected, other, DATA)
    assert_same(model, expected)
    assert_same(optimizer.companion, other.companion)


class Remembering(nn.Module):
    """Keeps what it has computed, as feature extractors and the older spectral norm do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.kept: Any = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.net[0](x)
        self.all = [self.kept]
        return self.net[2](self.net[1](self.kept))


@pytest.mark.parametrize("build", [Remembering, lambda: nn.Sequential(nn.utils.spectral_norm(mlp()[0]))])
def test_tensors_that_an_evaluation_has_left_on_the_model_do_not_prevent_the_copy(build: Any) -> None:
    model = build()
    optimizer = wrap(model)
    x, y = DATA[0]
    model.eval()(x)
    train(model.train(), optimizer, [(x, y)] * 3)
    assert optimizer.penalty > 0


@pytest.mark.integration
def test_the_optimizers_mode_is_the_companions_from_its_start() -> None:
    from schedulefree import SGDScheduleFree

    found = []
    for companion in (None, mlp()):
        model = mlp()
        optimizer = DCLOptimizer(SGDScheduleFree(model.parameters(), lr=0.1), model, companion=companion, weight=1.0)
        optimizer.train()
        train(model, optimizer, DATA)
        optimizer.eval()
        found.append((model, optimizer.companion))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


def test_a_hook_of_the_model_itself_behind_ours_is_not_the_forecasts() -> None:
    """It changes the logits behind the penalty, whether the copy is there or not."""
    model, expected = mlp(), mlp()
    optimizer, other = wrap(model), wrap(expected)
    assert other.companion is not None
    for net in (model, expected):
        net.register_forward_hook(lambda module, inputs, output: output * 3)
    train(model, optimizer, DATA)
    train(expected, other, DATA)
    assert_same(model, expected)
    assert_same(optimizer.companion, other.companion)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot train the companion"),
        (lambda model: NeedsMore(model.parameters(), extra=1), "a second NeedsMore for the companion could not be"),
    ],
)
def test_what_cannot_train_a_companion_is_refused_at_wrapping(base: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=rf"{message}.*companion_optimizer="):
        DCLOptimizer(base(model), model)
    assert not model._forward_hooks


class NeedsMore(torch.optim.SGD):
    def __init__(self, params: Any, extra: int) -> None:
        super().__init__(params, lr=0.1)


def test_a_model_without_trained_parameters_is_refused_at_wrapping() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        wrap(model)


# ---- inputs that the forward changes ---------------------------------------------------------------------------------


class Centred(nn.Module):
    """Writes to its input before its first layer, which is then computed from what was written."""

    def __init__(self, change: Callable[[Tensor], Any], from_step: int = 0) -> None:
        super().__init__()
        self.net, self._change = mlp(), change
        self._left = from_step

    def forward(self, x: Tensor) -> Tensor:
        self._left -= 1
        if self._left < 0:
            self._change(x)
        return self.net(x)


class Popping(nn.Module):
    """Takes the labels out of its batch, as models with a loss of their own do."""

    def __init__(self, pops: bool = True) -> None:
        super().__init__()
        self.net, self._pops = mlp(), pops

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        y = batch.pop("labels") if self._pops else batch["labels"]
        x = batch["inputs"].pop() if self._pops else batch["inputs"][-1]
        logits = self.net(x)
        return {"logits": logits, "loss": F.cross_entropy(logits, y)}


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "sub_": lambda x: x.sub_(0.5),
    "relu_": lambda x: F.relu(x, inplace=True),
    "item": lambda x: x.__setitem__((slice(None), 0), 3.0),
}


@pytest.mark.parametrize("options", [{}, {"companion_fraction": 0.5}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_inputs_that_the_forward_edits_in_place_are_the_companions_as_the_model_got_them(
    change: str, options: dict[str, Any]
) -> None:
    model, expected = Centred(CHANGES[change]), mlp()
    optimizer, other = wrap(model, **options), wrap(expected, **options)
    train(model, optimizer, [(x.clone(), y) for x, y in DATA])
    edited = [(x.clone(), y) for x, y in DATA]
    for x, _ in edited:
        CHANGES[change](x)
    train(expected, other, edited)
    assert_same(model.net, expected)
    assert_same(optimizer.companion.net, other.companion)


def test_an_input_with_a_graph_may_be_edited_in_place() -> None:
    """As where the body is another module, and the head that is wrapped begins with an in-place ReLU."""
    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        body, head = nn.Linear(FEATURES, 12).double(), nn.Sequential(nn.ReLU(inplace), nn.Linear(12, CLASSES)).double()
        optimizer = wrap(head)
        for x, y in DATA:
            optimizer.zero_grad()
            F.cross_entropy(head(body(x)), y).backward()
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((head, optimizer.companion, body.weight.grad))
    for first, second in zip(*found, strict=True):
        assert_same(first, second)


def test_an_edit_that_begins_later_is_an_error_that_names_the_fix() -> None:
    model = Centred(CHANGES["sub_"], from_step=2)
    optimizer = wrap(model)
    train(model, optimizer, [(x.clone(), y) for x, y in DATA[:2]])
    with pytest.raises(RuntimeError, match=r"written to one of its inputs.*dcl_optim.*x = x\.clone\(\)"):
        model(DATA[2][0].clone())


def test_what_the_forward_takes_out_of_its_batch_is_there_for_the_companion() -> None:
    found = []
    for pops in (True, False):
        model = Popping(pops)
        optimizer = wrap(model)
        for x, y in DATA:
            optimizer.zero_grad()
            model({"labels": y, "inputs": [x]})["loss"].backward()
            optimizer.step()
        assert optimizer.penalty > 0
        found.append((model, optimizer.companion))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


# ---- the first forecast of a copy is what the model gave -------------------------------------------------------------

NOT_EQUAL = r"first forecast of dcl_optim's companion.* is (\d+\.\d%|inf%).*reset_companion"


class Batch:
    """No container that is looked into."""

    def __init__(self, x: Tensor) -> None:
        self.rows = [x]


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch: Batch) -> Tensor:
        x = batch.rows[0]
        batch.rows[0] = x + 1
        return self.net(x)


class Counting(nn.Module):
    """Its state is outside of modules."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.net(x) * type(self).calls


class OtherDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.draws = mlp(), [3.0, 4.0, 5.0, 6.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * next(SEQUENCE)


SEQUENCE = iter(range(1, 1000))
FALSE_STARTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any]]] = {
    "an object": (Taking, Batch),
    "a class attribute": (Counting, lambda x: x),
    "draws": (OtherDraws, lambda x: x),
}


@pytest.mark.parametrize("case", FALSE_STARTS)
def test_a_first_forecast_that_is_not_the_models_is_told_once(case: str) -> None:
    build, pack = FALSE_STARTS[case]
    model = build()
    optimizer = wrap(model)
    with pytest.warns(UserWarning, match=NOT_EQUAL) as caught:
        train(model, optimizer, [(pack(x), y) for x, y in DATA])
    assert len(caught) == 1


def test_a_copy_that_was_made_before_the_model_changed_is_told() -> None:
    model = mlp()
    optimizer = wrap(model)
    assert optimizer.companion is not None
    initialise(model, optimizer)
    with pytest.warns(UserWarning, match=NOT_EQUAL):
        model(DATA[0][0])
    optimizer.reset_companion()
    train(model, optimizer, DATA)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return torch.cat([z[:, :-1], torch.full_like(z[:, :1], -torch.inf)], 1)


QUIET: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "masked": (Masked, {}),
    "dropout": (dropout_net, {}),
    "given": (mlp, {"companion": lambda: mlp(seed=4)}),
    "fraction": (batch_norm_net, {"companion_fraction": 0.5}),
    "every": (batch_norm_net, {"companion_every": 3}),
}


@pytest.mark.parametrize("case", QUIET)
def test_a_first_forecast_that_is_the_models_or_may_differ_is_not_told(case: str) -> None:
    build, options = QUIET[case]
    model = build()
    train(model, wrap(model, **options), [(x, y % 4) for x, y in DATA])


# ---- frozen parameters that the forward writes to --------------------------------------------------------------------


class Queue(nn.Module):
    """As MoCo: logits against a queue of keys, and a key encoder that follows the encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.keys = mlp(), mlp()
        self.keys.requires_grad_(False)
        self.queue = nn.Parameter(torch.randn(CLASSES, 8, dtype=torch.float64), requires_grad=False)
        self.still = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        with torch.no_grad():
            for slow, fast in zip(self.keys.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            keys, queue = self.keys(x), self.queue.clone()
            self.queue.copy_(keys[:8].T)
        return z + (z @ queue).mean(1, keepdim=True) + keys * self.still


def test_frozen_parameters_that_the_forward_writes_to_are_the_models_alone() -> None:
    model, alone = Queue(), Queue()
    optimizer = wrap(model, weight=0.0)
    train(model, optimizer, DATA)
    train(alone, sgd(alone), DATA)
    assert_same(model, alone)
    assert optimizer.companion.still is model.still
    assert optimizer.companion.queue is not model.queue
    assert not torch.equal(optimizer.companion.queue, model.queue)


def test_the_companion_has_a_queue_and_a_teacher_of_its_own_from_the_second_forward_on() -> None:
    """The first forecast is the model's, and what both have after it is the same."""
    model, hand = Queue(), Queue()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model)
    base, second = sgd(hand), sgd(companion)
    for index, (x, y) in enumerate(DATA):
        z, c = hand(x), companion(x)
        base.zero_grad()
        second.zero_grad()
        (F.cross_entropy(z, y) + F.mse_loss(z, c.detach())).backward()
        F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()).backward()
        base.step()
        if index:
            second.step()
    train(model, optimizer, DATA)
    assert_same(model, hand, rtol=1e-9, atol=1e-11)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-11)


def test_a_run_with_frozen_parameters_of_the_companions_own_resumes_exactly() -> None:
    model = Queue()
    optimizer = wrap(model)
    train(model, optimizer, DATA[:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = Queue()
    other = wrap(again)
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(model, optimizer, DATA[3:])
    train(again, other, DATA[3:])
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)
    assert other.companion.still is again.still
    assert not other.companion.queue.requires_grad


def test_a_teacher_that_the_script_updates_after_its_step_stays_shared() -> None:
    model = Queue()
    model.forward = model.net.forward
    optimizer = wrap(model)
    for batch in DATA:
        train(model, optimizer, [batch])
        with torch.no_grad():
            model.queue.add_(1)
    assert optimizer.companion.queue is model.queue


# ---- weights that are loaded in the middle of a run ------------------------------------------------------------------

LOADED = r"(?s)weights were loaded into the model since.*optimizer\.reset_companion\(\)"


def test_weights_loaded_in_mid_run_are_told_once_and_the_companion_can_start_anew() -> None:
    model, expected = mlp(), mlp()
    optimizer = wrap(model)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, DATA)
    model.load_state_dict(best)
    with pytest.warns(UserWarning, match=LOADED) as caught:
        train(model, optimizer, DATA[:1])
    model.load_state_dict(best)
    train(model, optimizer, DATA[:1])
    assert len(caught) == 1

    model.load_state_dict(best)
    optimizer.base.load_state_dict(sgd(model).state_dict())
    optimizer.reset_companion()
    train(model, optimizer, DATA)
    other = wrap(expected)
    train(expected, other, DATA)
    assert_same(model, expected)
    assert_same(optimizer.companion, other.companion)
    assert_same(optimizer.companion_optimizer.state_dict(), other.companion_optimizer.state_dict())


@pytest.mark.parametrize("model_first", [False, True])
def test_weights_that_are_loaded_with_the_optimizers_state_or_before_training_are_not_told(model_first: bool) -> None:
    model = mlp()
    optimizer = wrap(nn.Sequential(model))
    model.load_state_dict(mlp(seed=2).state_dict())
    train(optimizer.model, optimizer, DATA)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(optimizer.model, optimizer, DATA[:2])
    for first in (model_first, not model_first):
        if first:
            optimizer.model[0].load_state_dict(saved[0])
        else:
            optimizer.load_state_dict(saved[1])
    train(optimizer.model, optimizer, DATA)
    copy.deepcopy(model).load_state_dict(saved[0])
    train(optimizer.model, optimizer, DATA)


def test_what_was_learned_from_an_unfinished_step_is_dropped_with_the_companion() -> None:
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, DATA[:2])
    F.cross_entropy(model(DATA[2][0]), DATA[2][1]).backward()
    optimizer.reset_companion()
    optimizer.step()
    assert_same(optimizer.companion, model)


def test_a_companion_that_was_given_is_built_again_or_refuses() -> None:
    optimizer = wrap(mlp(), companion=lambda: mlp(seed=6))
    train(optimizer.model, optimizer, DATA)
    optimizer.reset_companion()
    assert_same(optimizer.companion, mlp(seed=6))
    given = wrap(mlp(), companion=mlp(seed=6))
    with pytest.raises(RuntimeError, match=r"given as a module.*load the weights.*optimizer\.companion"):
        given.reset_companion()


# ---- layers that were unfrozen and frozen again ----------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_layer_that_was_unfrozen_and_frozen_again_resumes_exactly(momentum: float) -> None:
    def started() -> tuple[nn.Module, DCLOptimizer]:
        model = mlp()
        model[0].requires_grad_(False)
        return model, DCLOptimizer(sgd(model, momentum=momentum), model, weight=1.0)

    model, optimizer = started()
    train(model, optimizer, DATA[:1])
    model[0].requires_grad_(True)
    train(model, optimizer, DATA[1:2])
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    train(model, optimizer, DATA[2:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, other = started()
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(model, optimizer, DATA[3:])
    train(again, other, DATA[3:])
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)
    assert not torch.equal(other.companion[0].weight, again[0].weight)


def test_a_state_from_before_a_layer_was_unfrozen_is_refused_with_the_fix() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, DATA[:1])
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(True)
    train(model, optimizer, DATA[1:2])
    with pytest.raises(ValueError, match=r"does not fit: missing.*reset_companion\(\)"):
        optimizer.load_state_dict(saved)
    model[0].requires_grad_(False)
    optimizer.reset_companion()
    optimizer.load_state_dict(saved)
