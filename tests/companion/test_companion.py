"""The companion: what it predicts and learns, random draws, outputs that it can follow, errors that name it."""

import copy
import sys
import weakref

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
    wrap,
)
from tests.reference import NEAR

DATA = list(batches(5))

# ---- learning --------------------------------------------------------------------------------------------------------


def test_the_companions_backward_runs_when_the_models_has_ended():
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
    loss.backward()
    assert logits[0]() is None
    for ours, expected in zip(optimizer.companion.parameters(), companion.parameters(), strict=True):
        assert_same(ours.grad, expected.grad, **NEAR)
    optimizer.step()
    assert all(parameter.grad is None for parameter in optimizer.companion.parameters())


def test_forward_passes_of_one_backward_pass_share_one_of_the_companion():
    model = mlp()
    optimizer = wrap(model)
    gradients = []
    optimizer.companion[0].weight.register_hook(gradients.append)
    x, y = one()
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)).backward()
    assert len(gradients) == 1
    optimizer.step()


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
    fit(optimizer, batches(4))
    assert len(model.drawn) == 4
    assert_same(model.drawn, optimizer.companion.drawn)


@pytest.mark.parametrize("draws", ["as many as the model", "more"])
def test_the_script_draws_from_its_stream_as_if_no_companion_ran(draws):
    """Between the forward and the backward, too."""
    found = []
    for wrapped in (True, False):
        model, drawn = dropout_net(), []
        companion = nn.Sequential(nn.Dropout(0.1), dropout_net(seed=3)) if draws == "more" else None
        optimizer = wrap(model, companion=companion) if wrapped else sgd(model)
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


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_companion_of_another_output_shape():
    model = mlp()
    optimizer = wrap(model, companion=nn.Linear(FEATURES, CLASSES + 1).double())
    before = copy.deepcopy(model.state_dict())
    message = r"logits of shape \(16, 6\) where the model gives \(16, 5\).*build the base optimizer and wrap it again"
    with pytest.raises(ValueError, match=message):
        fit(optimizer, batches(1))
    assert_same(model.state_dict(), before)


# ---- weights that are loaded in the middle of a run, and a new companion ---------------------------------------------


def test_after_weights_are_loaded_the_companion_can_start_anew():
    model, expected = mlp(), mlp()
    optimizer = wrap(model)
    best = copy.deepcopy(model.state_dict())
    fit(optimizer, DATA)
    F.cross_entropy(model(DATA[2][0]), DATA[2][1]).backward()  # what it has learned from an unfinished step goes too
    model.load_state_dict(best)
    optimizer.base.load_state_dict(sgd(model).state_dict())
    optimizer.reset_companion()
    fit(optimizer, DATA)
    other = wrap(expected)
    fit(other, DATA)
    assert_same_networks(optimizer, other)


def test_a_companion_that_was_given_is_not_built_again():
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

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden = None

    def forward(self, x):
        output, self.hidden = self.rnn(x, self.hidden)
        return self.head(output)


def test_a_hidden_state_in_an_attribute_of_the_companion_is_named_and_detached_there():
    model = Stateful()
    optimizer = wrap(model)

    def chunk(*networks):
        for network in networks:
            network.hidden = network.hidden.detach()
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 5, 3)).flatten(0, 1), torch.randint(4, (10,))).backward()
        optimizer.step()

    chunk()
    chunk(model, optimizer.companion)
    with pytest.raises(RuntimeError, match="a second time") as caught:
        chunk(model)
    if sys.version_info >= (3, 11):
        assert "it has to do so on optimizer.companion too" in caught.value.__notes__[0]
