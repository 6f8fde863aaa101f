"""``optimizer.penalty(...)`` as a term of any loss, and the line where it applies: the algorithm written out."""

import copy
import math
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from tests.helpers import (
    CLASSES,
    FEATURES,
    TwoHeads,
    assert_same,
    batches,
    dropout_net,
    mlp,
    one,
    read_values_as_on_a_device,
)
from tests.reference import (
    CLOSE,
    EACH,
    GOES_ON_BY_THE_TERM,
    VARIANTS,
    WEIGHT,
    assert_same_training,
    by_hand,
    term_of,
    train,
    wrap,
)

STEPS, IGNORED = 8, 255


# ---- steps of all forms ----------------------------------------------------------------------------------------------


def micro_batches(model, x, y, term):
    """Of 6, 6 and 4 rows."""
    for factor, rows, labels in zip((0.5, 0.3, 0.2), x.chunk(3), y.chunk(3), strict=True):
        z = model(rows)
        (factor * (F.cross_entropy(z, labels) + term(z, labels))).backward()


def r_drop(model, x, y, term):
    """The model draws other dropout masks in its second forward pass."""
    first, second = model(x), model(x)
    logs = F.log_softmax(first, 1), F.log_softmax(second, 1)
    apart = sum(F.kl_div(*pair, log_target=True, reduction="batchmean") for pair in (logs, logs[::-1]))
    (F.cross_entropy(first, y) + F.cross_entropy(second, y) + apart + term(first, y) + term(second, y)).backward()


def siamese(model, x, y, term):
    """Copies, as autocast's conversions to float32 are: the values tell which forward pass they are of."""
    first, second = model(x).clone(), model(x.flip(1)).clone()
    same = y == y.roll(1)
    distance = F.pairwise_distance(first, second.roll(1, 0))
    loss = torch.where(same, distance, F.relu(1.0 - distance)).square().mean()
    (loss + 0.5 * term(second, y) + 0.5 * term(first, y)).backward()


def two_tasks(model, x, y, term):
    z, side = model(x)
    (F.cross_entropy(z, y) + F.smooth_l1_loss(side, x[:, :CLASSES]) + term(z, y)).backward()


def dense(model, x, y, term):
    """(N, K, 2, 2); a sixth of the labels is ignored."""
    labels = (y[:, None, None] + torch.arange(4).view(2, 2)) % (CLASSES + 1)
    labels = labels.masked_fill(labels == CLASSES, IGNORED)
    z = model(x)
    (F.cross_entropy(z, labels, ignore_index=IGNORED) + term(z, labels, ignore_index=IGNORED)).backward()


def mixup(model, x, y, term):
    labels = 0.7 * F.one_hot(y, CLASSES).double() + 0.3 * F.one_hot(y.flip(0), CLASSES)
    z = model(0.7 * x + 0.3 * x.flip(0))
    (F.cross_entropy(z, labels) + term(z, labels)).backward()


def dense_mixup(model, x, y, term):
    """(N, K, 2, 2), as CutMix in segmentation."""
    labels = F.one_hot((y[:, None, None] + torch.arange(4).view(2, 2)) % CLASSES, CLASSES).double().movedim(-1, 1)
    labels = 0.7 * labels + 0.3 * labels.flip(0)
    z = model(x)
    (F.cross_entropy(z, labels) + term(z, labels)).backward()


def classes_last(model, x, y, term):
    """(N, 2, 2, K), which the line finds out."""
    labels = (y[:, None, None] + torch.arange(4).view(2, 2)) % CLASSES
    z = model(x).movedim(-1, 1)
    (F.cross_entropy(z, labels) + term(z, labels, z.movedim(1, -1))).backward()


def mixup_by_two_terms(model, x, y, term):
    """As most scripts write it; each call counts, by the factor on it."""
    z = model(0.7 * x + 0.3 * x.flip(0))
    losses = [F.cross_entropy(z, labels) + term(z, labels) for labels in (y, y.flip(0))]
    (0.7 * losses[0] + 0.3 * losses[1]).backward()


def tokens(model, x, y, term):
    """(B, T, K), flattened for the loss; the last token of a row has no label."""
    labels = (y[:, None] + torch.arange(4)) % CLASSES
    labels[:, -1] = -100
    returned = model(x)
    z, labels = returned.flatten(0, 1), labels.flatten()
    (F.cross_entropy(z, labels) + term(z, labels, returned)).backward()


def masked(model, x, y, term):
    returned = model(x)
    z, labels = returned.masked_fill(torch.arange(CLASSES) == 1, -torch.inf), y.masked_fill(y == 1, 0)
    (F.cross_entropy(z, labels) + term(z, labels, returned)).backward()


def one_output(model, x, y, term):
    """(N,)."""
    z = model(x)
    (F.mse_loss(z, x[:, 0]) + term(z, y)).backward()


def shaped(*shape):
    def build():
        torch.manual_seed(0)
        size = torch.Size(shape).numel()
        end = nn.Unflatten(1, shape) if shape else nn.Flatten(0)
        return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, size), end).double()

    return build


def main_head(output):
    return output[0]


BOTH, TERM = ("term", "line"), ("term",)
STEPS_OF = {
    micro_batches: (mlp, BOTH, BOTH),
    r_drop: (dropout_net, TERM, TERM),
    siamese: (mlp, TERM, TERM),
    two_tasks: (TwoHeads, BOTH, BOTH),
    dense: (shaped(CLASSES, 2, 2), BOTH, BOTH),
    mixup: (mlp, TERM, TERM),  # the line reads such labels to 1e-9
    dense_mixup: (shaped(CLASSES, 2, 2), TERM, TERM),
    classes_last: (shaped(2, 2, CLASSES), ("line",), BOTH),
    mixup_by_two_terms: (mlp, TERM, TERM),
    tokens: (shaped(4, CLASSES), BOTH, BOTH),
    masked: (mlp, TERM, TERM),
    one_output: (shaped(), TERM, ()),
}
CELLS = [
    (variant, way, step)
    for step, (_, *ways) in STEPS_OF.items()
    for variant, its_ways in zip(VARIANTS, ways, strict=True)
    for way in its_ways
]


def assert_equals_the_step_by_hand(variant, way, step):
    build, *_ = STEPS_OF[step]
    model, theirs = build(), build()
    named = variant == "dcl" or way == "line"  # the term of DCP names its logits itself
    found = {"logits": main_head} if build is TwoHeads and named else {}
    hand = by_hand(variant, theirs, **{"find": main_head} if build is TwoHeads and variant == "dcl" else {})
    optimizer = wrap(variant, model, **found)
    for trained, term in ((optimizer, term_of(optimizer, way)), (hand, term_of(hand))):
        torch.manual_seed(5)
        for x, y in batches(STEPS):
            trained.zero_grad()
            step(trained.model, x, y, term)
            trained.step()
    assert_same_training(optimizer, hand, **CLOSE)


@pytest.mark.parametrize(("variant", "way", "step"), CELLS)
def test_a_step_equals_the_one_by_hand(variant, way, step):
    assert_equals_the_step_by_hand(variant, way, step)


def test_values_tell_which_forward_pass_it_was_also_in_a_step_that_should_not_wait(monkeypatch):
    """DistributedDataParallel may return another tensor than the model did. Only two of one shape are compared."""
    read_values_as_on_a_device(monkeypatch)
    assert_equals_the_step_by_hand("dcl", "term", siamese)


# ---- the value, and the gradient at the logits -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "distance"), [*product(VARIANTS, ["mse", "squared", "l1", "kl"]), ("dcl", "infonce")]
)
def test_the_value_is_the_weight_times_the_distance(variant, distance):
    """Class 4 has no prototype, so that its rows have no distance; rows without a label are not counted."""
    model, companion, function = mlp(), mlp(seed=3), getattr(distances, distance)
    (x, y), options = one(), {"companion": companion} if variant == "dcl" else {"num_classes": CLASSES}
    optimizer = wrap(variant, model, distance=distance, **options)
    term = term_of(optimizer)
    train(optimizer, [(x, y.clamp(max=3))])
    z, labels = model(9.0 * x), y.index_fill(0, torch.tensor([0, 1]), -100)
    value = term(z, labels)
    if variant == "dcl":
        expected = function(z, companion(9.0 * x)).mean()
    else:
        known, labelled = (labels >= 0) & (labels < 4), labels >= 0
        assert 0 < known.sum() < labelled.sum() < len(y)
        rows = function(z[known], optimizer.prototypes[labels[known]])
        expected = rows.mean() * known.sum() / labelled.sum()
    assert value.shape == ()
    assert_same(value.detach(), WEIGHT * expected.detach(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@EACH
def test_the_value_is_float32_or_wider(variant, dtype):
    model, companion, (x, y) = mlp(dtype=dtype), mlp(seed=3, dtype=dtype), one()
    optimizer = wrap(variant, model, **{"companion": companion} if variant == "dcl" else {})
    train(optimizer, [(x.to(dtype), y)], loss=F.cross_entropy)
    z = model(x.to(dtype))
    c = companion(x.to(dtype)) if variant == "dcl" else optimizer.prototypes[y]
    value = term_of(optimizer)(z, y)
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert_same(value.detach(), WEIGHT * F.mse_loss(z.float(), c.float()).detach(), rtol=1e-5)


def pull(optimizer, x, y, z):
    """The gradient of the penalty at the logits, by hand."""
    companion = isinstance(optimizer, DCLOptimizer)
    c = copy.deepcopy(optimizer.companion)(x) if companion else optimizer.prototypes[y]
    return (WEIGHT * 2.0 * (z - c) / z.numel()).detach()


def added(optimizer, x, y, with_term):
    """What a backward pass adds to the gradient of cross-entropy at the logits."""
    z = optimizer.model(x)
    z.retain_grad()
    (F.cross_entropy(z, y) + (term_of(optimizer)(z, y) if with_term else 0.0)).backward()
    leaf = z.detach().requires_grad_()
    (plain,) = torch.autograd.grad(F.cross_entropy(leaf, y), leaf)
    if with_term:
        assert_same(z.grad - plain, pull(optimizer, x, y, z), atol=1e-15)
    return z.grad - plain


@pytest.mark.filterwarnings("ignore:a step without a penalty")
@GOES_ON_BY_THE_TERM
@EACH
def test_once_penalty_was_called_the_line_is_off_also_in_a_resumed_run(variant):
    """Of two micro-batches one has the term: the line would add a penalty to both."""
    optimizer = train(wrap(variant, mlp()), batches(2), "line", F.cross_entropy)
    first, second = batches(2, seed=2)
    assert added(optimizer, *first, with_term=False).any()
    for order in [(True, False), (False, True)]:
        optimizer.step()
        optimizer.zero_grad()
        for batch, with_term in zip((first, second), order, strict=False):
            assert bool(added(optimizer, *batch, with_term=with_term).any()) == with_term
    optimizer.step()
    resumed = wrap(variant, mlp())
    resumed.load_state_dict(optimizer.state_dict())
    for one_of_both in (optimizer, resumed):
        one_of_both.zero_grad()
        assert not added(one_of_both, *first, with_term=False).any()
        one_of_both.step()


@EACH
def test_another_loss_of_the_logits_may_have_its_backward_pass_before_the_term(variant):
    found = []
    for splits in (True, False):
        optimizer = wrap(variant, mlp())
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = optimizer.model(x)
            losses = F.multi_margin_loss(z, y), F.cross_entropy(z, y) + term_of(optimizer)(z, y)
            if splits:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                sum(losses).backward()
            optimizer.step()
        found.append(optimizer)
    assert_same_training(*found, **CLOSE)


@EACH
def test_gradients_that_are_cleared_between_the_call_and_its_backward_pass_do_not_take_it_along(variant):
    """As in adversarial training: an attack by backward, then a forward pass of what it found."""
    trained = []
    for attacks in (True, False):
        optimizer = wrap(variant, mlp())
        model, term = optimizer.model, term_of(optimizer)
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            loss = F.cross_entropy(z, y) + term(z, y)
            if attacks:
                F.cross_entropy(model(x.flip(0)), y).backward()
                optimizer.zero_grad()
            (loss + model(2.0 * x).square().mean()).backward()
            optimizer.step()
        trained.append(optimizer)
    assert_same_training(*trained)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param((0, 1), id="unread first", marks=pytest.mark.filterwarnings("ignore:a batch gets no penalty")),
        pytest.param((1, 0), id="read first"),  # the logits have their penalty then, and nothing is said
    ],
)
@GOES_ON_BY_THE_TERM
@EACH
def test_two_losses_of_the_same_logits_get_one_penalty(variant, order):
    """Each has a backward pass of its own, and the line can read one of them."""
    trained = []
    for way in ("line", "term"):
        optimizer = train(wrap(variant, mlp()), batches(4), "line", F.cross_entropy)
        for x, y in batches(STEPS, seed=2):
            optimizer.zero_grad()
            z = optimizer.model(x)
            losses = [0.1 * F.multi_margin_loss(z, y), F.cross_entropy(z, y)]
            if way == "term":
                (losses[0] + losses[1] + term_of(optimizer)(z, y)).backward()
            else:
                for index in order:
                    losses[index].backward(retain_graph=True)
            optimizer.step()
        trained.append(optimizer)
    assert trained[0].logs()["skipped"] == (0 if order[0] else STEPS)
    assert_same_training(*trained, **CLOSE)


@EACH
def test_logits_and_soft_labels_may_be_written_over_after_the_call(variant):
    """Liger's cross-entropy writes the gradient into the logits' memory."""
    trained = []
    for edits in (True, False):
        optimizer = wrap(variant, mlp())
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = optimizer.model(x)
            labels = F.one_hot(y, CLASSES).double()
            loss = z.sum(1).square().mean() + term_of(optimizer)(z, labels)
            if edits:
                z.data.fill_(-1e9)
                labels.zero_()
            loss.backward()
            optimizer.step()
        trained.append(optimizer)
    assert_same_training(*trained)


def test_weight_0_gives_no_gradient_to_a_head_that_the_loss_does_not_reach():
    """A gradient of 0 in place of none would let weight decay and momentum move it."""

    def trained(has_term):
        model = TwoHeads()
        base = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer = DCPOptimizer(base, model, weight=0, logits=lambda output: output[0]) if has_term else base
        for x, y in batches(4):
            optimizer.zero_grad()
            first, second = model(x)
            loss = F.cross_entropy(first, y)
            if has_term:
                loss = loss + optimizer.penalty(second, y)
            loss.backward()
            optimizer.step()
        return model.state_dict()

    assert_same(trained(True), trained(False))


@pytest.mark.parametrize("reads_always", [True, False])
@pytest.mark.parametrize(("variant", "way"), [*product(VARIANTS, ["line", "term"])])
def test_a_model_that_has_become_nan_is_seen_in_the_logs(variant, way, reads_always, monkeypatch):
    """By either way, also where values are read in few steps alone, as on a device."""
    if not reads_always:
        read_values_as_on_a_device(monkeypatch)
    optimizer = wrap(variant, mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guards say it, too
        for number, (x, y) in enumerate(batches(7)):
            train(optimizer, [(x * torch.nan if number == 4 else x, y)], way, F.cross_entropy)
            if number == 3:
                assert optimizer.logs()["penalty"] > 0
                assert optimizer.logs()["skipped"] == 0
    logs = optimizer.logs()
    assert math.isnan(logs["penalty"])
    assert logs["skipped"] == 3


def test_dcl_takes_labels_and_does_not_use_them():
    """So that a script which compares both methods needs no branch."""
    optimizer = wrap("dcl", mlp())
    x, y = one()
    z = optimizer.model(x)
    without = optimizer.penalty(z)
    assert torch.equal(optimizer.penalty(z, y - 100, ignore_index=-99), without)
