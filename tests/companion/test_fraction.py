"""companion_fraction: the companion gets a share of the rows of each batch, which alone are pulled (Table 10)."""

import copy
import itertools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence

from dcl_optim import distances
from dcl_optim.layout import to_rows
from dcl_optim.pull import pull_of
from tests import reference
from tests.helpers import (
    CLASSES,
    FEATURES,
    MODELS,
    assert_same,
    assert_same_networks,
    batch_norm_net,
    batches,
    dropout_net,
    fit,
    huber,
    mlp,
    needs_gloo,
    on_two_ranks,
    resume,
    sgd,
    train,
    wrap,
)
from tests.reference import EACH_WAY, NEAR, DrawnRows, HandDCL, assert_same_training, loss_of

SIZES = (16, 16, 16, 7, 16, 5, 4, 3, 2, 16)  # last batches, of which two rows or all are left


def of_sizes(sizes=SIZES):
    return [(x[:size], y[:size]) for size, (x, y) in zip(sizes, batches(len(sizes)), strict=True)]


@EACH_WAY
@pytest.mark.parametrize(
    ("name", "fraction", "distance", "is_copy"),
    [
        ("mlp", 0.25, "mse", False),
        ("dropout", 0.3, "mse", False),
        ("batch_norm", 0.5, "squared", False),
        ("batch_norm", 0.5, "squared", True),
        ("mlp", 0.01, "kl", False),
        ("batch_norm", 0.25, "infonce", False),
        ("mlp", 0.5, "l1", False),
        ("mlp", 0.9, huber, False),
    ],
)
def test_it_is_the_algorithm_on_the_drawn_rows(name, fraction, distance, is_copy, way):
    """Of batches of all sizes; dropout masks are the companion's own.

    A new copy gets a part of the first batch, too. It is compared with the model on the whole batch, which leaves no
    trace in its statistics.
    """
    model, hand = MODELS[name](), MODELS[name]()
    companion = MODELS[name](seed=0 if is_copy else 3)
    given = {} if is_copy else {"companion": copy.deepcopy(companion)}
    optimizer = wrap(model, **given, companion_fraction=fraction, distance=distance)
    base, second = sgd(hand), sgd(companion)
    data = of_sizes() + ([] if name == "batch_norm" else of_sizes([1]))
    torch.manual_seed(3)
    reference.train(optimizer, data, way, F.cross_entropy)
    drawn = torch.rand(2)
    draw = DrawnRows(fraction)
    torch.manual_seed(3)
    function = distances.DISTANCES.get(distance, distance)
    for x, y in data:
        rows = draw(len(x))
        reference.dcl_step(hand, companion, base, second, x, y, F.cross_entropy, function, rows=rows)
        draw.end_step()
    assert torch.equal(drawn, torch.rand(2)), "the script's generator is where it was"
    assert_same((model, optimizer.companion), (hand, companion), **NEAR)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("distance", ["squared", "mse", "l1"])
def test_over_all_draws_the_mean_is_that_of_all_rows(distance, added):
    """Of the gradient of 4 images of 3 pixels, of which 2 are drawn."""
    z, c, other = torch.randn(3, 4, CLASSES, 3).double().mul(4)
    function = distances.DISTANCES[distance]

    def gradient(rows):
        pull = pull_of(function, to_rows(z[rows]), to_rows(c[rows]))
        if len(rows) < 4:
            pull = pull._replace(drawn=torch.tensor(rows))
        return pull.gradient(z.shape, z.dtype, 1, 0.7, torch.tensor(2.0), added_to=other if added else None)

    before = other.clone()
    parts = [gradient(list(rows)) for rows in itertools.combinations(range(4), 2)]
    assert_same(torch.stack(parts).mean(0), gradient([0, 1, 2, 3]), rtol=1e-12)
    assert_same(other, before)


# ---- loops -----------------------------------------------------------------------------------------------------------


@EACH_WAY
@pytest.mark.parametrize("fraction", [0.25, 0.5])
@pytest.mark.parametrize("build", [mlp, batch_norm_net, dropout_net])
def test_micro_batches_have_rows_of_their_own(build, fraction, way):
    """As autograd has it, with other factors and sizes in one step."""
    optimizer = reference.wrap("dcl", build(), companion=build(3), companion_fraction=fraction)
    hand = HandDCL(build(), companion=build(3), fraction=fraction)
    for trained, by in ((optimizer, way), (hand, "term")):
        torch.manual_seed(5)
        for x, y in batches(6):
            trained.zero_grad()
            for factor, rows in ((0.5, slice(0, 8)), (0.2, slice(8, 13)), (0.3, slice(13, 16))):
                (factor * loss_of(trained, x[rows], y[rows], by)).backward()
            trained.step()
    assert_same_training(optimizer, hand, **NEAR)


def of_16_rows():
    return nn.Linear(16, 3, bias=False).double()


def seen_by_the_companion(optimizer, call, parts):
    """The rows that a step of equal micro-batches has drawn: row i moves column i of the companion's weight alone."""
    before = optimizer.companion.weight.detach().clone()
    optimizer.zero_grad()
    for _ in range(parts):
        F.cross_entropy(call(torch.eye(16).double()), torch.arange(16) % 3).backward()
    optimizer.companion_optimizer.state.clear()  # of its momentum
    optimizer.step()
    return (optimizer.companion.weight != before).any(0)


def test_the_rows_of_micro_batches_differ_and_in_the_end_all_are_seen():
    """No row of a sorted loader is left out."""
    model = of_16_rows()
    optimizer = wrap(model, companion=of_16_rows(), companion_fraction=0.25)
    seen = torch.zeros(16)
    for step in range(40):
        moved = seen_by_the_companion(optimizer, model, parts=2)
        seen += moved
        if step:
            assert 4 < moved.sum() <= 8
    assert seen.min() > 8
    assert seen.max() < 32


def test_a_run_is_resumed_bit_for_bit():
    """With dropout, and after a step that was skipped, as by a gradient scaler."""
    data = list(batches(9))

    def built(seed):
        model = dropout_net(seed)
        return model, wrap(model, companion_fraction=0.3)

    def skip(model, optimizer):
        F.cross_entropy(model(data[0][0]), data[0][1]).backward()
        optimizer.zero_grad()

    model, optimizer = built(0)
    train(model, optimizer, data[:4])
    skip(model, optimizer)
    again, other = built(9)
    train(again, other, data[:1])
    resume(other, optimizer)
    for network, trained_by in ((model, optimizer), (again, other)):
        torch.manual_seed(3)
        train(network, trained_by, data[4:])
    assert_same_networks(other, optimizer)
    assert_same(other.state_dict(), optimizer.state_dict())


def test_all_rows_are_no_part():
    """0.999 of 16 rows: masks of dropout are the model's, and nothing is tried."""
    found = []
    for fraction in (1.0, 0.999):
        torch.manual_seed(3)
        optimizer = wrap(dropout_net(), companion_fraction=fraction)
        fit(optimizer, batches(5))
        found.append(optimizer)
    assert_same_networks(*found)


def train_rank(rank, folder):
    parallel = DistributedDataParallel(of_16_rows())
    optimizer = wrap(parallel, companion=of_16_rows(), companion_fraction=0.25)
    for _ in range(2):
        moved = seen_by_the_companion(optimizer, parallel, parts=1)
    drawn = set()
    for number in range(2):
        generator = torch.Generator().manual_seed(2 * 2 + number)
        drawn |= set(torch.randperm(16, generator=generator)[:4].tolist())
    assert set(moved.nonzero().flatten().tolist()) == drawn


@needs_gloo
def test_ranks_have_rows_of_their_own_and_one_companion(tmp_path):
    on_two_ranks(train_rank, tmp_path)


# ---- what is cut -----------------------------------------------------------------------------------------------------


def logits_of(output):
    return output["logits"] if isinstance(output, dict) else output


class Calls(nn.Module):
    """Computes logits by its parts, and notes how many rows they have in training mode."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute, self.lengths = compute, []
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs, **options):
        output = self.compute(self, *inputs, **options)
        if self.training:
            self.lengths.append(len(logits_of(output)))
        return output


def pixels():
    return Calls(lambda model, x: model.net(x), net=nn.Conv2d(2, CLASSES, 3, padding=1))


def of_tokens(model, batch):
    """A text model: a dictionary of ids and mask, logits (rows, tokens, classes)."""
    h = model.embed(batch["ids"])
    mean = (h * batch["mask"][..., None]).sum(1, keepdim=True) / batch["mask"].sum(1)[:, None, None]
    return {"logits": model.head(h + mean)}


def tokens():
    return Calls(of_tokens, embed=nn.Embedding(9, 8), head=nn.Linear(8, CLASSES))


def images(number):
    return torch.randn(number, 2, 3, 4).double(), torch.randint(CLASSES, (number, 3, 4))


def sentences(number):
    mask = (torch.rand(number, 4) > 0.3).double()
    mask[:, 0] = 1.0
    return {"ids": torch.randint(9, (number, 4)), "mask": mask}, torch.randint(CLASSES, (number, 4))


@EACH_WAY
@pytest.mark.parametrize(("build", "batch"), [(pixels, images), (tokens, sentences)])
def test_images_and_dictionaries_with_the_classes_last_are_cut(build, batch, way):
    start, other = build().double(), build().double()
    data = [batch(number) for number in (8, 8, 12, 3)]

    def loss(z, y):
        return F.cross_entropy(z if build is pixels else z.movedim(-1, 1), y)

    optimizer = reference.wrap("dcl", copy.deepcopy(start), companion=copy.deepcopy(other), companion_fraction=0.25)
    hand = HandDCL(copy.deepcopy(start), companion=copy.deepcopy(other), find=logits_of, fraction=0.25)
    for trained, by in ((optimizer, way), (hand, "term")):
        reference.train(trained, data, by, loss, lambda x, trained=trained: logits_of(trained.model(x)))
    assert optimizer.companion.lengths == [2, 2, 3, 2]
    assert_same_training(optimizer, hand, **NEAR)


def test_a_table_is_not_cut_in_a_last_batch_of_as_many_rows():
    """What fits by chance is found each time that other arguments would be cut."""
    model = Calls(lambda model, x, table: model.net(x) @ table.T, net=nn.Linear(FEATURES, 4)).double()
    optimizer = wrap(model, companion_fraction=0.5)
    table = torch.randn(CLASSES, 4).double()

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x, table=table), y).backward()
        optimizer.step()

    for x, y in of_sizes([16, 16]):
        step(x, y)
    with pytest.warns(UserWarning, match="companion_fraction has no effect on a batch"):
        step(*of_sizes([CLASSES])[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in of_sizes([16, CLASSES]):
            step(x, y)
    assert optimizer.companion.lengths == [16, 8, 8, CLASSES, 8, CLASSES]  # the first compares it with the model


def test_trying_does_not_write_to_an_object_of_the_batch():
    """Else the first prediction of the copy, of an object that was written to before, differs, with a warning."""

    class Halving(nn.Linear):
        def forward(self, x, batch):
            batch.scale = batch.scale / 2
            return super().forward(x) * batch.scale

    model = Halving(FEATURES, CLASSES).double()
    optimizer = wrap(model, companion_fraction=0.5)
    for x, y in batches(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x, SimpleNamespace(scale=4.0)), y).backward()
        optimizer.step()


def test_trying_leaves_no_trace():
    """Neither in statistics nor in modes, layer by layer, nor in what the network notes in training."""

    class Twisted(nn.Linear):
        def train(self, mode=True):
            assert not hasattr(self, "is_made") or mode, "as layers that merge weights in eval()"
            return super().train(mode)

    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), Twisted(12, CLASSES)).double()
    companion = copy.deepcopy(model)
    for network in (model, companion):
        network[2].is_made = True
        network[1].training = False
    optimizer = wrap(model, companion=companion, companion_fraction=0.25)
    before = copy.deepcopy(companion[1].state_dict())
    fit(optimizer, batches(3))
    assert [layer.training for layer in companion.modules()] == [True, True, False, True]
    assert_same(companion[1].running_mean, before["running_mean"])


# ---- what is not cut -------------------------------------------------------------------------------------------------


def recurrent(compute):
    return Calls(compute, lstm=nn.LSTM(FEATURES, 8), head=nn.Linear(8, CLASSES))


def time_first():
    return recurrent(lambda model, x: model.head(model.lstm(x)[0][-1]))


def all_times():
    """Gives logits with the time first, which are no rows by themselves."""
    return recurrent(lambda model, x: model.head(model.lstm(x)[0]))


def packed():
    return recurrent(lambda model, batch: model.head(model.lstm(batch)[1][0][-1]))


def of_lists():
    def compute(model, images):
        return torch.stack([model.net(image).mean(0) for image in images])

    return Calls(compute, net=mlp().float())


def of_neighbors(model, x, edges):
    model.has_left = getattr(model, "has_left", False) or bool(edges.max() >= len(x))
    h = model.first(x)
    return model.second(h.index_add(0, edges[1], h[edges[0]]))


def graph():
    return Calls(of_neighbors, first=nn.Linear(FEATURES, 8), second=nn.Linear(8, CLASSES))


def masked():
    """A mask of the tokens, of which there are as many as rows."""

    def compute(model, batch):
        return model.net((batch["x"] * batch["mask"]).mean(1, keepdim=True))

    return Calls(compute, net=nn.Linear(1, CLASSES))


def of_nested():
    return Calls(lambda model, x: model.net(x.to_padded_tensor(0.0).mean(1)), net=nn.Linear(FEATURES, CLASSES))


def of_lists_with_labels():
    """A head of zeros, which gives any rows the same logits: only their number shows that images are not cut."""

    def compute(model, images, labels):
        return torch.stack([model.net(image).mean(0) for image in images])

    net = nn.Linear(FEATURES, CLASSES)
    nn.init.zeros_(net.weight)
    return Calls(compute, net=net)


def batch_statistics():
    norm = nn.BatchNorm1d(FEATURES, track_running_stats=False)
    return Calls(lambda model, x: model.head(model.norm(x)), norm=norm, head=nn.Linear(FEATURES, CLASSES))


def trains_only():
    """Raises in evaluation mode."""

    def compute(model, x):
        assert model.training
        return model.net(x)

    return Calls(compute, net=mlp().float())


N = 6
NOT_CUT = {
    "time first": (time_first, lambda: [torch.randn(5, N, FEATURES)]),
    "as many times as rows": (time_first, lambda: [torch.randn(N, N, FEATURES)]),
    "logits with the time first": (all_times, lambda: [torch.randn(N, 3, FEATURES)]),
    "list of images": (of_lists, lambda: [[torch.randn(2 + row % 2, FEATURES) for row in range(N)]]),
    "as many lines as images": (of_lists, lambda: [[torch.randn(N, FEATURES) for row in range(N)]]),
    "list of images with labels": (
        of_lists_with_labels,
        lambda: [[torch.randn(3, FEATURES) for row in range(N)], torch.arange(N)],
    ),
    "graph": (graph, lambda: [torch.randn(N, FEATURES), torch.randint(N, (2, 9))]),
    "mask": (masked, lambda: [{"x": torch.randn(N, N), "mask": torch.rand(N)}]),
    "mask of ones": (masked, lambda: [{"x": torch.randn(N, N), "mask": torch.ones(N)}]),
    "batch statistics": (batch_statistics, lambda: [torch.randn(N, FEATURES)]),
    "packed": (packed, lambda: [pack_padded_sequence(torch.randn(4, N, FEATURES), torch.tensor([4, 3, 3, 2, 2, 1]))]),
    "nested": (
        of_nested,
        lambda: [torch.nested.nested_tensor([torch.randn(2 + row % 2, FEATURES) for row in range(N)])],
    ),
    "no evaluation": (trains_only, lambda: [torch.randn(N, FEATURES)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NOT_CUT)
def test_what_cannot_be_cut_runs_whole_with_one_warning_that_says_what_it_costs(name):
    """Bit for bit as with a fraction of 1."""
    build, make = NOT_CUT[name]
    found = []
    for fraction in (1.0, 0.5):
        torch.manual_seed(0)
        model = build()
        optimizer = wrap(model, companion_fraction=fraction)
        expects = nullcontext() if fraction == 1 else pytest.warns(UserWarning, match="about twice as long as plain")
        with expects as caught:
            for _ in range(4):
                optimizer.zero_grad()
                z = model(*make()).flatten(0, -2)
                F.cross_entropy(z, torch.randint(CLASSES, z.shape[:1])).backward()
                optimizer.step()
        assert fraction == 1 or len(caught) == 1
        assert optimizer.companion.lengths == [N] * 4
        has_left = getattr(optimizer.companion, "has_left", False)
        assert not has_left, "an index out of range ends a process with a GPU"
        found.append(optimizer)
    assert_same_networks(*found)
