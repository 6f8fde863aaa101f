"""The companion that learns from a share of the rows (Table 10)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import distances
from tests import reference
from tests.helpers import MODELS, assert_same, backward, batch_norm_net, batches, mlp, sgd, train, wrap

# ---- a share of the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "number", "distance"), [(0.3, 5, "mse"), (0.01, 1, "kl"), (0.5, 8, "infonce")])
def test_a_share_of_the_rows_is_the_reference_that_learns_from_these(fraction, number, distance):
    """Of 16 rows; the distances are those of whole batches, which infonce is not of a part."""
    model, hand = MODELS["dropout"](), MODELS["dropout"]()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model, companion_fraction=fraction, distance=distance)
    base, second = sgd(hand), sgd(companion)
    torch.manual_seed(3)
    train(model, optimizer, batches(20))
    torch.manual_seed(3)
    for step, (x, y) in enumerate(batches(20), start=1):
        rows = torch.randperm(16, generator=torch.Generator().manual_seed(step))[:number]
        function = distances.DISTANCES[distance]
        reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, function, rows=rows)
    assert_same(model, hand, rtol=1e-9, atol=1e-11)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-11)


def test_a_share_is_drawn_of_the_rows_of_dense_logits_and_all_of_them_is_no_share():
    torch.manual_seed(0)
    start = torch.nn.Conv2d(2, 3, 1).double()
    found = []
    for fraction in (0.999, 1.0, 0.25):
        model, companion = copy.deepcopy(start), copy.deepcopy(start)
        companion.bias.data += torch.tensor([1.0, 0.0, 0.0])
        optimizer = wrap(model, companion=companion, companion_fraction=fraction, weight=0.0)
        train(model, optimizer, [(torch.ones(2, 2, 4, 4).double(), torch.zeros(2, 4, 4, dtype=torch.long))])
        found.append(companion.bias.detach().clone())
    assert_same(found[0], found[1])
    assert_same(found[2], found[1], rtol=1e-12)  # all rows are alike, and the mean is that of the drawn ones


def test_each_micro_batch_draws_rows_of_its_own():
    """Row i moves column i of the companion's weight alone."""
    model, companion = torch.nn.Linear(16, 3, bias=False).double(), torch.nn.Linear(16, 3, bias=False).double()
    before = companion.weight.detach().clone()
    optimizer = wrap(model, companion=companion, companion_fraction=0.25)
    optimizer.zero_grad()
    for _ in range(2):
        F.cross_entropy(model(torch.eye(16).double()), torch.arange(16) % 3).backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(1)
    drawn = {row for _ in range(2) for row in torch.randperm(16, generator=generator)[:4].tolist()}
    assert {*(companion.weight != before).any(0).nonzero().flatten().tolist()} == drawn
    assert len(drawn) > 4


# ---- resumption, and what is refused ---------------------------------------------------------------------------------


def test_resuming_keeps_the_count_of_steps_and_the_draws():
    """Of rows and of dropout masks, bit for bit."""
    data = list(batches(7))

    def built(seed):
        model = MODELS["dropout"](seed)
        return model, wrap(model, companion_fraction=0.3)

    model, optimizer = built(0)
    train(model, optimizer, data[:4])
    again, other = built(9)
    train(again, other, data[:1])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, copied = copy.deepcopy((model, optimizer))
    for network, trained_by in ((model, optimizer), (again, other), (twin, copied)):
        torch.manual_seed(3)
        train(network, trained_by, data[4:])
    for network, trained_by in ((again, other), (twin, copied)):
        assert_same(network, model)
        assert_same(trained_by.companion, optimizer.companion)
        assert_same(trained_by.state_dict(), optimizer.state_dict())
