"""DCPOptimizer: the documentation of its arguments, the number of classes, and the ways of the labels."""

import inspect
import re

import torch
import torch.nn.functional as F

from dcl_optim import DCPOptimizer
from dcl_optim.distances import mse
from tests import reference
from tests.helpers import CLASSES, assert_same, batches, fit, mlp, sgd
from tests.reference import NEAR


def wrap(model, **options):
    return DCPOptimizer(sgd(model), model, **{"weight": 1.0, "alpha": 0.6} | options)


# ---- the documentation -----------------------------------------------------------------------------------------------


def test_the_documentation_has_every_argument_with_its_default_and_no_other():
    arguments = inspect.getdoc(DCPOptimizer).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE)
    parameters = inspect.signature(DCPOptimizer).parameters
    assert dict(entries).keys() == parameters.keys()
    for name, text in entries:
        text = re.sub(r"\s+", " ", text)
        found = re.search(r"Default (True|\d+(?:\.\d+)?)\b|(None|``\S+``) \(default", text)
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            assert found is None, name
        else:
            assert (found[1] or found[2].strip("`").strip('"')) == str(default), name


# ---- the classes -----------------------------------------------------------------------------------------------------


def test_the_number_of_classes_is_that_of_the_first_logits():
    results = []
    for number in (None, CLASSES):
        model = mlp()
        optimizer = wrap(model, num_classes=number)
        assert optimizer.prototypes.shape == (0, 0)
        fit(optimizer, batches(5))
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_a_term_in_another_shape_in_evaluation_mode_and_with_a_factor_is_the_reference():
    model, theirs, prototypes, numbers = mlp(), mlp(), {}, {}
    optimizer, plain = wrap(model), sgd(theirs)
    for x, y in batches(10):
        optimizer.zero_grad()
        z = model.eval()(x)
        ((2 * F.cross_entropy(z, y) + 2 * optimizer.penalty(z.T[None], y[None].int())) / 2).backward()
        optimizer.step()
        reference.dcp_step(theirs, prototypes, plain, x, y, F.cross_entropy, mse, numbers=numbers)
    rows = torch.stack([prototypes[k] for k in range(CLASSES)])
    assert_same((model.state_dict(), optimizer.prototypes), (theirs.state_dict(), rows), **NEAR)
