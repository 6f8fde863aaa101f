"""Distillation: what a method's loss is put together from, what it trains, and DCL's share."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer
from examples.research.applications.distillation import losses, methods, stages
from examples.research.paper.tasks import in_steps
from examples.research.tests.applications.distillation_cases import SHAPE, TAUGHT, batch, method, network

pytestmark = pytest.mark.usefixtures("double")


def sgd(made):
    """Of all that a method trains."""
    return torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def with_dcl(made, weight=1.0):
    return DCLOptimizer(sgd(made), made.model, weight=weight, alpha=0.6, companion_fraction=1)


def test_the_losses_are_put_together_as_published():
    x, y = batch()
    share = 0.25
    for name in TAUGHT:
        made = method(name).eval()
        output, taught = made.model(x), stages.cut(network("resnet10-s", seed=1)).eval()(x)
        entropy, z, t = F.cross_entropy(output.logits, y), output.logits, taught.logits
        if name == "KD":
            expected = losses.distillation(z, t, y)
        elif name == "DKD":
            expected = entropy + share * losses.decoupled(z, t, y)
        elif name == "ReviewKD":
            theirs = (*taught.maps, taught.pooled)
            expected = entropy + share * 5 * losses.hierarchical_context(made.review(output), theirs)
        else:
            expected = ((output.maps[0] - taught.maps[-1].clamp(min=0)) ** 2).mean()
        loss, logits = made(x, y, share)
        torch.testing.assert_close(loss, expected)
        assert torch.equal(logits, z)


@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize("dcl", [False, True])
def test_only_the_student_and_what_is_beside_it_are_trained(name, dcl):
    made = method(name)
    assert not any(p.requires_grad for p in made.teacher.parameters())
    before = deepcopy(made.teacher.state_dict())
    optimizer = with_dcl(made) if dcl else sgd(made)
    started = {key: value.clone() for key, value in made.state_dict().items()}
    made.train()
    assert not any(module.training for module in made.teacher.modules())
    for _ in range(2):
        optimizer.zero_grad()
        loss, z = made(*batch())
        (loss + optimizer.penalty(z) if dcl else loss).backward()
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in made.teacher.state_dict().items())
    trained = {key for key, p in made.named_parameters() if not torch.equal(p, started[key])}
    frozen = ("teacher.", "model.pool.", "model.classifier.") if name == "SimKD" else ("teacher.",)
    assert trained == {key for key, _ in made.named_parameters() if not key.startswith(frozen)}


def test_simkds_classifier_is_the_teachers_and_the_companion_shares_it():
    made = method("SimKD")
    made.train()
    assert made.model.projector.training
    assert not any(m.training for m in made.model.classifier.modules())
    optimizer = with_dcl(made)
    head = made.teacher.network.classifier
    for holder in (made.model, optimizer.companion):
        assert holder.classifier.network[-1].weight is head[-1].weight
    assert not any(m.training for m in optimizer.companion.classifier.modules())


def test_dcl_does_not_copy_the_teacher_or_what_is_beside_the_student():
    for name in ("KD", "ReviewKD", "DKD"):
        made = method(name)
        companion = with_dcl(made).companion
        assert [key for key, _ in companion.named_parameters()] == [key for key, _ in made.model.named_parameters()]
        assert type(companion) is stages.Staged


@pytest.mark.filterwarnings("ignore:the first prediction of dcl_optim's companion")  # changed on purpose
@pytest.mark.parametrize("name", methods.NAMES)
def test_dcl_adds_its_penalty_with_factor_one(name):
    """The gradient is that of the loss plus λ times the mean squared distance to the companion's logits."""
    made = method(name)
    made.train()
    twin = deepcopy(made)
    optimizer = with_dcl(made, weight=0.7)
    with torch.no_grad():
        for parameter in optimizer.companion.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.3)
    companion = deepcopy(optimizer.companion)
    x, y = batch()
    optimizer.zero_grad()
    loss, z = made(x, y, 0.5)
    (loss + optimizer.penalty(z)).backward()
    loss, z = twin(x, y, 0.5)
    distance = F.mse_loss(z, companion(x).logits.detach())
    assert distance > 1e-3
    (loss + 0.7 * distance).backward()
    for (key, ours), theirs in zip(made.named_parameters(), twin.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=key)


def test_unknown_names_and_a_missing_teacher_are_refused():
    student = stages.cut(network())
    with pytest.raises(ValueError, match=r"method='AT' is unknown; choose one of plain, KD, ReviewKD, SimKD, DKD"):
        methods.make("AT", student, student, SHAPE)
    with pytest.raises(ValueError, match="teacher=None: method='KD' needs one"):
        methods.make("KD", student, None, SHAPE)


def test_steps_are_the_literatures():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = in_steps(optimizer, 240)
    rates = []
    for _ in range(240):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    drops = [epoch for epoch in range(1, 240) if rates[epoch] != rates[epoch - 1]]
    assert drops == [150, 180, 210]
    assert rates[-1] == pytest.approx(5e-5)
