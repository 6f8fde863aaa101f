"""torch.compile in every order; a backend without code generation keeps all but one of these fast."""

import copy
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import Network, assert_same, batch_norm_net, batches, cells, dropout_net, sgd, train
from tests.reference import CLOSE, EACH, NEAR, assert_same_training, term_of, wrap
from tests.reference import train as train_by_term

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Skipping serialization:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch's own tracer looks there
)
ORDERS = ["compiled before", "compiled after", "compiled in place", "outer module wrapped", "parallel around compiled"]
ORDERS += ["a block in place"]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they are; counts how many were compiled and how often one ran."""

    def __init__(self):
        self.compiled = self.runs = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled(order, weight=1.0, **options):
    """An optimizer, and what the script calls."""
    model = Network(batch_norm_net())
    base = sgd(model)
    call = wrapped = model
    if order in ("compiled before", "outer module wrapped", "parallel around compiled"):
        call = torch.compile(model, **options)
    if order == "parallel around compiled":
        call = nn.DataParallel(call)  # without a GPU it calls the module inside
    if order in ("outer module wrapped", "parallel around compiled"):
        wrapped = call
    optimizer = wrap("dcl", wrapped, base, weight=weight)
    if order == "compiled after":
        call = torch.compile(model, **options)
    elif order == "compiled in place":
        model.compile(**options)
    elif order == "a block in place":
        model.body.compile(**options)
    return optimizer, call


def trained(order, **options):
    optimizer, call = compiled(order, **options)
    train(call, optimizer, batches(6))
    return network_of(call), optimizer.companion


def network_of(call):
    call = getattr(call, "module", call)
    return getattr(call, "_orig_mod", call)


@pytest.mark.parametrize("order", ORDERS)
def test_compiled_equals_eager_in_whole_graphs_where_the_model_is_one(order):
    """The hooks of a class of the script's own run outside of the graph."""
    whole = order in ("compiled before", "compiled after", "outer module wrapped")
    assert_same(trained(order, backend="aot_eager", fullgraph=whole), trained("eager"), **NEAR)


@pytest.mark.parametrize("order", cells(ORDERS[:-1], "compiled after", "compiled in place"))
def test_nothing_is_compiled_again_and_the_companion_if_it_is_asked_for(order):
    backend = Backend()
    optimizer, call = compiled(order, backend=backend)
    train(call, optimizer, batches(4))
    assert (backend.compiled, backend.runs) == (1, 4)
    optimizer.companion.compile(backend=backend)
    train(call, optimizer, batches(4, seed=2))
    assert backend.compiled <= 2
    assert backend.runs == 4 + 8


def test_a_copy_with_a_compiled_model_is_regularized():
    optimizer, call = compiled("outer module wrapped", backend="aot_eager")
    train(call, optimizer, batches(2))
    twin_call, twin = copy.deepcopy((call, optimizer))
    for model, trained_by in ((call, optimizer), (twin_call, twin)):
        train(model, trained_by, batches(3, seed=2))
    assert_same(network_of(twin_call), network_of(call), **NEAR)
    assert twin.logs()["penalty"] == pytest.approx(optimizer.logs()["penalty"])


@pytest.mark.parametrize("mode", cells(["default", "reduce-overhead"], "default"))
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_with_zero_weight_equals_plain_training_of_the_compiled_model(mode):
    optimizer, call = compiled("outer module wrapped", weight=0.0, mode=mode)
    train(call, optimizer, batches(4))
    plain = Network(batch_norm_net())
    train(torch.compile(plain, mode=mode), sgd(plain), batches(4))
    assert_same(network_of(call), plain, **CLOSE)


def test_wrapped_after_the_first_compiled_call():
    model = Network(batch_norm_net())
    call = torch.compile(model, backend="aot_eager")
    call(next(iter(batches(1)))[0])
    expected = Network(batch_norm_net())
    expected.load_state_dict(model.state_dict())
    for network, called in ((model, call), (expected, expected)):
        optimizer = wrap("dcl", network)
        train(called, optimizer, batches(3))
    assert_same(model, expected, **NEAR)


@pytest.mark.parametrize("first_call", [False, True])
def test_a_bare_sequential_has_its_hooks_in_the_graph_and_never_trains_unregularized(first_call):
    model = batch_norm_net()
    call = torch.compile(model, backend="aot_eager", fullgraph=not first_call)
    x, y = next(iter(batches(1)))
    if first_call:
        call(x)
    optimizer = wrap("dcl", model)
    with pytest.raises(Exception, match=r"Hook.__call__|it was compiled and called before it was wrapped"):
        train(call, optimizer, [(x, y)])


def test_a_compiled_loss_function():
    backend = Backend()
    models = Network(batch_norm_net()), Network(batch_norm_net())
    for model in models:
        optimizer = wrap("dcl", model)
        loss_of = lambda x, y, model=model: F.cross_entropy(model(x), y)  # noqa: E731
        function = torch.compile(loss_of, backend=backend) if model is models[0] else loss_of
        for x, y in batches(3):
            optimizer.zero_grad()
            function(x, y).backward()
            optimizer.step()
    assert_same(*models, **NEAR)
    assert backend.runs >= 3


@pytest.mark.parametrize("what", ["model", "model in place", "loss function"])
@EACH
def test_the_term_compiled_equals_eager(variant, what):
    """A graph break at the term is fine."""
    compiled, runs = partial(torch.compile, backend="aot_eager"), []
    for compiles in (True, False):
        optimizer, options = wrap(variant, Network(dropout_net())), {}
        if compiles and what == "model in place":
            optimizer.model.compile(backend="aot_eager")
        elif compiles:
            options = {"call": compiled(optimizer.model)} if what == "model" else {"compiled": compiled}
        torch.manual_seed(5)
        runs.append(train_by_term(optimizer, batches(6), **options))
    assert_same_training(*runs, **CLOSE)


def train_in_one_function(variant, weight, compiled):
    """The loss and its backward pass, in one compiled function; with weight -1 of the base alone."""
    torch._dynamo.reset()
    model = Network()
    base = sgd(model)
    optimizer = base if weight < 0 else wrap(variant, model, base, weight=weight)
    term = term_of(optimizer, "line" if weight < 0 else "term")

    def backward(x, y):
        z = model(x)
        (F.cross_entropy(z, y) + term(z, y)).backward()

    call = torch.compile(backward, backend="aot_eager") if compiled else backward
    for x, y in batches(4):
        optimizer.zero_grad()
        call(x, y)
        optimizer.step()
    return model, optimizer


@EACH
def test_loss_and_backward_in_one_compiled_function(variant):
    """Dynamo does not trace the term's backward pass, of which it would warn: a warning is an error here."""
    (_, compiled), (_, eager) = (train_in_one_function(variant, 1.0, compiled) for compiled in (True, False))
    assert_same_training(compiled, eager, **CLOSE)


@pytest.mark.filterwarnings("ignore:.*TF32", "ignore:.*functional optimizers is deprecated")
def test_weight_0_under_compiled_autograd_is_the_base_bit_for_bit_and_the_companion_learns():
    """It adds up what the term's backward pass returns, which may not be None."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        (model, optimizer), (alone, _) = (train_in_one_function("dcl", weight, True) for weight in (0.0, -1.0))
    assert_same(model, alone)
    _, eager = train_in_one_function("dcl", 0.0, False)
    assert_same_training(optimizer, eager, **CLOSE)


@EACH
def test_a_compiled_step(variant):
    """PyTorch's recipe for optimizers. Dynamo would warn of what it cannot trace, and a warning is an error here."""
    trained = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = batch_norm_net()
        optimizer = wrap(variant, model)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
        for x, y in batches(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()
        trained.append(model)
    assert_same(*trained, **CLOSE)
