"""Faults that readers found, one section each: every test here was red on the code that was read."""

from __future__ import annotations

import copy
import itertools
import linecache
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcl_optim import DCLOptimizer, DCPOptimizer, reference
from tests.helpers import CLASSES, FEATURES, SHARDS_ON_CPU, assert_same, batches, mlp, one, sgd, train

ALPHA, WEIGHT, LR = 0.6, 2.0, 0.1
VARIANTS = ["dcl", "dcp"]


def apart() -> nn.Module:
    """A companion that is not the model's copy, so that the first batch has a penalty."""
    return mlp(seed=3)


def companion_of(variant: str, optimizer: Any) -> Any:
    """What the forecaster has learned."""
    return optimizer.companion.state_dict() if variant == "dcl" else optimizer.prototypes


# ---- gradients that are asked for where the logits were converted ----------------------------------------------------


class Converting(nn.Module):
    """Returns logits of another dtype than its body computes, and the loss that it took before, where it gets labels.

    So do models under accelerate's mixed precision: bfloat16 inside, ``.float()`` at the end.
    """

    def __init__(self, inside: torch.dtype, outside: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.body, self._outside = mlp(seed, dtype=inside), outside

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        found = {"logits": logits.to(self._outside)}
        return found if labels is None else found | {"loss": F.cross_entropy(logits, labels)}


def loss_of_converted(model: Converting, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["logits"], y)


def loss_of_both(model: Converting, x: Tensor, y: Tensor) -> Tensor:
    """Half of it the model's own, half the script's on what the model returned: together the whole cross-entropy."""
    output = model(x, labels=y)
    return (output["loss"] + F.cross_entropy(output["logits"], y)) / 2


CONVERSIONS = {
    "float32 to float64": (torch.float32, torch.float64, 1e-5),
    "bfloat16 to float32": (torch.bfloat16, torch.float32, 3e-2),
}


@pytest.mark.parametrize("loss_of", [loss_of_converted, loss_of_both])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_query_and_the_backward_after_it_each_have_the_penalty_once(variant, conversion, loss_of):
    inside, outside, tolerance = CONVERSIONS[conversion]
    model = Converting(inside, outside)
    parameters, (first, second) = [*model.parameters()], batches(2, dtype=inside)
    if variant == "dcl":
        companion = Converting(inside, outside, seed=3)
        optimizer = DCLOptimizer(sgd(model), model, companion=companion, weight=WEIGHT, alpha=ALPHA, loss_scale=1.0)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=WEIGHT, alpha=ALPHA, loss_scale=1.0)
        optimizer.set_targets(first[1])
        loss_of(model, *first).backward()  # the prototypes are this batch's class means then
        optimizer.step()
        optimizer.zero_grad()
    x, y = second
    with torch.no_grad():
        c = companion(x)["logits"] if variant == "dcl" else optimizer.prototypes[y].to(outside)
    alone = copy.deepcopy(model.body)
    z = alone(x)
    (F.cross_entropy(z, y) + WEIGHT * F.mse_loss(z.to(outside), c)).backward()

    if variant == "dcp":
        optimizer.set_targets(y)
    loss = loss_of(model, x, y)
    asked = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    for expected, query, parameter in zip(alone.parameters(), asked, parameters, strict=True):
        scale = float(expected.grad.abs().max())
        torch.testing.assert_close(query, expected.grad, rtol=0.0, atol=tolerance * scale)
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=0.0, atol=tolerance * scale)


# ---- alpha under optimizers that divide a factor of the gradient out only in part ------------------------------------

SCALED_IN_PART = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-3),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, eps=1e-3),
}


@pytest.mark.parametrize("name", SCALED_IN_PART)
def test_alpha_shapes_the_target_and_leaves_the_learning_rate(name):
    """The paper, literally: the base's class and rate, and the gradient of the distance to the target."""
    make = SCALED_IN_PART[name]
    model, hand, companion = mlp(), mlp(), apart()
    optimizer = DCLOptimizer(
        make(model.parameters()), model, companion=copy.deepcopy(companion), weight=WEIGHT, alpha=ALPHA
    )
    base, second = make(hand.parameters()), make(companion.parameters())
    for x, y in batches(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

        z, c = hand(x), companion(x)
        base.zero_grad()
        (F.cross_entropy(z, y) + WEIGHT * F.mse_loss(z, c.detach())).backward()
        base.step()
        second.zero_grad()
        F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach()).backward()
        second.step()
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-10)
    assert_same(model, hand, rtol=1e-9, atol=1e-10)


# ---- hooks that the companion goes without ---------------------------------------------------------------------------


class ZeroHead(nn.Module):
    """As fine-tuning starts: with a head of zeros no hook makes a difference to the first logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(FEATURES, 12).double(), nn.Linear(12, CLASSES).double()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


HELD = {
    "list": ([3.0], lambda held: held[0]),
    "object": (SimpleNamespace(scale=3.0), lambda held: held.scale),
    "tensor": (torch.full((12,), 3.0, dtype=torch.float64), lambda held: held),
}


def change_output(model: ZeroHead, held: Any, read: Callable[[Any], Any]) -> None:
    model.encoder.register_forward_hook(lambda module, inputs, output: output * read(held))


def change_input(model: ZeroHead, held: Any, read: Callable[[Any], Any]) -> None:
    model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * read(held),))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("change", "place"), [(change_output, "encoder"), (change_input, "head")])
def test_a_hook_that_the_companion_goes_without_is_named_with_the_copy(change, place, held):
    model = ZeroHead()
    change(model, *HELD[held])
    optimizer = DCLOptimizer(sgd(model), model, weight=WEIGHT, alpha=ALPHA)
    with pytest.warns(UserWarning, match="hook") as caught:
        assert optimizer.companion is not None  # which makes the copy
    assert [place in str(warning.message) for warning in caught] == [True]
    x, y = one()
    F.cross_entropy(model(x), y).backward()  # no second warning: the first logits agree
    optimizer.step()


# ---- process groups --------------------------------------------------------------------------------------------------

STEPS, PARTS = 4, 2
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def build(variant: str, model: nn.Module, **options: Any) -> Any:
    if variant == "dcl":
        return DCLOptimizer(sgd(model), model, weight=WEIGHT, alpha=ALPHA, **options)
    return DCPOptimizer(sgd(model), model, CLASSES, weight=WEIGHT, alpha=ALPHA, **options)


def halves(rank: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's rows of each batch."""
    return [(x.chunk(PARTS)[rank], y.chunk(PARTS)[rank]) for x, y in batches(STEPS)]


def train_and_average(called: nn.Module, optimizer: Any, rank: int, by_hand: bool) -> None:
    """Train on the rank's rows; ``by_hand`` averages the gradients as a script without DDP does."""
    for x, y in halves(rank):
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        if by_hand:
            for parameter in called.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= PARTS
        optimizer.step()


def independent(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Another start on each rank, and nothing in common: a search over seeds, say."""
    model = mlp(seed=rank)
    optimizer = build(variant, model)
    train_and_average(model, optimizer, rank, by_hand=False)
    return model, optimizer


def averaged_by_hand(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = build(variant, model, process_group=dist.group.WORLD)
    train_and_average(model, optimizer, rank, by_hand=True)
    return model, optimizer


def averaged_by_hand_in_no_group(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = build(variant, model)
    train_and_average(model, optimizer, rank, by_hand=True)
    return model, optimizer


def parallel_without_a_group(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    model = mlp()
    parallel = DistributedDataParallel(model)
    optimizer = build(variant, parallel, process_group=None)
    train_and_average(parallel, optimizer, rank, by_hand=False)
    return model, optimizer


def wrapped_before(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """The model's own group holds this rank alone."""
    model = mlp(seed=rank)
    parallel = DistributedDataParallel(model, process_group=own)
    optimizer = build(variant, parallel)
    train_and_average(parallel, optimizer, rank, by_hand=False)
    return model, optimizer


def wrapped_after(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    model = mlp(seed=rank)
    optimizer = build(variant, model)
    parallel = DistributedDataParallel(model, process_group=own)
    train_and_average(parallel, optimizer, rank, by_hand=False)
    return model, optimizer


def wrapped_after_in_the_world(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Green before too: what the new default must not lose, where the optimizer has seen the inner module only."""
    model = mlp(seed=10 * rank)
    optimizer = build(variant, model)
    parallel = DistributedDataParallel(model)
    train_and_average(parallel, optimizer, rank, by_hand=False)
    return model, optimizer


def sharded(variant: str, rank: int, own: dist.ProcessGroup) -> tuple[nn.Module, Any]:
    """Sharded over a mesh of this rank alone."""
    model = mlp(seed=rank)
    fully_shard(model, mesh=DeviceMesh.from_group(own, "cpu"))
    optimizer = build(variant, model)
    train_and_average(model, optimizer, rank, by_hand=False)
    return model, optimizer


# For each cell the variants, whether the ranks' models are one, and whether their forecasters are.
CELLS: dict[Callable[..., Any], tuple[list[str], bool, bool]] = {
    independent: (VARIANTS, False, False),
    averaged_by_hand: (VARIANTS, True, True),
    averaged_by_hand_in_no_group: (VARIANTS, True, False),
    parallel_without_a_group: (VARIANTS, True, False),
    wrapped_before: (VARIANTS, False, False),
    wrapped_after: (VARIANTS, False, False),
    wrapped_after_in_the_world: (VARIANTS, True, True),
}
if SHARDS_ON_CPU:
    CELLS[sharded] = (["dcp"], False, False)
RANKS = [(cell, variant) for cell, (variants, *_) in CELLS.items() for variant in variants]


def worker(rank: int, folder: Path) -> None:
    groups = [dist.new_group([index]) for index in range(PARTS)]
    for cell, variant in RANKS:
        try:
            model, optimizer = cell(variant, rank, groups[rank])
            own = companion_of(variant, optimizer)
            found = {"model": whole(model.state_dict()), "own": own if variant == "dcp" else whole(own)}
        except Exception as error:  # told by the cell's own test: the same on both ranks, so that none waits
            found = {"error": f"{type(error).__name__}: {error}"}
        torch.save(found, folder / f"{cell.__name__} {variant} {rank}.pt")


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in state.items()}


def by_hand(variant: str, seeds: list[int], one_model: bool, one_forecaster: bool) -> list[dict[str, Any]]:
    """Both ranks in one process: gradients and class sums are averaged where the ranks have them in common."""
    models = [mlp(seed=seed) for seed in seeds]
    companions, prototypes = copy.deepcopy(models), [dict[int, Tensor]() for _ in seeds]
    optimizers, seconds = ([sgd(net) for net in networks] for networks in (models, companions))
    for rows in zip(*map(halves, range(PARTS)), strict=True):
        outputs = []
        for rank, (x, y) in enumerate(rows):
            z = models[rank](x)
            optimizers[rank].zero_grad()
            if variant == "dcl":
                c = companions[rank](x)
                penalty = F.mse_loss(z, c.detach())
                seconds[rank].zero_grad()
                F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach()).backward()
            else:
                known = [i for i in range(len(y)) if int(y[i]) in prototypes[rank]]
                squares = [(z[i] - prototypes[rank][int(y[i])]).square().mean() for i in known]
                penalty = sum(squares, start=z.new_zeros(())) / len(y)
            (F.cross_entropy(z, y) + WEIGHT * penalty).backward()
            outputs.append((z.detach(), y))
        joined = [tuple(map(torch.cat, zip(*outputs, strict=True)))] * PARTS
        for rank, (z, y) in enumerate(joined if one_forecaster else outputs):
            for k in set(y.tolist()):
                mean, before = z[y == k].mean(0), prototypes[rank].get(k)
                prototypes[rank][k] = mean if before is None else ALPHA * before + (1 - ALPHA) * mean
        for networks, together in ((models, one_model), (companions, one_forecaster and variant == "dcl")):
            for parameters in zip(*(network.parameters() for network in networks), strict=True) if together else ():
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in itertools.chain(optimizers, seconds if variant == "dcl" else ()):
            optimizer.step()
    zero = torch.zeros(CLASSES, dtype=torch.float64)
    tables = [torch.stack([rows.get(k, zero) for k in range(CLASSES)]) for rows in prototypes]
    own = [companion.state_dict() for companion in companions] if variant == "dcl" else tables
    return [{"model": model.state_dict(), "own": learned} for model, learned in zip(models, own, strict=True)]


@needs_gloo
@pytest.mark.parametrize(("cell", "variant"), RANKS)
def test_forecasters_are_averaged_over_the_models_own_group_or_the_given_one(cell, variant, ranks: Path):
    found = [torch.load(ranks / f"{cell.__name__} {variant} {rank}.pt", weights_only=True) for rank in range(PARTS)]
    assert [part["error"] for part in found if "error" in part] == []
    _, one_model, one_forecaster = CELLS[cell]
    expected = by_hand(variant, [0, 0] if one_model else [0, 1], one_model, one_forecaster)
    for part, hand in zip(found, expected, strict=True):
        assert_same(part, hand, rtol=1e-9, atol=1e-10)
    if one_forecaster:
        assert_same(found[0], found[1])
    else:
        with pytest.raises(AssertionError):
            assert_same(found[0]["own"], found[1]["own"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("given", [3, "world", [0, 1], torch.zeros(1)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_no_process_group_is_refused_before_anything_changes(variant, given):
    model = mlp()
    with pytest.raises(TypeError, match=r"(?s)process_group.*ProcessGroup"):
        build(variant, model, process_group=given)
    assert not model._forward_hooks


# ---- logits of (batch, time, classes) --------------------------------------------------------------------------------

# The classes' dimension matters to these; to mse's mean over all entries it does not.
BY_CLASS = {
    "kl": {"distance": "kl"},
    "infonce": {"distance": "infonce"},
    "callable": {"distance": lambda z, c: (z - c).square().mean()},
}


def warnings_of_two_steps(**options: Any) -> list[list[str]]:
    """What each of two steps of a model with logits of shape (4, 7, CLASSES) warns of."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double()
    optimizer = DCLOptimizer(sgd(model), model, loss_scale=1.0, weight=WEIGHT, alpha=ALPHA, **options)
    found = []
    for _ in range(2):
        x = torch.randn(4, 7, FEATURES, dtype=torch.float64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            model(x).square().mean().backward()  # no cross-entropy, which would tell
            optimizer.step()
        assert all(issubclass(warning.category, UserWarning) for warning in caught)
        found.append([str(warning.message) for warning in caught])
    return found


@pytest.mark.parametrize("options", BY_CLASS.values(), ids=BY_CLASS)
def test_three_dimensional_logits_without_class_dim_are_warned_of_once(options):
    first, second = warnings_of_two_steps(**options)
    assert len(first) == 1
    assert "class_dim" in first[0]
    assert "(4, 7, 5)" in first[0]
    assert second == []
    for class_dim in (1, -1):
        assert warnings_of_two_steps(class_dim=class_dim, **options) == [[], []]
    assert warnings_of_two_steps() == [[], []]


# ---- several backwards of one forward --------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parts_of_a_loss_that_go_backward_one_by_one_carry_the_whole_penalty(variant, shares):
    model, hand = mlp(), mlp()
    companion, prototypes = apart(), dict[int, Tensor]()
    if variant == "dcl":
        given = copy.deepcopy(companion)
        optimizer = DCLOptimizer(sgd(model), model, companion=given, weight=WEIGHT, alpha=ALPHA)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, weight=WEIGHT, alpha=ALPHA)
    base, second = sgd(hand), sgd(companion)
    settings = {"weight": WEIGHT, "alpha": ALPHA}
    for x, y in batches(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (shares[0] * loss).backward(retain_graph=True)
        (shares[1] * loss).backward()
        optimizer.step()
        if variant == "dcl":
            reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, F.mse_loss, **settings)
        else:
            reference.dcp_step(hand, prototypes, base, x, y, F.cross_entropy, F.mse_loss, **settings)
    assert_same(model, hand, rtol=1e-10, atol=1e-10)
    if variant == "dcl":
        assert_same(optimizer.companion, companion, rtol=1e-10, atol=1e-10)
    else:
        for k, prototype in prototypes.items():
            assert_same(optimizer.prototypes[k], prototype, rtol=1e-10, atol=1e-10)


# ---- what a subclass of the wrapper has to provide -------------------------------------------------------------------

OptimizerWrapper: Any = next(kind for kind in DCLOptimizer.__mro__ if kind.__name__ == "OptimizerWrapper")
PROVIDED: dict[str, Callable[..., Any]] = {
    "_own_state": lambda self: {},
    "_check_own_state": lambda self, state: None,
    "_load_own_state": lambda self, state: None,
}


@pytest.mark.parametrize("missing", PROVIDED)
def test_a_wrapper_without_one_of_its_abstract_methods_cannot_be_made(missing):
    methods = {name: method for name, method in PROVIDED.items() if name != missing}
    partial = type("Partial", (OptimizerWrapper,), {"_name": "Partial"} | methods)
    complete = type("Complete", (OptimizerWrapper,), {"_name": "Complete"} | PROVIDED)
    assert isinstance(complete(sgd(mlp())), torch.optim.Optimizer)
    with pytest.raises(TypeError, match=missing):
        partial(sgd(mlp()))


# ---- where warnings point --------------------------------------------------------------------------------------------


def lines_warned_of(script: Callable[[], None]) -> list[tuple[str, str]]:
    """The file and the text of the line that each warning of a script points at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script()
    return [(warning.filename, linecache.getline(warning.filename, warning.lineno).strip()) for warning in caught]


def test_the_warning_of_an_unreadable_loss_scale_points_at_the_backward():
    def script() -> None:
        model = mlp()
        optimizer = DCLOptimizer(sgd(model), model, weight=WEIGHT, alpha=ALPHA)
        for x, y in batches(2):  # the second one before a step is where a wrong factor would matter
            F.mse_loss(model(x), F.one_hot(y, CLASSES).double()).backward()
        optimizer.step()

    assert lines_warned_of(script) == [(__file__, "F.mse_loss(model(x), F.one_hot(y, CLASSES).double()).backward()")]


def test_the_warning_of_a_missing_class_dim_points_into_the_script():
    def script() -> None:
        model = nn.Linear(FEATURES, CLASSES).double()
        optimizer = DCLOptimizer(sgd(model), model, distance="kl", loss_scale=1.0, weight=WEIGHT, alpha=ALPHA)
        model(torch.zeros(4, 7, FEATURES, dtype=torch.float64)).square().mean().backward()
        optimizer.step()

    assert [file for file, _ in lines_warned_of(script)] == [__file__]


def test_the_warning_of_a_hook_points_at_the_first_forward():
    def script() -> None:
        model = ZeroHead()
        change_output(model, *HELD["list"])
        optimizer = DCLOptimizer(sgd(model), model, weight=WEIGHT, alpha=ALPHA)
        model(one()[0])
        optimizer.detach()

    assert lines_warned_of(script) == [(__file__, "model(one()[0])")]


# ---- copies of dense logits ------------------------------------------------------------------------------------------

COPIES = ("clone", "copy_", "_to_copy", "_reshape_copy", "cat")  # what copies come to below autograd, contiguous' too


class CopiesOf(TorchDispatchMode):
    """Finds the copies that give a tensor of so many elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements, self.found = elements, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.found += [name for size in sizes if name in COPIES and size == self._elements]
        return result


@pytest.mark.parametrize("kind", ["dcl", "dcp"])
def test_dense_logits_are_copied_once_a_forward_of_each_network(kind):
    torch.manual_seed(0)
    model = nn.Conv2d(3, CLASSES, 1).double()
    if kind == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, weight=WEIGHT, alpha=ALPHA)
    else:
        labels = torch.zeros(2, 6, 7, dtype=torch.int64)
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, targets=lambda args, kwargs: labels)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    y = torch.randint(CLASSES, (2, 6, 7))
    for _ in range(3):
        with CopiesOf(2 * CLASSES * 6 * 7) as copies:
            z = model(x)
        assert z.numel() == 2 * CLASSES * 6 * 7
        with CopiesOf(z.numel()) as network:
            nn.Conv2d.forward(model, x)
        optimizer.zero_grad()
        F.cross_entropy(z, y).backward()
        optimizer.step()
    assert network.found == []
    assert len(copies.found) <= (2 if kind == "dcl" else 1), copies.found


# ---- inputs that only happen to be as long as the batch --------------------------------------------------------------


class Looking(nn.Module):
    """Multiplies features by a table of the call's; ``scale`` is of another length than the batch, and stays whole."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(FEATURES, hidden).double()

    def forward(self, x: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        return (self.encoder(x) * scale) @ table


CALLS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "by position": (lambda model, x, scale, table: model(x, scale, table), "args[2]"),
    "by name": (lambda model, x, scale, table: model(x, scale=scale, table=table), "kwargs['table']"),
}
BATCH = 16


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_forward_names_the_inputs_that_companion_fraction_cut(call):
    """The table is (hidden, classes), and as many are hidden as the batch has rows."""
    model, (calls, name) = Looking(hidden=BATCH), CALLS[call]
    require_names(model, lambda *inputs: calls(model, *inputs), torch.ones(BATCH, CLASSES, dtype=torch.float64), name)


@pytest.mark.parametrize("call", CALLS)
def test_an_output_of_the_wrong_shape_names_the_inputs_that_companion_fraction_cut(call):
    """The table is (classes, hidden), and there are as many classes as the batch has rows: half of them are left."""

    class Transposing(Looking):
        def forward(self, x: Tensor, scale: Tensor, table: Tensor) -> Tensor:
            return super().forward(x, scale, table.T)

    model, (calls, name) = Transposing(hidden=3), CALLS[call]
    require_names(model, lambda *inputs: calls(model, *inputs), torch.ones(BATCH, 3, dtype=torch.float64), name)


def require_names(model: Looking, call: Callable[..., Tensor], table: Tensor, name: str) -> None:
    optimizer = DCLOptimizer(sgd(model), model, companion_fraction=0.5, weight=WEIGHT, alpha=ALPHA)
    x, y = one()
    assert len(x) == len(table) == BATCH
    scale = torch.ones(1, dtype=torch.float64)

    def step() -> None:
        F.cross_entropy(call(x, scale, table), y).backward()
        optimizer.step()

    with pytest.raises((ValueError, RuntimeError)) as caught:
        step()
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "companion_fraction" in message
    assert name in message
    assert "args[1]" not in message, "the scale is passed whole"
    assert "kwargs['scale']" not in message


# ---- what the review of the second edition found ---------------------------------------------------------------------


class FailsOnce(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            self.fails = False
            raise MemoryError("once")
        return super().step(closure)


def test_after_an_error_in_the_companions_optimizer_the_next_batch_is_learned_from():
    model = mlp()
    optimizer = DCLOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        model,
        weight=WEIGHT,
        alpha=ALPHA,
        companion_optimizer=lambda parameters: FailsOnce(parameters, lr=LR),
    )
    first, second, third = batches(3)
    train(model, optimizer, [first])
    optimizer.companion_optimizer.fails = True
    with pytest.raises(RuntimeError, match="once"):
        train(model, optimizer, [second])
    hand_model, hand_companion = copy.deepcopy(model), copy.deepcopy(optimizer.companion)
    x, _ = third
    z, c = hand_model(x), hand_companion(x)
    F.mse_loss(c, ALPHA * c.detach() + (1 - ALPHA) * z.detach()).backward()
    torch.optim.SGD(hand_companion.parameters(), lr=LR).step()
    train(model, optimizer, [third])
    assert_same(optimizer.companion, hand_companion, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_batch_whose_gradients_are_cleared_before_an_unconditional_step_is_not_learned_from(variant, set_to_none):
    model, loss = mlp(), nn.CrossEntropyLoss()
    base = torch.optim.SGD(model.parameters(), lr=LR)
    if variant == "dcl":
        optimizer = DCLOptimizer(base, model, weight=WEIGHT)
    else:
        optimizer = DCPOptimizer(base, model, CLASSES, weight=WEIGHT)
    train(model, optimizer, batches(2), loss)
    own = f"dcl_optim.{type(optimizer).__name__}"
    before = copy.deepcopy(optimizer.state_dict()[own]["forecaster"])
    x, y = next(batches(1, seed=7))
    optimizer.zero_grad()
    loss(model(x * float("nan")), y).backward()
    optimizer.zero_grad(set_to_none)
    optimizer.step()
    assert_same(optimizer.state_dict()[own]["forecaster"], before)
    train(model, optimizer, batches(2), loss)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_closure_with_a_graph_of_its_gradients_keeps_it():
    def run(wrapped):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        if wrapped:
            optimizer = DCLOptimizer(optimizer, model, weight=0.0, strict=False)
        x, y = one()

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward(create_graph=True)
            return loss

        optimizer.step(closure)
        found = [parameter.grad.grad_fn is not None for parameter in model.parameters()]
        optimizer.zero_grad()  # the graph and the gradients hold each other
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of that cycle
        assert run(True) == run(False)


def test_labels_that_are_written_over_before_the_step_are_those_of_their_batch():
    found = []
    for reused in (False, True):
        model = mlp()
        optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=LR), model, CLASSES, alpha=0.5)
        buffer = torch.empty(16, dtype=torch.int64)
        optimizer.zero_grad()
        for x, y in batches(2):
            labels = buffer.copy_(y) if reused else y
            optimizer.set_targets(labels)
            F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        found.append(optimizer.prototypes)
    assert_same(found[0], found[1])


def test_losses_of_parts_of_the_rows_add_up():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    optimizer = DCLOptimizer(sgd(model), model, weight=WEIGHT)
    x, y = one()
    z = model(x)
    (0.5 * criterion(z[:8], y[:8]) + 0.5 * criterion(z[8:], y[8:])).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)


def test_a_superseded_optimizer_takes_no_further_step():
    model = mlp()
    optimizer = DCLOptimizer(sgd(model), model)
    x, y = one()
    F.cross_entropy(model(x), y).backward()
    DCLOptimizer(optimizer.base, model)
    with pytest.raises(RuntimeError, match="another optimizer has wrapped the model"):
        optimizer.step()
