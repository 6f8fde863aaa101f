"""Meshes of several dimensions: which ranks share what is learned, pipelines, and tensor parallelism."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from tests.helpers import assert_same, batches, fit, mlp, needs_fsdp2, needs_gloo, on_ranks, sgd
from tests.reference import CLOSE, EACH, EACH_WAY, VARIANTS, learned, result, term_of, wrap
from tests.reference import train as train_by

pytestmark = [needs_gloo, needs_fsdp2]
STEPS = 5
WAYS = ("line", "term")


def alone(variant, seed=0):
    optimizer = wrap(variant, mlp(seed))
    fit(optimizer, batches(STEPS))
    return result(optimizer)


def base_of(model):
    return sgd(model, foreach=False)  # torch's own cannot take DTensors of two kinds in one call


def sharded(variant, mesh, seed=0, **options):
    model, twin = (fully_shard(mlp(seed), mesh=mesh) for _ in range(2))
    companion = {"companion": twin} if variant == "dcl" else {}
    return wrap(variant, model, base_of(model), **companion, **options)


# ---- four ranks ------------------------------------------------------------------------------------------------------


def four_ranks(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    row, column = mesh.get_coordinate()
    data = [(x.chunk(4)[rank], y.chunk(4)[rank]) for x, y in batches(STEPS)]
    for variant in VARIANTS:
        optimizer = sharded(variant, mesh)  # hybrid: shards in each half, copies of them in both
        fit(optimizer, data)
        save(optimizer, folder / f"hybrid {variant} {rank}.pt")
        number = torch.tensor(float(rank))
        optimizer.forecaster._group.broadcast([number])
        assert number == 0
        optimizer = sharded(variant, mesh["shards"], seed=row)  # two models, each on two ranks
        halves = [(x.chunk(2)[column], y.chunk(2)[column]) for x, y in batches(STEPS)]
        fit(optimizer, halves)
        save(optimizer, folder / f"models {variant} {rank}.pt")
        optimizer = two_dimensional(variant, mesh)
        rows = [(x.chunk(2)[row], y.chunk(2)[row]) for x, y in batches(STEPS)]
        fit(optimizer, rows)
        save(optimizer, folder / f"two dimensions {variant} {rank}.pt")
    if row == 0:  # the others train nothing, and are asked for nothing
        optimizer = sharded("dcp", mesh["shards"])
        fit(optimizer, halves)
        save(optimizer, folder / f"some ranks dcp {rank}.pt")


def two_dimensional(variant, mesh):
    """Layers over the ranks of a row, and their parts sharded over the rows."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    networks = [fully_shard(parallelize_module(mlp(), mesh["shards"], plan), mesh=mesh["copies"]) for _ in range(2)]
    companion = {"companion": networks[1]} if variant == "dcl" else {}
    return wrap(variant, networks[0], base_of(networks[0]), **companion)


def save(optimizer, file):
    torch.save(result(optimizer), file)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    on_ranks(4, four_ranks, folder)
    return folder


@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@EACH
@pytest.mark.parametrize("name", ["hybrid", "models", "two dimensions", "some ranks"])
def test_the_group_is_that_of_the_mesh_that_shards_the_model(name, variant, four):
    """Neither ranks with another model, nor those that compute other parts of the same rows."""
    files = sorted(four.glob(f"{name} {variant} *.pt"))
    assert len(files) == {("some ranks", "dcp"): 2, ("some ranks", "dcl"): 0}.get((name, variant), 4)
    for rank, file in enumerate(files):
        expected = alone(variant, seed=rank // 2 if name == "models" else 0)
        assert_same(torch.load(file, weights_only=True), expected, rtol=1e-7, atol=1e-9)


# ---- two ranks: tensor parallelism -----------------------------------------------------------------------------------


PLANS = {
    "columns": {"2": ColwiseParallel(output_layouts=Replicate())},
    "rows": {"0": ColwiseParallel(), "2": RowwiseParallel()},
}
DTENSORS = {
    "shards": {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
    "copies": {"2": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)},
}


def two_ranks(rank, folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("layers",))
    found = {}
    for variant, plan, way in product(VARIANTS, PLANS, WAYS):
        model = parallelize_module(mlp(), mesh, PLANS[plan])
        optimizer = wrap(variant, model, base_of(model))
        found[f"{variant} {plan} {way}"] = result(train_by(optimizer, batches(STEPS), way, F.cross_entropy))
    for variant, plan, way in product(VARIANTS, DTENSORS, WAYS):
        found[f"{variant} {plan} {way}"] = error_of(variant, parallelize_module(mlp(), mesh, DTENSORS[plan]), way)
    found["gathered"] = gathered(parallelize_module(mlp(), mesh, DTENSORS["shards"]))
    torch.save(found, folder / f"{rank}.pt")


def error_of(variant, model, way):
    optimizer = wrap(variant, model, base_of(model))
    x, y = next(batches(1))
    try:
        z = model(x)
        term = term_of(optimizer, way)(z, y)
        F.cross_entropy(z.full_tensor(), y).backward()
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, and a term of {term}"


def gathered(model):
    """The loss of shards, and the penalty of whole logits."""
    optimizer = wrap("dcp", model, base_of(model))
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        z = model(x)
        with loss_parallel():
            loss = F.cross_entropy(z, y)
            (loss.full_tensor() + optimizer.penalty(z.full_tensor(), y)).backward()
        optimizer.step()
    return result(optimizer)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    on_ranks(2, two_ranks, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(("variant", "plan", "way"), [*product(VARIANTS, PLANS, WAYS)])
def test_layers_that_are_split_over_ranks(variant, plan, way, two):
    """Each rank has all rows, so nothing is summed; gradients of whole parameters lie beside sharded ones."""
    for found in two:
        assert_same(found[f"{variant} {plan} {way}"], alone(variant), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("variant", "plan", "way"), [*product(VARIANTS, DTENSORS, WAYS)])
def test_logits_that_are_a_dtensor_are_refused(variant, plan, way, two):
    error = two[0][f"{variant} {plan} {way}"]
    assert "the logits are a DTensor with" in error
    assert "Fix: have the last layer give them whole" in error
    assert "loss.full_tensor() + optimizer.penalty(logits.full_tensor(), labels)" in error


def test_the_fix_for_shards_of_logits_is_right(two):
    for found in two:
        assert_same(found["gathered"], alone("dcp"), rtol=1e-7, atol=1e-9)


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def piped(schedule, variant, way):
    """Two micro-batches through two stages, of which the last one has the head; None for a plain loop."""
    model = mlp()
    body, head = model[:2], nn.Sequential(model[2])
    twin = {"companion": nn.Sequential(mlp(seed=1)[2])} if variant == "dcl" else {}
    optimizer = wrap(variant, head, sgd(model), **twin)
    term = term_of(optimizer, way)

    def loss_of(z, y):
        return F.cross_entropy(z, y) + term(z, y)

    if schedule is not None:
        is_single = schedule in ("GPipe", "1F1B")
        parts = [nn.Sequential(body, head)] if is_single else [body, head]
        stages = [pipelining.PipelineStage(part, i, len(parts), torch.device("cpu")) for i, part in enumerate(parts)]
        call = getattr(pipelining, f"Schedule{schedule}")(stages[0] if is_single else stages, 2, loss_fn=loss_of)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        if schedule is not None:
            call.step(x, target=y)
        else:
            for inputs, labels in zip(x.chunk(2), y.chunk(2), strict=True):
                (loss_of(head(body(inputs)), labels) / 2).backward()
        optimizer.step()
    return [model.state_dict(), learned(optimizer)]


@EACH_WAY
@EACH
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_schedules_of_pipelines(schedule, variant, way, one_process):
    assert_same(piped(schedule, variant, way), piped(None, variant, way), **CLOSE)
