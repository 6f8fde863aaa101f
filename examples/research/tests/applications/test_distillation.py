"""Distillation: what a method's loss is put together from, what it trains, DCL's share, and the runs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.research import datasets, networks
from examples.research.applications import classification
from examples.research.applications.comparison import main
from examples.research.applications.distillation import losses, methods, stages, training
from examples.research.applications.distillation.__main__ import APPLICATION, train, with_dcl
from examples.research.applications.optimizers import penalty
from examples.research.tests.applications.distillation_cases import (
    CPU,
    SHAPE,
    TAUGHT,
    TINY,
    batch,
    method,
    network,
)

pytestmark = pytest.mark.usefixtures("double")

# ---- what a method's loss is, and what it trains ---------------------------------------------------------------------


def test_the_losses_are_put_together_as_published():
    x, y = batch()
    share = 0.25
    for name in TAUGHT:
        made = method(name).eval()
        output, taught = made.model(x), stages.cut(network("small-cnn-half", seed=1)).eval()(x)
        entropy, z, t = F.cross_entropy(output.logits, y), output.logits, taught.logits
        if name == "KD":
            expected = losses.distillation(z, t, y)
        elif name == "DKD":
            expected = entropy + share * losses.decoupled(z, t, y)
        elif name == "ReviewKD":
            theirs = (*taught.maps, taught.pooled)
            expected = entropy + share * 5 * losses.hierarchical_context(made.review(output), theirs)
        else:
            expected = ((output.maps[0] - taught.maps[-1].clamp(min=0)) ** 2).mean()
        loss, logits = made(x, y, share)
        torch.testing.assert_close(loss, expected)
        assert torch.equal(logits, z)


@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize("dcl", [False, True])
def test_only_the_student_and_what_is_beside_it_are_trained(name, dcl):
    made = method(name, teacher="cnn")
    assert not any(p.requires_grad for p in made.teacher.parameters())
    before = deepcopy(made.teacher.state_dict())
    optimizer = training.sgd(made, TINY)
    if dcl:
        optimizer = with_dcl(optimizer, made, TINY)
    started = {key: value.clone() for key, value in made.state_dict().items()}
    made.train()
    assert not any(module.training for module in made.teacher.modules())
    for _ in range(2):
        optimizer.zero_grad()
        loss, z = made(*batch())
        (loss + penalty(optimizer, z)).backward()
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in made.teacher.state_dict().items())
    trained = {key for key, p in made.named_parameters() if not torch.equal(p, started[key])}
    frozen = ("teacher.", "model.pool.", "model.classifier.") if name == "SimKD" else ("teacher.",)
    assert trained == {key for key, _ in made.named_parameters() if not key.startswith(frozen)}


def test_simkds_classifier_is_the_teachers_and_the_companion_shares_it():
    made = method("SimKD", teacher="cnn")
    made.train()
    assert made.model.projector.training
    assert not any(m.training for m in made.model.classifier.modules())  # the cnn's has dropout
    optimizer = with_dcl(training.sgd(made, TINY), made, TINY)
    head = made.teacher.network.classifier
    for holder in (made.model, optimizer.companion):
        assert holder.classifier.network[-1].weight is head[-1].weight
    assert not any(m.training for m in optimizer.companion.classifier.modules())


def test_dcl_does_not_copy_the_teacher_or_what_is_beside_the_student():
    for name in ("KD", "ReviewKD", "DKD"):
        made = method(name)
        companion = with_dcl(training.sgd(made, TINY), made, TINY).companion
        assert [key for key, _ in companion.named_parameters()] == [key for key, _ in made.model.named_parameters()]
        assert type(companion) is stages.Staged


@pytest.mark.filterwarnings("ignore:the first prediction of dcl_optim's companion")  # changed on purpose
@pytest.mark.parametrize("name", methods.NAMES)
def test_dcl_adds_its_penalty_with_factor_one(name):
    """The gradient is that of the loss plus λ times the mean squared distance to the companion's logits."""
    made = method(name)
    made.train()
    twin = deepcopy(made)
    optimizer = with_dcl(training.sgd(made, TINY), made, replace(TINY, weight=0.7))
    with torch.no_grad():
        for parameter in optimizer.companion.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.3)
    companion = deepcopy(optimizer.companion)
    x, y = batch()
    optimizer.zero_grad()
    loss, z = made(x, y, 0.5)
    (loss + penalty(optimizer, z)).backward()
    loss, z = twin(x, y, 0.5)
    distance = F.mse_loss(z, companion(x).logits.detach())
    assert distance > 1e-3
    (loss + 0.7 * distance).backward()
    for (key, ours), theirs in zip(made.named_parameters(), twin.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=key)


def test_unknown_names_and_a_missing_teacher_are_refused():
    student = stages.cut(network())
    with pytest.raises(ValueError, match=r"method='AT' is unknown; choose one of plain, KD, ReviewKD, SimKD, DKD"):
        methods.make("AT", student, student, SHAPE)
    with pytest.raises(ValueError, match="teacher=None: method='KD' needs one"):
        methods.make("KD", student, None, SHAPE)
    with pytest.raises(ValueError, match="schedule='linear' is unknown"):
        training.scheduled(torch.optim.SGD(student.parameters()), "linear", 8)


def test_steps_are_the_literatures():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    scheduler = training.scheduled(optimizer, "steps", 240)
    rates = []
    for _ in range(240):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    drops = [epoch for epoch in range(1, 240) if rates[epoch] != rates[epoch - 1]]
    assert drops == [150, 180, 210]
    assert rates[-1] == pytest.approx(5e-5)


# ---- the runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "FOLDER", tmp_path / "teachers")
    return tmp_path / "teachers"


def scored(settings, progress=lambda text: None, **options):
    chosen = asdict(settings) | {"method": "plain", "dcl": False, "seed": 0} | options
    return train(**chosen, device=CPU, progress=progress)


def trained(settings, monkeypatch, **options):
    """The weights that a run ends with."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(classification, "accuracy", lambda model, *_, **__: found.append(model))
        scored(settings, **options)
    return found[0].state_dict()


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", methods.NAMES)
@pytest.mark.usefixtures("single", "folder")
def test_without_weight_dcl_is_the_plain_run_bit_for_bit(name, monkeypatch):
    plain = trained(TINY, monkeypatch, method=name)
    assert equal(trained(replace(TINY, weight=0.0), monkeypatch, method=name, dcl=True), plain)
    assert not equal(trained(TINY, monkeypatch, method=name, dcl=True), plain)


@pytest.mark.usefixtures("single")
def test_the_teacher_is_trained_once_for_its_settings(folder):
    texts = []
    first = scored(TINY, texts.append, method="teacher")
    assert [text.split(",")[:2] for text in texts] == [["teacher", " epoch 1 of 1"]]
    (path,) = folder.iterdir()
    texts.clear()
    assert scored(replace(TINY, lr=0.05, epochs=1, student="small-cnn"), texts.append, method="teacher") == first
    assert texts == []
    assert scored(replace(TINY, teacher_weights=str(path), lr=9.0), texts.append, method="teacher") == first
    scored(replace(TINY, teacher_epochs=2), texts.append, method="teacher")
    assert len(texts) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.usefixtures("single", "folder")
def test_another_teacher_teaches_otherwise_and_the_plain_student_needs_none(folder, monkeypatch):
    plain = trained(TINY, monkeypatch)
    assert not folder.exists()
    assert equal(trained(TINY, monkeypatch), plain)
    students = [trained(replace(TINY, teacher_epochs=n), monkeypatch, method="KD") for n in (1, 2)]
    assert not equal(*students)
    with pytest.raises(ValueError, match="teacher_weights='/nowhere' does not exist"):
        scored(replace(TINY, teacher_weights="/nowhere"), method="KD")


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    """Its head would be random."""
    data = datasets.load(TINY.data)
    path = tmp_path / "teacher.pt"
    torch.save(networks.build(TINY.teacher, data.classes + 1, data.shape).state_dict(), path)
    with pytest.raises(ValueError, match=r"2 entries are .* of another shape"):
        scored(replace(TINY, teacher_weights=str(path)), method="KD")


@pytest.mark.usefixtures("single")
def test_the_rows_of_a_seed_start_alike_and_see_the_same_batches(folder, monkeypatch):
    seen = {}
    fit = training.fit

    def noted(method, optimizer, data, settings, *rest):
        batches = data.epoch(settings.batch_size, torch.Generator().manual_seed(rest[1]))
        state = {key: value.clone() for key, value in method.state_dict().items() if key.startswith("model.stages")}
        seen[current] = (state, next(batches)[0])
        fit(method, optimizer, data, settings, *rest)

    monkeypatch.setattr(training, "fit", noted)
    for label, row in APPLICATION.rows.items():
        current = label
        scored(replace(TINY, epochs=1), **row.options)
    seen.pop("teacher")
    assert len(seen) == 10
    first, pictures = seen["student"]
    assert all(equal(state, first) and torch.equal(x, pictures) for state, x in seen.values())


@pytest.mark.usefixtures("single", "folder")
def test_the_command_fills_the_papers_table(tmp_path, capsys):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(TINY).items() if value is not None]
    arguments = [*options, "--seeds=1", "--device=cpu", f"--results={tmp_path}", "--only"]
    main(APPLICATION, "A test.", [*arguments, "student", "KD", "KD, DCL"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["student", "KD", "KD, DCL"]
    assert float(lines[1].split("|")[2]) == pytest.approx(scored(TINY, method="KD"), abs=5e-3)
    assert APPLICATION.rows["DKD, DCL"].against == "DKD"
    assert APPLICATION.rows["student, DCL"].against == "student"
