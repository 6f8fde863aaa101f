"""A batch that is not finite is said once, with what to do about rows of nan that have no label."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import batches, fit, mlp
from tests.reference import EACH, EACH_WAY, term_of, wrap


@EACH_WAY
@EACH
def test_it_is_said_once(variant, way):
    optimizer, factors = wrap(variant, mlp()), iter((1.0, torch.inf, 1.0, torch.inf))

    def loss(z, y):
        return next(factors) * (F.cross_entropy(z, y) + term_of(optimizer, way)(z, y))

    with pytest.warns(UserWarning, match=r"non-finite logits or loss(?s:.*)penalty\(z\[keep\], y\[keep\]\)") as caught:
        fit(optimizer, batches(4), loss)
    assert len(caught) == 1
