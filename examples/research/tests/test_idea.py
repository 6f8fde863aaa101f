"""The figure of the idea: prototypes pull the logits of each class together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.research import idea


def relative_spread(model: nn.Module) -> float:
    """The spread inside the classes over that of their means, of test images."""
    images, classes = idea.of_three_digits(*idea.digits()[2:])
    with torch.no_grad():
        points = idea.in_plane(model(images))
    means = torch.stack([points[classes == k].mean(0) for k in range(3)])
    return float((points - means[classes]).norm(dim=1).mean() / (means - means.mean(0)).norm(dim=1).mean())


def test_the_line_pulls_the_logits_of_each_class_together():
    images, labels = idea.of_three_digits(*idea.digits()[:2])
    (plain, nothing), (wrapped, prototypes) = (idea.train(images, labels, wraps) for wraps in (False, True))
    assert nothing is None
    assert prototypes is not None
    assert relative_spread(wrapped) < 0.7 * relative_spread(plain)


def test_points_keep_the_distances_of_logits_that_sum_to_zero():
    logits = torch.tensor([[1.0, 2.0, -3.0], [0.0, -1.0, 1.0]])
    points = idea.in_plane(logits)
    assert torch.pdist(points).item() == pytest.approx(torch.pdist(logits).item())


def test_the_figure_is_written(tmp_path):
    path = idea.main(["--out", str(tmp_path / "idea.png")])
    assert path.read_bytes().startswith(b"\x89PNG")
