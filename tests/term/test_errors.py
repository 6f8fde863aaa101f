"""``optimizer.penalty(...)``: wrong arguments, a term not in the loss, no gradients, batches that are not finite."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import FEATURES, TwoHeads, assert_same, batches, dropout_net, gradients_put_back, mlp
from tests.reference import EACH, EACH_WAY, assert_same_training, learned, loss_of, term_of, train, wrap

# ---- wrong arguments: the name, the value, the fix -------------------------------------------------------------------


def dense(z):
    return torch.stack([z, 2 * z, 3 * z], 2)


def other_model(z):
    return mlp(seed=9)(torch.ones(len(z), FEATURES).double())


OF_DCP = {
    "a large label": (lambda p, z, y: p(z, y + 3), ValueError, ["labels", "0..4", "ignore_index", "Hidden"]),
    "a negative label": (lambda p, z, y: p(z, 0 * y - 1), ValueError, ["labels", "-1", "ignore_index"]),
    "a label too few": (lambda p, z, y: p(z, y[1:]), ValueError, ["labels", "(15,)", "(16, 5)"]),
    "transposed": (lambda p, z, y: p(dense(z), y.expand(3, -1)), ValueError, ["labels", "(3, 16)", "(16, 5, 3)"]),
    "sigmoids' labels": (lambda p, z, y: p(z, torch.ones_like(z)), ValueError, ["labels", "DCLOptimizer"]),
    "labels of floats": (lambda p, z, y: p(z, y.double()), ValueError, ["labels", "float64", "(16,)"]),
    "one-hot integers": (lambda p, z, y: p(z, F.one_hot(y, 5)), ValueError, ["labels", "int64", "(16, 5)", "float()"]),
    "labels of bools": (lambda p, z, y: p(z, y > 2), TypeError, ["labels", "bool", "labels.long()"]),
    "a list of labels": (lambda p, z, y: p(z, y.tolist()), TypeError, ["labels", "list", "torch.as_tensor(labels)"]),
    "one dimension": (lambda p, z, y: p(z[:, 0], y), ValueError, ["logits", "(16,)", "DCLOptimizer"]),
    "one logit a row": (lambda p, z, y: p(z[:, :1], y > 2), ValueError, ["logits", "(16, 1)", "DCLOptimizer"]),
    "fewer classes": (lambda p, z, y: p(z[:, :4], 0 * y), ValueError, ["logits", "4", "5"]),
    "integers": (lambda p, z, y: p(z.long(), y), TypeError, ["logits", "int64"]),
    "a list": (lambda p, z, y: p([z], y), TypeError, ["logits", "list"]),
}
OF_DCL = {
    "other values": (lambda p, z, y: p(2 * z), ValueError, ["logits", "(16, 5)", "returned", "use torch.no_grad()"]),
    "a mean of two": (lambda p, z, y: p((z + other_model(z)) / 2), ValueError, ["mean of several calls", "inside"]),
    "some of the rows": (lambda p, z, y: p(z[:8]), ValueError, ["logits", "(8, 5)", "returned"]),
    "another model's logits": (lambda p, z, y: p(other_model(z)), ValueError, ["logits", "(16, 5)", "returned"]),
    "integers": (lambda p, z, y: p(z.long()), TypeError, ["logits", "int64"]),
    "a model's output": (
        lambda p, z, y: p({"logits": z}),
        TypeError,
        ["dict with keys 'logits'", "output[...]"],
    ),
}


@pytest.mark.guard
@pytest.mark.parametrize(("variant", "what"), [("dcp", what) for what in OF_DCP] + [("dcl", what) for what in OF_DCL])
def test_a_wrong_argument_is_named_and_leaves_nothing(variant, what):
    optimizer, calm = (wrap(variant, mlp()) for _ in range(2))
    data, (call, error, words) = list(batches(4)), (OF_DCP if variant == "dcp" else OF_DCL)[what]
    train(optimizer, data[:2])
    z = optimizer.model(data[2][0])
    with pytest.raises(error) as caught:
        call(optimizer.penalty, z, data[2][1].clamp(min=2))
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    train(optimizer, data[3:])
    assert_same_training(optimizer, train(calm, [*data[:2], data[3]]))


@pytest.mark.guard
def test_dcl_says_which_output_is_the_logits():
    optimizer, (x, _) = wrap("dcl", TwoHeads()), next(batches(1))
    _, side = optimizer.model(x)
    with pytest.raises(ValueError, match=r"say which are the logits, logits=lambda output: output\[1\]"):
        optimizer.penalty(side)


@pytest.mark.guard
@pytest.mark.parametrize("what", ["eval mode", "reentrant checkpoint", "an earlier step"])
def test_what_no_training_forward_pass_of_the_step_returned_has_no_companion(what):
    optimizer, (x, y) = wrap("dcl", mlp()), next(batches(1))
    if what == "reentrant checkpoint":  # which runs the model without gradients
        z = checkpoint(optimizer.model, x.requires_grad_(), use_reentrant=True)
    else:
        z = optimizer.model.train(what != "eval mode")(x)
    if what == "an earlier step":
        (F.cross_entropy(z, y) + optimizer.penalty(z)).backward(retain_graph=True)
        optimizer.step()
    fix = r"call model.train\(\)" if what == "eval mode" else r"called as model\(x\)"
    if what == "reentrant checkpoint":
        fix += ".*use_reentrant=False"
    with pytest.raises(ValueError, match=rf"(?s)logits.*\(16, 5\).*training forward pass.*{fix}"):
        optimizer.penalty(z)


# ---- without gradients -----------------------------------------------------------------------------------------------


def validate(optimizer, how):
    model, term, draws = optimizer.model, term_of(optimizer), torch.get_rng_state()
    dtype = next(model.parameters()).dtype
    model.train(how == "training mode")
    for x, y in batches(2, seed=9, dtype=dtype):
        with torch.inference_mode() if how == "inference mode" else torch.no_grad():
            values = [term(model(x), y)]
        z = model(x)
        with torch.no_grad():
            values.append(term(z, y))
        for found in (*values, term(z.detach(), y)):
            assert (float(found), found.shape, found.requires_grad) == (0.0, (), False)
            assert found.dtype == torch.promote_types(dtype, torch.float32)
    model.train()
    torch.set_rng_state(draws)


@pytest.mark.parametrize("how", ["eval mode", "training mode", "inference mode"])
@EACH
def test_a_validation_is_not_observed(variant, how):
    """One function serves both, and no term is missed in the next step."""
    found = []
    for validates in (True, False):
        optimizer = wrap(variant, dropout_net())
        torch.manual_seed(5)
        for batch in batches(4):
            train(optimizer, [batch])
            if validates:
                validate(optimizer, how)
        found.append(optimizer)
    assert_same_training(*found)
    assert_same(found[0].state_dict(), found[1].state_dict())
    validate(wrap(variant, mlp(dtype=torch.bfloat16)), how)


# ---- batches that are not finite -------------------------------------------------------------------------------------


def backward(optimizer, way, x, y, factor=1.0):
    (factor * loss_of(optimizer, x, y, way)).backward()


def nan_in_the_input(optimizer, way, x, y):
    backward(optimizer, way, torch.where(torch.arange(len(x))[:, None] == 2, torch.nan, x), y)


def an_overflow_in_the_logits(optimizer, way, x, y):
    handle = optimizer.model[-1].register_forward_hook(lambda *found: found[-1].index_fill(0, y[:1], torch.inf))
    backward(optimizer, way, x, y)
    handle.remove()


def infinite_factor(optimizer, way, x, y):
    backward(optimizer, way, x, y, torch.inf)


@pytest.mark.parametrize("weight", [0.7, lambda step: 0.7])
@pytest.mark.parametrize("distance", ["mse", "l1", "kl", "infonce"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@EACH
def test_the_value_is_not_finite_where_a_logit_is_not(variant, value, distance, weight):
    optimizer = train(wrap(variant, mlp(), distance=distance, weight=weight), batches(3))
    x, y = next(batches(1))
    place = (torch.tensor(3), (y[3] + 1) % 5)
    networks = [optimizer.model, *([optimizer.companion] if variant == "dcl" else [])]
    for number, is_finite in ((value, False), (-torch.inf, True)):
        change = partial(_put, place, torch.tensor(number).double())
        handles = [network[-1].register_forward_hook(change) for network in networks]
        assert bool(term_of(optimizer)(optimizer.model(x), y).isfinite()) == is_finite
        for handle in handles:
            handle.remove()


def _put(place, number, module, args, z):
    return z.index_put(place, number)


def padded_term(optimizer, keeps_padding):
    (x, y), is_padding = next(batches(1, seed=5)), torch.arange(16) < 3
    z, y = optimizer.model(x).masked_fill(is_padding[:, None], torch.nan), y.masked_fill(is_padding, -100)
    return term_of(optimizer)(z, y) if keeps_padding else term_of(optimizer)(z[~is_padding], y[~is_padding])


@pytest.mark.filterwarnings("ignore:non-finite")
def test_rows_of_nan_without_a_label_count():
    optimizer, calm = (train(wrap("dcp", mlp()), batches(3)) for _ in range(2))
    before = optimizer.prototypes
    assert padded_term(calm, keeps_padding=False).isfinite()
    penalty = padded_term(optimizer, keeps_padding=True)
    assert penalty.isnan()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
    assert_same(optimizer.prototypes, before)
    assert all(bool(parameter.isfinite().all()) for parameter in optimizer.model.parameters())


@pytest.mark.filterwarnings("ignore:non-finite", "ignore:.*not finite")
@pytest.mark.parametrize("bad", [nan_in_the_input, an_overflow_in_the_logits, infinite_factor])
@EACH_WAY
@EACH
def test_a_batch_that_is_not_finite_takes_no_part(variant, way, bad):
    """Of two micro-batches one is bad: as if it had not been; the base gets a zero from it."""
    found, data = [], list(batches(7))
    for meets_it in (True, False):
        optimizer = train(wrap(variant, mlp()), data[:4], way, F.cross_entropy)
        optimizer.zero_grad()
        backward(optimizer, way, *data[4])
        if meets_it:
            with gradients_put_back(optimizer.model):
                bad(optimizer, way, *data[5])
        optimizer.step()
        found.append(train(optimizer, data[6:], way, F.cross_entropy))
    assert_same_training(*found)
    assert all(bool(tensor.isfinite().all()) for tensor in learned(found[0]).values())
