"""A guard changes nothing in a right script: trainings with guards that do nothing are the same bit for bit.

``--without-guards`` runs all tests of the method so.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import NoGuards, assert_same, batches, dropout_net, mlp
from tests.reference import EACH, EACH_WAY, loss_of, train, wrap


def plain(variant, way):
    """Up to a step in which a value may be read again."""
    return train(wrap(variant, dropout_net()), batches(130), way, F.cross_entropy)


def micro_batches_skipped_steps_and_nan(variant, way):
    optimizer = wrap(variant, mlp(), strict=False)
    for step, (x, y) in enumerate(batches(12)):
        optimizer.zero_grad()
        for rows, labels in zip(x.chunk(2), y.chunk(2), strict=True):
            factor = torch.inf if step in (0, 5) else 0.5
            (factor * loss_of(optimizer, rows, labels, way)).backward()
        if step % 5:
            optimizer.step()
    return optimizer


def losses_that_the_line_cannot_read(variant, way):
    optimizer = train(wrap(variant, mlp()), batches(4), way, F.cross_entropy)
    train(optimizer, batches(2, seed=2), way, F.multi_margin_loss)
    return train(optimizer, batches(4, seed=3), way, F.cross_entropy)


TRAININGS = [plain, micro_batches_skipped_steps_and_nan, losses_that_the_line_cannot_read]


@pytest.mark.filterwarnings("ignore:a batch gets no penalty", "ignore:non-finite")
@pytest.mark.parametrize("training", TRAININGS)
@EACH_WAY
@EACH
def test_a_training_is_the_same(variant, way, training, without_guards):
    with without_guards:
        bare = training(variant, way)
    guarded = training(variant, way)
    assert isinstance(bare._algorithm.guards, NoGuards)
    for found, expected in ((bare.model, guarded.model), (bare.state_dict(), guarded.state_dict())):
        assert_same(found, expected)
    assert repr(bare.logs()) == repr(guarded.logs())
