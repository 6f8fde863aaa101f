"""overlap=True and threads: both networks at once, the number of torch's threads, no thread that stays."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import (
    CLASSES,
    FEATURES,
    PATIENCE,
    assert_overlap_changes_nothing,
    backward,
    batches,
    cells,
    intra_op_threads,
    mlp,
    one,
    train,
    wrap,
)


class Calling(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function("backward")
        return gradient, None


class Reporting(nn.Module):
    """Calls a function in forward and in backward; one function for the model and its companion."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        self.function("forward")
        return Calling.apply(x, self.function)


def network(function):
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 12), Reporting(function), nn.BatchNorm1d(12), nn.Linear(12, CLASSES))
    return nn.Sequential(*layers).double()


def report_steps(optimizer, function):
    for own in (optimizer.base, optimizer.companion_optimizer):
        own.register_step_pre_hook(lambda *_: function("step"))


# ---- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_both_networks_are_inside_at_once(phase):
    """Each of the two waits for the other: they would break the barrier if one had to end before the other begins."""
    barrier, met = threading.Barrier(2, timeout=PATIENCE), []

    def meet(place):
        if place == phase and enabled:
            barrier.wait()
            met.append(threading.current_thread().name)

    enabled = False
    model = network(meet)
    optimizer = wrap(model, overlap=True)
    train(model, optimizer, batches(1))  # the first forward is serial
    enabled = True
    train(model, optimizer, batches(3))
    assert sorted(met) == ["MainThread"] * 3 + ["dcl_optim_0"] * 3


@pytest.mark.parametrize("steps", cells([40, 300], 40))
def test_random_delays_change_nothing(steps):
    """Steps in which now one, now the other network is late, at places drawn by a seed."""

    def script(overlap):
        chance = random.Random(3)

        def delay(place):
            if chance.random() < 0.3:
                time.sleep(chance.random() * 1e-3)

        model = network(delay)
        optimizer = wrap(model, overlap=overlap)
        report_steps(optimizer, delay)
        for step, (x, y) in enumerate(batches(steps)):
            backward(model, x, y)
            if step % 3 != 1:
                optimizer.step()
                optimizer.zero_grad()
        return optimizer

    assert_overlap_changes_nothing(script)


class Failure:
    """Raises in the caller's thread where it is told to, while it is armed."""

    def __init__(self, place, error=ZeroDivisionError):
        self.place, self.error, self.armed = place, error, False

    def __call__(self, where):
        if self.armed and where == self.place and threading.current_thread() is threading.main_thread():
            raise self.error


def overlapped(function):
    """An overlapping optimizer of a network, both of which call a function in forward, backward and step."""
    optimizer = wrap(network(function), overlap=True)
    report_steps(optimizer, function)
    return optimizer


# ---- the number of intra-op threads ---------------------------------------------------------------------------------


def test_each_of_the_two_has_half_of_the_threads_in_forward_and_backward_and_all_of_them_in_its_step():
    given, half, seen = 4, 2, set()

    def note(place):
        seen.add((place, threading.current_thread().name, torch.get_num_threads()))

    optimizer = overlapped(note)
    model = optimizer.model
    with intra_op_threads(given):
        train(model, optimizer, batches(1))
        seen.clear()
        for x, y in batches(3):
            optimizer.zero_grad()
            z = model(x)
            assert torch.get_num_threads() == half  # until the step
            F.cross_entropy(z, y).backward()
            assert torch.get_num_threads() == half
            optimizer.step()
            assert torch.get_num_threads() == given
    concurrent = {(place, name, half) for place in ("forward", "backward") for name in ("MainThread", "dcl_optim_0")}
    assert seen == concurrent | {("step", "MainThread", given)}


@pytest.mark.parametrize(
    ("place", "error"),
    [("forward", KeyboardInterrupt), ("backward", ZeroDivisionError), ("step", ZeroDivisionError)],
)
def test_the_callers_threads_come_back_after_an_error(place, error):
    failure = Failure(place, error)
    optimizer = overlapped(failure)
    model = optimizer.model
    with intra_op_threads(4):
        train(model, optimizer, batches(2))
        failure.armed = True
        with pytest.raises(error):
            train(model, optimizer, batches(1))
        failure.armed = False
        if place != "step":  # for which they are back already
            with torch.no_grad():
                model(next(batches(1))[0])
        assert torch.get_num_threads() == 4
        assert new_threads_number() == 4
        train(model, optimizer, batches(2))
        assert torch.get_num_threads() == 4


def new_threads_number():
    """How many intra-op threads a thread gets that the script starts by now."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_the_callers_threads_come_back_when_it_goes_on_without_an_optimizer_after_an_error():
    failure = Failure("backward")
    model = network(failure)
    with intra_op_threads(4):
        with wrap(model, overlap=True) as optimizer:
            train(model, optimizer, batches(2))
            failure.armed = True
            with pytest.raises(ZeroDivisionError):
                backward(model, *one())
        assert torch.get_num_threads() == 4


def test_a_number_that_the_script_sets_stays():
    model = mlp()
    optimizer = wrap(model, overlap=True)
    with intra_op_threads(4):
        for step, (x, y) in enumerate(batches(6)):
            optimizer.zero_grad()
            z = model(x)
            torch.set_num_threads(2 + step)
            loss = F.cross_entropy(z, y)
            loss.backward()
            optimizer.step()
            assert torch.get_num_threads() == 2 + step
            assert new_threads_number() == 2 + step
            torch.set_num_threads(3 + step)


def test_a_number_that_is_set_inside_the_models_forward_stays():
    numbers = iter(range(5, 9))

    def set_threads(place):
        if place == "forward" and threading.current_thread() is threading.main_thread():
            torch.set_num_threads(next(numbers))

    model = network(set_threads)
    optimizer = wrap(model, overlap=True)
    with intra_op_threads(4):
        train(model, optimizer, batches(1))  # both networks' forwards are in this thread: two numbers
        for number in (7, 8):
            train(model, optimizer, batches(1))
            assert torch.get_num_threads() == number


def test_two_optimizers_in_one_backward_give_all_threads_back():
    first, second = mlp(), mlp(seed=4)
    optimizers = [wrap(model, overlap=True) for model in (first, second)]
    with intra_op_threads(4):
        for x, y in batches(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (F.cross_entropy(first(x), y) + F.cross_entropy(second(x), y)).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert torch.get_num_threads() == 4
