"""The copy of the model: when it is made, what of the model it takes over, and how its first prediction is checked."""

from __future__ import annotations

import copy
import io
import linecache
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    one,
    sgd,
    train,
    wrap,
)

DATA = list(batches(5))


def test_a_copy_starts_equal_and_shares_nothing_that_is_trained():
    model = batch_norm_net()
    optimizer = wrap(model)
    assert_same(model, optimizer.companion)
    ours, theirs = dict(optimizer.companion.named_parameters()), dict(model.named_parameters())
    assert all(ours[name].data_ptr() != theirs[name].data_ptr() for name in theirs)
    assert optimizer.companion[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()
    assert not optimizer.companion._forward_hooks


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES, bias=False)
            self.second = nn.Linear(FEATURES, FEATURES, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = Tied().double()
    optimizer = wrap(model)
    assert optimizer.companion.first.weight is optimizer.companion.second.weight
    train(model, optimizer, batches(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_model_that_cannot_be_copied():
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)).double()
    model.uncopyable = (i for i in range(3))
    uncopied = wrap(model)
    with pytest.raises(RuntimeError, match=r"could not be made as a copy.*pass it as companion="):
        train(model, uncopied, batches(1))
    optimizer = wrap(model, companion=nn.Linear(FEATURES, CLASSES).double())
    train(model, optimizer, batches(2))


# ---- what a script does between wrapping and the first forward pass --------------------------------------------------


def load_weights(model: nn.Sequential, optimizer: Any) -> None:
    """As every ``--resume`` that loads weights only."""
    model.load_state_dict(mlp(seed=7).state_dict())


def initialize(model: nn.Sequential, optimizer: Any) -> None:
    torch.manual_seed(3)
    model.apply(lambda layer: nn.init.xavier_uniform_(layer.weight) if isinstance(layer, nn.Linear) else None)


def to_float32(model: nn.Sequential, optimizer: Any) -> None:
    model.float()


def patch_forward(model: nn.Sequential, optimizer: Any) -> None:
    """By a function that takes the module, as Accelerate does."""
    inner = type(model).forward
    model.forward = (lambda self, x: inner(self, x) * 2).__get__(model)


def parametrize_weight(model: nn.Sequential, optimizer: Any) -> None:
    """The parameter stays the very object that the base optimizer has."""
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())


def set_attribute(model: nn.Sequential, optimizer: Any) -> None:
    model[1] = nn.Softsign()


class Tripler(nn.Linear):
    def triple(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 3


def register_hook(model: nn.Sequential, optimizer: Any) -> None:
    model[0].__class__ = Tripler
    model[0].register_forward_hook(model[0].triple)


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
    load_weights, initialize, to_float32, patch_forward, parametrize_weight, set_attribute, register_hook,
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


@pytest.mark.parametrize("detached", [False, True])
def test_a_first_forward_with_other_parameters_names_the_fix_which_works(detached: bool) -> None:
    """As in MAML, whose inner loop calls the model with fast weights."""
    x, y = one()

    def loss_of(model: nn.Module) -> Tensor:
        fast = {
            name: p.detach().clone().requires_grad_() if detached else 1 * p for name, p in model.named_parameters()
        }
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)

    model = mlp()
    optimizer = wrap(model)
    with pytest.raises(
        ValueError, match=r"(?s)no parameter to train.*ask for optimizer.companion before .*functional_call"
    ):
        loss_of(model)
    assert_same(optimizer.companion, model)
    loss_of(model)
    train(model, optimizer, batches(2))
    assert optimizer.penalty > 0


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


def test_a_copy_whose_making_draws_from_python_and_numpy_leaves_their_generators_alone() -> None:
    """As Keras names its layers; with weight 0 a script's own draws were others."""

    class Drawing(nn.Linear):
        def __deepcopy__(self, memo: Any) -> nn.Module:
            twin = nn.Linear(self.in_features, self.out_features).double()
            with torch.no_grad():
                twin.bias.add_(random.random() + np.random.rand())  # noqa: NPY002
            twin.load_state_dict(self.state_dict())
            return twin

    found = []
    for weight in (0.0, None):
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
        torch.manual_seed(5)
        model = nn.Sequential(Drawing(FEATURES, CLASSES).double())
        base = sgd(model)
        train(model, base if weight is None else DCLOptimizer(base, model, weight=weight), DATA)
        found.append((random.random(), np.random.rand(), torch.rand(1).item()))  # noqa: NPY002
    assert found[0] == found[1]


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


# ---- hooks of the model ----------------------------------------------------------------------------------------------


class ZeroHead(nn.Module):
    """As fine-tuning starts: with a head of zeros no hook makes a difference to the first logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(FEATURES, 12).double(), nn.Linear(12, CLASSES).double()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


HELD = {
    "list": ([3.0], lambda held: held[0]),
    "object": (SimpleNamespace(scale=3.0), lambda held: held.scale),
    "tensor": (torch.full((12,), 3.0, dtype=torch.float64), lambda held: held),
}


def change_output(model: ZeroHead, held: Any, read: Callable[[Any], Any]) -> None:
    model.encoder.register_forward_hook(lambda module, inputs, output: output * read(held))


def change_input(model: ZeroHead, held: Any, read: Callable[[Any], Any]) -> None:
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * read(held),))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("change", "place"), [(change_output, "encoder"), (change_input, "head")])
def test_a_hook_that_is_not_copied_is_named_when_the_copy_is_made(change, place, held):
    model = ZeroHead()
    change(model, *HELD[held])
    optimizer = DCLOptimizer(sgd(model), model, weight=2.0, alpha=0.6)
    with pytest.warns(UserWarning, match="hook") as caught:
        assert optimizer.companion is not None  # which makes the copy
    assert [place in str(warning.message) for warning in caught] == [True]
    x, y = one()
    F.cross_entropy(model(x), y).backward()  # no second warning: the first logits agree
    optimizer.step()


def test_the_warning_of_a_hook_points_at_the_first_forward():
    model = ZeroHead()
    change_output(model, *HELD["list"])
    optimizer = wrap(model)
    with pytest.warns(UserWarning, match="hook") as caught:
        model(one()[0])
    assert linecache.getline(caught[0].filename, caught[0].lineno).strip() == "model(one()[0])"
    optimizer.detach()


def test_a_hook_of_the_model_itself_behind_ours_is_not_the_companions() -> None:
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


# ---- the first prediction of a copy is what the model gave -----------------------------------------------------------

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
def test_a_first_prediction_that_is_not_the_models_is_warned_of_once(case: str) -> None:
    build, pack = FALSE_STARTS[case]
    model = build()
    optimizer = wrap(model)
    with pytest.warns(UserWarning, match=NOT_EQUAL) as caught:
        train(model, optimizer, [(pack(x), y) for x, y in DATA])
    assert len(caught) == 1


def test_a_copy_that_was_made_before_the_model_changed_is_warned_of() -> None:
    model = mlp()
    optimizer = wrap(model)
    assert optimizer.companion is not None
    initialize(model, optimizer)
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
    "every": (batch_norm_net, {"companion_every": 3}),
}


@pytest.mark.parametrize("case", QUIET)
def test_a_first_prediction_that_is_the_models_or_may_differ_brings_no_warning(case: str) -> None:
    build, options = QUIET[case]
    model = build()
    train(model, wrap(model, **options), [(x, y % 4) for x, y in DATA])


class RenamedByCopies(nn.Module):
    """As a Keras model: its copy's parameters have other names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, mlp())

    def forward(self, x):
        return next(self.children())(x)

    def __deepcopy__(self, memo):
        copied = RenamedByCopies("copied")
        copied.copied.load_state_dict(next(self.children()).state_dict())
        return copied


def test_a_copy_with_other_names_is_refused_and_one_of_the_scripts_works():
    model = RenamedByCopies("body")
    with pytest.raises(RuntimeError, match=r"parameter 'body.0.weight' is called 'copied.0.weight'.*companion="):
        train(model, wrap(model), batches(1))
    expected = mlp()
    train(model, wrap(model, companion=copy.deepcopy(model)), batches(4))
    train(expected, wrap(expected), batches(4))
    assert_same(model.body, expected)
