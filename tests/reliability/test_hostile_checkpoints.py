"""Damaged checkpoints: an error before anything changes, or a state that fits."""

import copy
import random

import pytest
import torch

from tests.reference import EACH
from tests.reliability.hostile import ABSENT, JUNK, Training, places, replaced

FLIPS = 200
# What junk may be in its place: an optimizer without a state, prototypes from before the first batch, a loss of which
# nothing is known yet, numbers of the same type, whose values are not looked at.
RIGHT = {("state", "empty"), ("steps", "minus one"), ("dcl_optim.DCPOptimizer", "forecaster", "empty")}
RIGHT |= {("loss", name, "none") for name in ("smoothing", "class_dim", "scale")}
RIGHT |= {("loss", name, "nan") for name in ("smoothing", "error", "scale")}
RIGHT |= {("loss", name, "minus one") for name in ("class_dim", "num_silent")}


def is_taken(load, error):
    try:
        load()
    except error:
        return False
    return True


@EACH
def test_a_flipped_bit_is_an_error_before_any_change_or_a_state_that_fits(variant, tmp_path):
    """torch.load does not compare the checksums of tensors: a bit flipped inside one goes unnoticed."""
    checkpoint = tmp_path / "run.pt"
    torch.save(Training(variant, 6).state(), checkpoint)  # three steps ahead of the one that is to take it over
    whole, draw, victim = checkpoint.read_bytes(), random.Random(0), Training(variant, 3)
    before, ours, taken = victim.everything(), copy.deepcopy(victim.optimizer.state_dict()), 0

    def load():  # torch.load runs into any error, in the middle of a pickle that makes no sense
        victim.optimizer.load_state_dict(torch.load(checkpoint, weights_only=True)["optimizer"])

    for _ in range(FLIPS):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        checkpoint.write_bytes(damaged)
        if is_taken(load, Exception):
            taken += 1
            victim.optimizer.load_state_dict(ours)
        assert victim.everything() == before
    print(f"{variant}: {FLIPS - taken} of {FLIPS} flips refused")
    assert taken < 0.9 * FLIPS


def is_left_to_torch(place):
    """Whether a place is inside a base's or companion's optimizer state or group, which torch does not look into."""
    return any(name in place[:-1] for name in ("state", "param_groups"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, for what it makes of complex numbers and indices
@EACH
def test_a_state_with_another_name_type_or_shape_is_refused_whole(variant):
    good, victim = Training(variant, 6).optimizer.state_dict(), Training(variant, 3)
    before, ours = victim.everything(), copy.deepcopy(victim.optimizer.state_dict())
    refused, taken = 0, set()
    for place in places(good):
        for name, junk in {**JUNK, "absent": ABSENT}.items():
            bad = replaced(good, place, junk)
            if is_taken(lambda bad=bad: victim.optimizer.load_state_dict(bad), ValueError):
                taken.add((place, name))
                victim.optimizer.load_state_dict(ours)
            else:
                refused += 1
            assert victim.everything() == before, (place, name)
    print(f"{variant}: {refused} refused, {len(taken)} taken")
    right = {(place, name) for place, name in taken if (*place[-2:], name) in RIGHT or (place[-1], name) in RIGHT}
    assert {(place, name) for place, name in taken - right if not is_left_to_torch(place)} == set()
    assert refused > 100
