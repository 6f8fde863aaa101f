"""Hugging Face Accelerate: prepare, accumulation, mixed precision, save_state."""

from contextlib import contextmanager
from itertools import product

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import assert_same, batches, dropout_net, every, mlp
from tests.integrations import EACH_METHOD, METHODS, differ, wrap
from tests.integrations.conftest import forget
from tests.reference import learned, term_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch")
SIZE, BATCHES, PARTS = 8, 7, 2  # an epoch's last accumulation has one batch
WAYS = ["line", "term"]


@contextmanager
def accelerator(**options):
    """Accelerate keeps its settings in singletons."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    try:
        yield Accelerator(cpu=True, dataloader_config=order, **options)
    finally:
        forget()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrapped(method, model):
    return wrap(method, adamw(model), model, weight=5.0)


@EACH_METHOD
def test_a_prepared_optimizer_is_refused_with_the_order_that_works(method):
    """It leaves out the steps of micro-batches, which would then be steps of ours."""
    model = mlp()
    with accelerator() as prepares, pytest.raises(ValueError, match=r"prepared by Accelerate.*\n.*wrap before prepare"):
        wrap(method, prepares.prepare(adamw(model)), model)


class Script:
    """Training as Accelerate's examples write it, which can be cut after any batch."""

    def __init__(self, accelerator, method, build=mlp, *, shuffle=False, size=SIZE, wrapped_after=False, way="line"):
        self.accelerator, self.criterion = accelerator, nn.CrossEntropyLoss()
        dtype = torch.float32 if accelerator.mixed_precision == "bf16" else torch.float64
        model = build().to(dtype)
        if wrapped_after:
            model = accelerator.prepare(model)
        optimizer = wrapped(method, model)
        self.term = term_of(
            optimizer, way
        )  # of the wrapper: the prepared optimizer has the methods of torch.optim alone
        # Accelerate steps a schedule once for each process.
        scheduler = CosineAnnealingLR(optimizer, 20 * accelerator.num_processes)
        data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(BATCHES, SIZE, dtype=dtype), strict=True)))
        # A generator of its own: the loader's seed would be drawn from dropout's stream, anew when a run goes on.
        loader = DataLoader(data, size, shuffle=shuffle, generator=torch.Generator())
        self.optimizer, self.loader, self.scheduler = accelerator.prepare(optimizer, loader, scheduler)
        self.model = model if wrapped_after else accelerator.prepare(model)

    def epoch(self, number, first=0, last=None, clip=None):
        self.loader.set_epoch(number)
        loader = skip_first_batches(self.loader, first) if first else self.loader
        for index, (x, y) in enumerate(loader, start=first):
            if index == last:
                break
            with self.accelerator.accumulate(self.model):
                z = self.model(x)
                self.accelerator.backward(self.criterion(z, y) + self.term(z, y))
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    @property
    def ours(self):
        return self.optimizer.optimizer


class InBfloat16(nn.Module):
    """What Accelerate makes of a model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.net(x)
        return z.float()


def by_hand(method, model, parts, clip=None, dtype=torch.float64, way="line"):
    criterion, optimizer = nn.CrossEntropyLoss(), wrapped(method, model)
    term = term_of(optimizer, way)
    scheduler = CosineAnnealingLR(optimizer, 20)
    for index, (x, y) in enumerate([*batches(BATCHES, SIZE, dtype=dtype)] * 2):
        z = model(x)
        ((criterion(z, y) + term(z, y)) / parts).backward()
        place = index % BATCHES + 1
        if place % parts == 0 or place == BATCHES:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return optimizer


LOOPS = [(1, None), (PARTS, None), (PARTS, 0.05)]


@pytest.mark.parametrize(
    ("method", "loop", "wrapped_after", "way"),
    every(7, product(METHODS, LOOPS, [False, True], WAYS)),
)
def test_two_epochs_are_the_loop_by_hand_bit_for_bit(method, loop, wrapped_after, way):
    parts, clip = loop
    with accelerator(gradient_accumulation_steps=parts) as shared:
        script = Script(shared, method, wrapped_after=wrapped_after, way=way)
        script.epoch(0, clip=clip).epoch(1, clip=clip)
    optimizer = by_hand(method, model := mlp(), parts, clip, way=way)
    assert_same(script.model, model)
    assert_same(script.ours.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("method", "parts", "wrapped_after", "way"),
    every(5, product(METHODS, [1, PARTS], [False, True], WAYS)),
)
def test_bfloat16_is_the_loop_by_hand_under_autocast(method, parts, wrapped_after, way):
    """Wrapped before, the model returns bfloat16, and the script gets a float32 copy of it."""
    with accelerator(gradient_accumulation_steps=parts, mixed_precision="bf16") as shared:
        script = Script(shared, method, wrapped_after=wrapped_after, way=way).epoch(0).epoch(1)
    net = mlp(dtype=torch.float32)
    optimizer = by_hand(method, InBfloat16(net), parts, dtype=torch.float32, way=way)
    assert_same(script.model, net)
    assert_same([*learned(script.ours).values()], [*learned(optimizer).values()])


@EACH_METHOD
def test_an_epoch_that_is_cut_in_two_by_save_state_goes_on_to_the_last_bit(method, tmp_path):
    """Shuffled, with dropout, a schedule and accumulation; the second half in what could be another process."""

    def started():
        set_seed(3)
        return Script(shared, method, dropout_net, shuffle=True)

    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        whole = started().epoch(0).epoch(1)
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        half = started().epoch(0, last=4)
        shared.save_state(tmp_path)
    assert differ(whole.model, half.model)
    with accelerator(gradient_accumulation_steps=PARTS) as shared:
        resumed = started()
        torch.manual_seed(99)
        shared.load_state(tmp_path)
        resumed.epoch(0, first=4).epoch(1)
    assert_same(resumed.model, whole.model)
    assert_same(resumed.ours.state_dict(), whole.ours.state_dict())
    assert_same(resumed.scheduler.state_dict(), whole.scheduler.state_dict())
