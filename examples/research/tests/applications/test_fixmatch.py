"""FixMatch's parts: the loss and the schedule by hand, the views, the labels."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torchvision
from torch import nn

from examples.research.applications.fixmatch import Views, cosine, fixmatch_loss, groups, labelled


def cross_entropy(row, label):
    return -(row[label] - row.exp().sum().log())


@pytest.mark.parametrize("threshold", [0.0, 0.7, 0.85, 1.1])
def test_the_loss_is_the_one_of_a_loop(threshold):
    """Hard pseudo-labels, masked by the weak views' certainty, and a mean over all unlabelled images."""
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(3, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 3, 1])
    weak, strong = 2 * torch.randn(2, 9, 4, generator=generator, dtype=torch.float64)
    expected, counted = sum(cross_entropy(z[i], y[i]) for i in range(3)) / 3, 0
    for i in range(9):
        q = weak[i].exp() / weak[i].exp().sum()
        if max(q.tolist()) >= threshold:
            counted += 1
            expected += 0.7 * cross_entropy(strong[i], q.tolist().index(max(q.tolist()))) / 9
    loss, share = fixmatch_loss(z, y, weak, strong, threshold, 0.7)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert share.item() == pytest.approx(counted / 9)
    assert {0.0: counted == 9, 1.1: counted == 0}.get(threshold, 0 < counted < 9)


def test_no_gradient_reaches_the_weak_views_or_a_masked_strong_one():
    """By hand: (softmax - target) over all unlabelled rows, here 2, of which only the first is certain enough."""
    z, y = torch.zeros(1, 2, requires_grad=True), torch.tensor([0])
    weak = torch.tensor([[-4.0, 4.0], [0.1, 0.0]], requires_grad=True)
    strong = torch.tensor([[0.0, 0.0], [5.0, 0.0]], requires_grad=True)
    fixmatch_loss(z, y, weak, strong, 0.95, 1.0)[0].backward()
    assert weak.grad is None
    torch.testing.assert_close(strong.grad, torch.tensor([[0.25, -0.25], [0.0, 0.0]]))
    torch.testing.assert_close(z.grad, torch.tensor([[-0.5, 0.5]]))


def test_the_learning_rate_goes_through_7_16ths_of_a_half_turn():
    """From 1 to cos(7 pi / 16) = 0.195; that training follows it is in the test by hand below."""
    assert cosine(0, 1000) == 1
    assert cosine(1000, 1000) == pytest.approx(0.1950903220161283)
    assert cosine(500, 1000) == pytest.approx(math.sqrt((1 + 0.1950903220161283) / 2))  # half the angle


def stripes():
    """Twelve images of 16x16, each of one colour, the first black and the second white, with its number as label."""
    shades = torch.tensor([0, 255, *range(20, 220, 20)], dtype=torch.uint8)
    x = shades[:, None, None, None].expand(12, 1, 16, 16).float() / 255
    return SimpleNamespace(fixed=lambda part: iter([((x - 0.3) / 0.2, torch.arange(12))]), shape=(1, 16, 16))


def test_the_bytes_are_the_pictures_and_weak_views_are_normalised_shifts():
    views, generator = Views(stripes(), mirror=True, together=1), torch.Generator().manual_seed(0)
    assert views.pictures[:, 0, 8, 8].tolist() == [0, 255, *range(20, 220, 20)]
    seen = views.weak(torch.arange(12), generator)
    shade = (torch.tensor([0, 255, *range(20, 220, 20)]) / 255 - 0.3) / 0.2
    for picture, value in zip(seen, shade, strict=True):
        inside = torch.isclose(picture[0], value, atol=1e-5)
        black = torch.isclose(picture[0], torch.tensor(-1.5), atol=1e-5)
        assert (inside | black).all()
        assert inside.any(1).sum() >= 14  # of 16 rows; an eighth of the side is 2
        assert inside.any(0).sum() >= 14
    shifts = {(picture[0] == picture[0, 8, 8]).sum().item() for picture in seen[2:]}
    assert len(shifts) > 1


def test_weak_views_mirror_half_of_the_pictures_or_none():
    x = torch.zeros(1, 1, 16, 16)
    x[..., 8:] = 1
    data = SimpleNamespace(fixed=lambda part: iter([(x, torch.tensor([0]))]), shape=(1, 16, 16))
    index = torch.zeros(400, dtype=torch.long)
    for mirror, least, most in ((True, 160, 240), (False, 0, 0)):
        seen = Views(data, mirror, 1).weak(index, torch.Generator().manual_seed(0))
        assert least <= (seen[:, 0, 8, 3] > seen[:, 0, 8, 12]).sum() <= most


@pytest.mark.parametrize("channels", [1, 3])
def test_strong_views_cut_half_the_side_differ_by_group_and_leave_the_global_generator_alone(channels):
    torch.manual_seed(5)
    noise = torch.randint(256, (1, channels, 32, 32)).float() / 255
    noise[0, :, 0, 0], noise[0, :, 0, 1] = 0, 1
    x = ((noise - 0.4) / 0.25).expand(64, channels, 32, 32)
    data = SimpleNamespace(fixed=lambda part: iter([(x, torch.zeros(64))]), shape=(channels, 32, 32))
    state, views = torch.get_rng_state(), Views(data, False, 1)
    seen = views.strong(torch.arange(64), torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seen, views.strong(torch.arange(64), torch.Generator().manual_seed(0)))
    assert not torch.equal(seen, views.strong(torch.arange(64), torch.Generator().manual_seed(1)))
    cut = (seen == 0).flatten(1).sum(1) / channels
    assert (cut >= 64).all()  # a quarter of 16 x 16, where the centre is in the corner
    assert cut.max() >= 256
    views._padding, views._cutout = 0, lambda picture: picture
    uncut = views.strong(torch.arange(64), torch.Generator().manual_seed(0))
    assert len({tuple(picture.flatten().tolist()) for picture in uncut}) > 48


def test_the_two_operations_have_strengths_of_their_own(monkeypatch):
    """What torchvision's RandAugment is asked for: one operation at a time, any of its 31 strengths."""
    asked = []

    class Asked(torchvision.transforms.v2.RandAugment):
        def forward(self, *inputs):
            asked.append((self.num_ops, self.magnitude))
            return super().forward(*inputs)

    monkeypatch.setattr(torchvision.transforms.v2, "RandAugment", Asked)
    Views(stripes(), False, 1).strong(torch.arange(12).repeat(25), torch.Generator().manual_seed(0))
    assert len(asked) == 600
    assert {count for count, _ in asked} == {1}
    assert {strength for _, strength in asked} == set(range(31))
    assert 3 < sum(one == other for one, other in zip(asked[::2], asked[1::2], strict=True)) < 25


def test_neighbours_share_their_operations():
    x = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).expand(8, 1, 16, 16)
    data = SimpleNamespace(fixed=lambda part: iter([(x, torch.zeros(8))]), shape=(1, 16, 16))
    views = Views(data, False, 4)
    views._padding, views._cutout = 0, lambda picture: picture
    seen = views.strong(torch.arange(8), torch.Generator().manual_seed(2))
    assert all(torch.equal(seen[0], seen[i]) and torch.equal(seen[4], seen[4 + i]) for i in range(1, 4))
    assert not torch.equal(seen[0], seen[4])


def test_labels_are_spread_over_the_classes():
    y = torch.arange(200) % 10
    chosen = labelled(y, 40, seed=0)
    assert torch.bincount(y[chosen]).tolist() == [4] * 10
    assert len(set(chosen.tolist())) == 40
    assert torch.equal(chosen, labelled(y, 40, seed=0))
    assert not torch.equal(chosen, labelled(y, 40, seed=1))


@pytest.mark.parametrize("count", [0, 9, 201])
def test_too_few_or_too_many_labels_are_refused(count):
    with pytest.raises(ValueError, match=f"labels={count} must be at most the 200"):
        labelled(torch.arange(200) % 10, count, seed=0)


def test_only_kernels_decay():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2)).requires_grad_()
    kernels, rest = groups(network, 0.1)
    assert (kernels["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in kernels["params"]] == [id(network[0].weight), id(network[2].weight)]
    assert len(rest["params"]) == 4
