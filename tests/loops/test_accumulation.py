"""Several backward passes before a step: through several forward passes or one, each row is learned from once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dcl_optim.distances import squared
from tests import reference
from tests.helpers import CLASSES, assert_same, batches, mlp, one, sgd
from tests.reference import ALPHA, CLOSE, VARIANTS, WEIGHT, learned, term_of, wrap

WAYS = ("line", "term")


@pytest.mark.parametrize("parts", [(20, 30, 10), (3, 4, 2), (1,) * 30], ids=str)
def test_several_forwards_before_a_step_count_as_one(parts):
    """Whether they have more rows than there are classes or fewer."""
    model, expected, numbers = mlp(), {}, dict.fromkeys(range(CLASSES), 0.0)
    optimizer = wrap("dcp", model, alpha=0.3)
    for x, y in batches(6, size=sum(parts)):
        z = model(x).detach()
        optimizer.zero_grad()
        for rows in torch.arange(len(x)).split(parts):
            (F.cross_entropy(model(x[rows]), y[rows]) / len(parts)).backward()
        optimizer.step()
        for k in y.unique().tolist():
            numbers[k] = 0.3 * numbers[k] + int((y == k).sum())
            before = expected.get(k, 0.0)
            expected[k] = before + (z[y == k] - before).sum(0) / numbers[k]
        for k, prototype in expected.items():
            assert_same(optimizer.prototypes[k], prototype, **CLOSE)


@pytest.mark.parametrize("names_inputs", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_loss_that_go_backward_one_by_one_carry_the_whole_penalty(variant, way, names_inputs):
    model, hand = mlp(), mlp()
    companion, prototypes, numbers = mlp(seed=3), dict[int, Tensor](), dict[int, float]()
    optimizer = wrap(variant, model, **{"companion": mlp(seed=3)} if variant == "dcl" else {})
    base, second = sgd(hand), sgd(companion)
    settings = {"weight": WEIGHT, "alpha": ALPHA}
    for x, y in batches(5):
        optimizer.zero_grad()
        z = model(x)
        loss = F.cross_entropy(z, y) + term_of(optimizer, way)(z, y)
        for share in (0.25, 0.6, 0.15):
            inputs = {"inputs": [*model.parameters()]} if names_inputs else {}
            (share * loss).backward(retain_graph=True, **inputs)
            assert optimizer.logs()["loss_scale"] == pytest.approx(share)
        optimizer.step()
        if variant == "dcl":
            reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, squared, **settings)
        else:
            reference.dcp_step(hand, prototypes, base, x, y, F.cross_entropy, squared, **settings, numbers=numbers)
    assert_same(model, hand, rtol=1e-10, atol=1e-10)
    rows = {"prototypes": torch.stack([prototypes[k] for k in range(CLASSES)])} if variant == "dcp" else None
    assert_same(learned(optimizer), rows or dict(companion.state_dict()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("labels", "distance"), [("hard", "infonce"), ("soft", "kl"), ("soft", "mse"), ("ignored", "l1")]
)
def test_prototypes_too_carry_the_whole_penalty_in_parts(labels, distance):
    """The second backward sees the logits, and the labels, as the first one did."""
    found = []
    for parts in ((1.0,), (0.5, 0.5)):
        model = mlp()
        optimizer = wrap("dcp", model, distance=distance)
        for x, y in batches(4):
            y = y.where(y != 0, -100) if labels == "ignored" else y
            given = 0.9 * F.one_hot(y, CLASSES) + 0.1 / CLASSES if labels == "soft" else y
            optimizer.zero_grad()
            z = model(x)
            loss = F.cross_entropy(z, y) + optimizer.penalty(z, given)
            for part in parts:
                (part * loss).backward(retain_graph=True)
            optimizer.step()
        found.append((model.state_dict(), optimizer.prototypes, optimizer.logs()["penalty"]))
    assert found[0][2] > 0
    assert_same([*found[0][:2], torch.tensor(found[0][2])], [*found[1][:2], torch.tensor(found[1][2])], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forward_counts_once_and_is_learned_from_once(variant):
    """As if its last backward had not come: the second one changes neither the companion nor the prototypes."""
    found = []
    for times in (1, 3):
        model = mlp()
        optimizer = wrap(variant, model, **{"companion": mlp(seed=1)} if variant == "dcl" else {})
        z = model(one()[0])
        for _ in range(times):
            optimizer.zero_grad()
            F.cross_entropy(z, one()[1]).backward(retain_graph=True)
        optimizer.step()
        found.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_kept_over_several_steps_is_refused(variant):
    model = mlp()
    optimizer = wrap(variant, model)
    x, y = one()
    loss = F.cross_entropy(model(x), y)
    parameter = model[-1].bias  # what lies behind a weight autograd refuses, since the step has changed that
    loss.backward(retain_graph=True, inputs=[parameter])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"(?s)before the last step.*\n  Fix: call the model in each step"):
        loss.backward(inputs=[parameter])
