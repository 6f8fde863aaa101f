"""Distillation: each loss against its formula in loops, the networks in pieces, what is trained, and DCL's share."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.applications import classification
from examples.applications.comparison import main
from examples.applications.distillation import losses, methods, stages, training
from examples.applications.distillation.__main__ import APPLICATION, train, with_dcl
from examples.applications.distillation.student import Fusion, ReusedClassifier, Review
from examples.applications.distillation.training import Settings

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)
TINY = Settings(
    data="digits", train_size=100, teacher="small-cnn-half", student="small-cnn-quarter", epochs=2, teacher_epochs=1,
    batch_size=32, lr=0.05, preset="paper",
)  # fmt: skip
PAIRS = [("small-cnn", "small-cnn-quarter"), ("cnn", "small-cnn-quarter"), ("small-cnn-quarter", "cnn")]
TAUGHT = [name for name in methods.NAMES if name != "plain"]


@pytest.fixture(autouse=True)
def double():
    """Everything that is computed by hand, is in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def single():
    torch.set_default_dtype(torch.float32)


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits():
    return drawn(6, 5, scale=3), drawn(6, 5, seed=1, scale=3), torch.tensor([0, 4, 2, 2, 1, 3])


def softmax(row, temperature):
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def network(name="small-cnn-quarter", seed=0, shape=SHAPE):
    """A network whose batch norm has seen data, so that evaluation and training differ."""
    torch.manual_seed(seed)
    built = stages.build(name, 5, shape)
    built(2 * torch.randn(8, *shape) + 1)
    return built


def method(name, teacher="small-cnn-half", student="small-cnn-quarter"):
    return methods.make(name, stages.cut(network(student)), stages.cut(network(teacher, seed=1)), SHAPE)


def batch(count=12):
    return drawn(count, *SHAPE, seed=3), torch.arange(count) % 5


# ---- the losses ------------------------------------------------------------------------------------------------------


def test_distillation_is_a_tenth_of_cross_entropy_and_nine_of_softened_divergence():
    z, t, y = logits()
    expected = 0.0
    for own, other, label in zip(z.tolist(), t.tolist(), y.tolist(), strict=True):
        soft = 4.0**2 * kl(softmax(other, 4.0), softmax(own, 4.0))
        expected += (-0.1 * math.log(softmax(own, 1.0)[label]) + 0.9 * soft) / len(z)
    assert losses.distillation(z, t, y).item() == pytest.approx(expected, rel=1e-12)


def decoupled_by_hand(z, t, y, alpha, beta, temperature):
    total = 0.0
    for own, other, label in zip(z.tolist(), t.tolist(), y.tolist(), strict=True):
        q, p = softmax(own, temperature), softmax(other, temperature)
        target = kl((p[label], 1 - p[label]), (q[label], 1 - q[label]))
        others = [k for k in range(len(q)) if k != label]
        rest = kl([p[k] / (1 - p[label]) for k in others], [q[k] / (1 - q[label]) for k in others])
        total += temperature**2 * (alpha * target + beta * rest)
    return total / len(z)


@pytest.mark.parametrize("options", [(1.0, 8.0, 4.0), (0.5, 2.0, 1.5)])
def test_decoupled_is_the_weighted_sum_of_both_divergences(options):
    z, t, y = logits()
    assert losses.decoupled(z, t, y, *options).item() == pytest.approx(decoupled_by_hand(z, t, y, *options), rel=1e-12)


def test_decoupled_has_the_papers_weights_by_default():
    z, t, y = logits()
    assert losses.decoupled(z, t, y) == losses.decoupled(z, t, y, 1.0, 8.0, 4.0)


def test_decoupled_with_kds_own_weights_is_kd():
    """Equation 5 of the DKD paper: KD weighs NCKD by what the teacher leaves to the others; here row by row."""
    z, t, y = logits()
    for i in range(len(z)):
        left = 1 - softmax(t[i].tolist(), 4.0)[int(y[i])]
        row = slice(i, i + 1)
        expected = losses.distillation(z[row], t[row], y[row], weight=1.0)
        assert losses.decoupled(z[row], t[row], y[row], 1.0, left).item() == pytest.approx(expected.item(), rel=1e-10)


def test_decoupled_stays_finite_where_both_are_sure():
    z = torch.tensor([[1000.0, 0.0, -1000.0]], requires_grad=True)
    losses.decoupled(z, z.detach().flip(1), torch.tensor([0])).backward()
    assert z.grad.isfinite().all()


def pooled_by_hand(x, side):
    """Adaptive average pooling of one channel: cell i covers rows floor(i H / side) to ceil((i + 1) H / side)."""
    height, width = len(x), len(x[0])

    def span(i, length):
        return range(i * length // side, -(-(i + 1) * length // side))

    cells = [(span(i, height), span(j, width)) for i in range(side) for j in range(side)]
    return [sum(x[r][c] for r in rows for c in columns) / (len(rows) * len(columns)) for rows, columns in cells]


def context_by_hand(ours, theirs):
    """Mean squared errors of the maps, 1, and of what is pooled to 4, 2, 1, half as much each time; for side 7."""
    errors = []
    for side in (7, 4, 2, 1):
        squares = []
        for own, other in zip(ours.flatten(0, 1).tolist(), theirs.flatten(0, 1).tolist(), strict=True):
            a, b = (pooled_by_hand(x, side) for x in (own, other))
            squares += [(u - v) ** 2 for u, v in zip(a, b, strict=True)]
        errors.append(sum(squares) / len(squares))
    return (errors[0] + errors[1] / 2 + errors[2] / 4 + errors[3] / 8) / (1 + 1 / 2 + 1 / 4 + 1 / 8)


def test_hierarchical_context_sums_the_maps_weighted_errors():
    ours, theirs = ([drawn(2, 3, 7, 7, seed=s), drawn(2, 4, 7, 7, seed=s + 1)] for s in (0, 2))
    expected = sum(context_by_hand(a, b) for a, b in zip(ours, theirs, strict=True))
    assert losses.hierarchical_context(ours, theirs).item() == pytest.approx(expected, rel=1e-12)


def test_hierarchical_context_pools_to_smaller_sizes_only():
    """Of a side of 2 only 1x1 is smaller, and the next weight is still a half; of a side of 1 nothing is."""
    a, b = drawn(2, 3, 2, 2), drawn(2, 3, 2, 2, seed=1)
    error = ((a - b) ** 2).mean() + ((a.mean((2, 3)) - b.mean((2, 3))) ** 2).mean() / 2
    assert losses.hierarchical_context([a], [b]).item() == pytest.approx(error.item() / 1.5, rel=1e-12)
    a, b = a[:, :, :1, :1], b[:, :, :1, :1]
    assert losses.hierarchical_context([a], [b]).item() == pytest.approx(((a - b) ** 2).mean().item(), rel=1e-12)


# ---- networks in pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", stages.NAMES)
@pytest.mark.usefixtures("single")
def test_pieces_compute_what_the_network_does(name):
    torch.manual_seed(0)
    whole = stages.build(name, 5, (1, 12, 12))
    x = drawn(3, 1, 12, 12)
    pieces = stages.cut(deepcopy(whole))
    torch.testing.assert_close(pieces.eval()(x).logits, whole.eval()(x), rtol=1e-5, atol=1e-6)
    whole.train(), pieces.train()
    torch.manual_seed(1)
    expected = whole(x)
    torch.manual_seed(1)
    output = pieces(x)
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-6)
    assert all((each < 0).any() for each in output.maps)
    assert (output.pooled >= 0).all()
    assert stages.shapes(pieces, (1, 12, 12)) == [each.shape[1:] for each in (*output.maps, output.pooled)]


def test_a_resnets_maps_are_those_of_its_stages():
    whole = stages.build("resnet8x4", 5, SHAPE).eval()
    x, _ = batch()
    output = stages.cut(whole)(x)
    for ours, theirs in zip(output.maps, whole.features(x, before_relu=True)[1:], strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(output.pooled, F.relu(output.maps[-1]).mean((2, 3), keepdim=True))


def test_the_networks_state_dict_is_the_pieces_own():
    whole = network()
    with torch.no_grad():
        for parameter in stages.cut(whole).parameters():
            parameter.fill_(7.0)
    assert all((value == 7).all() for value in whole.parameters())


@pytest.mark.parametrize("name", ["resnet18", "vit-tiny", "nonsense"])
def test_other_networks_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"network={name!r} .* cnn, .*resnet32x4"):
        stages.build(name, 5, SHAPE)


# ---- ReviewKD's fusion and SimKD's network ---------------------------------------------------------------------------


def test_fusion_is_the_one_in_loops():
    """A map of 2x2, a deeper one of 1x1, a teacher's of 4x4: attention picks between the two at each pixel."""
    torch.manual_seed(0)
    fusion = Fusion(3, 2, torch.Size((5, 4, 4)), deepest=False).eval()
    fusion.inward[1].running_mean.copy_(torch.tensor([0.3, -0.2]))
    x, deeper = drawn(2, 3, 2, 2), drawn(2, 2, 1, 1, seed=1)
    compared, fused = fusion(x, deeper)
    inward, convolution = fusion.inward[0].weight[:, :, 0, 0], fusion.attention[0]
    expected = torch.empty(2, 2, 4, 4)
    for b in range(2):
        for row in range(4):
            for column in range(4):
                own = (inward @ x[b, :, row // 2, column // 2] - torch.tensor([0.3, -0.2])) / math.sqrt(1 + 1e-5)
                below = deeper[b, :, 0, 0]
                scores = convolution.weight[:, :, 0, 0] @ torch.cat([own, below]) + convolution.bias
                first, second = (1 / (1 + math.exp(-score)) for score in scores.tolist())
                expected[b, :, row, column] = first * own + second * below
    torch.testing.assert_close(fused, expected)
    torch.testing.assert_close(compared, fusion.outward(expected))
    assert compared.shape == (2, 5, 4, 4)


@pytest.mark.parametrize(("teacher", "student"), [*PAIRS, ("resnet8x4", "resnet8x4")])
def test_review_gives_the_teachers_shapes_from_the_deepest_down(teacher, student):
    ours, theirs = (stages.cut(network(name)) for name in (student, teacher))
    review = Review(stages.shapes(ours, SHAPE), stages.shapes(theirs, SHAPE))
    x, _ = batch()
    output = ours(x)
    found = review(output)
    assert [each.shape[1:] for each in found] == stages.shapes(theirs, SHAPE)
    assert [fusion.attention is None for fusion in review.fusions] == [False] * len(output.maps) + [True]
    review.eval()
    before = review(output)
    changed = output._replace(pooled=output.pooled + 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, review(changed), strict=True))  # all depend on the deepest
    changed = output._replace(maps=(output.maps[0] + 1, *output.maps[1:]))
    same = [torch.equal(a, b) for a, b in zip(before, review(changed), strict=True)]
    assert same == [False] + [True] * len(output.maps)


def test_review_takes_the_students_maps_after_their_relu():
    ours = stages.cut(network())
    review = Review(*[stages.shapes(ours, SHAPE)] * 2).eval()
    output = ours(batch()[0])
    clipped = output._replace(maps=tuple(each.clamp(min=0) for each in output.maps))
    assert all(torch.equal(a, b) for a, b in zip(review(output), review(clipped), strict=True))


def test_review_needs_as_many_stages():
    with pytest.raises(ValueError, match="student has 2 stages and teacher 3"):
        method("ReviewKD", teacher="resnet8x4")


@pytest.mark.parametrize(("teacher", "student"), [*PAIRS, ("resnet8x4", "small-cnn")])
def test_simkd_runs_the_teachers_classifier_on_its_projected_map(teacher, student):
    ours, theirs = stages.cut(network(student)), stages.cut(network(teacher, seed=1))
    model = ReusedClassifier(ours, theirs, SHAPE).eval()
    x, _ = batch()
    output = model(x)
    (own, other), (projected,) = (stages.shapes(each, SHAPE)[-2] for each in (ours, theirs)), output.maps
    assert projected.shape[1:] == (other[0], min(own[1], other[1]), min(own[2], other[2]))
    expected = theirs.eval().classifier(theirs.pool(projected))
    assert torch.equal(output.logits, expected)
    last = F.relu(ours.eval()(x).maps[-1])
    torch.testing.assert_close(projected, model.projector(F.adaptive_avg_pool2d(last, projected.shape[2:])))


def test_simkds_student_that_copies_the_teachers_map_is_the_teacher():
    """What the paper's method rests on: no distance to the teacher's map, no difference in the logits."""
    teacher = stages.cut(network("resnet8x4"))
    model = ReusedClassifier(deepcopy(teacher), teacher, SHAPE).eval()
    model.projector = nn.Identity()
    x, _ = batch()
    torch.testing.assert_close(model(x).logits, teacher.eval()(x).logits)


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
        torch.testing.assert_close(made(x, y, share), expected)


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
        made(*batch()).backward()
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
    made(x, y, 0.5).backward()
    given = []
    handle = twin.model.register_forward_hook(lambda module, inputs, output: given.append(output.logits))
    loss = twin(x, y, 0.5)
    handle.remove()
    penalty = F.mse_loss(given[0], companion(x).logits.detach())
    assert penalty > 1e-3
    (loss + 0.7 * penalty).backward()
    for (key, ours), theirs in zip(made.named_parameters(), twin.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=key)
    assert optimizer.logs()["loss_scale"] == 1.0


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


@pytest.mark.usefixtures("single", "folder")
def test_the_student_learns(monkeypatch):
    """Far above the ten per cent of chance, and the teacher's help shows in SimKD, which never sees a label."""
    settings = replace(TINY, train_size=400, epochs=4, teacher_epochs=4, preset="safe")
    assert scored(settings, method="teacher") > 60
    assert scored(settings, method="SimKD") > 60
    assert scored(settings, method="KD", dcl=True) > 40
