"""The applications, small: they run alone, learn more than chance, and the penalty is part of the training."""

from functools import partial

import pytest

from examples import class_incremental, distillation, fine_tuning, segmentation, semi_supervised, text

TRAININGS = {
    "segmentation": (partial(segmentation.train, count=40, epochs=15), 11),
    "text": (partial(text.train, epochs=6), len(text.MODULES)),
    "fine_tuning": (lambda weight, seed: fine_tuning.fine_tune(fine_tuning.pretrained(1), weight, seed, epochs=6), 5),
    "distillation": (lambda weight, seed: distillation.distill(distillation.teach(3), weight, seed, epochs=10), 10),
    "semi_supervised": (partial(semi_supervised.train, steps=60), 10),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_it_learns_and_the_penalty_changes_what(name):
    train, classes = TRAININGS[name]
    plain, penalized = train(0, seed=0), train(3.0, seed=0)
    assert plain == train(0, seed=0)
    assert plain > 1.5 * 100 / classes
    assert plain != penalized


@pytest.mark.filterwarnings("ignore:the companion's logits are masked")
@pytest.mark.parametrize("head", class_incremental.HEADS)
def test_class_incremental_training_learns_all_tasks_and_all_masks_are_alike(head):
    accuracies = [class_incremental.train(head, method, seed=0, epochs=3) for method in class_incremental.METHODS]
    assert min(accuracies) > 60  # the last two of five tasks alone are 40
    if head != "grows":
        expected = [class_incremental.train("-inf", method, seed=0, epochs=3) for method in class_incremental.METHODS]
        assert accuracies == pytest.approx(expected, abs=1e-4)
