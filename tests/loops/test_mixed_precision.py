"""Mixed precision beyond the plain loop: clipping, skipped steps, resumption, autocast's cache, bfloat16 networks."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same, batches, dropout_net, every, mlp, sgd
from tests.reference import EACH, VARIANTS, Rounded, apart, by_hand, end, learned, loss_of, wrap

CLIP = 0.3
# A step's gradient passes through a few roundings of the dtype, and the errors of steps add up as the steps do: the
# relative error of a run is a few units of rounding.
OFF = 8
WAYS = ["line", "term"]


def scaler_of(scale=2.0**12, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def data(steps, **options):
    return list(batches(steps, 24, **{"dtype": torch.float32} | options))


def backward(optimizer, x, y, scaler, half=None, way="line", factor=1.0):
    with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
        loss = factor * loss_of(optimizer, x, y, way)
    scaler.scale(loss).backward()


def finish(optimizer, scaler, clip=None):
    if clip is not None:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(optimizer.model.parameters(), clip)
        assert not norm < clip, "each step has to be clipped"
    scaler.step(optimizer)
    scaler.update()


def train(optimizer, steps, scaler, parts=1, clip=None, **options):
    """As torch's guide to mixed precision has it."""
    for x, y in steps:
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            backward(optimizer, part, labels, scaler, factor=1 / parts, **options)
        finish(optimizer, scaler, clip)
    return optimizer


def assert_close(found, expected, start, dtype):
    """How far a run ends from where it should, relative to the way from the start to there."""
    for ours, theirs, before in zip(end(found), end(expected), start, strict=True):
        way = theirs - before if len(before) else theirs  # no prototypes before the first step
        assert (ours - theirs).norm() < OFF / 2 * torch.finfo(dtype).eps * way.norm()


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "way", "clip"),
    every(5, itertools.product(VARIANTS, [torch.float32, torch.float16, torch.bfloat16], WAYS, [CLIP, None])),
)
def test_mixed_precision_clipped_or_not_equals_the_float32_loop_by_hand(variant, dtype, way, clip):
    """Whole batches and micro-batches, by a scale that grows; without the penalty a run ends far away."""
    hand = train(apart(variant, by_hand), data(10), NO_SCALER, clip=clip, way="term")
    half = None if dtype == torch.float32 else dtype
    start = end(apart(variant))
    for parts in (1, 3):
        scaler = NO_SCALER if dtype == torch.bfloat16 else scaler_of(growth_interval=4)
        found = train(apart(variant), data(10), scaler, parts, clip, half=half, way=way)
        assert_close(found, hand, start, dtype)
    plain = apart(variant)
    plain.weight = 0.0
    with pytest.raises(AssertionError):
        assert_close(train(plain, data(10), NO_SCALER, clip=clip), hand, start, dtype)


# ---- steps that the scaler skips -------------------------------------------------------------------------------------


def snapshot(optimizer):
    """Without the last scale, which goes with the scaler's."""
    state = copy.deepcopy({"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()})
    del state["optimizer"][optimizer._key]["loss"]["scale"]
    return state


def skipping_run(variant, poison, parts, to_none, clip, way):
    """Eight steps with dropout; before the fifth, if asked to, a batch of which the scaler skips the step."""
    optimizer, scaler = wrap(variant, dropout_net().float()), scaler_of()
    for step, batch in enumerate(data(8)):
        if step == 4 and poison is not None:
            before = snapshot(optimizer)
            optimizer.zero_grad(set_to_none=to_none)
            ((x, y),) = data(1, seed=99)
            for index, (part, labels) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
                is_bad = poison == "in the loss" and index == parts - 1
                factor = torch.inf if is_bad else 1 / parts
                backward(optimizer, part, labels, scaler, way=way, factor=factor)
            if poison == "in the gradient":
                optimizer.model[-1].weight.grad[0, 0] = torch.inf
            finish(optimizer, scaler, clip)
            assert_same(snapshot(optimizer), before)
            assert scaler.get_scale() == 2.0**11, "the scaler has to have skipped"
        torch.manual_seed(100 + step)  # the skipped batch drew its dropout masks, as it does without us
        train(optimizer, [batch], scaler, parts, way=way)
    return optimizer


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize(
    ("variant", "poison", "parts", "to_none", "clip", "way"),
    every(
        7,
        [
            (*case, *ending, way)
            for case in itertools.product(VARIANTS, ["in the loss", "in the gradient"], [1, 3])
            for ending in ((True, None), (False, None), (True, CLIP))
            for way in WAYS
        ],
    ),
)
def test_after_a_skipped_step_the_run_is_as_if_it_had_not_seen_the_batch(variant, poison, parts, to_none, clip, way):
    seen, never = (skipping_run(variant, how, parts, to_none, clip, way) for how in (poison, None))
    assert_same(snapshot(seen), snapshot(never))
    assert seen.logs()["loss_scale"] == pytest.approx(never.logs()["loss_scale"] / 2, rel=1e-5)


# ---- float16: what the scale must not do -----------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_companion_learns_at_any_scale_that_suits_the_model(weight):
    """The scaler climbs until the model's gradient overflows; the companion's, here the larger, must not go under."""
    moved = []
    for half in (False, True):
        scaler = torch.amp.GradScaler("cpu", growth_interval=5, enabled=half)
        model = mlp(dtype=torch.float32)
        optimizer = wrap("dcl", model, sgd(model, lr=0.01), companion=mlp(3, dtype=torch.float32), weight=weight)
        taken, (_, start) = [], end(optimizer)
        optimizer.companion_optimizer.register_step_post_hook(lambda *_, taken=taken: taken.append(1))
        for x, _ in data(100):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.float16, enabled=half):
                    z = model(x)
                    loss = 1e-3 * z.float().square().mean() + optimizer.penalty(z)
                scaler.scale(loss / 2).backward()
            finish(optimizer, scaler)
        moved.append((end(optimizer)[1] - start) / len(taken))
        assert len(taken) == optimizer.logs()["step"], "the companion learns in each step that the model takes"
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()


def test_a_penalty_that_underflows_in_float16_is_scaled_first():
    """Of 64 x 500 logits each has a gradient of some 1e-7, where float16 has steps of 6e-8."""
    model, companion, scale = nn.Linear(4, 500).half(), nn.Linear(4, 500).half(), 2.0**16
    with torch.no_grad():
        companion.load_state_dict(model.state_dict())
        companion.bias += 2.0**-11
    optimizer = wrap("dcl", model, companion=companion, weight=1.0)
    x = torch.randn(64, 4).half()
    z, c = model(x), companion(x).detach()
    z.retain_grad()
    (scale * optimizer.penalty(z)).backward()
    expected = 2.0 * scale / z.numel() * (z.detach().float() - c.float())
    assert_same(z.grad.float(), expected, rtol=1e-3)
    assert optimizer.logs()["penalty"] > 0


# ---- the backward pass under autocast, and no autocast at all --------------------------------------------------------


def test_the_companions_backward_is_outside_of_the_scripts_autocast():
    """The model's backward pass is its own affair."""
    ((x, y),), companions = data(1), []
    for inside in (True, False):
        optimizer = apart("dcl")
        loss = F.cross_entropy(optimizer.model(x), y)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        optimizer.step()
        companions.append(optimizer.companion)
    assert_same(*companions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EACH
def test_a_network_in_half_precision_outright_equals_the_loop_by_hand(variant, dtype):
    """No autocast; the companion's weights are float32. The loop by hand does the same, and differs where it rounds."""

    def narrow(make, of_companion=lambda network, dtype: network.to(dtype)):
        options = {"companion": of_companion(mlp(3, dtype=dtype), dtype)} if variant == "dcl" else {}
        return make(variant, mlp(dtype=dtype), **options)

    found, hand = narrow(wrap), narrow(by_hand, Rounded)
    train(found, data(10, dtype=dtype), NO_SCALER)
    train(hand, data(10, dtype=dtype), NO_SCALER, way="term")
    assert_close(found, hand, end(narrow(wrap)), dtype)
    assert all(parameter.dtype == dtype for parameter in found.model.parameters())
    widths = {tensor.dtype for tensor in learned(found).values()}
    assert widths == {dtype if variant == "dcl" else torch.float32}, "averages of half precision are kept wide"
