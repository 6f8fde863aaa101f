"""The copy of the model: when it is made, what of the model it takes over, and how its first prediction is checked."""

import copy
import linecache
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    assert_same_networks,
    batches,
    dropout_net,
    fit,
    mlp,
    one,
    sgd,
    through_a_file,
    train,
    wrap,
)

DATA = list(batches(5))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(FEATURES, FEATURES, bias=False)
            self.second = nn.Linear(FEATURES, FEATURES, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    optimizer = wrap(Tied().double())
    assert optimizer.companion.first.weight is optimizer.companion.second.weight
    fit(optimizer, batches(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_model_that_cannot_be_copied():
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)).double()
    model.uncopyable = (i for i in range(3))
    uncopied = wrap(model)
    with pytest.raises(RuntimeError, match=r"could not be made as a copy.*pass it as companion="):
        fit(uncopied, batches(1))
    optimizer = wrap(model, companion=nn.Linear(FEATURES, CLASSES).double())
    fit(optimizer, batches(2))


def test_a_model_that_keeps_its_last_output_with_its_graph_is_copied():
    """Of which torch makes no deep copy, as of what torch.nn.utils.weight_norm computes."""

    class Noting(nn.Sequential):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = Noting(*mlp())
    optimizer = wrap(model)
    fit(optimizer, batches(2))
    optimizer.reset_companion()
    fit(optimizer, batches(2))
    assert optimizer.logs()["penalty"] > 0


def test_a_copy_whose_parameters_have_other_names_is_refused():
    """As of Keras's models, whose names are counted up."""

    class Renamed(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name
            self.add_module(name, nn.Linear(FEATURES, CLASSES).double())

        def __deepcopy__(self, memo):
            return Renamed(self.name + "_1")

        def forward(self, x):
            return self.get_submodule(self.name)(x)

    model = Renamed("dense")
    refused = wrap(model)
    with pytest.raises(ValueError, match=r"have other names or another order; .* pass it as companion="):
        model(one()[0])
    refused.detach()
    optimizer = wrap(model, companion=Renamed("dense"))
    train(model, optimizer, batches(2))
    assert optimizer.logs()["penalty"] > 0


# ---- what a script does between wrapping and the first forward pass --------------------------------------------------


def load_weights(model, optimizer):
    """As every ``--resume`` that loads weights only."""
    model.load_state_dict(mlp(seed=7).state_dict())


def to_float32(model, optimizer):
    model.float()


def patch_forward(model, optimizer):
    """By a function that takes the module, as Accelerate does."""
    inner = type(model).forward
    model.forward = (lambda self, x: inner(self, x) * 2).__get__(model)


def unfreeze(model, optimizer):
    model[2].requires_grad_(True)


def add_layer(model, optimizer):
    torch.manual_seed(4)
    model.append(nn.Linear(CLASSES, CLASSES).double())
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.3})


def evaluate(model, optimizer):
    """With gradients on, as those do who look at the first loss, before the weights are there."""
    model.eval()
    F.cross_entropy(model(DATA[0][0]), DATA[0][1]).backward()
    optimizer.zero_grad()
    model.train()
    load_weights(model, optimizer)


def save_and_load(model, optimizer):
    """As Accelerate's ``prepare`` does to move the state, before the weights are there."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    load_weights(model, optimizer)


BETWEEN = [load_weights, to_float32, patch_forward, unfreeze, add_layer, evaluate, save_and_load]


def run(change, wrapped_first):
    model = mlp()
    if change is unfreeze:
        model[2].requires_grad_(False)
    base = sgd(model)
    if wrapped_first:
        optimizer = wrap(model, base)
        change(model, optimizer)
    else:
        change(model, base)
        optimizer = wrap(model, base)
    fit(optimizer, [(x.to(model[0].bias.dtype), y) for x, y in DATA])
    assert optimizer.logs()["penalty"] > 0
    return model, optimizer


@pytest.mark.parametrize("change", BETWEEN)
def test_what_is_done_after_wrapping_is_as_if_it_had_been_done_before(change):
    (_, optimizer), (_, other) = (run(change, first) for first in (True, False))
    assert_same_networks(optimizer, other)


@pytest.mark.parametrize("how", ["companion", "companion_optimizer", "state"])
def test_the_copy_is_made_earlier_where_it_is_asked_for(how):
    model = mlp()
    optimizer = wrap(model)
    if how == "state":
        trained = wrap(mlp(seed=2))
        fit(trained, DATA)
        optimizer.load_state_dict(trained.state_dict())
        expected = copy.deepcopy(trained.companion)
    else:
        getattr(optimizer, how)
        expected = copy.deepcopy(model)
    load_weights(model, optimizer)
    assert_same(optimizer.companion, expected)


def test_a_first_forward_with_other_parameters_names_the_fix_which_works():
    """As in MAML, whose inner loop calls the model with fast weights."""
    x, y = one()

    def loss_of(model):
        fast = {name: 1 * parameter for name, parameter in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)

    model = mlp()
    optimizer = wrap(model)
    with pytest.raises(ValueError, match=r"(?s)no parameter to train.*optimizer.companion before .*functional_call"):
        loss_of(model)
    assert_same(optimizer.companion, model)
    loss_of(model)
    fit(optimizer, batches(2))
    assert optimizer.logs()["penalty"] > 0


def test_the_copy_draws_nothing_from_the_scripts_generators():
    """Neither that of the optimizer, nor that of a layer as Keras's, which is named at random."""

    class Optimizer(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr)
            torch.rand(3)

    class Layer(nn.Linear):
        def __deepcopy__(self, memo):
            twin = nn.Linear(self.in_features, self.out_features).double()
            with torch.no_grad():
                twin.bias.add_(torch.rand(()))
            twin.load_state_dict(self.state_dict())
            return twin

    found, models = [], []
    for weight in (0.0, None):
        torch.manual_seed(5)
        model = nn.Sequential(Layer(FEATURES, 12), dropout_net()[1:]).double()
        base = Optimizer(model.parameters())
        train(model, base if weight is None else wrap(model, base, weight=weight), DATA)
        found.append(torch.rand(1).item())
        models.append(model)
    assert found[0] == found[1]
    assert_same(*models)


def test_a_state_that_was_saved_before_the_first_forward_resumes_exactly():
    model = mlp()
    optimizer = wrap(model)
    weights, state = through_a_file((model.state_dict(), optimizer.state_dict()))
    fit(optimizer, DATA)
    again = mlp(seed=8)
    other = wrap(again)
    fit(other, DATA[:1])  # it has a companion by now
    again.load_state_dict(weights)
    other.load_state_dict(state)
    fit(other, DATA)
    assert_same_networks(other, optimizer)


def test_a_state_that_is_refused_makes_no_copy():
    model, wide = mlp(), mlp(width=13)
    optimizer, other = wrap(model), wrap(wide)
    assert other.companion is not None
    with pytest.raises(ValueError, match="state of the companion has shape"):
        optimizer.load_state_dict(other.state_dict())
    load_weights(model, optimizer)
    assert_same(optimizer.companion, model)


# ---- layers that functions, lists and globals hold -------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, _, self.head = mlp()

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def compile_a_layer(model):
    model.body.forward = torch.compile(model.body.forward, backend="eager")


def hold_it_in_a_function(model):
    """As minGPT's ``mlpf`` holds layers."""
    body = model.body
    model.body.forward = lambda x: F.linear(x, body.weight, body.bias)


class Borrowing(nn.Module):
    """Has a layer, and borrows another."""

    def __init__(self):
        super().__init__()
        self.body = mlp()[0]

    def forward(self, x, head=None):
        return (HEADS[0] if head is None else head)(torch.tanh(self.body(x)))


HEADS = [mlp()[2]]


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, *self.layers = mlp()  # whose copies no one would train

    def forward(self, x):
        for layer in (self.body, *self.layers):
            x = layer(x)
        return x


HELD = {
    "a compiled forward": (Network, compile_a_layer, [], "the model's 'body.weight'"),
    "a function": (Network, hold_it_in_a_function, [], "the model's 'body.weight'"),
    "a global": (Borrowing, lambda model: None, [], r"a tensor of shape \(5, 12\)"),
    "an argument": (Borrowing, lambda model: None, HEADS, r"a tensor of shape \(5, 12\)"),
    "a list": (Listing, lambda model: None, [], r"a tensor of shape \(5, 12\)"),
}


@pytest.mark.parametrize("held", HELD)
def test_a_layer_that_is_not_the_copys_own_is_refused_by_name_at_the_first_prediction(held):
    """The companion's backward pass would add to the model's gradients, or train what no optimizer steps."""
    build, change, arguments, name = HELD[held]
    model = build()
    change(model)
    base = torch.optim.SGD([*model.parameters(), *HEADS[0].parameters()], lr=0.1)
    message = rf"would train {name}, which is not its own(?s:.*)pass it as companion="
    optimizer = wrap(model, base, weight=0.0)
    with pytest.raises(RuntimeError, match=message):
        model(one()[0], *arguments)
    optimizer.detach()
    torch.compiler.reset()


def test_a_part_that_torchscript_made_is_refused_with_its_name():
    """Of which a copy shares the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        part = torch.jit.script(nn.Linear(FEATURES, CLASSES))
    model = nn.Sequential(part)
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"would train the model's '0.weight'.*torch\.jit\.script holds that layer"):
        model(torch.ones(2, FEATURES))
    optimizer.detach()


class Normalizing(Network):
    """A function holds its batch norm, which has no parameters: the copy would write to the model's statistics."""

    def __init__(self):
        super().__init__()
        self.norm = norm = nn.BatchNorm1d(12, affine=False).double()
        self.function = lambda x: torch.tanh(norm(x))

    def forward(self, x):
        return self.head(self.function(self.body(x)))


def test_a_layer_without_parameters_that_is_not_the_copys_own_is_refused_too():
    model = Normalizing()
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"(?s)writes to the model's own tensors.*pass it as companion="):
        model(one()[0])
    optimizer.detach()


def test_a_companion_whose_logits_have_no_parameter_of_its_own_is_refused():
    companion = nn.Linear(FEATURES, CLASSES).double()
    companion.forward = lambda x: torch.zeros(len(x), CLASSES).double()
    model = mlp()
    optimizer = wrap(model, companion=companion)
    with pytest.raises(RuntimeError, match="do not depend on its parameters"):
        model(one()[0])
    optimizer.detach()


# ---- the first prediction of a copy is what the model gave -----------------------------------------------------------

NOT_EQUAL = r"first prediction of dcl_optim's companion.* is not what the model gave.*reset_companion"


class Counting(nn.Module):
    """Its state is outside of modules."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        type(self).calls += 1
        return self.net(x) * type(self).calls


def test_a_first_prediction_that_is_not_the_models_is_warned_of_once():
    model = Counting()
    optimizer = wrap(model)
    with pytest.warns(UserWarning, match=NOT_EQUAL) as caught:
        model(DATA[0][0])
    assert linecache.getline(caught[0].filename, caught[0].lineno).strip() == "model(DATA[0][0])"
    fit(optimizer, DATA)
    assert len(caught) == 1


@pytest.mark.parametrize("fraction", [1, 0.5])
def test_a_copy_that_was_made_before_the_models_weights_is_warned_of(fraction):
    """Also where layers are frozen, whose weights it has as soon as the model, and where it gets a part of the rows."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model, companion_fraction=fraction)
    assert optimizer.companion is not None
    load_weights(model, optimizer)
    with pytest.warns(UserWarning, match=NOT_EQUAL):
        model(DATA[0][0])
    optimizer.reset_companion()
    fit(optimizer, DATA)
