"""What a script does to the model in the middle of a run, and the companion follows: place, mode, frozen layers."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim.distances import mse
from tests.helpers import (
    CLASSES,
    FEATURES,
    MODELS,
    assert_same,
    assert_same_networks,
    batch_norm_net,
    batches,
    fit,
    mlp,
    one,
    sgd,
    train,
    wrap,
)
from tests.reference import EACH_WAY, NEAR, Rounded, dcl_step, train_by_hand

DATA = list(batches(5))
AGAIN = r"trains other parameters than before.*the companion is copied from the model again"


def flat(module):
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


# ---- device, dtype and mode ------------------------------------------------------------------------------------------


def unfrozen(by_hand):
    """Train, unfreeze a layer, and train on: with a companion that the script resets, or not."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    fit(optimizer, DATA[:2])
    model[0].requires_grad_(True)
    if by_hand:
        optimizer.reset_companion()
    with nullcontext([]) if by_hand else pytest.warns(UserWarning, match=AGAIN) as caught:
        fit(optimizer, DATA[2:])
    assert len(caught) == (not by_hand)
    return optimizer


def test_the_companion_is_copied_again_when_a_layer_is_unfrozen():
    """As by hand, and said once; test_model_structure adds groups."""
    assert_same_networks(unfrozen(by_hand=False), unfrozen(by_hand=True))


@pytest.mark.parametrize("loaded", [True, False])
def test_of_a_model_that_is_converted_in_mid_run_there_is_another_copy_and_a_warning(loaded):
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, DATA[:2])
    if loaded:
        again = wrap(model)
        again.load_state_dict(optimizer.state_dict())
        optimizer.detach()
        optimizer = again
    model.float()
    expected = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="the model was moved: the companion is copied from the model again"):
        train(model, optimizer, [(DATA[2][0].float(), DATA[2][1])])
    assert optimizer.logs()["penalty"] == 0
    assert_same(optimizer.companion, expected)


def test_layers_that_are_frozen_in_turn_keep_their_companion():
    """As block-coordinate training and GANs freeze them; the written-out loop with a companion that is frozen too."""
    model, hand = mlp(), mlp()
    companion = copy.deepcopy(hand)
    optimizer, base, second = wrap(model), sgd(hand), sgd(companion)
    fit(optimizer, DATA[:1])
    dcl_step(hand, companion, base, second, *DATA[0], F.cross_entropy, mse)
    for step, (x, y) in enumerate(batches(12, seed=4)):
        frozen = step // 2 % 2 * 2
        for network in (model, hand, companion):
            network.requires_grad_(True)
            network[frozen].requires_grad_(False)
        before = copy.deepcopy(optimizer.companion[frozen])
        fit(optimizer, [(x, y)])
        assert_same(optimizer.companion[frozen], before)
        dcl_step(hand, companion, base, second, x, y, F.cross_entropy, mse)
        assert optimizer.logs()["penalty"] > 0
    assert_same((model, optimizer.companion), (hand, companion), **NEAR)


def test_modes_are_mirrored_module_by_module():
    model = batch_norm_net()
    optimizer = wrap(model)
    model[1].eval()  # the frozen batch norm of fine-tuning scripts
    fit(optimizer, batches(2))
    assert optimizer.companion[0].training
    assert not optimizer.companion[1].training
    assert optimizer.companion[1].num_batches_tracked == 0
    model[1].train()
    optimizer.companion.eval()
    fit(optimizer, batches(2))
    assert optimizer.companion[1].num_batches_tracked == 2


# ---- a companion that was given stays --------------------------------------------------------------------------------


class Elsewhere(nn.Module):
    """A companion on another device or of another dtype, which moves its inputs itself."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        logits = self.network(x.to(next(self.network.parameters())))
        return logits


@pytest.mark.parametrize(("name", "dtype"), [("mlp", torch.float32), ("batch_norm", torch.bfloat16)])
def test_a_given_companion_of_its_own_dtype_is_the_reference_and_stays(name, dtype):
    model, hand, start = MODELS[name](), MODELS[name](), MODELS[name]()
    optimizer = wrap(model, companion=Elsewhere(copy.deepcopy(model).to(dtype)))
    companion = Elsewhere(Rounded(copy.deepcopy(hand), dtype))
    fit(optimizer, batches(20))
    train_by_hand(hand, sgd, batches(20), companion)
    assert_same(model, hand, rtol=1e-3, atol=1e-4)
    weights = nn.ParameterList(optimizer.companion_optimizer.param_groups[0]["params"])
    assert (flat(weights) - flat(companion)).norm() < 0.1 * (flat(companion) - flat(start)).norm()
    model.float()
    model(torch.zeros(4, FEATURES))
    assert {parameter.dtype for parameter in optimizer.companion.parameters()} == {dtype}


def test_a_given_companion_shares_what_is_frozen_and_trains_what_the_base_does():
    """Of a whole copy under a base of the head alone, the body is as untrained as the model's."""
    model = mlp()
    model[0].requires_grad_(False)
    sharing = nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, CLASSES).double())
    optimizer = wrap(model, companion=sharing)
    fit(optimizer, batches(2))
    assert optimizer.companion[0] is model[0]

    model = mlp()
    whole = copy.deepcopy(model)
    train(
        model,
        wrap(model, sgd(model[2]), companion=whole),
        DATA,
    )
    assert_same(whole[0], mlp()[0])
    assert not torch.equal(whole[2].weight, mlp()[2].weight)


def test_a_given_companion_that_shares_what_is_unfrozen_is_refused():
    """Its backward pass would add to the model's gradients."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model, companion=nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, CLASSES).double()))
    fit(optimizer, batches(2))
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"companion would train the model's '0.weight', which is not its own"):
        fit(optimizer, batches(1))


# ---- what the base does not train is shared --------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_base_does_not_train_is_shared_and_not_saved(frozen):
    """Frozen parameters are the very same; others, which may get gradients of the script's, share their memory."""
    model = mlp()
    model[0].requires_grad_(not frozen)
    optimizer = wrap(model, sgd(model[2]), weight=0.0)
    alone = copy.deepcopy(model)
    base = sgd(alone[2])
    for batch in DATA:
        fit(optimizer, [batch])
        train(alone, base, [batch])
        for network in (model, alone):
            network[0].weight.data.mul_(0.9)  # a teacher that the script moves
    model(DATA[0][0])
    ours, theirs = optimizer.companion[0].weight, model[0].weight
    assert (ours is theirs) == frozen
    assert ours.data_ptr() == theirs.data_ptr()
    assert not ours.requires_grad
    for trained, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_same(trained, expected)
        assert frozen or torch.equal(trained.grad, expected.grad)
    saved = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    assert set(saved) == {"2.weight", "2.bias"}
    optimizer.load_state_dict(optimizer.state_dict())


# ---- frozen parameters that the forward pass writes to ---------------------------------------------------------------


class MoCo(nn.Module):
    """Logits with those of a key encoder, which follows the encoder in each forward pass."""

    def __init__(self, in_place=True):
        super().__init__()
        self.net, self.keys, self.in_place = mlp(), mlp(), in_place
        self.keys.requires_grad_(False)
        self.still = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.keys.parameters(), self.net.parameters(), strict=True):
                if self.in_place:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                else:
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
        return self.net(x) + self.keys(x) * self.still


@pytest.mark.parametrize("in_place", [True, False])
def test_frozen_parameters_that_the_forward_writes_to_are_refused(in_place):
    model = MoCo(in_place)
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"writes to the model's own tensors.*, or pass companion="):
        model(one()[0])
    optimizer.detach()


class Statistics(nn.Module):
    """Keeps a running mean in a frozen parameter, and writes to its data, which torch does not count."""

    def __init__(self, rate):
        super().__init__()
        self.net, self.rate = mlp(), rate
        self.mean = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64), requires_grad=False)
        self.table = nn.Parameter(torch.tensor([torch.nan, -torch.inf]), requires_grad=False)
        self.codes = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        self.mean.data.lerp_(x.mean(0), self.rate)
        return self.net(x - self.mean)


def test_frozen_parameters_whose_data_the_forward_writes_to_are_refused():
    """The companion would write to them a second time. With a rate of 0 nothing changes."""
    model = Statistics(0.1)
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"writes to the model's own tensors.*, or pass companion="):
        model(one()[0])
    optimizer.detach()
    still = Statistics(0.0)
    train(still, wrap(still), DATA)
    alone, given = Statistics(0.1), Statistics(0.1)
    train(alone, sgd(alone), DATA)
    train(given, wrap(given, weight=0.0, companion=copy.deepcopy(given)), DATA)
    assert_same(given.net, alone.net)


# ---- what a forward pass leaves outside of its output ----------------------------------------------------------------

REGISTRY = []


class Regular(nn.Module):
    """Puts a term of the loss into a list that is no part of the model."""

    def __init__(self, of):
        super().__init__()
        self.net, self.of = mlp(), of

    def forward(self, x):
        hidden = self.net[:2](x)
        REGISTRY.append(self.net[0].weight.abs().mean() if self.of == "weights" else hidden.square().mean())
        return self.net[2:](hidden)


@pytest.mark.guard
@EACH_WAY
@pytest.mark.parametrize("of", ["weights", "activations"])
def test_a_term_that_a_list_outside_of_the_model_has_twice_is_an_error_that_names_it(of, way):
    model = Regular(of)
    optimizer = wrap(model, weight=0.0)
    (x, y) = one()
    z = model(x)
    loss = F.cross_entropy(z, y) + 0.1 * sum(REGISTRY)
    REGISTRY.clear()
    if way == "term":
        loss = loss + optimizer.penalty(z)
    with pytest.raises(RuntimeError, match=r"gradients to the companion: .*global variable.*\n  Fix: return them"):
        loss.backward()
    optimizer.detach()


def test_a_given_companion_begins_without_the_gradients_of_the_script():
    found = []
    for has_gradients in (True, False):
        model, companion = mlp(), mlp(1)
        if has_gradients:
            F.cross_entropy(companion(one()[0]), one()[1]).backward()
        optimizer = wrap(model, companion=companion)
        fit(optimizer, DATA)
        found.append(optimizer)
    assert_same_networks(*found)


def test_a_model_whose_parameters_are_another_list_trains():
    class Listed(nn.Linear):
        """As a MAML script: ``parameters`` gives those of the inner loop, as a list."""

        def parameters(self, recurse=True):
            return [self.weight]

    model = Listed(FEATURES, CLASSES).double()
    model.bias.requires_grad_(False)
    optimizer = wrap(model)
    fit(optimizer, batches(3))
    assert optimizer.logs()["penalty"] > 0
