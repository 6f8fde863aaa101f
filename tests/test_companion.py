"""The companion: what it predicts and learns, random draws, outputs that it can follow, errors that name it."""

from __future__ import annotations

import copy
import sys
import weakref
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, distances
from dcl_optim.companion import Companion
from dcl_optim.distances import mse, to_rows
from dcl_optim.loss.outputs import find_logits
from dcl_optim.reference import dcl_step
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    backward,
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


def test_companion_is_a_forecaster_on_its_own():
    model = mlp()
    forecaster = Companion(model, sgd(model), find_logits)
    assert_same(forecaster.module, model)


# ---- learning --------------------------------------------------------------------------------------------------------


def by_backward(loss: Tensor, model: nn.Module) -> None:
    loss.backward()


def by_grad(loss: Tensor, model: nn.Module) -> None:
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("bring", [by_backward, by_grad])
def test_the_companions_backward_runs_when_the_models_has_ended(bring):
    """Its gradient, of Equation 4, is there before the step, and nothing holds on to its graph."""
    model, companion = mlp(), mlp(seed=3)
    optimizer = wrap(model, companion=copy.deepcopy(companion), alpha=0.25)
    x, y = one()
    z, c = model(x), companion(x)
    F.mse_loss(c, 0.25 * c.detach() + 0.75 * z.detach()).backward()
    logits = []
    optimizer.companion.register_forward_hook(lambda module, inputs, output: logits.append(weakref.ref(output)))
    loss = F.cross_entropy(model(x), y)
    assert logits[0]() is not None
    assert all(parameter.grad is None for parameter in optimizer.companion.parameters())
    bring(loss, model)
    assert logits[0]() is None
    for ours, expected in zip(optimizer.companion.parameters(), companion.parameters(), strict=True):
        assert_same(ours.grad, expected.grad, rtol=1e-10, atol=1e-13)
    optimizer.step()
    assert all(parameter.grad is None for parameter in optimizer.companion.parameters())


@pytest.mark.parametrize("parts", [1, 2])
def test_the_buffer_of_the_inputs_may_be_refilled_before_the_step(parts):
    """As a loader's does that hands out one array; the step may also never come, and the batch is given up then."""
    runs = []
    for refills in (False, True):
        model, buffer = mlp(), numpy.zeros((16 // parts, FEATURES))
        optimizer = wrap(model)
        for step, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                inputs = buffer if refills else numpy.empty(rows.shape)
                inputs[:] = rows
                (F.cross_entropy(model(torch.from_numpy(inputs)), labels) / parts).backward()
                if refills:
                    inputs[:] = 1000.0
            if step % 3 != 1:
                optimizer.step()
        runs.append((model.state_dict(), optimizer.companion.state_dict(), optimizer.state_dict()))
    assert_same(*runs)


# ---- random draws ----------------------------------------------------------------------------------------------------


def test_companion_replays_the_models_draws():
    model = dropout_net()
    optimizer = wrap(model)
    x, y = one()
    backward(model, x, y)
    assert optimizer.penalty == 0.0, "same weights and same masks give the same logits"


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


@pytest.mark.parametrize("draws", ["as many", "more"])
def test_random_streams_are_left_as_without_the_companion(draws):
    model = dropout_net()
    companion = None if draws == "as many" else nn.Sequential(nn.Dropout(0.1), dropout_net(seed=3))
    alone = dropout_net()
    x, _ = one()
    torch.manual_seed(4)
    alone(x)
    expected = torch.get_rng_state()
    with wrap(model, companion=companion):
        torch.manual_seed(4)
        model(x)
    assert torch.equal(torch.get_rng_state(), expected)


# ---- another architecture --------------------------------------------------------------------------------------------


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
    model, theirs, companion = mlp(), mlp(), small()
    optimizer = wrap(model, companion=small(), companion_lr_scale=0.5)
    train(model, optimizer, batches(20))
    plain, second = sgd(theirs), sgd(companion, lr=0.05)
    for x, y in batches(20):
        dcl_step(theirs, companion, plain, second, x, y, F.cross_entropy, mse)
    assert_same(model, theirs, rtol=1e-9, atol=1e-10)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-10)


# ---- outputs ---------------------------------------------------------------------------------------------------------


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
def test_outputs_without_logits_name_the_fix(output):
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
    delta = getattr(distances, distance)(to_rows(z, dim), to_rows(c, dim))
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


@pytest.mark.gpu
def test_cuda_equals_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model = batch_norm_net().to(device)
        optimizer = wrap(model)
        train(model, optimizer, [(x.to(device), y.to(device)) for x, y in batches(20)])
        results.append(copy.deepcopy(optimizer.companion).cpu())
    assert_same(results[0], results[1], rtol=1e-8, atol=1e-9)


# ---- weights that are loaded in the middle of a run, and a new companion ---------------------------------------------

LOADED = r"(?s)weights were loaded into the model since.*optimizer\.reset_companion\(\)"


def test_weights_loaded_in_mid_run_are_warned_of_once_and_the_companion_can_start_anew() -> None:
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
def test_weights_loaded_with_the_optimizers_state_or_before_training_bring_no_warning(
    model_first: bool,
) -> None:
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
    with pytest.raises(RuntimeError, match=r"given as a module.*load weights into it"):
        given.reset_companion()


# ---- errors in the companion -----------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
def test_an_error_in_the_companions_forward_says_where_it_is_from():
    model = mlp()
    optimizer = wrap(model)
    x, _ = one()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

    handle = optimizer.companion[1].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x)
    assert ["optimizer.companion" in note for note in caught.value.__notes__] == [True]
    handle.remove()
    model[1].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x)
    assert not hasattr(caught.value, "__notes__")


class Stateful(nn.Module):
    """Keeps its hidden state in an attribute, which the script detaches after each chunk of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        output, self.hidden = self.rnn(x, self.hidden)
        return self.head(output)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_hidden_state_in_an_attribute_of_the_companion_is_named(detaches):
    model = Stateful()
    optimizer = DCLOptimizer(sgd(model), model)

    def chunk() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 5, 3)).flatten(0, 1), torch.randint(4, (10,))).backward()
        optimizer.step()
        model.hidden = model.hidden.detach()
        if detaches:
            optimizer.companion.hidden = optimizer.companion.hidden.detach()

    chunk()
    if detaches:
        chunk()
        return
    with pytest.raises(RuntimeError, match="a second time") as caught:
        chunk()
    if hasattr(caught.value, "__notes__"):  # from Python 3.11 on
        assert "it has to do so on optimizer.companion too" in caught.value.__notes__[0]
