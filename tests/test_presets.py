"""The defaults: what they are, that they hold the penalty back as they say, and that the paper's are one word away."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer, functional
from dcl_optim.reference import dcl_step, dcp_step
from tests.helpers import CLASSES, assert_same, backward, batch_norm_net, batches, mlp, sgd, train

PADDED = partial(functional.mse, reduction="padded_mean")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SAFE = {
    DCLOptimizer: {"weight": 1.0, "alpha": 0.6, "agreement": 2.0, "reduction": "padded_mean"},
    DCPOptimizer: {"weight": 0.3, "alpha": 0.97, "agreement": 2.0, "reduction": "padded_mean"},
}
PAPER = {"weight": 1.0, "alpha": 0.6, "agreement": 0.0, "reduction": "mean"}


def built(kind, base=sgd, model=mlp, **options):
    network, criterion = model(), nn.CrossEntropyLoss()
    arguments = () if kind is DCLOptimizer else (CLASSES,)
    return network, criterion, kind(base(network), network, *arguments, criterion=criterion, **options)


def trained(kind, steps=6, **options):
    model, criterion, optimizer = built(kind, **options)
    for x, y in batches(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("kind", SAFE)
def test_a_preset_is_its_arguments(kind):
    assert_same(trained(kind), trained(kind, **SAFE[kind]))
    assert_same(trained(kind, preset="paper"), trained(kind, **PAPER))
    with pytest.raises(AssertionError):
        assert_same(trained(kind), trained(kind, preset="paper"))


@pytest.mark.parametrize("kind", SAFE)
@pytest.mark.parametrize("name", ["weight", "alpha", "agreement", "reduction"])
def test_what_is_given_outranks_the_preset(kind, name):
    given = {name: PAPER[name]} if name in ("agreement", "reduction") else {name: 0.4}
    assert_same(trained(kind, **given), trained(kind, **(SAFE[kind] | given)))
    assert_same(trained(kind, preset="paper", alpha=0.2), trained(kind, **(PAPER | {"alpha": 0.2})))


@pytest.mark.parametrize("kind", SAFE)
def test_an_unknown_preset_is_refused(kind):
    with pytest.raises(ValueError, match="preset='fast' is unknown; choose one of safe, paper"):
        built(kind, preset="fast")


@pytest.mark.parametrize("kind", SAFE)
@pytest.mark.parametrize(("value", "error"), [(-0.1, ValueError), (float("inf"), ValueError), ("2", TypeError)])
def test_the_agreement_is_a_finite_number(kind, value, error):
    with pytest.raises(error, match="agreement="):
        built(kind, agreement=value)


@pytest.mark.parametrize("kind", SAFE)
@pytest.mark.parametrize("distance", ["kl", "infonce", lambda z, c: (z - c).abs().mean()])
def test_distances_without_a_reduction_take_the_preset_too(kind, distance):
    assert_same(trained(kind, distance=distance), trained(kind, distance=distance, reduction=None, agreement=2.0))


# ---- against the algorithm written out ------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [mlp, batch_norm_net])
def test_the_default_is_the_reference_held_back(build):
    model = build()
    optimizer = DCLOptimizer(sgd(model), model)
    theirs, companion = build(), build()
    plain, chasing = sgd(theirs), sgd(companion)
    train(model, optimizer, batches(20))
    for x, y in batches(20):
        dcl_step(theirs, companion, plain, chasing, x, y, F.cross_entropy, PADDED, agreement=2.0)
    assert_same(model, theirs, **CLOSE)
    assert_same(optimizer.companion, companion, **CLOSE)


@pytest.mark.parametrize(
    ("distance", "reduction"),
    [("mse", "padded_mean"), ("mse", "mean"), ("mse", "per_class"), ("kl", "mean"), ("kl", "per_class")],
)
def test_prototypes_default_is_the_reference_held_back(distance, reduction):
    options = {"distance": distance, "reduction": reduction, "weight": 0.8, "alpha": 0.7}
    model, criterion, optimizer = built(DCPOptimizer, **options)
    theirs, prototypes = mlp(), {}
    plain = sgd(theirs)
    per_class = reduction == "per_class"
    delta = functional.kl if distance == "kl" else partial(functional.mse, reduction="mean" if per_class else reduction)
    for x, y in batches(20):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        settings = {"weight": 0.8, "alpha": 0.7, "agreement": 2.0, "per_class": per_class}
        dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, delta, **settings)
    assert_same(model, theirs, **CLOSE)


@pytest.mark.parametrize("kind", SAFE)
def test_micro_batches_make_the_same_step_as_the_whole_batch(kind):
    """Each row is held back by itself: how a batch is split over forwards or processes does not matter."""
    whole, criterion, in_one = built(kind)
    parts, second, in_two = built(kind)
    for x, y in batches(4):
        in_one.zero_grad()
        criterion(whole(x), y).backward()
        in_one.step()
        in_two.zero_grad()
        for rows in (slice(0, 8), slice(8, 16)):
            (second(parts(x[rows]), y[rows]) / 2).backward()
        in_two.step()
    assert_same(whole, parts, **CLOSE)


def test_the_gradient_by_hand():
    """Two rows of two classes: the companion knows nothing, the model is sure (agreement 1/2) or not (1/2 too)."""
    model = nn.Linear(2, 2, bias=False).double()
    companion = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        companion.weight.zero_()
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, companion=companion, loss_scale=1.0)
    model(torch.eye(2, dtype=torch.float64)).backward(torch.zeros(2, 2, dtype=torch.float64))
    # 2 (z - c) / (N max(K, 100)) times (1/2)^2, through the identity as input
    expected = 2 * torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64) / (2 * 100) / 4
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=0.0)
    assert optimizer.penalty == pytest.approx((9 + 1) / (2 * 100))


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def test_lbfgs_gets_the_penalty_whole():
    chasing = {"companion_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01)}
    for kind, options in ((DCLOptimizer, chasing), (DCPOptimizer, {})):
        results = []
        for agreement in (None, 0.0):
            model, criterion, optimizer = built(kind, base=lbfgs, agreement=agreement, **options)
            for x, y in batches(2):

                def closure(x=x, y=y, model=model, criterion=criterion, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    return loss

                optimizer.step(closure)
            results.append(model.state_dict())
        assert_same(*results)
        with pytest.raises(ValueError, match=r"agreement=2\.0 cannot go with LBFGS"):
            built(kind, base=lbfgs, agreement=2.0, **options)


def test_half_precision_logits_are_held_back_in_float32():
    model = mlp(dtype=torch.bfloat16)
    optimizer = DCLOptimizer(sgd(model), model, companion=mlp(seed=3, dtype=torch.bfloat16))
    (x, y), *_ = batches(1, dtype=torch.bfloat16)
    backward(model, x, y)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert optimizer.penalty > 0


# ---- the two functions ----------------------------------------------------------------------------------------------


def test_agreement_by_hand():
    z = torch.tensor([[0.0, 0.0], [1e3, 0.0], [1e3, 0.0], [0.0, 2.0]])
    c = torch.tensor([[5.0, 5.0], [1e3, 0.0], [0.0, 1e3], [0.0, 0.0]])
    torch.testing.assert_close(functional.agreement(z, c), torch.tensor([0.5, 1.0, 0.0, 0.5]))
    torch.testing.assert_close(functional.agreement(z, c, 2.0), torch.tensor([0.25, 1.0, 0.0, 0.25]))


rows = st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=2, max_size=4)


@given(rows, rows)
def test_agreement_is_a_probability_and_symmetric(first, second):
    count = min(len(first), len(second))
    z, c = (torch.tensor(found[:count], dtype=torch.float64) for found in (first, second))
    found = functional.agreement(z, c)
    assert ((found >= 0) & (found <= 1 + 1e-12)).all()
    torch.testing.assert_close(found, functional.agreement(c, z))
    brute = [sum(p * q for p, q in zip(a.softmax(0), b.softmax(0), strict=True)) for a, b in zip(z, c, strict=True)]
    torch.testing.assert_close(found, torch.stack(brute))


@pytest.mark.parametrize("classes", [1, 10, 99, 100, 101, 1000])
@pytest.mark.parametrize("distance", [functional.mse, functional.l1])
def test_the_padded_mean_counts_a_hundred_classes_at_least(classes, distance):
    z, c = torch.randn(2, 3, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    missing = torch.zeros(3, max(0, 100 - classes), dtype=torch.float64)
    filled = distance(torch.cat([z, missing], 1), torch.cat([c, missing], 1))
    torch.testing.assert_close(distance(z, c, reduction="padded_mean"), filled)
