"""Distillation: each loss against its formula in loops, networks in pieces, ReviewKD's fusion, SimKD's network."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from examples.research.applications.distillation import losses, stages
from examples.research.applications.distillation.student import Fusion, ReusedClassifier, Review
from examples.research.tests.applications.distillation_cases import (
    PAIRS,
    SHAPE,
    batch,
    drawn,
    kl,
    logits,
    method,
    network,
    softmax,
)

pytestmark = pytest.mark.usefixtures("double")

# ---- the losses ------------------------------------------------------------------------------------------------------


def test_distillation_is_a_tenth_of_cross_entropy_and_nine_of_softened_divergence():
    z, t, y = logits()
    expected = 0.0
    for own, other, label in zip(z.tolist(), t.tolist(), y.tolist(), strict=True):
        soft = 4.0**2 * kl(softmax(other, 4.0), softmax(own, 4.0))
        expected += (-0.1 * math.log(softmax(own, 1.0)[label]) + 0.9 * soft) / len(z)
    assert losses.distillation(z, t, y).item() == pytest.approx(expected, rel=1e-12)


def decoupled_by_hand(z, t, y, alpha, beta, temperature):
    total = 0.0
    for own, other, label in zip(z.tolist(), t.tolist(), y.tolist(), strict=True):
        q, p = softmax(own, temperature), softmax(other, temperature)
        target = kl((p[label], 1 - p[label]), (q[label], 1 - q[label]))
        others = [k for k in range(len(q)) if k != label]
        rest = kl([p[k] / (1 - p[label]) for k in others], [q[k] / (1 - q[label]) for k in others])
        total += temperature**2 * (alpha * target + beta * rest)
    return total / len(z)


@pytest.mark.parametrize("options", [(), (0.5, 2.0, 1.5)])
def test_decoupled_is_the_weighted_sum_of_both_divergences(options):
    """By default with the paper's weights, 1 and 8, and T = 4."""
    z, t, y = logits()
    expected = decoupled_by_hand(z, t, y, *(options or (1.0, 8.0, 4.0)))
    assert losses.decoupled(z, t, y, *options).item() == pytest.approx(expected, rel=1e-12)


def test_decoupled_stays_finite_where_both_are_sure():
    z = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    losses.decoupled(z, z.detach().flip(1), torch.tensor([0])).backward()
    assert z.grad.isfinite().all()


def pooled_by_hand(x, side):
    """Adaptive average pooling of one channel: cell i covers rows floor(i H / side) to ceil((i + 1) H / side)."""
    height, width = len(x), len(x[0])

    def span(i, length):
        return range(i * length // side, -(-(i + 1) * length // side))

    cells = [(span(i, height), span(j, width)) for i in range(side) for j in range(side)]
    return [sum(x[r][c] for r in rows for c in columns) / (len(rows) * len(columns)) for rows, columns in cells]


def context_by_hand(ours, theirs):
    """Mean squared errors of the maps, 1, and of what is pooled to 4, 2, 1, half as much each time; for side 7."""
    errors = []
    for side in (7, 4, 2, 1):
        squares = []
        for own, other in zip(ours.flatten(0, 1).tolist(), theirs.flatten(0, 1).tolist(), strict=True):
            a, b = (pooled_by_hand(x, side) for x in (own, other))
            squares += [(u - v) ** 2 for u, v in zip(a, b, strict=True)]
        errors.append(sum(squares) / len(squares))
    return (errors[0] + errors[1] / 2 + errors[2] / 4 + errors[3] / 8) / (1 + 1 / 2 + 1 / 4 + 1 / 8)


def test_hierarchical_context_sums_the_maps_weighted_errors():
    ours, theirs = ([drawn(2, 3, 7, 7, seed=s), drawn(2, 4, 7, 7, seed=s + 1)] for s in (0, 2))
    expected = sum(context_by_hand(a, b) for a, b in zip(ours, theirs, strict=True))
    assert losses.hierarchical_context(ours, theirs).item() == pytest.approx(expected, rel=1e-12)


def test_hierarchical_context_pools_to_smaller_sizes_only():
    """Of a side of 2 only 1x1 is smaller, and the next weight is still a half; of a side of 1 nothing is."""
    a, b = drawn(2, 3, 2, 2), drawn(2, 3, 2, 2, seed=1)
    error = ((a - b) ** 2).mean() + ((a.mean((2, 3)) - b.mean((2, 3))) ** 2).mean() / 2
    assert losses.hierarchical_context([a], [b]).item() == pytest.approx(error.item() / 1.5, rel=1e-12)
    a, b = a[:, :, :1, :1], b[:, :, :1, :1]
    assert losses.hierarchical_context([a], [b]).item() == pytest.approx(((a - b) ** 2).mean().item(), rel=1e-12)


# ---- networks in pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet10-xs", "resnet8x4"])
def test_pieces_compute_what_the_network_does(name):
    torch.manual_seed(0)
    whole = stages.build(name, 5, SHAPE)
    x = drawn(3, *SHAPE)
    pieces = stages.cut(deepcopy(whole))
    torch.testing.assert_close(pieces.eval()(x).logits, whole.eval()(x))
    output = pieces.train()(x)
    torch.testing.assert_close(output.logits, whole.train()(x))
    assert all((each < 0).any() for each in output.maps)
    assert (output.pooled >= 0).all()
    assert stages.shapes(pieces, SHAPE) == [each.shape[1:] for each in (*output.maps, output.pooled)]


def test_a_resnets_maps_are_those_of_its_stages():
    whole = stages.build("resnet8x4", 5, SHAPE).eval()
    x, _ = batch()
    output = stages.cut(whole)(x)
    for ours, theirs in zip(output.maps, whole.features(x, before_relu=True)[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(output.pooled, F.relu(output.maps[-1]).mean((2, 3), keepdim=True))


def test_the_networks_state_dict_is_the_pieces_own():
    whole = network()
    with torch.no_grad():
        for parameter in stages.cut(whole).parameters():
            parameter.fill_(7.0)
    assert all((value == 7).all() for value in whole.parameters())


@pytest.mark.parametrize("name", ["resnet18", "small-cnn"])
def test_other_networks_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"network={name!r} .*resnet32x4"):
        stages.build(name, 5, SHAPE)


# ---- ReviewKD's fusion and SimKD's network ---------------------------------------------------------------------------


def test_fusion_is_the_one_in_loops():
    """A map of 2x2, a deeper one of 1x1, a teacher's of 4x4: attention picks between the two at each pixel."""
    torch.manual_seed(0)
    fusion = Fusion(3, 2, torch.Size((5, 4, 4)), deepest=False).eval()
    fusion.inward[1].running_mean.copy_(torch.tensor([0.3, -0.2]))
    x, deeper = drawn(2, 3, 2, 2), drawn(2, 2, 1, 1, seed=1)
    compared, fused = fusion(x, deeper)
    inward, convolution = fusion.inward[0].weight[:, :, 0, 0], fusion.attention[0]
    expected = torch.empty(2, 2, 4, 4)
    for b in range(2):
        for row in range(4):
            for column in range(4):
                own = (inward @ x[b, :, row // 2, column // 2] - torch.tensor([0.3, -0.2])) / math.sqrt(1 + 1e-5)
                below = deeper[b, :, 0, 0]
                scores = convolution.weight[:, :, 0, 0] @ torch.cat([own, below]) + convolution.bias
                first, second = (1 / (1 + math.exp(-score)) for score in scores.tolist())
                expected[b, :, row, column] = first * own + second * below
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(compared, fusion.outward(expected))
    assert compared.shape == (2, 5, 4, 4)


@pytest.mark.parametrize(("teacher", "student"), PAIRS)
def test_review_gives_the_teachers_shapes_from_the_deepest_down(teacher, student):
    ours, theirs = (stages.cut(network(name)) for name in (student, teacher))
    review = Review(stages.shapes(ours, SHAPE), stages.shapes(theirs, SHAPE))
    x, _ = batch()
    output = ours(x)
    found = review(output)
    assert [each.shape[1:] for each in found] == stages.shapes(theirs, SHAPE)
    assert [fusion.attention is None for fusion in review.fusions] == [False] * len(output.maps) + [True]
    review.eval()
    before = review(output)
    changed = output._replace(pooled=output.pooled + 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, review(changed), strict=True))  # all depend on the deepest
    changed = output._replace(maps=(output.maps[0] + 1, *output.maps[1:]))
    same = [torch.equal(a, b) for a, b in zip(before, review(changed), strict=True)]
    assert same == [False] + [True] * len(output.maps)


def test_review_takes_the_students_maps_after_their_relu():
    ours = stages.cut(network())
    review = Review(*[stages.shapes(ours, SHAPE)] * 2).eval()
    output = ours(batch()[0])
    clipped = output._replace(maps=tuple(each.clamp(min=0) for each in output.maps))
    assert all(torch.equal(a, b) for a, b in zip(review(output), review(clipped), strict=True))


def test_review_needs_as_many_stages():
    with pytest.raises(ValueError, match="student has 4 stages and teacher 3"):
        method("ReviewKD", teacher="resnet8x4")


@pytest.mark.parametrize(("teacher", "student"), [*PAIRS, ("resnet8x4", "resnet10-xs")])
def test_simkd_runs_the_teachers_classifier_on_its_projected_map(teacher, student):
    ours, theirs = stages.cut(network(student)), stages.cut(network(teacher, seed=1))
    model = ReusedClassifier(ours, theirs, SHAPE).eval()
    x, _ = batch()
    output = model(x)
    (own, other), (projected,) = (stages.shapes(each, SHAPE)[-2] for each in (ours, theirs)), output.maps
    assert projected.shape[1:] == (other[0], min(own[1], other[1]), min(own[2], other[2]))
    expected = theirs.eval().classifier(theirs.pool(projected))
    assert torch.equal(output.logits, expected)
    last = F.relu(ours.eval()(x).maps[-1])
    torch.testing.assert_close(projected, model.projector(F.adaptive_avg_pool2d(last, projected.shape[2:])))
