"""What has happened since the last step: terms that are missing, logits that are hidden, nothing that is kept."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import Returning, Storages, assert_same, batches, mlp, no_collector, one
from tests.reference import EACH, learned, loss_by_the_line, loss_with_the_term, term_of, train, wrap

# ---- a script that has called penalty ------------------------------------------------------------------------------


@EACH
def test_a_step_after_detach_is_the_bases_also_where_the_term_was_called(variant):
    (x, y), optimizer = one(), wrap(variant, mlp())
    z = optimizer.model(x)
    (F.cross_entropy(z, y) + term_of(optimizer)(z, y)).backward()
    optimizer.step()
    z = optimizer.model(x)
    term_of(optimizer)(z, y)
    F.cross_entropy(z, y).backward()
    optimizer.detach()
    optimizer.step()
    assert optimizer.logs()["step"] == 2.0


# ---- where the logits are ------------------------------------------------------------------------------------------


def test_the_prototypes_term_takes_logits_that_the_model_hides():
    """Under no name that is looked for."""
    hiding = wrap("dcp", Returning(lambda z: {"scores": z}))
    train(hiding, batches(4), loss=F.cross_entropy, call=lambda x: hiding.model(x)["scores"])
    plain = train(wrap("dcp", mlp()), batches(4), loss=F.cross_entropy)
    assert_same((hiding.model.body, learned(hiding)), (plain.model, learned(plain)))


# ---- nothing is kept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_of", [loss_by_the_line, loss_with_the_term])
@EACH
def test_a_loss_that_the_script_keeps_keeps_nothing_but_numbers(variant, loss_of):
    """As in ``total = total + loss``, whose graph is that of all steps."""
    optimizer, batch = wrap(variant, mlp()), one()
    with no_collector(), Storages() as storages:
        total = torch.zeros(()).double()
        sizes = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = loss_of(optimizer, *batch)
            loss.backward()
            optimizer.step()
            total = total + loss
            del loss
            sizes.append(storages.live()[1])
        growth = [later - before for before, later in itertools.pairwise(sizes[2:])]
    assert max(growth) <= 64, "bytes a step; the logits alone have 640"
