"""The companion: what it is made of, what it shares, what it learns from, and the outputs it can follow."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from dcl_optim.companion import Companion
from dcl_optim.loss.outputs import find_logits
from tests.helpers import CLASSES, FEATURES, assert_same, batch_norm_net, batches, dropout_net, mlp, train


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def wrap(model, **options):
    return DCLOptimizer(sgd(model), model, **{"weight": 1.0} | options)


# ---- random draws ----------------------------------------------------------------------------------------------------


def test_layers_that_draw_from_a_generator_of_their_own():
    """The companion has a copy of it, which draws the same by itself."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.generator, self.drawn = mlp(), torch.Generator().manual_seed(3), []

        def forward(self, x):
            self.drawn.append(torch.rand(x.shape, generator=self.generator))
            return self.body(x + self.drawn[-1])

    model = Noisy()
    optimizer = wrap(model)
    train(model, optimizer, batches(4))
    assert len(model.drawn) == 4
    assert_same(model.drawn, optimizer.companion.drawn)


def test_the_script_draws_from_its_stream_as_if_no_companion_ran():
    """Between the forward and the backward, too."""
    found = []
    for wrapped in (True, False):
        model, drawn = dropout_net(), []
        optimizer = wrap(model) if wrapped else sgd(model)
        torch.manual_seed(4)
        for x, y in batches(4):
            optimizer.zero_grad()
            z = model(x)
            drawn.append(torch.rand(2))
            F.cross_entropy(z, y).backward()
            drawn.append(torch.rand(2))
            optimizer.step()
            drawn.append(torch.rand(2))
        found.append(drawn)
    assert_same(*found)


# ---- how it is made -------------------------------------------------------------------------------------------------


def test_copy_starts_equal_and_apart():
    model = batch_norm_net()
    optimizer = wrap(model)
    assert_same(model, optimizer.companion)
    ours, theirs = dict(optimizer.companion.named_parameters()), dict(model.named_parameters())
    assert all(ours[name].data_ptr() != theirs[name].data_ptr() for name in theirs)
    assert optimizer.companion[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()
    assert not optimizer.companion._forward_hooks


def test_frozen_parameters_are_shared_and_not_saved():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    assert optimizer.companion[0].weight is model[0].weight
    train(model, optimizer, batches(3))
    assert model[0].weight.grad is None
    saved = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    assert set(saved) == {"2.weight", "2.bias"}
    optimizer.load_state_dict(optimizer.state_dict())


def test_frozen_parameters_that_train_later_are_copied_then():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)  # the whole model is in the optimizer, as many scripts have it
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    reference = mlp()
    train(model, optimizer, batches(3))
    assert optimizer.companion[0].weight is not model[0].weight
    assert not torch.equal(optimizer.companion[0].weight, reference[0].weight)
    assert not torch.equal(optimizer.companion[0].weight, model[0].weight)


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


def small() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(FEATURES, CLASSES)).double()


def test_other_architecture_as_module_and_as_callable():
    states = []
    for companion in (small(), small):
        model = mlp()
        optimizer = wrap(model, companion=companion)
        train(model, optimizer, batches(10))
        assert not torch.equal(optimizer.companion[0].weight, small()[0].weight)
        states.append((model, optimizer.companion))
    assert_same(states[0][0], states[1][0])
    assert_same(states[0][1], states[1][1])


def test_other_architecture_equals_the_loop_written_out():
    from dcl_optim.reference import dcl_step

    model, theirs, companion = mlp(), mlp(), small()
    optimizer = wrap(model, companion=small(), companion_lr_scale=0.5)
    train(model, optimizer, batches(20))
    plain, chasing = sgd(theirs), sgd(companion, lr=0.05)
    for x, y in batches(20):
        dcl_step(theirs, companion, plain, chasing, x, y, F.cross_entropy, F.mse_loss)
    assert_same(model, theirs, rtol=1e-9, atol=1e-10)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-10)


def test_companion_optimizer_of_its_own():
    model = mlp()
    optimizer = wrap(model, companion_optimizer=partial(torch.optim.AdamW, lr=0.02))
    assert isinstance(optimizer.companion_optimizer, torch.optim.AdamW)
    optimizer.param_groups[0]["lr"] = 0.7
    train(model, optimizer, batches(2))
    assert optimizer.companion_optimizer.param_groups[0]["lr"] == 0.02

    given = small()
    own = torch.optim.Adam(given.parameters(), lr=0.3)
    model = mlp()
    optimizer = wrap(model, companion=given, companion_optimizer=own)
    assert optimizer.companion_optimizer is own
    train(model, optimizer, batches(2))
    assert own.state


def test_base_class_that_cannot_be_built_again():
    class Odd(torch.optim.SGD):
        def __init__(self, params, required):
            super().__init__(params, lr=0.1)

    model = mlp()
    with pytest.raises(ValueError, match=r"second Odd for the companion could not be built.*companion_optimizer="):
        DCLOptimizer(Odd(model.parameters(), required=1), model, weight=1.0)
    assert not model._forward_hooks
    optimizer = DCLOptimizer(
        Odd(model.parameters(), required=1), model, companion_optimizer=partial(torch.optim.SGD, lr=0.1), weight=1.0
    )
    train(model, optimizer, batches(2))


def test_model_that_cannot_be_copied():
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)).double()
    model.uncopyable = (i for i in range(3))
    uncopied = wrap(model)
    with pytest.raises(RuntimeError, match=r"could not be made as a copy.*pass it as companion="):
        train(model, uncopied, batches(1))
    optimizer = wrap(model, companion=small())
    train(model, optimizer, batches(2))


# ---- modes, fraction ------------------------------------------------------------------------------------------------


def test_modes_are_mirrored_module_by_module():
    model = batch_norm_net()
    optimizer = wrap(model)
    model[1].eval()  # the frozen batch norm of fine-tuning scripts
    train(model, optimizer, batches(2))
    assert optimizer.companion[0].training
    assert not optimizer.companion[1].training
    assert optimizer.companion[1].num_batches_tracked == 0
    model[1].train()
    train(model, optimizer, batches(2))
    assert optimizer.companion[1].num_batches_tracked == 2


def test_fraction_learns_from_the_first_rows_and_holds_all():
    model, companion = mlp(), mlp(seed=4)
    optimizer = wrap(model, companion=copy.deepcopy(companion), companion_fraction=0.25, alpha=0.6, loss_scale=1.0)
    x, y = next(iter(batches(1, size=16)))
    theirs = mlp()
    z, c = theirs(x), companion(x)
    (F.cross_entropy(z, y) + F.mse_loss(z, c.detach())).backward()
    F.mse_loss(c[:4], 0.6 * c[:4].detach() + 0.4 * z[:4].detach()).backward()
    train(model, optimizer, [(x, y)])
    sgd(theirs).step()
    sgd(companion).step()
    assert_same(model, theirs, rtol=1e-12, atol=1e-14)
    assert_same(optimizer.companion, companion, rtol=1e-12, atol=1e-14)


def test_fraction_keeps_at_least_two_rows_for_batch_norm():
    model = batch_norm_net()
    optimizer = wrap(model, companion_fraction=0.01)
    train(model, optimizer, batches(2))
    last = wrap(other := batch_norm_net(), companion_fraction=0.95)  # 15 of 16 would leave one row
    train(other, last, batches(2))


def test_fraction_of_one_is_the_whole_batch():
    results = []
    for fraction in (1.0, 1):
        model = batch_norm_net()
        optimizer = wrap(model, companion_fraction=fraction)
        train(model, optimizer, batches(3))
        results.append(optimizer.companion)
    assert_same(results[0], results[1])


# ---- outputs --------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


class Wrapped(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.net, self.form = mlp(), form

    def forward(self, x, *, scale=1.0):
        return self.form(self.net(x * scale))


FORMS = {
    "tuple": (lambda z: (z, z.detach()), lambda out: out[0], None),
    "mapping": (lambda z: {"logits": z, "other": 1}, lambda out: out["logits"], None),
    "segmentation": (lambda z: {"out": z, "aux": z.detach()}, lambda out: out["out"], None),
    "dataclass": (lambda z: Output(z, z), lambda out: out.logits, None),
    "function": (lambda z: {"deep": [z]}, lambda out: out["deep"][0], lambda out: out["deep"][0]),
}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_that_are_not_a_tensor(name):
    form, pick, logits = FORMS[name]
    model, bare = Wrapped(form), mlp()
    optimizer = wrap(model, logits=logits)
    reference = wrap(bare)
    for x, y in batches(5):
        for m, o, get in ((model, optimizer, pick), (bare, reference, lambda z: z)):
            o.zero_grad()
            out = m(x, scale=1.0) if m is model else m(x)
            F.cross_entropy(get(out), y).backward()
            o.step()
    assert_same(model.net, bare)
    assert_same(optimizer.companion.net, reference.companion)


@pytest.mark.parametrize("output", [{"deep": 1}, (), "text", torch.tensor(1.0), torch.zeros(3, dtype=torch.long)])
def test_outputs_without_logits_name_the_mend(output):
    with pytest.raises(TypeError, match="pass logits="):
        find_logits(output)


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, CLASSES, 3, padding=1).double()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


SHAPES = {
    "dense": (dense, (4, 2, 5, 6), {"class_dim": 1}),
    "sequence": (lambda: Sequence().double(), (4, 7, 3), {"class_dim": -1}),
    "reconstruction": (lambda: nn.Conv2d(2, 2, 3, padding=1).double(), (4, 2, 5, 6), {"class_dim": 1}),
    "regression": (lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double(), (4, 3), {}),
}


@pytest.mark.parametrize("distance", ["mse", "kl", "infonce"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_output_shape(shape, distance):
    """The penalty's gradient on the weights is that of the distance between rows, classes last."""
    from dcl_optim.distances import resolve_distance, to_rows

    build, size, options = SHAPES[shape]
    model, companion = build(), build()
    for p in companion.parameters():
        p.data += 0.1
    alone = copy.deepcopy(model)
    x = torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrap(model, companion=companion, distance=distance, loss_scale=1.0, **options)  # dies at once: no penalty
    optimizer = wrap(model, companion=companion, distance=distance, loss_scale=1.0, **options)
    model(x).square().mean().backward()
    z, c = alone(x), companion(x).detach()
    dim = options.get("class_dim", 1)
    delta = resolve_distance(distance)(to_rows(z, dim), to_rows(c, dim))
    (z.square().mean() + delta).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    optimizer.step()


def test_companion_of_another_output_shape():
    model = mlp()
    optimizer = wrap(model, companion=nn.Linear(FEATURES, CLASSES + 1).double())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"companion gives logits of shape \(16, 6\) where the model gives \(16, 5\)"):
        train(model, optimizer, batches(1))
    assert_same(model.state_dict(), before)


def test_fraction_needs_the_batch_first():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, offset):
            return self.net(x) + offset

    model = Flat()
    optimizer = wrap(model, companion_fraction=0.5)
    x, y = next(iter(batches(1)))
    offset = torch.zeros(16, CLASSES, dtype=torch.float64)
    F.cross_entropy(model(x, offset), y).backward()
    optimizer.step()
    del optimizer

    doubling = nn.Sequential(nn.Linear(FEATURES, 2 * CLASSES), nn.Unflatten(1, (2, CLASSES)), nn.Flatten(0, 1)).double()
    optimizer = wrap(doubling, companion_fraction=0.5)
    with pytest.raises(ValueError, match=r"companion_fraction=0.5 .*of the 32 rows of no input"):
        optimizer.model(x)  # 32 rows from 16 inputs: no row knows its input


# ---- moving ---------------------------------------------------------------------------------------------------------


def test_model_moved_to_another_dtype_after_wrapping():
    model = mlp(dtype=torch.float32)
    optimizer = wrap(model)
    train(model, optimizer, batches(2, dtype=torch.float32))
    model.double()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    train(model, optimizer, batches(2))
    assert optimizer.companion[0].weight.dtype == torch.float64
    buffers = [state["momentum_buffer"].dtype for state in optimizer.companion_optimizer.state.values()]
    assert set(buffers) == {torch.float64}


@pytest.mark.gpu
def test_cuda_equals_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model = batch_norm_net().to(device)
        optimizer = wrap(model)
        train(model, optimizer, [(x.to(device), y.to(device)) for x, y in batches(20)])
        results.append(copy.deepcopy(optimizer.companion).cpu())
    assert_same(results[0], results[1], rtol=1e-8, atol=1e-9)


def test_companion_is_a_forecaster_on_its_own():
    model = mlp()
    forecaster = Companion(model, sgd(model), find_logits)
    assert_same(forecaster.module, model)
