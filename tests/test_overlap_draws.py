"""overlap=True and random numbers: the companion replays the model's, the script goes on as with the model alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (
    CLASSES,
    FEATURES,
    assert_overlap_changes_nothing,
    batches,
    dropout_net,
    one,
    train,
    wrap,
)

STEPS, WIDTH = 6, 12


class Noisy(nn.Module):
    """Draws something of the shape of its hidden layer, and remembers what."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.draw, self.drawn = draw, []
        self.double()

    def forward(self, x):
        hidden = self.first(x)
        noise = self.draw(hidden)
        self.drawn.append(noise.detach().clone())
        return self.last(hidden + 0.1 * noise)


def like(sample):
    """What fills a tensor in place, of another dtype too."""
    return lambda h: sample(torch.empty_like(h.detach()))


def distribution(kind, *parameters):
    return lambda h: kind(*(torch.full_like(h.detach(), value) for value in parameters)).sample()


def attention(h, p=0.3):
    heads = h.reshape(1, 1, *h.shape)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)[0, 0]


def both(h):
    """Where nothing else draws, the companion would not be asked to replay."""
    return attention(h, p=0.0) + F.dropout(h)


DRAWS = {
    "dropout": F.dropout,
    "dropout in place": lambda h: F.dropout(h * 1, inplace=True),
    "dropout1d": lambda h: F.dropout1d(h[None])[0],
    "alpha_dropout": lambda h: F.alpha_dropout(h, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, training=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "attention": attention,
    "attention without dropout": both,
    "gumbel_softmax": F.gumbel_softmax,
    "fractional pooling": lambda h: h + F.fractional_max_pool2d(h[None], 2, (4, 4)).mean(),
    "rand": lambda h: torch.rand(h.shape, dtype=h.dtype),
    "rand, out": lambda h: torch.rand(h.shape, out=torch.empty_like(h.detach())),
    "rand_like": torch.rand_like,
    "randn": lambda h: torch.randn(h.shape, dtype=h.dtype),
    "randn_like": torch.randn_like,
    "randint": lambda h: torch.randint(5, h.shape).to(h),
    "randint, low": lambda h: torch.randint(2, 5, h.shape).to(h),
    "randint_like": lambda h: torch.randint_like(h, 5),
    "randint_like, low": lambda h: torch.randint_like(h, 2, 5),
    "randperm": lambda h: torch.randperm(WIDTH).to(h).expand_as(h),
    "randperm, out": lambda h: torch.randperm(WIDTH, out=torch.empty(0, dtype=torch.long)).to(h).expand_as(h),
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.3)),
    "bernoulli, p": lambda h: torch.bernoulli(h.detach(), p=0.3),
    "multinomial": lambda h: torch.multinomial(torch.ones(len(h), 20), WIDTH).to(h),
    "multinomial, replacement": lambda h: torch.multinomial(torch.ones(len(h), 20), WIDTH, True).to(h),
    "normal": lambda h: torch.normal(0.0, 1.0, h.shape, dtype=h.dtype),
    "normal of tensors": lambda h: torch.normal(h.detach(), 1.0),
    "poisson": lambda h: torch.poisson(torch.full_like(h, 2.0)),
    "gamma": distribution(torch.distributions.Gamma, 2.0, 1.0),
    "beta": distribution(torch.distributions.Beta, 2.0, 1.0),
    "binomial": lambda h: torch.binomial(torch.full_like(h, 5.0), torch.full_like(h, 0.3)),
    "trunc_normal_": like(nn.init.trunc_normal_),
} | {
    name: like(lambda t, name=name, arguments=arguments: getattr(t, name)(*arguments))
    for name, arguments in {
        "bernoulli_": (0.3,),
        "exponential_": (),
        "normal_": (),
        "uniform_": (),
        "log_normal_": (),
        "cauchy_": (),
        "geometric_": (0.3,),
        "random_": (1, 5),
    }.items()
}


def trained(model, overlap, loss=F.cross_entropy, **options):
    optimizer = wrap(model, overlap=overlap, **options)
    torch.manual_seed(7)
    train(model, optimizer, batches(STEPS), loss=loss)
    return optimizer


@pytest.mark.parametrize("draw", DRAWS)
def test_every_kind_of_draw(draw):
    def script(overlap):
        optimizer = trained(Noisy(DRAWS[draw]), overlap)
        theirs, ours = optimizer.model.drawn, optimizer.companion.drawn
        assert len(theirs) == len(ours) == STEPS
        assert any(not torch.equal(noise, theirs[0]) for noise in theirs), "nothing was drawn"
        return optimizer

    assert_overlap_changes_nothing(script)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(1, 8, num_layers=2, dropout=0.4, batch_first=True)
        self.double().head = nn.Linear(8, CLASSES, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.cells(x[..., None])[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.3, batch_first=True)
        self.double().head = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.layer(x[:, None])[:, 0])


class Dropping(nn.Module):
    """Leaves whole samples out of its residual branch, as a library's layer does it."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.branch, self.layer = nn.Linear(FEATURES, FEATURES), layer
        self.double().head = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, x):
        return self.head(x + self.layer(self.branch(x)))


def drop_path():
    return Dropping(pytest.importorskip("timm.layers").DropPath(0.4))


def stochastic_depth():
    return Dropping(pytest.importorskip("torchvision.ops").StochasticDepth(0.4, "row"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("network", [Recurrent, Attending, drop_path, stochastic_depth])
def test_layers_that_draw(network):
    assert_overlap_changes_nothing(lambda overlap: trained(network(), overlap))


def test_layers_of_the_script_that_draw_from_a_generator_of_their_own():
    """The companion has a copy of it, which draws the same by itself."""

    class Own(Noisy):
        def __init__(self):
            super().__init__(None)
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            hidden = self.first(x)
            return self.last(F.dropout(hidden) + torch.rand(hidden.shape, generator=self.generator))

    assert_overlap_changes_nothing(lambda overlap: trained(Own(), overlap))


def test_draws_between_forward_and_backward():
    def criterion(logits, labels):
        return F.cross_entropy(logits + 0.1 * torch.randn_like(logits), labels)

    assert_overlap_changes_nothing(lambda overlap: trained(dropout_net(), overlap, criterion, loss_scale=1.0))


def test_an_op_that_takes_no_generator_is_refused_by_its_name():
    with torch.library._scoped_library("dcl_optim_tests", "DEF") as library:
        library.define("noise(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("noise", torch.rand_like, "CompositeExplicitAutograd")
        model = Noisy(lambda h: torch.ops.dcl_optim_tests.noise(h.detach()))
        optimizer = wrap(model, overlap=True)
        first, second = batches(2)
        train(model, optimizer, [first])
        with pytest.raises(RuntimeError, match=r"dcl_optim_tests\.noise\.default.*no generator.*overlap=False"):
            model(second[0])
        optimizer.detach()


class Switchable(Noisy):
    """Remembers its masks, of which there are none while it is off."""

    on = True

    def __init__(self):
        super().__init__(lambda h: F.dropout(torch.ones_like(h), training=Switchable.on))


@pytest.mark.parametrize("begins_at", [1, 3])
def test_after_the_forward_that_begins_to_draw_the_masks_are_the_models(begins_at, monkeypatch):
    model = Switchable()
    optimizer = wrap(model, overlap=True)
    for step, batch in enumerate(batches(8)):
        monkeypatch.setattr(Switchable, "on", step >= begins_at)
        train(model, optimizer, [batch])
    pairs = list(zip(model.drawn, optimizer.companion.drawn, strict=True))
    for step, (theirs, ours) in enumerate(pairs):
        assert bool((theirs == 0).any()) == (step >= begins_at)
        assert torch.equal(theirs, ours) or step == begins_at


def test_a_model_that_draws_now_and_then_is_replayed_each_time(monkeypatch):
    def script(overlap):
        model = Switchable()
        optimizer = wrap(model, overlap=overlap)
        torch.manual_seed(7)
        for step, batch in enumerate(batches(12)):
            monkeypatch.setattr(Switchable, "on", step % 4 < 2)
            train(model, optimizer, [batch])
        return optimizer

    assert_overlap_changes_nothing(script)


def test_the_script_draws_from_its_stream_as_if_no_companion_ran():
    streams = []
    for wrapped in (True, False):
        model = dropout_net()
        optimizer = wrap(model, overlap=True)
        if not wrapped:
            optimizer.detach()
        torch.manual_seed(4)
        drawn = []
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            z = model(x)
            drawn.append(torch.rand(2))
            F.cross_entropy(z, y).backward()
            drawn.append(torch.rand(2))
            optimizer.step()
            drawn.append(torch.rand(2))
        streams.append(torch.cat(drawn))
    assert torch.equal(*streams)


def test_a_forward_that_raises_leaves_the_stream_where_the_model_alone_does():
    streams = []
    for wrapped in (True, False):
        model = dropout_net()
        optimizer = wrap(model, overlap=True)
        train(model, optimizer, batches(2))
        if not wrapped:
            optimizer.detach()
        torch.manual_seed(4)
        with model[3].register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            model(one()[0])
        streams.append(torch.get_rng_state())
    assert torch.equal(*streams)
