"""k steps, a checkpoint, n - k steps in a new process: bit for bit the run that was not interrupted."""

import copy
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_same,
    batches,
    fit,
    linear_growth,
    mlp,
    resume,
    running_average,
    sgd,
    train,
    wrap,
)

BASES = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.05, t0=3),
}
CASES = [(variant, base) for variant in ("dcl", "dcp") for base in BASES]
TOTAL, BREAK = 12, 5


def build(variant, base):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(FEATURES, 12), torch.nn.BatchNorm1d(12), torch.nn.Dropout(0.2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(12, CLASSES))
    criterion = torch.nn.CrossEntropyLoss()
    schedules = {"weight": linear_growth, "alpha": running_average}
    inner = BASES[base](model.parameters())
    if variant == "dcl":
        optimizer = DCLOptimizer(inner, model, companion_fraction=0.5, **schedules)
    else:
        optimizer = DCPOptimizer(inner, model, **schedules)
    return model, criterion, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)


def run(model, criterion, optimizer, scheduler, first, last):
    for step, (x, y) in enumerate(batches(TOTAL, dtype=torch.float32)):
        if first <= step < last:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()


def snapshot(model, optimizer, scheduler):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return state | {"random": torch.get_rng_state()}


def resume_in_a_process(_, folder):
    """Runs in the new process, with as many threads: sums are bit-identical for one number of threads only."""
    torch.set_num_threads(1)
    for variant, base in CASES:
        path = folder / f"{variant} {base}.pt"
        state = torch.load(path, weights_only=True)
        model, criterion, optimizer, scheduler = build(variant, base)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        run(model, criterion, optimizer, scheduler, BREAK, TOTAL)
        torch.save(snapshot(model, optimizer, scheduler), path)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Where the runs are that were interrupted; one new process has ended them all."""
    folder = tmp_path_factory.mktemp("resumed")
    for variant, base in CASES:
        torch.manual_seed(7)
        half = build(variant, base)
        run(*half, 0, BREAK)
        torch.save(snapshot(half[0], half[2], half[3]), folder / f"{variant} {base}.pt")
    mp.start_processes(resume_in_a_process, (folder,), nprocs=1, start_method="forkserver")
    return folder


@pytest.mark.parametrize(("variant", "base"), CASES)
def test_resumed_run_equals_uninterrupted_run(variant, base, resumed):
    torch.manual_seed(7)
    whole = build(variant, base)
    run(*whole, 0, TOTAL)
    expected = snapshot(whole[0], whole[2], whole[3])
    assert_same(torch.load(resumed / f"{variant} {base}.pt", weights_only=True), expected)
    key = f"dcl_optim.{type(whole[2]).__name__}"
    assert expected["optimizer"][key]["steps"] == TOTAL


def test_state_dict_keeps_the_bases_part_readable_by_the_plain_optimizer():
    model = mlp()
    optimizer = wrap(model)
    fit(optimizer, batches(3))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups", "dcl_optim.DCLOptimizer"}
    plain = sgd(model)
    plain.load_state_dict(state)
    assert_same(plain.state_dict()["state"], optimizer.base.state_dict()["state"])


def dcl_and_other():
    model, other = mlp(), mlp()
    dcl = wrap(model)
    dcp = DCPOptimizer(sgd(other), other, num_classes=CLASSES)
    return dcl, dcp


def test_states_of_another_class_or_shape_are_refused_before_anything_changes():
    dcl, dcp = dcl_and_other()
    wide = mlp(width=13)
    other_shape = wrap(wide)
    assert dcl.companion is not other_shape.companion  # a state without one fits everywhere
    three = mlp()
    fewer_classes = DCPOptimizer(sgd(three), three, num_classes=3)
    fewer_classes.forecaster.create_state()
    dcl.base.param_groups[0]["lr"] = 0.123
    before = repr(dcl.state_dict())
    own = dcl.state_dict()["dcl_optim.DCLOptimizer"]
    without_companion = {"dcl_optim.DCLOptimizer": own | {"forecaster": {}}}
    for state, message in (
        (sgd(mlp()).state_dict(), r"(?s)no entry 'dcl_optim.DCLOptimizer'.*optimizer.base"),
        (dcp.state_dict(), r"no entry 'dcl_optim.DCLOptimizer'.*'dcl_optim.DCPOptimizer'"),
        (other_shape.state_dict(), r"state of the companion has shape"),
        (dcl.state_dict() | {"dcl_optim.DCLOptimizer": own | {"steps": 3.0}}, r"has a float for 'steps'"),
        (dcl.state_dict() | {"dcl_optim.DCLOptimizer": own | {"loss": own["loss"] | {"scale": "1"}}}, "a str for 'sca"),
        (dcl.state_dict() | {"dcl_optim.DCLOptimizer": {"steps": 1}}, r"missing \['forecaster', 'loss', 'term'\]"),
        (dcl.state_dict() | {"dcl_optim.DCLOptimizer": own | {"loss": {}}}, r"state of the loss does not fit: missing"),
        (dcl.state_dict() | without_companion, r"missing \["),
    ):
        with pytest.raises(ValueError, match=message):
            dcl.load_state_dict(state)
        assert repr(dcl.state_dict()) == before
    with pytest.raises(ValueError, match=r"state of the prototypes has shape \(3, 3\).*expected \(5, 5\)"):
        dcp.load_state_dict(fewer_classes.state_dict())
    trained = DCPOptimizer(sgd(three), three)
    fit(trained, batches(1))
    with pytest.raises(ValueError, match=r"state of the prototypes has shape \(3, 3\).*expected \(5, 5\)"):
        trained.load_state_dict(fewer_classes.state_dict())
    sgd_state = dcl.state_dict()
    sgd_state["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["param_groups"] = []
    with pytest.raises(ValueError, match="different number of parameter groups"):
        dcl.load_state_dict(sgd_state)


def test_a_damaged_state_that_only_loading_finds_out_changes_nothing():
    dcl, _ = dcl_and_other()
    fit(dcl, batches(1))
    damaged = copy.deepcopy(dcl.state_dict())
    damaged["dcl_optim.DCLOptimizer"]["forecaster"]["optimizer"]["state"] = None
    fit(dcl, batches(1, seed=5))
    before = copy.deepcopy(dcl.state_dict())
    with pytest.raises(ValueError, match="state_dict could not be loaded, and nothing has changed"):
        dcl.load_state_dict(damaged)
    assert_same(dcl.state_dict(), before)


class Extra(torch.nn.Linear):
    """Keeps more than tensors in its state_dict."""

    note = 0

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def test_a_model_with_an_extra_state_is_resumed():
    def built():
        model = torch.nn.Sequential(Extra(FEATURES, CLASSES)).double()
        return model, wrap(model)

    model, optimizer = built()
    train(model, optimizer, batches(2))
    optimizer.companion[0].note = 3
    again, other = built()
    resume(other, optimizer)
    assert other.companion[0].note == 3
    train(model, optimizer, batches(2))
    train(again, other, batches(2))
    assert_same(other.companion[0].weight, optimizer.companion[0].weight)
