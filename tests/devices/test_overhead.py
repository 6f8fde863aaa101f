"""What the wrapper costs beside the mathematics: Python per layer, waiting for a device, memory kept, garbage left."""

import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dcl_optim import DCPOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    Storages,
    WrappersWork,
    batches,
    items_in_containers,
    live_tensors,
    mlp,
    no_collector,
    one,
    sgd,
    two_processes,
    wrap,
)
from tests.reference import train, train_by_closures


def dcp(model, **options):
    return DCPOptimizer(sgd(model), model, **{"weight": 1.0, "alpha": 0.6, "num_classes": CLASSES} | options)


def plain(optimizer, x, y):
    train(optimizer, [(x, y)], "line", F.cross_entropy)


def closed(optimizer, x, y):
    train_by_closures(optimizer, [(x, y)], F.cross_entropy, "line")


def accumulated(optimizer, x, y):
    optimizer.zero_grad()
    for part, labels in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(optimizer.model(part), labels) / 2).backward()
    optimizer.step()


def by_term(optimizer, x, y):
    train(optimizer, [(x, y)], "term", F.cross_entropy)


LOOPS = {"plain": plain, "closure": closed, "accumulation": accumulated, "term": by_term}
WRAPPERS = {"DCL": wrap, "DCP": dcp}


# ---- Python per layer ------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Many layers before the head."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(layers)])
        self.head = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


def frozen(layers):
    model = Deep(layers)
    model.body.requires_grad_(False)
    return model


def head_only(layers):
    model = frozen(layers)
    return wrap(model, sgd(model.head))


def in_groups(layers):
    model = Deep(layers)
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.01}]
    return wrap(model, torch.optim.SGD(groups, lr=0.1))


SCENARIOS = {
    "DCL": (lambda layers: wrap(Deep(layers)), plain),
    "DCL, two groups": (in_groups, plain),
    "DCL, half the rows": (lambda layers: wrap(Deep(layers), companion_fraction=0.5), plain),
    "DCL, frozen layers shared": (head_only, plain),
    "DCL, float16": (lambda layers: wrap(Deep(layers).half()), plain),
    "DCP, term": (lambda layers: dcp(Deep(layers)), by_term),
}
LINES = 4  # of Python for a parameter, in a step; torch's own zero_grad has more
MOST_LINES = {"DCL, float16": 7}  # the companion's gradients are moved to those of its float32 weights


def work_of_a_step(optimizer, step):
    dtype = next(optimizer.model.parameters()).dtype
    *first, last = batches(5, dtype=dtype)  # steps 1, 2 and 4 read values
    for batch in first:
        step(optimizer, *batch)
    with no_collector(), WrappersWork() as work:  # which calls others' functions when it likes
        step(optimizer, *last)
    return work.places


def assert_nearly_flat(make, step, lines=LINES):
    few, many = (work_of_a_step(make(layers), step) for layers in (2, 20))
    assert few.total() > 30
    growing = {place: (few[place], many[place]) for place in sorted(few | many) if few[place] != many[place]}
    assert many.total() - few.total() <= lines * 2 * 18, f"lines for few and for many layers, by place: {growing}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_does_little_python_for_more_layers(scenario):
    assert_nearly_flat(*SCENARIOS[scenario], MOST_LINES.get(scenario, LINES))


def test_a_step_of_several_processes_does_little_python_for_more_layers():
    with two_processes():
        assert_nearly_flat(lambda layers: wrap(Deep(layers), process_group=dist.group.WORLD), plain)


def test_the_count_sees_a_loop_over_parameters():
    def work(layers):
        model = Deep(layers)

        def logits(output):
            shapes = []
            for parameter in model.parameters():
                shape = parameter.shape
                shapes.append(shape)
            return output

        return work_of_a_step(wrap(model, logits=logits), plain).total()

    assert work(20) - work(2) > LINES * 2 * 18


# ---- waiting for a device --------------------------------------------------------------------------------------------


class Small(nn.Sequential):
    def __init__(self, dtype=torch.float32):
        super().__init__(nn.Linear(FEATURES, 12, dtype=dtype), nn.BatchNorm1d(12, dtype=dtype), nn.ReLU())
        self.append(nn.Linear(12, CLASSES, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_on_cuda_does_not_synchronise(wrapper, loop, autocast):
    optimizer = WRAPPERS[wrapper](Small().cuda())
    data = [(x.cuda(), y.cuda()) for x, y in batches(7, dtype=torch.float32)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for batch in data[:4]:  # of which 1, 2 and 4 may read values
            LOOPS[loop](optimizer, *batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in data[4:]:
                LOOPS[loop](optimizer, *batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.logs()["step"] == 7


# ---- memory kept, garbage left ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_hundreds_of_steps_keep_no_more_memory_than_a_few(wrapper, older_objects):
    """By the line and by the term, with an optimizer for each."""
    both, data = (WRAPPERS[wrapper](mlp()), WRAPPERS[wrapper](mlp())), list(batches(4))
    schedule = itertools.cycle(itertools.product(LOOPS, data))

    def memory_after(steps):
        for loop, batch in itertools.islice(schedule, steps):
            LOOPS[loop](both[loop == "term"], *batch)
        gc.collect()
        objects = gc.get_objects()
        return live_tensors(), items_in_containers(itertools.chain(older_objects, objects)), len(objects)

    (tensors, items, objects), (tensors_later, items_later, objects_later) = memory_after(32), memory_after(320)
    assert tensors_later == tensors
    # What Python and torch keep for themselves goes up and down a little; a leak is at least one a step.
    assert items_later - items < 300
    assert objects_later - objects < 300


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_leaves_nothing_to_the_garbage_collector(wrapper, loop):
    optimizer, batch = WRAPPERS[wrapper](Small(torch.float64)), one()
    with no_collector(), Storages() as storages:
        kept = []
        for _ in range(8):
            LOOPS[loop](optimizer, *batch)
            kept.append(storages.live())
    assert kept[2:] == kept[2:3] * 6


def detaching():
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


@pytest.mark.parametrize("hooks", [nullcontext, detaching])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_batch_takes_its_memory_along_with_the_scripts_variables(wrapper, hooks):
    """Also under hooks on saved tensors, as those of a checkpoint."""
    model = Small(torch.float64)
    optimizer = WRAPPERS[wrapper](model)
    small, large = (next(batches(1, size=size)) for size in (16, 48))
    with no_collector(), Storages() as storages:
        for _ in range(3):
            plain(optimizer, *small)
        with hooks():
            model(large[0])  # follows what is saved of the script's own, such as the batch
        before = storages.live()
        with hooks():
            output = model(large[0])  # no backward: the forecast and its graph wait for none
        during = storages.live()
        del output
        after_forward = storages.live()
        plain(optimizer, *large)
        after_large = storages.live()
        plain(optimizer, *small)
        after_step = storages.live()
    assert during > before
    assert after_forward == after_step == before
    # Values of each row wait for logs(), but nothing of the size of the logits.
    assert after_large[0] == before[0]
    assert after_large[1] - before[1] < (48 - 16) * CLASSES * 8


def test_the_companions_activations_end_with_the_step_though_the_output_is_kept():
    model, (x, y) = Small(torch.float64), one()
    optimizer, activations = wrap(model), []
    optimizer.companion[0].register_forward_hook(
        lambda module, inputs, output: activations.append(StorageWeakRef(output.untyped_storage()))
    )
    with no_collector():
        output = model(x)
        assert [activation.expired() for activation in activations] == [False]
        F.cross_entropy(output, y).backward()
        optimizer.step()
        assert [activation.expired() for activation in activations] == [True]
        assert output.grad_fn is not None


def test_a_cycle_that_holds_a_tensor_is_seen():
    with no_collector(), Storages() as storages:
        before = storages.live()
        cycle = [torch.zeros(3) + 1]
        cycle.append(cycle)
        del cycle
        assert storages.live() > before
