"""Every optimizer of pytorch_optimizer and timm as the base: it trains as alone, or says why it cannot."""

import copy
from functools import partial

import pytest
import pytorch_optimizer
import timm.optim
import torch

from tests.helpers import (
    assert_same,
    assert_same_networks,
    batches,
    cells,
    fit,
    matrices_and_others,
    mlp,
    sgd,
    through_a_file,
    train,
    wrap,
)
from tests.integrations import in_training_mode
from tests.reference import train_by_hand

pytestmark = pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum':UserWarning:timm")

# What step alone cannot serve: named, so that a new release that changes it shows here.
NEED_A_MODULE = {"adalomo", "adammini", "lomo"}  # of which AdamMini serves
NEED_SECOND_ORDER = {"adahessian", "sophiah"}
NEED_A_CLOSURE = {"alig", "bsam", "lbfgs"}
NEED_MORE_INSTALLED = {"demo", "distributedmuon"}  # einops; a process group
HAVE_A_STATE_FROM_THE_START = {"sara", "spam"}  # by parameters, which a copy begins without
DIVIDE_BY_THEIR_FIRST_GRADIENT = {"dadaptadan", "dadaptsgd"}  # and the companion's is close to zero
APART = NEED_A_MODULE | NEED_SECOND_ORDER | NEED_A_CLOSURE | NEED_MORE_INSTALLED | HAVE_A_STATE_FROM_THE_START
APART |= DIVIDE_BY_THEIR_FIRST_GRADIENT
SERVED = [name for name in pytorch_optimizer.get_supported_optimizers() if name not in APART]
DRAWING = {"dash", "gravity", "kron", "magma"}  # steps that draw random numbers: two loops never meet the same ones
IN_FLOAT32_ONLY = {"fadam"}
SETS_ITS_RATE = {"asgd"}  # and the companion's optimizer follows it
ILL_CONDITIONED = {"soap"}  # the eigenvectors of tiny gradients: 1e-15 in a weight by hand becomes 1e-2 in ten steps
NOT_BY_HAND = DRAWING | IN_FLOAT32_ONLY | SETS_ITS_RATE | ILL_CONDITIONED
REPRODUCIBLE = [name for name in SERVED if name not in NOT_BY_HAND]
STATE_OF_OTHER_TYPES = {"adashift", "conda", "scalableshampoo", "scion", "scionlight"}  # not for weights_only=True
WITH_TWO_KINDS_OF_GROUPS = {"adago", "adamuon", "muon", "muonclip", "normuon"}
REPRESENTATIVES = (
    "aggmo",  # momentum, several in a list
    "adan",  # adaptive, with the last gradient in its state
    "lion",  # signs
    "lars",  # norms of whole layers
    "muon",  # orthogonalised, in two kinds of groups
    "soap",  # preconditioned
    "prodigy",  # state in its groups
    "schedulefreeadamw",
    "kron",  # draws
    "fadam",  # in float32 only
    "magma",  # wraps another one in its state
)

STEPS = {"adashift": 30}  # it waits for gradients of ten steps, twice; the others 14

SETTINGS = {"weight": 0.3, "alpha": 0.6}


def build(name, model):
    optimizer_class = pytorch_optimizer.load_optimizer(name)
    matrices, others = matrices_and_others(model)
    if name in WITH_TWO_KINDS_OF_GROUPS:
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        return optimizer_class(groups)
    if name == "spectralsphere":
        return optimizer_class(matrices)
    if name == "kron":
        return optimizer_class(model.parameters(), balance_prob=0.0)  # NumPy's draws are not put back
    if name == "ranger21":
        return optimizer_class(model.parameters(), num_iterations=12)
    return optimizer_class(model.parameters())


def is_moved(network):
    first = dict(mlp(dtype=next(network.parameters()).dtype).named_parameters())
    return all((p - first[name]).abs().max() > 0.0 for name, p in network.named_parameters() if p.ndim == 2)


def assert_trained_alike(first, second, steps):
    """Train two models by their optimizers, from the same random draws, and compare them bit for bit."""
    for model, optimizer in (first, second):
        torch.manual_seed(7)
        train(model, optimizer, batches(steps, dtype=torch.float32))
    assert_same(first[0], second[0])


@pytest.mark.parametrize("name", cells(SERVED, *REPRESENTATIVES))
def test_with_weight_zero_the_run_is_the_base_optimizers_bit_for_bit(name):
    plain, model = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    base = in_training_mode(build(name, plain))
    optimizer = in_training_mode(wrap(model, build(name, model), weight=0.0))
    assert_trained_alike((plain, base), (model, optimizer), steps=12)
    assert is_moved(plain)


@pytest.mark.parametrize("name", cells(REPRODUCIBLE, *(name for name in REPRESENTATIVES if name in REPRODUCIBLE)))
def test_both_networks_train_as_two_optimizers_built_by_hand_do(name):
    model, data = mlp(), list(batches(STEPS.get(name, 14)))
    optimizer = in_training_mode(wrap(model, build(name, model), **SETTINGS))
    hand = train_by_hand(mlp(), lambda network: in_training_mode(build(name, network)), data, **SETTINGS)
    train(model, optimizer, data)
    assert_same(hand, (model, optimizer.companion), atol=1e-9)
    assert is_moved(optimizer.companion)


@pytest.mark.parametrize("name", cells(SERVED, *REPRESENTATIVES))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name):
    model, data = mlp(dtype=torch.float32), list(batches(STEPS.get(name, 14), dtype=torch.float32))
    resumed = copy.deepcopy(model)
    optimizer = in_training_mode(wrap(model, build(name, model), **SETTINGS))
    torch.manual_seed(7)
    train(model, optimizer, data[:8])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    state = through_a_file(state, weights_only=name not in STATE_OF_OTHER_TYPES)
    train(model, optimizer, data[8:])

    second = wrap(resumed, build(name, resumed), **SETTINGS)
    resumed.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    fit(second, data[8:])
    assert_same_networks(optimizer, second)
    assert is_moved(second.companion)


def test_a_base_that_is_built_from_a_module_trains_the_companion_as_one_built_from_that():
    model, make = mlp(), partial(pytorch_optimizer.AdamMini, lr=0.01)
    optimizer = wrap(model, make(model), **SETTINGS)
    fit(optimizer, batches(14))
    hand = train_by_hand(mlp(), make, batches(14), **SETTINGS)
    assert_same(hand, (model, optimizer.companion), atol=1e-9)
    assert is_moved(optimizer.companion)


WRAPPERS = {
    "Lookahead": pytorch_optimizer.Lookahead,
    "OrthoGrad": pytorch_optimizer.OrthoGrad,
    "TRAC": pytorch_optimizer.TRAC,
    "PCGrad": pytorch_optimizer.PCGrad,
    "timm's Lookahead": timm.optim.Lookahead,
}


# Lookahead's copy is refused, as tested above; PCGrad is no optimizer that a script could make.
WAYS = [(name, "copied") for name in WRAPPERS if name != "Lookahead"]
WAYS += [(name, "made by the script") for name in WRAPPERS if name != "PCGrad"]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_wrapper_of_an_optimizer_trains_both_networks(name, way):
    def make(weights):
        return WRAPPERS[name](torch.optim.SGD(weights, lr=0.1))

    model, data = mlp(), list(batches(14))  # past the slow weights' first two updates
    optimizer = wrap(model, make(model.parameters()), weight=0.3, companion_optimizer=None if way == "copied" else make)
    fit(optimizer, data)
    hand = train_by_hand(mlp(), lambda network: make(network.parameters()), data, weight=0.3)
    assert_same(hand, (model, optimizer.companion), atol=1e-9)


@pytest.mark.parametrize("lookahead", [timm.optim.Lookahead, pytorch_optimizer.Lookahead])
def test_lookahead_may_wrap_the_dcl_optimizer(lookahead):
    theirs, model = mlp(), mlp()
    inner = wrap(model, weight=0.3)
    train(model, lookahead(inner, k=3), batches(7))
    hand = train_by_hand(
        theirs,
        lambda network: lookahead(sgd(network), k=3) if network is theirs else sgd(network),
        batches(7),
        weight=0.3,
    )
    assert_same(hand, (model, inner.companion), atol=1e-12)
