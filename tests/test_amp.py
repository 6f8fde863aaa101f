"""Mixed precision beyond the plain loop: clipping, skipped steps, resumption, autocast's cache, bfloat16 networks."""

from __future__ import annotations

import copy
import io
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer, distances
from dcl_optim.reference import dcl_step, dcp_step
from tests.by_hand import term_of
from tests.helpers import CLASSES, assert_same, batches, cells, dropout_net, mlp, surviving_tensors

BATCH, CLIP = 24, 0.3
METHOD = {"weight": 0.7, "alpha": 0.4}
OFF = 8  # units of the dtype's rounding that a run may be off by, relative to its way: see test_loops.py
narrow = partial(mlp, dtype=torch.float32)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Script:
    """A training script in mixed precision: wrapped model, criterion, scaler."""

    def __init__(self, variant, model=None, scaler=None, dtype=torch.float16, way="line", base=sgd, **options):
        self.model, self.criterion, self.dtype, self.way = model or narrow(), nn.CrossEntropyLoss(), dtype, way
        self.scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**12)
        inner, options = base(self.model.parameters()), METHOD | options
        if variant == "dcl":
            # Apart from the model: penalty and chase are large from the start.
            self.optimizer = DCLOptimizer(inner, self.model, companion=self.model_like(seed=3), **options)
        else:
            self.optimizer = DCPOptimizer(inner, self.model, **options)

    def model_like(self, seed):
        like = next(self.model.parameters())
        return (narrow if len(self.model) == 3 else dropout_net)(seed=seed).to(like.dtype)

    def loss(self, x, y):
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            z = self.model(x)
            return self.criterion(z, y) + term_of(self.optimizer, self.way)(z, y)

    def step(self, parts, clip=None, to_none=True):
        """One step over micro-batches, as torch's guide to mixed precision has it."""
        self.optimizer.zero_grad(set_to_none=to_none)
        for x, y in parts:
            self.scaler.scale(self.loss(x, y) / len(parts)).backward()
        self.finish(clip)

    def finish(self, clip=None):
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def learned(self):
        """What the forecaster knows."""
        if isinstance(self.optimizer, DCPOptimizer):
            return [self.optimizer.prototypes.clone()]
        return [p.detach().clone() for p in self.optimizer.companion.parameters()]

    def snapshot(self):
        """Without the last scale, which goes with the scaler's."""
        state = copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})
        del state["optimizer"][self.optimizer._key]["loss"]["scale"]
        return state | {"learned": self.learned()}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def off(found, expected, start):
    """How far a run ends from where it should, relative to the way from the start to there."""
    expected = flat(expected)
    return float((flat(found) - expected).norm() / (expected - flat(start)).norm())


def data(steps, dtype=torch.float32, **options):
    return list(batches(steps, BATCH, dtype=dtype, **options))


# ---- clipping -------------------------------------------------------------------------------------------------------


def clipped_reference(variant, steps):
    """The reference in float32 whose optimizer clips before each step, and what the forecaster knows then."""
    model, companion, prototypes, numbers = narrow(), narrow(seed=3), {}, {}
    optimizer, chasing, norms = sgd(model.parameters()), sgd(companion.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
    for x, y in data(steps):
        if variant == "dcl":
            step = partial(dcl_step, model, companion, optimizer, chasing)
        else:
            step = partial(dcp_step, model, prototypes, optimizer, numbers=numbers)
        step(x, y, F.cross_entropy, distances.mse, **METHOD)
    assert min(norms) > CLIP, "each step has to be clipped"
    if variant == "dcl":
        return model, list(companion.parameters()), list(narrow(seed=3).parameters())
    rows = torch.stack([prototypes[k] for k in range(CLASSES)])
    return model, [rows], [torch.zeros_like(rows)]


@pytest.mark.parametrize(
    ("variant", "dtype", "way"),
    cells(
        itertools.product(["dcl", "dcp"], [torch.float32, torch.float16], ["line", "term"]),
        *(("dcl", torch.float16, "line"), ("dcl", torch.float32, "term"), ("dcp", torch.float16, "line")),
    ),
)
def test_unscale_and_clip_equal_the_clipped_reference(variant, dtype, way):
    steps, bound = 10, OFF * torch.finfo(dtype).eps / 2
    model, learned, start = clipped_reference(variant, steps)
    for parts in (1, 3):
        script = Script(variant, dtype=dtype, way=way)
        for x, y in data(steps):
            script.step(list(zip(x.chunk(parts), y.chunk(parts), strict=True)), CLIP)
        assert off(script.model.parameters(), model.parameters(), narrow().parameters()) < bound
        assert off(script.learned(), learned, start) < bound


# ---- steps that the scaler skips ------------------------------------------------------------------------------------


def poison_loss(script, parts, at):
    for index, (x, y) in enumerate(parts):
        loss = script.loss(x, y) / len(parts)
        script.scaler.scale(loss * float("inf") if index == at else loss).backward()


def poison_gradient(script, parts, at):
    poison_loss(script, parts, at=None)
    script.model[-1].weight.grad[0, 0] = float("inf")


POISONS = {"in the loss": poison_loss, "in the gradient": poison_gradient}


def skipping_run(variant, poison, parts, to_none, clip):
    """Eight steps with dropout; before the fifth, if asked to, a batch of which the scaler skips the step."""
    script = Script(variant, dropout_net().float(), dtype=torch.float32)
    skipped = data(1, seed=99)[0]
    for step, (x, y) in enumerate(data(8)):
        if step == 4 and poison is not None:
            before = script.snapshot()
            script.optimizer.zero_grad(set_to_none=to_none)
            micro = list(zip(*(t.chunk(parts) for t in skipped), strict=True))
            POISONS[poison](script, micro, at=parts - 1)
            script.finish(clip)
            assert_same(script.snapshot(), before)
            assert script.scaler.get_scale() == 2.0**11, "the scaler has to have skipped"
        torch.manual_seed(100 + step)  # the skipped batch drew its dropout masks, as it does without us
        script.step(list(zip(x.chunk(parts), y.chunk(parts), strict=True)), clip, to_none)
    return script


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize(
    ("variant", "poison", "parts", "to_none", "clip"),
    cells(
        [
            (*case, *way)
            for case in itertools.product(["dcl", "dcp"], POISONS, [1, 3])
            for way in ((True, None), (False, None), (True, CLIP))
        ],
        ("dcl", "in the loss", 1, True, None),
        ("dcl", "in the gradient", 3, False, None),
        ("dcl", "in the loss", 3, True, CLIP),
        ("dcp", "in the gradient", 1, True, CLIP),
        ("dcp", "in the loss", 3, False, None),
    ),
)
def test_after_a_skipped_step_the_run_is_as_if_it_had_not_seen_the_batch(variant, poison, parts, to_none, clip):
    seen, never = (skipping_run(variant, how, parts, to_none, clip) for how in (poison, None))
    assert_same(seen.snapshot(), never.snapshot())
    assert seen.optimizer.logs()["loss_scale"] == pytest.approx(never.optimizer.logs()["loss_scale"] / 2, rel=1e-5)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_skipped_batch_draws_what_the_model_alone_draws(variant):
    streams = []
    for wrapped in (True, False):
        script = Script(variant, dropout_net().float(), dtype=torch.float32)
        if not wrapped:
            script.optimizer.detach()
        torch.manual_seed(4)
        poison_loss(script, data(1), at=0)
        script.finish()
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)


@pytest.mark.usefixtures("older_objects")
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_skipped_step_keeps_no_graph(variant):
    script = Script(variant)

    first, second, third, *rest = data(12)
    script.step([first])
    script.step([second])
    usual = surviving_tensors()
    poison_loss(script, [third], at=0)
    script.finish()
    for batch in rest:
        script.step([batch])
    assert surviving_tensors() == usual


# ---- float16: what the scale must not do ----------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_companion_learns_at_any_scale_that_suits_the_model(weight):
    """The scaler climbs until the model's gradient overflows; the companion's, here the larger, must not go under."""
    moved = []
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", growth_interval=5, enabled=enabled)
        dtype = torch.float16 if enabled else torch.float32
        slow = partial(torch.optim.SGD, lr=0.01)
        script = Script("dcl", scaler=scaler, dtype=dtype, way="term", weight=weight, base=slow)
        script.criterion = lambda z, y: 1e-3 * z.float().square().mean()
        taken, start = [], script.learned()
        script.optimizer.companion_optimizer.register_step_post_hook(lambda *_, taken=taken: taken.append(1))
        for batch in data(100):
            script.step([batch, batch])
        moved.append((flat(script.learned()) - flat(start)) / len(taken))
        assert len(taken) == script.optimizer.logs()["step"], "the companion learns in each step that the model takes"
    assert (moved[0] - moved[1]).norm() < 0.1 * moved[0].norm()


def test_a_penalty_that_float16_has_no_room_for_is_scaled_first():
    """Of 64 x 500 logits each has a gradient of some 1e-7, where float16 has steps of 6e-8."""
    torch.manual_seed(0)
    model, companion, scale = nn.Linear(4, 500).half(), nn.Linear(4, 500).half(), 2.0**16
    with torch.no_grad():
        companion.load_state_dict(model.state_dict())
        companion.bias += 2.0**-11
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters()), model, companion=companion, weight=1.0)
    x = torch.randn(64, 4).half()
    z, c = model(x), companion(x).detach()
    z.retain_grad()
    (scale * optimizer.penalty(z)).backward()
    expected = 2.0 * scale / z.numel() * (z.detach().float() - c.float())
    assert_same(z.grad.float(), expected, rtol=1e-3)
    assert optimizer.logs()["penalty"] > 0


# ---- resumption -----------------------------------------------------------------------------------------------------


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", ["line", "term"])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_resumed_with_its_scaler_equals_uninterrupted(variant, way):
    whole, half, again = (
        Script(variant, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3), way=way)
        for _ in range(3)
    )
    everything = data(12)
    for script, part in ((whole, everything), (half, everything[:6])):  # after which the scaler has grown
        for batch in part:
            script.step([batch])
    for name in ("model", "optimizer", "scaler"):
        getattr(again, name).load_state_dict(through_a_file(getattr(half, name).state_dict()))
    for batch in everything[6:]:
        again.step([batch])
    assert_same([again.model.state_dict(), again.learned()], [whole.model.state_dict(), whole.learned()])
    assert_same(again.optimizer.state_dict(), whole.optimizer.state_dict())
    assert again.scaler.state_dict() == whole.scaler.state_dict()
    assert whole.scaler.get_scale() == 2.0**12, "the scale has to have grown, before the break and after"


# ---- autocast's cache, and no autocast at all -----------------------------------------------------------------------


def test_autocasts_cache_of_converted_weights_changes_nothing():
    """Two views within one region share the converted weights: the model's, and the companion's."""
    results = []
    for cache in (True, False):
        script = Script("dcl", scaler=torch.amp.GradScaler("cpu", enabled=False))
        for x, y in data(6):
            script.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                losses = [script.criterion(script.model(view), y) for view in (x, -x)]
            sum(losses).backward()
            script.optimizer.step()
        results.append(script)
    cached, converted_anew = results  # which differ in where the two views' gradients are rounded and added up
    bound = OFF * torch.finfo(torch.bfloat16).eps / 2
    assert off(cached.model.parameters(), converted_anew.model.parameters(), narrow().parameters()) < bound
    assert off(cached.learned(), converted_anew.learned(), narrow(seed=3).parameters()) < bound


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_network_in_bfloat16_outright_equals_the_loop_by_hand(variant):
    """No autocast, no float32 weights: the reference does the same, and differs where it rounds."""
    dtype = torch.bfloat16
    script = Script(variant, narrow().to(dtype), torch.amp.GradScaler("cpu", enabled=False), dtype=torch.float32)
    model, companion = (narrow(seed=seed).to(dtype) for seed in (0, 3))
    optimizer, chasing, prototypes, numbers = sgd(model.parameters()), sgd(companion.parameters()), {}, {}
    for x, y in data(10, dtype=dtype):
        script.step([(x, y)])
        if variant == "dcl":
            dcl_step(model, companion, optimizer, chasing, x, y, F.cross_entropy, distances.mse, **METHOD)
        else:
            dcp_step(model, prototypes, optimizer, x, y, F.cross_entropy, distances.mse, **METHOD, numbers=numbers)
    bound = OFF * torch.finfo(dtype).eps / 2
    start = narrow().to(dtype).parameters()
    assert all(p.dtype == dtype for p in script.model.parameters())
    assert off(script.model.parameters(), model.parameters(), start) < bound
    if variant == "dcl":
        assert all(p.dtype == dtype for p in script.learned())
        assert off(script.learned(), companion.parameters(), narrow(seed=3).to(dtype).parameters()) < bound
    else:
        assert script.optimizer.prototypes.dtype == torch.float32, "averages of half-precision numbers are kept wide"
        rows = torch.stack([prototypes[k] for k in range(CLASSES)]).float()
        assert off(script.learned(), [rows], [torch.zeros_like(rows)]) < bound
