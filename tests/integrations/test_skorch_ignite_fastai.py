"""skorch, ignite and fastai train as the loop by hand, with the recipes of docs/frameworks.md."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, create_supervised_trainer
from skorch import NeuralNetClassifier
from torch import nn

from tests.helpers import batches, dropout_net, mlp, sgd
from tests.reference import CLOSE, EACH, assert_same_training, by_hand, term_of, train, wrap

EPOCHS = 2
DATA = list(batches(5))
WAYS = pytest.mark.parametrize(("way", "loss"), [("line", F.cross_entropy), ("term", F.multi_margin_loss)])


class Criterion(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, z, y):
        return self.loss(z, y)


def trained_by_hand(variant, loss, network=dropout_net):
    hand = by_hand(variant, network())
    torch.manual_seed(3)
    return train(hand, DATA * EPOCHS, loss=loss)


@WAYS
@EACH
def test_skorch(variant, way, loss):
    class Net(NeuralNetClassifier):
        def initialize_optimizer(self, *args, **kwargs):
            super().initialize_optimizer(*args, **kwargs)
            self.optimizer_ = wrap(variant, self.module_, self.optimizer_)
            return self

        def get_loss(self, y_pred, y_true, *args, **kwargs):
            plain = super().get_loss(y_pred, y_true, *args, **kwargs)
            return plain + term_of(self.optimizer_, way)(y_pred, y_true)

    x, y = (torch.cat(parts).numpy() for parts in zip(*DATA, strict=True))
    (group,) = sgd(dropout_net()).param_groups
    net = Net(
        dropout_net,
        criterion=Criterion,
        criterion__loss=loss,
        optimizer=torch.optim.SGD,
        **{f"optimizer__{name}": group[name] for name in ("lr", "momentum", "weight_decay")},
        batch_size=len(DATA[0][0]),
        max_epochs=EPOCHS,
        iterator_train__generator=torch.Generator(),  # the loader's seed would be drawn from dropout's stream
        train_split=None,
        verbose=0,
    ).initialize()
    torch.manual_seed(3)
    net.partial_fit(x, y)
    assert_same_training(net.optimizer_, trained_by_hand(variant, loss), **CLOSE)
    assert np.mean(net.predict(x) == y) > 0.2  # predicts without a penalty or an error


@WAYS
@EACH
def test_ignite(variant, way, loss):
    optimizer = wrap(variant, dropout_net())

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        z = optimizer.model(x)
        total = loss(z, y) + optimizer_term(z, y)
        total.backward()
        optimizer.step()
        return total.item()

    optimizer_term = term_of(optimizer)
    trainer = Engine(update) if way == "term" else create_supervised_trainer(optimizer.model, optimizer, loss)
    torch.manual_seed(3)
    trainer.run(DATA, max_epochs=EPOCHS)
    assert_same_training(optimizer, trained_by_hand(variant, loss), **CLOSE)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning")
@WAYS
@EACH
def test_fastai(variant, way, loss):
    """fastai brings spaCy and pandas, so the group dev leaves it out: ``pip install fastai`` runs these tests."""
    pytest.importorskip("fastai")
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    model = mlp()  # without dropout, from whose stream fastai's loader draws
    (group,) = sgd(model).param_groups
    options = {name: group[name] for name in ("momentum", "weight_decay")}

    def opt_func(parameters, lr):
        def build(groups, **settings):
            return wrap(variant, model, torch.optim.SGD(groups, **settings, **options))

        return OptimWrapper(parameters, build, lr=lr)

    def total(z, y):
        return loss(z, y) + term_of(learner.opt.opt, way)(z, y)

    loader = DataLoader(DATA, bs=None, num_workers=0)
    learner = Learner(DataLoaders(loader, loader), model, total, opt_func=opt_func, lr=group["lr"])
    learner.remove_cb(learner.recorder)  # which takes float32 only
    torch.manual_seed(3)
    learner.fit(EPOCHS)
    assert_same_training(learner.opt.opt, trained_by_hand(variant, loss, mlp), **CLOSE)
