"""What has happened since the last step: a term that is missing, nothing that is kept."""

import itertools

import torch
import torch.nn.functional as F

from tests.helpers import Storages, mlp, no_collector, one
from tests.reference import EACH, EACH_WAY, loss_of, term_of, train, wrap

# ---- a script that has called penalty ------------------------------------------------------------------------------


@EACH
def test_a_step_after_detach_is_the_bases_also_where_the_term_was_called(variant):
    (x, y), optimizer = one(), wrap(variant, mlp())
    train(optimizer, [(x, y)])
    z = optimizer.model(x)
    term_of(optimizer)(z, y)
    F.cross_entropy(z, y).backward()
    optimizer.detach()
    optimizer.step()
    assert optimizer.logs()["step"] == 2.0


# ---- nothing is kept -----------------------------------------------------------------------------------------------


@EACH_WAY
@EACH
def test_a_loss_that_the_script_keeps_keeps_nothing_but_numbers(variant, way):
    """As in ``total = total + loss``, whose graph is that of all steps."""
    optimizer, batch = wrap(variant, mlp()), one()
    with no_collector(), Storages() as storages:
        total = torch.zeros(()).double()
        sizes = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(optimizer, *batch, way)
            loss.backward()
            optimizer.step()
            total = total + loss
            del loss
            sizes.append(storages.live()[1])
        growth = [later - before for before, later in itertools.pairwise(sizes[2:])]
    assert max(growth) <= 64, "bytes a step; the logits alone have 640"
