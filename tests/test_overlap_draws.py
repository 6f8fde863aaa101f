"""overlap=True and random numbers: on a CPU a model that draws runs serially, and a warning says so once."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (
    CLASSES,
    DRAWS,
    FEATURES,
    assert_overlap_changes_nothing,
    assert_same,
    batches,
    dropout_net,
    mlp,
    snapshot,
    threads_of_forwards,
    train,
    worker_threads,
    wrap,
)

STEPS = 6


def other_network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Dropout(0.4), nn.Linear(7, CLASSES)).double()


class Adding(nn.Module):
    """Adds something drawn to its input."""

    def __init__(self, draw):
        super().__init__()
        self.body, self.draw = mlp(), draw

    def forward(self, x):
        return self.body(x + 0.1 * self.draw(x))


DRAWING = {
    "dropout": (dropout_net, {}),
    "a kind of draw that takes no generator": (lambda: Adding(lambda x: torch.poisson(torch.ones_like(x))), {}),
    "the companion alone": (mlp, {"companion": other_network}),
    "the model alone": (dropout_net, {"companion": mlp}),
    "every third step, a fraction": (dropout_net, {"companion_every": 3, "companion_fraction": 0.5}),
}


@pytest.mark.parametrize("case", DRAWING)
def test_a_model_that_draws_runs_serially_and_a_warning_says_so_once(case):
    network, options = DRAWING[case]
    found = []
    for overlap in (False, True):
        existing = set(worker_threads())  # those of earlier tests may still be ending
        optimizer = wrap(network(), overlap=overlap, **options)
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as caught, threads_of_forwards() as names:
            warnings.simplefilter("always")
            train(optimizer.model, optimizer, batches(STEPS))
        assert names == {"MainThread"}
        assert set(worker_threads()) <= existing
        messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
        assert len(messages) == int(overlap)
        assert all(re.search(DRAWS, message) for message in messages)
        found.append(snapshot(optimizer))
    assert_same(*found)


class Switchable(Adding):
    """Draws while it is on, and remembers what; ones while it is off."""

    on = True

    def __init__(self):
        super().__init__(lambda x: F.dropout(torch.ones_like(x), training=Switchable.on))
        self.drawn = []

    def forward(self, x):
        noise = self.draw(x)
        self.drawn.append(noise)
        return self.body(x + 0.1 * noise)


def test_from_the_forward_that_begins_to_draw_on_it_is_serial(monkeypatch):
    """Within an accumulation, whose first backward runs in the worker; only that one forward's masks may differ."""
    model = Switchable()
    optimizer = wrap(model, overlap=True)
    begins_at, forwards = 7, 0
    caught, names = [], []
    for x, y in batches(8):
        for rows in torch.arange(len(x)).chunk(2):
            monkeypatch.setattr(Switchable, "on", forwards >= begins_at)
            with warnings.catch_warnings(record=True) as new, threads_of_forwards() as now:
                warnings.simplefilter("always")
                z = model(x[rows])
            caught += [(forwards, str(warning.message)) for warning in new]
            names.append(sorted(now))
            (F.cross_entropy(z, y[rows]) / 2).backward()
            forwards += 1
        optimizer.step()
        optimizer.zero_grad()
    assert [forward for forward, _ in caught] == [begins_at]
    assert re.search(DRAWS, caught[0][1])
    concurrent, serial = ["MainThread", "dcl_optim_0"], ["MainThread"]
    assert names == [serial] + [concurrent] * begins_at + [serial] * (forwards - begins_at - 1)
    pairs = list(zip(model.drawn, optimizer.companion.drawn, strict=True))
    assert len(pairs) == forwards
    for forward, (theirs, ours) in enumerate(pairs):
        assert bool((theirs == 0).any()) == (forward >= begins_at)
        assert torch.equal(theirs, ours) or forward == begins_at


def test_a_companion_that_begins_to_draw_is_serial_from_then_on():
    model = mlp()
    optimizer = wrap(model, companion=other_network, overlap=True)
    optimizer.companion[2].p = 0.0
    train(model, optimizer, batches(3))
    optimizer.companion[2].p = 0.4
    with pytest.warns(UserWarning, match=DRAWS):
        train(model, optimizer, batches(1))
    with threads_of_forwards() as names:
        train(model, optimizer, batches(2))
    assert names == {"MainThread"}


def test_layers_of_the_script_that_draw_from_a_generator_of_their_own():
    """The companion has a copy of it, which draws the same by itself."""

    class Own(Adding):
        def __init__(self):
            super().__init__(None)
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            return self.body(x + torch.rand(x.shape, generator=self.generator))

    assert_overlap_changes_nothing(partial(trained, Own))


def trained(network, overlap, loss=F.cross_entropy, **options):
    optimizer = wrap(network(), overlap=overlap, **options)
    torch.manual_seed(7)
    train(optimizer.model, optimizer, batches(STEPS), loss=loss)
    return optimizer


def test_the_script_draws_from_its_stream_as_if_no_companion_ran():
    """Between the forward and the backward, too, while the companion runs."""

    def script(overlap, wrapped=True):
        model = mlp()
        optimizer = wrap(model, overlap=overlap, loss_scale=1.0)
        if not wrapped:
            optimizer.detach()
        torch.manual_seed(4)
        drawn.clear()
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            drawn.append(torch.rand(2))
            F.cross_entropy(z + 0.1 * torch.randn_like(z), y).backward()
            drawn.append(torch.rand(2))
            optimizer.step()
            drawn.append(torch.rand(2))
        return optimizer

    drawn = []
    assert_overlap_changes_nothing(script)
    overlapped = torch.cat(drawn)
    script(False, wrapped=False)
    assert torch.equal(torch.cat(drawn), overlapped)
