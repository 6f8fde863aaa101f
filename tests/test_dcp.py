"""DCPOptimizer: what each argument does, where labels come from, and that the documentation says so."""

from __future__ import annotations

import copy
import inspect
import re
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, TwoHeads, assert_same, batches, mlp, one, sgd, train


def wrap(model, **options):
    return DCPOptimizer(sgd(model), model, **{"num_classes": CLASSES, "weight": 1.0, "alpha": 0.6} | options)


# ---- the documentation -----------------------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """The text of each argument; one that several share goes to each of them."""
    arguments = inspect.getdoc(DCPOptimizer).partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    ([\w, ]+): (.*(?:\n     .*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for names, text in entries for name in names.split(", ")}


def test_every_argument_is_documented_and_no_other():
    assert documented().keys() == inspect.signature(DCPOptimizer).parameters.keys()


def test_defaults_are_those_of_the_documentation():
    """Where it refers to DCLOptimizer, the defaults are that one's."""
    ours, theirs = (inspect.signature(kind).parameters for kind in (DCPOptimizer, DCLOptimizer))
    checked = []
    for name, text in documented().items():
        default = ours[name].default
        if "as in" in text and "DCLOptimizer" in text:
            assert default == theirs[name].default, name
        elif found := re.search(r"Default (-?\d+(?:\.\d+)?)\b|(None|``\S+``) \(default\)", text):
            shown = found[1] or found[2].strip("`").strip('"')
            assert shown == str(default), name
            checked.append(name)
        else:
            assert default in (inspect.Parameter.empty, None), name
    assert checked == ["num_classes", "weight", "alpha", "update", "ignore_index"]


# ---- the classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("give_labels", [False, True])
def test_the_number_of_classes_is_that_of_the_first_logits(give_labels):
    results = []
    for number in (None, CLASSES):
        model = mlp()
        optimizer = wrap(model, num_classes=number)
        assert optimizer.prototypes.shape == ((0, 0) if number is None else (CLASSES, CLASSES))
        for x, y in batches(5):
            if give_labels:
                optimizer.set_targets(y)
            train(model, optimizer, [(x, y)])
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(*results)


def test_a_state_of_before_the_first_batch_and_of_after_it_load_into_an_optimizer_that_knows_no_number():
    model, other = mlp(), mlp()
    optimizer, second = wrap(model, num_classes=None), wrap(other, num_classes=None)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, batches(2))
    assert second.prototypes.shape == (0, 0)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(second.prototypes, optimizer.prototypes)


@pytest.mark.parametrize(
    ("shape", "class_dim", "fix"),
    [((2, 4, 5), 1, "class_dim=-1, along which it gives 5"), ((2, 4, 5, 3), 1, "class_dim=2, along which it gives 5")],
)
def test_logits_whose_classes_are_in_another_dimension_name_the_fix(shape, class_dim, fix):
    model = nn.Sequential(nn.Linear(1, 60 if len(shape) == 4 else 20), nn.Unflatten(1, shape[1:]))
    optimizer = wrap(model, class_dim=class_dim)
    optimizer.set_targets(torch.zeros(2, *shape[2:], dtype=torch.long))
    with pytest.raises(ValueError, match=fix):
        model(torch.ones(2, 1)).sum().backward()
    del optimizer


# ---- labels ----------------------------------------------------------------------------------------------------------


class WithLabels(nn.Module):
    """Like a Hugging Face model: labels go in, the loss comes out beside the logits."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, labels=None):
        z = self.net(x)
        return {"loss": None if labels is None else F.cross_entropy(z, labels), "logits": z}


def ways():
    """Each way to give labels: the model, the optimizer, and one training step."""
    model = mlp()
    reading = wrap(model)
    yield "read", model, reading, lambda x, y: train(model, reading, [(x, y)])

    labelled = WithLabels()
    by_keyword = wrap(labelled, targets="labels")

    def keyword_step(x, y):
        by_keyword.zero_grad()
        labelled(x, labels=y)["loss"].backward()
        by_keyword.step()

    yield "keyword", labelled.net, by_keyword, keyword_step

    labelled_too = WithLabels()
    by_function = wrap(labelled_too, targets=lambda args, kwargs: args[1])

    def function_step(x, y):
        by_function.zero_grad()
        labelled_too(x, y)["loss"].backward()
        by_function.step()

    yield "function", labelled_too.net, by_function, function_step

    set_model = mlp()
    by_call = wrap(set_model)

    def call_step(x, y):
        by_call.set_targets(y)
        train(set_model, by_call, [(x, y)])

    yield "set_targets", set_model, by_call, call_step

    closure_model = mlp()
    in_closure = wrap(closure_model)

    def closure_step(x, y):
        def closure():
            in_closure.set_targets(y)
            return F.cross_entropy(closure_model(x), y)

        in_closure.step(closure)

    yield "set_targets in a closure", closure_model, in_closure, closure_step


def test_every_way_to_give_labels_is_the_same():
    results = {}
    for name, model, optimizer, step in ways():
        for x, y in batches(10):
            step(x, y)
        results[name] = (model.state_dict(), optimizer.prototypes)
    for name, found in results.items():
        assert_same(found, results["read"], rtol=1e-10, atol=1e-12)
        assert name


def test_labels_given_twice_are_refused():
    x, y = one()
    labelled = WithLabels()
    optimizer = wrap(labelled, targets="labels")
    optimizer.set_targets(y)
    with pytest.raises(RuntimeError, match="labels twice, from targets= and from set_targets"):
        labelled(x, labels=y)


def test_keyword_that_is_missing():
    model = WithLabels()
    optimizer = wrap(model, targets="labels")
    with pytest.raises(ValueError, match=r"targets='labels': the model was called without that keyword"):
        model(torch.randn(2, FEATURES, dtype=torch.float64))
    model.eval()
    model(torch.randn(2, FEATURES, dtype=torch.float64))  # evaluation needs no labels
    del optimizer


def test_step_takes_no_labels():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(TypeError, match="targets"):
        optimizer.step(lambda: F.cross_entropy(model(x), y), targets=y)
    assert_same((model.state_dict(), optimizer.state_dict()), before)


def test_labels_set_in_a_closure_that_is_evaluated_several_times():
    """The line search of LBFGS evaluates it at other weights, and each evaluation needs the labels."""

    def trained(by):
        model = mlp()
        base = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        optimizer = DCPOptimizer(base, model, CLASSES, weight=1.0, alpha=0.6, loss_scale=1.0)
        evaluations = []

        def closure(x, y):
            evaluations.append(x)
            optimizer.zero_grad()
            if by == "set_targets":
                optimizer.set_targets(y)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for x, y in batches(3):
            optimizer.step(lambda: closure(x, y))  # noqa: B023
        assert len(evaluations) > 6
        return model.state_dict(), optimizer.prototypes

    assert_same(trained("set_targets"), trained("read"))


@pytest.mark.parametrize("given", ["tensor", "list"])
def test_set_targets_takes_tensors(given):
    optimizer = wrap(mlp())
    if given == "list":
        with pytest.raises(TypeError, match="targets must be a tensor of labels, got list"):
            optimizer.set_targets([0, 1])
    else:
        optimizer.set_targets(torch.tensor([0, 1]))


def hinge(z, y):
    return F.multi_margin_loss(z, y, margin=50.0)


def test_with_a_loss_scale_the_label_of_a_row_is_its_only_negative_entry():
    results = []
    for given in (False, True):
        model = mlp()
        optimizer = wrap(model, loss_scale=1.0)
        for x, y in batches(5):
            if given:
                optimizer.set_targets(y)
            train(model, optimizer, [(x, y)], hinge)
        results.append((model.state_dict(), optimizer.prototypes))
    assert_same(*results)


def test_labels_of_other_losses_have_to_be_given_and_the_message_says_how():
    model = mlp()
    optimizer = wrap(model)
    x, y = one()
    loss = hinge(model(x), y)
    with pytest.raises(RuntimeError, match=r"(?s)cannot be read.*\n  Fix: .*loss_scale=.*set_targets.*targets="):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    del optimizer


# ---- the logits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auxiliary_first", [False, True])
def test_an_auxiliary_head_is_not_taken_for_the_logits(auxiliary_first):
    model = TwoHeads()
    optimizer = wrap(model, logits=itemgetter(0))
    x, y = one()
    main, side = model(x)
    calls = [lambda: F.cross_entropy(main, y), lambda: 0.4 * F.cross_entropy(side, y.flip(0))]
    sum(call() for call in (reversed(calls) if auxiliary_first else calls)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0, rel=1e-12)
    optimizer.step()
    assert_same(optimizer.prototypes[0], main.detach()[y == 0].mean(0), atol=1e-12)


def test_a_loss_of_a_converted_copy_of_the_logits():
    model = mlp(dtype=torch.float32)
    optimizer = wrap(model)
    x, y = next(batches(1, dtype=torch.float32))
    (3.0 * F.cross_entropy(model(x).double(), y)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(3.0)
