"""DCL's search: the choice by hand, the order of the runs, the controls, the tables."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from examples.research import records
from examples.research.configuration import DCL, Configuration
from examples.research.experiments import EXPERIMENTS
from examples.research.rivals import companion, companion_queue, companion_tables, queue, settings, values
from examples.research.rivals.companion import KEPT, TODAY, Confirmed, Judged, pair_row
from examples.research.rivals.experiments import name_of
from examples.research.tests.test_methods import advance, assert_close, batches, started, train
from examples.research.tests.test_methods_formulas import by_hand, cross_entropy, descend, normed, twin
from examples.research.tests.test_rivals import cells_of, scores_of
from examples.research.trainer import Run

A, B, C = (0.3, 0.97), (1.0, 0.97), (0.1, 0.0)


def a_record(label, seed, validation, test):
    """A record with accuracies in percent: the model's, or those of all predictors."""
    found = {"label": label, "seed": seed}
    for part, given in (("validation_accuracy", validation), ("accuracy", test)):
        all_of_them = given if isinstance(given, dict) else {"model": given}
        found[part] = {name: value / 100 for name, value in all_of_them.items()}
    return found


def three(model, other, both):
    """The accuracies of DCL's predictors."""
    return {"model": model, "companion": other, "mean of both": both}


def written(folder, experiment, found):
    """Add records to an experiment's file."""
    with (folder / f"{experiment}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in found)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder without records, and a repository without any."""
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "none")
    return tmp_path


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_scores_are_of_a_predictor_and_the_kept_one_is_the_best_on_validation_images():
    """In seed 0 the companion is the best one, in seed 1 the mean of both is only as good as the model."""
    found = [
        a_record("a", 0, three(50, 60, 55), three(40, 30, 35)),
        a_record("a", 1, three(50, 40, 50), three(41, 31, 36)),
        a_record("CE", 0, 70, 45),
        a_record("a", 2, three(0, 0, 0), three(0, 0, 0)),
    ]
    expected = {
        "model": {0: 40.0, 1: 41.0},
        "companion": {0: 30.0, 1: 31.0},
        "mean of both": {0: 35.0, 1: 36.0},
        KEPT: {0: 30.0, 1: 41.0},
    }
    assert set(expected) == set(companion.PREDICTORS)
    for predictor, of_a in expected.items():
        scores = companion.scores(found, "test", predictor, {0, 1})
        assert scores == {"a": pytest.approx(of_a), "CE": pytest.approx({0: 45.0})}
    validation = companion.scores(found, "validation", KEPT, {0, 1})
    assert validation == {"a": pytest.approx({0: 60.0, 1: 50.0}), "CE": pytest.approx({0: 70.0})}


def test_scores_are_the_models_where_a_row_has_no_such_predictor():
    """The teacher comes first in the records of a training toward the average of the weights."""
    found = [a_record("a", 0, {"teacher": 60, "model": 50}, {"teacher": 45, "model": 35})]
    for predictor, expected in (("companion", 35.0), ("mean of both", 35.0), ("teacher", 45.0), (KEPT, 45.0)):
        assert companion.scores(found, "test", predictor, {0}) == {"a": pytest.approx({0: expected})}


def test_the_model_is_kept_at_a_tie_also_where_another_predictor_comes_first():
    """As the teacher does, which a training toward the average of its weights deploys."""
    assert companion.kept(a_record("a", 0, {"teacher": 50, "model": 50}, 0)) == "model"
    assert companion.kept(a_record("a", 0, {"model": 50, "teacher": 51}, 0)) == "teacher"


def searched(**gains):
    """Two settings with CE at 50 and 52 in two seeds, and pairs with what they gain in each setting."""
    found = {}
    for place, position in (("x", 0), ("y", 1)):
        found[place] = scores_of(CE=[50.0, 52.0])
        for name, both in gains.items():
            pair = {"A": A, "B": B, "C": C, "TODAY": TODAY}[name]
            found[place][pair_row(pair)] = {0: 49.0 + both[position], 1: 53.0 + both[position]}
    return found


def test_the_regret_is_the_distance_to_the_best_pair_of_the_setting():
    """B is the best pair in x with 5, A in y with 3; the mean regrets are 1, 2.5 and 3.5."""
    given = searched(A=(3.0, 3.0), B=(5.0, -2.0), TODAY=(1.0, 1.0))
    del given["y"][pair_row(TODAY)][1]
    judged = companion.judge(given)
    assert [one.pair for one in judged] == [A, B, TODAY]
    assert judged[0].regrets == {"x": 2.0, "y": 0.0}
    assert judged[1].regrets == {"x": 0.0, "y": 5.0}
    assert judged[1].gains == {"x": 5.0, "y": -2.0}
    assert [one.mean_regret for one in judged] == [1.0, 2.5, 3.5]
    assert judged[2].gains["y"] == 0.0, "its seed 0, where it is 1 below the mean of both"


def test_a_pair_that_was_not_run_in_all_settings_is_not_judged():
    given = searched(A=(3.0, 3.0), B=(9.0, 9.0))
    del given["x"][pair_row(B)]
    (judged,) = companion.judge(given)
    assert judged.pair == A
    assert judged.regrets == {"x": 0.0, "y": 0.0}, "nor is it the best pair of the other setting"
    assert companion.judge({"x": {}}) == []


def judged_of(*found):
    """Judged pairs, the smallest regret first, with what they gain where they gain least."""
    return [Judged(pair, {"x": 5.0, "y": least}, {"x": 0.0}) for pair, least in found]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(A, 1.0), (B, 0.0), (C, 2.0), (TODAY, 0.0)], [A, B]),
        ([(A, -0.5), (B, -0.51), (C, 2.0), (TODAY, 0.0)], [A, C]),
        ([(A, -0.7), (B, -0.71), (C, 2.0), (TODAY, -0.7)], [A, C]),
        ([(TODAY, 0.0), (A, 1.0), (B, 0.0)], [A]),
        ([(A, 1.0), (TODAY, 0.0), (B, 0.0)], [A]),
        ([(A, -0.6), (B, 0.0)], [B]),
        ([(A, -0.6)], []),
        ([], []),
    ],
    ids=["two", "limit", "todays-worst", "today-first", "today-second", "without-today", "none", "nothing"],
)
def test_candidates_are_the_first_two_that_lose_no_more_than_half_a_point_or_than_today(found, expected):
    """Today's default is a pair of the search, and no candidate."""
    assert companion.candidates(judged_of(*found)) == expected


def test_a_candidate_is_shown_if_it_gains_more_than_its_error_and_loses_nowhere_more_than_half_a_point():
    """The mean of 0, 1 and 2 is 1, and its error 1 / sqrt(3)."""
    found = Confirmed([0.0, 1.0, 2.0], {"x": 0.5, "y": -0.5})
    assert found.mean == 1.0
    assert found.error == pytest.approx(3**-0.5)
    assert found.is_shown
    assert not replace(found, by_setting={"x": 1.0, "y": -0.51}).is_shown
    assert not replace(found, differences=[-1.0, 1.0]).is_shown
    assert not replace(found, differences=[0.0, 2.0]).is_shown, "the error is 1, as the mean is"
    assert replace(found, differences=[0.1, 2.0]).is_shown


def confirmation_of(**rows):
    """Accuracies in two settings, of four and of two seeds: first those of one, then those of the other."""
    pairs = {"A": A, "B": B, "TODAY": TODAY}
    return {
        "x": {pair_row(pairs[name]): dict(enumerate(found[:4])) for name, found in rows.items()},
        "y": {pair_row(pairs[name]): dict(enumerate(found[4:])) for name, found in rows.items()},
    }


def test_candidates_are_compared_with_today_over_all_pairs_and_by_setting():
    found = companion.confirm(confirmation_of(A=[50, 51, 52, 53, 60, 64], TODAY=[49, 49, 49, 49, 61, 61]), A)
    assert found.differences == [1, 2, 3, 4, -1, 3]
    assert found.by_setting == {"x": 2.5, "y": 1.0}
    assert found.mean == 2.0
    assert companion.confirm(confirmation_of(A=[50, 51, 52, 53], TODAY=[49, 49, 49, 49, 61, 61]), A) is None


FLAT = [50.0] * 6
ONE_MORE = [51.0, 51.0, 51.0, 51.0, 51.0, 51.1]
TWO_MORE = [52.0, 52.0, 52.0, 52.0, 52.0, 52.1]
ABOUT_ONE = [53.0, 49.0, 53.0, 51.0, 51.0, 51.0]  # 0.33 more than the one above, with an error of 0.6
WORSE = [49.0] * 6


@pytest.mark.parametrize(
    ("winner", "runner_up", "expected"),
    [
        (WORSE, WORSE, TODAY),
        (FLAT, FLAT, TODAY),
        (ONE_MORE, WORSE, A),
        (WORSE, ONE_MORE, B),
        (TWO_MORE, ONE_MORE, A),
        (ONE_MORE, TWO_MORE, B),
        (ONE_MORE, ABOUT_ONE, A),
        (ONE_MORE, ONE_MORE, A),
    ],
    ids=["none", "equal", "winner", "runner-up", "both", "runner-up-better", "within-error", "same"],
)
def test_the_default_is_the_winner_unless_the_runner_up_alone_is_shown_or_is_better_by_more_than_the_error(
    winner, runner_up, expected
):
    given = confirmation_of(A=winner, B=runner_up, TODAY=FLAT)
    assert companion.default(given, [A, B]) == expected


def test_the_default_stays_without_candidates_and_while_they_are_not_confirmed():
    given = confirmation_of(A=TWO_MORE, TODAY=FLAT)
    assert companion.default(given, []) == TODAY
    assert companion.default(given, [A]) == A
    del given["y"]
    assert companion.default(given | {"y": {}}, [A]) == TODAY


def test_tuned_is_what_is_best_on_validation_images_in_what_is_kept(folder):
    """A has the best companion and the worst model; the seed 2 is of no choice."""
    found = [a_record("CE", seed, 50, 50) for seed in (0, 1, 2)]
    for seed in (0, 1):
        found += [
            a_record(pair_row(A), seed, three(40, 60, 50), three(0, 0, 0)),
            a_record(pair_row(B), seed, three(59, 50, 55), three(90, 90, 90)),
            a_record("never learns, λ = 0.1", seed, three(51, 10, 50), three(0, 0, 0)),
            a_record("never learns, λ = 1", seed, three(52, 10, 50), three(0, 0, 0)),
            a_record("λ = 0, α = 0.97", seed, three(50, 58, 50), three(0, 0, 0)),
            a_record("λ = 0, α = 0.99", seed, three(50, 57, 50), three(0, 0, 0)),
            a_record("toward an average, λ = 0.3", seed, {"teacher": 53, "model": 51}, 0),
            a_record("toward an average, λ = 1", seed, {"teacher": 50, "model": 52}, 0),
        ]
    found.append(a_record(pair_row(B), 2, 99, 99))
    written(folder, "rivals-companion-text", found)
    assert companion.tuned(folder, "text") == {
        "DCL": pair_row(A),
        "never learns": "never learns, λ = 1",
        "λ = 0": "λ = 0, α = 0.97",
        "toward an average": "toward an average, λ = 0.3",
    }
    assert companion.tuned(folder, "scripts") == {}


# ---- the rows --------------------------------------------------------------------------------------------------------


def test_each_row_is_another_run_and_todays_pair_is_the_rivals_dcl():
    plain = settings.FAST["kanji-5"].plain
    made = companion.rows(plain)
    assert len(companion.PAIRS) == len(set(companion.PAIRS)) == 15
    assert len(made) == 1 + 15 + 2 + 3 + 3 + 1
    assert len({json.dumps(run.as_dict(), sort_keys=True) for run in made.values()}) == len(made)
    assert made[pair_row(TODAY)] == values.rows(plain)["DCL 0.1"]
    assert made[pair_row(A)] == replace(
        plain, method="dcl", options=DCL | {"weight": 0.3, "alpha": 0.97, "distance": "mse"}
    )
    assert made["λ = 0, α = 0.99"].options["weight"] == 0.0
    assert made["toward an average, λ = 0.3"].options == {
        "weight": 0.3,
        "ramp_up": 0,
        "decay": 0.998,
        "of_logits": True,
    }
    assert made[companion.AVERAGED] == replace(plain, averages=companion.AVERAGES)
    assert {companion.AVERAGED, *(row for found in companion.CONTROLS.values() for row in found)} < set(made)
    for name in settings.FAST:
        assert EXPERIMENTS[f"rivals-companion-{name}"].runs == companion.rows(settings.FAST[name].plain)


TINY = Configuration("digits", "small-cnn", "plain", epochs=2, shots=4, batch_size=20)


def trained(label):
    """A row's networks before and after a tiny training."""
    run = Run(companion.rows(TINY)[label], 0, torch.device("cpu"))
    before = copy.deepcopy(run.method.networks())
    for _ in range(TINY.epochs):
        run.train_epoch()
    return before, run.method.networks()


def differ(ours, theirs):
    """The names of the parameters and buffers in which two networks are not equal, bit for bit."""
    other = theirs.state_dict()
    return {name for name, value in ours.state_dict().items() if not torch.equal(value, other[name])}


def test_without_a_penalty_the_model_is_that_of_plain_training_bit_for_bit_and_the_companion_learns():
    plain = trained("CE")[1]["model"]
    for label in companion.ZERO_ROWS:
        before, after = trained(label)
        assert differ(after["model"], plain) == set()
        assert differ(after["companion"], before["companion"]) >= {name for name, _ in plain.named_parameters()}
    assert differ(trained(pair_row(TODAY))[1]["model"], plain), "which a penalty changes"


def test_a_companion_that_never_learns_stays_as_it_was_and_the_model_is_held_to_it():
    """Batch norm's statistics are no parameters: they follow the images, as the companion predicts in training mode."""
    plain = trained("CE")[1]["model"]
    for label in companion.NEVER_ROWS:
        before, after = trained(label)
        parameters = {name for name, _ in plain.named_parameters()}
        assert differ(after["companion"], before["companion"]).isdisjoint(parameters)
        assert differ(after["model"], plain) >= parameters


def steep():
    """A network whose logits move far in a step."""
    network = normed()
    with torch.no_grad():
        network[-1].weight.mul_(10.0)
    return network


def test_toward_an_average_the_distance_is_of_the_logits():
    """Squared up to the distance K / sqrt(2) of a row and linear from there on, without a ramp, the mean over rows."""
    method = started("mean-teacher", by_hand(steep), weight=3.0, ramp_up=0, decay=0.8, of_logits=True)
    net, teacher = twin(method), twin(method, "teacher")
    far = []
    for count, batch in enumerate(batches()):
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z, average = net(x), copy.deepcopy(teacher)(x).detach()
        classes = z.shape[1]
        radius = classes / 2**0.5
        squares = (z - average).square().sum(1)
        distant = squares > radius**2
        linear = 2 * radius * squares.clamp(min=radius**2).sqrt() - radius**2
        penalty = torch.where(distant, linear, squares) / classes
        far += distant.tolist()
        descend(net, cross_entropy(z, y) + 3.0 * penalty.mean(), epoch)
        share = min(0.8, count / (count + 1))
        state = net.state_dict()
        for name, value in teacher.state_dict().items():
            value.copy_(share * value + (1 - share) * state[name] if value.is_floating_point() else state[name])
    assert_close(method.networks()["model"], net)
    assert_close(method.networks()["teacher"], teacher)
    assert 0 < sum(far) < len(far), "some rows are distant, and some are not"


def test_the_teachers_distance_is_of_probabilities_unless_it_is_said():
    default, other = (started("mean-teacher", by_hand(normed), weight=3.0, ramp_up=0) for _ in range(2))
    logits = started("mean-teacher", by_hand(normed), weight=3.0, ramp_up=0, of_logits=True)
    for method in (default, other, logits):
        train(method)
    assert differ(default.networks()["model"], other.networks()["model"]) == set()
    assert differ(default.networks()["model"], logits.networks()["model"])


# ---- the order -------------------------------------------------------------------------------------------------------

GAINS = {A: 3.0, B: 2.0, TODAY: 1.0}  # of the pairs, on validation images; the others gain nothing
CONTROLLED = {"never learns, λ = 0.3": 3.0, "λ = 0, α = 0.99": 2.0, "toward an average, λ = 1": 1.0}


def as_made(item, test):
    """The record of a run of the queue: on validation images its row's gain, on test images what is given."""
    gains = {pair_row(pair): gain for pair, gain in GAINS.items()} | CONTROLLED
    return a_record(item.label, item.seed, 50.0 + gains.get(item.label, 0.0) + item.seed % 7, test)


def rivals_of_wrong_labels(folder):
    """The records that the values of the rivals are chosen by: each method's second value is the best one."""
    for place in settings.FAST:
        found = [a_record("CE", 0, 50, 50)]
        for method in (companion_queue.LOGITS, *(companion_queue.RIVALS if place in companion_queue.WRONG else ())):
            found += [a_record(label, 0, 51 + (n == 1), 50) for n, label in enumerate(values.LABELS[method])]
        written(folder, name_of(place), found)


def made_in_order(folder, test_of):
    """Make all runs of the queue, part by part, with test accuracies that a function of the item gives."""
    rivals_of_wrong_labels(folder)
    made = []
    for part in companion_queue.parts(folder):
        items = list(part())
        made.append(items)
        found = {}
        for item in items:
            found.setdefault(item.experiment, []).append(as_made(item, test_of(item)))
        for experiment, some in found.items():
            written(folder, experiment, some)
    return made


@pytest.fixture
def made(folder):
    """The parts of the queue, each made before the next is asked for."""
    return made_in_order(folder, lambda item: 50.0)


def seeds_of(name, rounds):
    return {seed for one in rounds for seed in settings.PLACES[name].of_round(one)}


def assert_all_runs(items, names, labels, rounds):
    """There is each of these rows in all seeds of the rounds, once, in the experiments of DCL's search."""
    runs = [(item.experiment, item.label, item.seed) for item in items]
    assert len(runs) == len(set(runs))
    assert set(runs) == {
        (f"rivals-companion-{name}", label, seed)
        for name in names
        for label in labels
        for seed in seeds_of(name, rounds)
    }


ALL_PAIRS = ["CE", *map(pair_row, companion.PAIRS)]
ALL_CONTROLS = ["CE", companion.AVERAGED, *companion.NEVER_ROWS, *companion.ZERO_ROWS, *companion.TOWARD_ROWS]


def test_the_search_comes_first_then_its_confirmation_then_the_controls_and_the_other_settings(made):
    search, confirmation, wrong, of_digits, _, _, controls, everywhere, _, _, pairs_of_digits = made[:11]
    _, controls_of_others, others, _ = made[11:]
    assert_all_runs(search, settings.SEARCHED, ALL_PAIRS, (0, 1))
    assert_all_runs(
        confirmation, settings.CONFIRMED, ["CE", *map(pair_row, (TODAY, A, B))], settings.CONFIRMATION_ROUNDS
    )
    decided = ["CE", pair_row(TODAY)]  # no candidate is shown by equal accuracies
    assert_all_runs(wrong, companion_queue.WRONG, decided, settings.CHOSEN_ROUNDS)
    assert_all_runs(controls, settings.SEARCHED, ALL_CONTROLS, (0, 1))
    assert_all_runs(of_digits, ["digits-30-noise-30"], ALL_CONTROLS, (0, 1))
    assert_all_runs(everywhere, settings.FAST, decided, settings.CHOSEN_ROUNDS[:2])
    assert_all_runs(pairs_of_digits, ["digits-30-noise-30"], ALL_PAIRS, (0, 1))
    assert_all_runs(others, settings.CONFIRMED, ALL_PAIRS, (0, 1))
    assert_all_runs(controls_of_others, settings.CONFIRMED, ALL_CONTROLS, (0, 1))
    assert [item.stage for item in search] == ["search, round 0"] * 128 + ["search, round 1"] * 128
    stages = [part[0].stage.split(",")[0] for part in made]
    assert stages == [
        "search",
        "confirmation",
        "the default in new seeds",
        "controls with wrong labels of digits",
        "new seeds",
        "rivals at their tuned values",
        "controls",
        "the default in new seeds",
        "rivals at their tuned values",
        "new seeds",
        "pairs with wrong labels of digits",
        "new seeds",
        "controls",
        "other settings",
        "new seeds",
    ]


def test_what_was_chosen_is_run_in_seeds_that_no_choice_has_seen(made):
    rivals, logit_penalty, first, of_wrong_labels, chosen = (made[n] for n in (5, 8, 9, 11, 14))
    pairs = ["CE", companion.AVERAGED, *map(pair_row, (A, B, TODAY))]
    labels = [*pairs, *CONTROLLED]
    controlled = [*settings.SEARCHED, "digits-30-noise-30"]  # settings whose controls are made by then
    others = [name for name in settings.FAST if name not in controlled]
    in_others = {f"rivals-companion-{name}" for name in others}
    for names, expected in ((controlled, labels), (others, pairs)):
        found = [item for item in first if (item.experiment in in_others) == (names is others)]
        assert_all_runs(found, names, expected, settings.CHOSEN_ROUNDS[:2])
    assert_all_runs(of_wrong_labels, companion_queue.WRONG, labels, settings.CHOSEN_ROUNDS)
    assert_all_runs(chosen, settings.FAST, labels, settings.CHOSEN_ROUNDS)
    assert_all_runs(made[4], ["digits-30-noise-30"], labels, settings.CHOSEN_ROUNDS[:2])
    choices = [made[n] for n in (0, 1, 3, 6, 10, 12, 13)]
    seen = {(item.experiment, item.seed) for part in choices for item in part}
    assert seen.isdisjoint({(item.experiment, item.seed) for item in chosen})
    found = {(item.experiment, item.label, item.seed) for item in rivals}
    assert len(found) == len(rivals) == 3 * (15 + 5)
    assert found == {
        (f"rivals-{name}", values.LABELS[method][1], seed)
        for name in companion_queue.WRONG
        for method in companion_queue.RIVALS
        for seed in seeds_of(name, settings.CHOSEN_ROUNDS)
    }
    assert {(item.experiment, item.label, item.seed) for item in logit_penalty} == {
        (f"rivals-{name}", values.LABELS[companion_queue.LOGITS][1], seed)
        for name in settings.FAST
        for seed in seeds_of(name, settings.CHOSEN_ROUNDS[:2])
    }


def test_all_runs_are_of_rows_that_there_are(made):
    for item in (item for part in made for item in part):
        assert item.label in EXPERIMENTS[item.experiment].runs


def test_no_part_comes_before_all_runs_of_the_part_before_it(folder):
    rivals_of_wrong_labels(folder)
    (search, confirmation, *_) = (list(part()) for part in companion_queue.parts(folder)[:2])
    for item in search[:-1]:
        written(folder, item.experiment, [as_made(item, 50.0)])
    assert list(queue.wanted(folder, companion_queue.parts)) == search
    written(folder, search[-1].experiment, [as_made(search[-1], 50.0)])
    confirmation = list(companion_queue.parts(folder)[1]())
    assert list(queue.wanted(folder, companion_queue.parts)) == [*search, *confirmation]


def test_test_accuracies_change_no_choice(folder):
    """Those of one folder are the others' reversed; the runs are the same, the confirmation's result is not."""
    found = []
    for sign in (1, -1):
        some = folder / str(sign)
        some.mkdir()

        def test_of(item, sign=sign):
            place = sorted(companion.rows(TINY)).index(item.label) if "companion" in item.experiment else 0
            return 50.0 + sign * place

        parts = made_in_order(some, test_of)
        # Which default is decided follows from test images, by the criterion.
        chosen = [[item for item in part if item.stage.split(",")[0] != "the default in new seeds"] for part in parts]
        found.append((chosen, [companion.tuned(some, name) for name in settings.FAST]))
        assert companion_queue.candidates(some) == [A, B]
    assert found[0] == found[1]


def test_the_queue_of_the_rivals_is_not_changed_by_these_records(folder, capsys):
    def listed(main=queue.main, **options):
        main(["--results", str(folder), "--list"], **options)
        return capsys.readouterr().out

    rivals_of_wrong_labels(folder)
    before = listed()
    assert "first values, round 0: 28 of 300\n" in before
    for item in companion_queue.parts(folder)[0]():
        written(folder, item.experiment, [as_made(item, 50.0)])
    assert listed() == before
    assert listed(parts=companion_queue.parts).startswith("search, round 0: 128 of 128\nsearch, round 1: 128 of 128\n")


# ---- the tables ------------------------------------------------------------------------------------------------------


def of_seeds(label, seeds, validation, tests):
    """Records of a row with the same accuracies on validation images in all seeds."""
    return [a_record(label, seed, validation, test) for seed, test in zip(seeds, tests, strict=True)]


@pytest.fixture
def results(folder):
    """The search with one seed: A gains 4 everywhere and is the winner, today's default 1 and with the digits 6."""
    for name in settings.SEARCHED:
        today = 56 if name == "digits-5" else 51
        found = [a_record("CE", 0, 50, 0), a_record(pair_row(A), 0, 54, 0), a_record(pair_row(TODAY), 0, today, 0)]
        written(folder, f"rivals-companion-{name}", found)
    return folder


def test_the_search_has_the_regret_of_each_pair_and_those_that_miss_a_setting_come_last(results):
    written(results, "rivals-companion-text", [a_record(pair_row(B), 0, 60, 0)])
    found = cells_of(companion_tables.search(results))
    assert len(found) == 2 + 15 + 1
    assert list(found)[2:5] == ["λ = 0.3, α = 0.97", "λ = 0.1, α = 0.6 (today)", "λ = 0.3, α = 0.6"]
    digits = settings.SEARCHED.index("digits-5")
    assert found["λ = 0.3, α = 0.97"] == ["0.33", "+4.0", *["+4.0"] * 6, "6"]
    today = found["λ = 0.1, α = 0.6 (today)"]
    assert today[:2] == ["2.50", "+1.0"]
    assert today[2 + digits] == "+6.0"
    text = settings.SEARCHED.index("text")
    assert found["λ = 1, α = 0.97"] == ["", "", *["+10.0" if place == text else "" for place in range(6)], "1"]
    best = found["the best pair"]
    assert best[:2] == ["0", ""]
    assert best[2 + digits] == "+6.0 (λ = 0.1, α = 0.6)"
    assert best[2 + text] == "+4.0 (λ = 0.3, α = 0.97)", "of those that were run in all settings"


def test_the_search_can_be_shown_for_what_is_kept(results):
    written(results, "rivals-companion-text", [a_record(pair_row(A), 0, three(40, 70, 60), 0)])
    text = 2 + settings.SEARCHED.index("text")
    for predictor, expected in (("model", "-10.0"), ("companion", "+20.0"), (KEPT, "+20.0")):
        assert cells_of(companion_tables.search(results, predictor))["λ = 0.3, α = 0.97"][text] == expected


def test_the_confirmation_has_differences_by_setting_and_together_and_then_the_default(results):
    """A gains 1 and 3 more in one setting and 0 and 0 in another; later -0.5, 0 and 0 in three others."""
    for name, gains in (("kanji-3", (1, 3)), ("fashion-5000", (0, 0))):
        found = of_seeds("CE", (3, 4), 0, (50, 50)) + of_seeds(pair_row(TODAY), (3, 4), 0, (52, 53))
        found += of_seeds(pair_row(A), (3, 4), 0, (52 + gains[0], 53 + gains[1]))
        written(results, f"rivals-companion-{name}", found)
    table = cells_of(companion_tables.confirmation(results))
    assert table[""] == ["today", "λ = 0.3, α = 0.97", "minus today's", "seeds"]
    assert table["kanji, 3"] == ["+2.50 ± 0.50", "+4.50 ± 1.50", "+2.00 ± 1.00", "2"]
    assert table["kanji, 32"] == ["", "", "", "0"]
    assert table["all"] == ["", "", "+1.00 ± 0.71", "4"]
    assert companion_tables.decision(results) == "not known yet"
    for name, gain in (("kanji-5-noise-40", -0.5), ("kanji-32", 0), ("digits-30-noise-30", 0)):
        seed = settings.PLACES[name].of_round(3)[0]
        found = [a_record("CE", seed, 0, 50), a_record(pair_row(TODAY), seed, 0, 50)]
        written(results, f"rivals-companion-{name}", [*found, a_record(pair_row(A), seed, 0, 50 + gain)])
    assert companion_tables.decision(results) == (
        "λ = 0.3, α = 0.97, minus today's: +0.50 ± 0.45, 7 pairs, the least -0.50 with kanji, 5, 40 % wrong: shown; "
        "the default is λ = 0.3, α = 0.97"
    )
    written(results, "rivals-companion-kanji-32", [a_record(pair_row(A), 3, 0, 49.4)])
    assert "the least -0.60 with kanji, 32: not shown; the default is λ = 0.1, α = 0.6 (today)" in (
        companion_tables.decision(results)
    )


def test_without_a_candidate_todays_default_is_shown_alone(folder):
    assert companion_tables.decision(folder) == "the default is λ = 0.1, α = 0.6 (today)"
    assert cells_of(companion_tables.confirmation(folder))["all"] == ["", "0"]


@pytest.fixture
def new_seeds(results):
    """Two new seeds of text: CE has 50 and 52 on test images; by the validation images today's default has the model,
    and A its companion in the first seed alone. B is the best pair of the setting, by its companion."""
    found = [a_record(pair_row(B), 0, three(50, 70, 60), three(0, 0, 0))]
    found += of_seeds("CE", (9, 10), 50, (50, 52))
    found += of_seeds(pair_row(TODAY), (9, 10), three(55, 53, 54), (three(51, 40, 45), three(53, 44, 49)))
    found += of_seeds(pair_row(A), (9,), three(55, 56, 54), (three(52, 54, 53),))
    found += of_seeds(pair_row(A), (10,), three(55, 54, 55), (three(54, 58, 56),))
    found += of_seeds(pair_row(B), (9, 10), three(50, 70, 60), (three(50, 57, 54), three(50, 57, 54)))
    written(results, "rivals-companion-text", found)
    return results


def test_the_three_networks_have_their_gains_in_new_seeds(new_seeds):
    found = cells_of(companion_tables.predictors(new_seeds))
    assert found[""][0] == "λ = 0.1, α = 0.6 (today): model"
    assert found[""][5] == "λ = 0.3, α = 0.97: mean of both"
    assert found["text"] == [
        *("+1.0 ± 0.0", "-9.0 ± 1.0", "-4.0 ± 1.0"),
        *("+2.0 ± 0.0", "+5.0 ± 1.0", "+3.5 ± 0.5"),
        "2",
    ]
    assert found["scripts"] == [""] * 7


def test_the_kept_network_is_the_one_that_validation_images_choose_in_each_run(new_seeds):
    """Of A the companion gains 4 in the first seed, and the model 2 in the second one. B's companion: 7 and 5."""
    found = cells_of(companion_tables.kept(new_seeds))
    assert found[""] == ["λ = 0.1, α = 0.6 (today)", "λ = 0.3, α = 0.97", "best pair", "seeds"]
    assert found["text"] == ["+1.0 ± 0.0", "+3.0 ± 1.0", "+6.0 ± 1.0 (λ = 1, α = 0.97)", "2"]
    counts = cells_of(companion_tables.which_kept(new_seeds))
    assert counts["text"] == ["2 / 0 / 0", "1 / 1 / 0", "0 / 2 / 0"]
    assert counts["scripts"] == ["", "", ""]
    assert counts["all"] == counts["text"]


def test_rows_with_fewer_seeds_are_seen(new_seeds):
    written(new_seeds, "rivals-companion-text", of_seeds("CE", (11,), 50, (50,)))
    written(new_seeds, "rivals-companion-text", of_seeds(pair_row(TODAY), (11,), three(55, 53, 54), (three(51, 0, 0),)))
    assert cells_of(companion_tables.kept(new_seeds))["text"][-1] == "2 to 3"


def test_the_mean_over_the_settings_is_that_of_their_mean_gains_with_the_worst_one(new_seeds):
    """Today's default gains 1 in text, -3 in the scripts, where B is no best pair."""
    found = of_seeds("CE", (9,), 50, (50,)) + of_seeds(pair_row(TODAY), (9,), three(50, 51, 50), (three(47, 49, 50),))
    written(new_seeds, "rivals-companion-scripts", found)
    table = [line.strip("| ").split(" | ") for line in companion_tables.overall(new_seeds).splitlines()]
    assert table[2:] == [
        ["λ = 0.1, α = 0.6 (today)", "model", "-1.0", "-3.0 (scripts)", "2"],
        ["λ = 0.1, α = 0.6 (today)", "kept", "+0.0", "-1.0 (scripts)", "2"],
        ["λ = 0.3, α = 0.97", "model", "+2.0 ± 0.0", "+2.0 (text)", "1"],
        ["λ = 0.3, α = 0.97", "kept", "+3.0 ± 1.0", "+3.0 (text)", "1"],
        ["best pair of the setting", "model", "-1.0 ± 1.0", "-1.0 (text)", "1"],
        ["best pair of the setting", "kept", "+6.0 ± 1.0", "+6.0 (text)", "1"],
        ["DCP default", "model", "", "", "0"],
    ]


def test_controls_have_their_best_value_and_the_best_one_is_taken_from_dcl_seed_by_seed(new_seeds):
    """On validation images toward an average with λ = 0.3 gains 8, the averages 9 in what they keep, the penalty 5.

    On test images the averages gain 1 and 2 in what they keep, and B's companion 7 and 5.
    """
    averages = {"model": 50, "EMA over 100 steps": 59}
    found = [
        a_record("toward an average, λ = 0.3", 0, {"teacher": 58, "model": 51}, 0),
        a_record("toward an average, λ = 1", 0, {"teacher": 57, "model": 51}, 99),
        a_record("never learns, λ = 1", 0, three(52, 1, 51), 0),
        a_record(companion.AVERAGED, 0, averages, 0),
        *of_seeds("toward an average, λ = 0.3", (9,), {"teacher": 55, "model": 51}, ({"teacher": 53, "model": 0},)),
        *of_seeds(companion.AVERAGED, (9, 10), averages, [averages | {"EMA over 100 steps": 51 + n} for n in (0, 3)]),
    ]
    written(new_seeds, "rivals-companion-text", found)
    penalties = [a_record("CE", 0, 50, 50), a_record("logit penalty 0.1", 0, 55, 53)]
    written(new_seeds, name_of("text"), penalties)
    written(new_seeds, name_of("scripts"), penalties)
    table = cells_of(companion_tables.controls(new_seeds))
    assert table[""][:5] == [*companion.CONTROLS, "averages of the weights", "logit penalty"]
    penalty = "+3.0 (seeds of the choice)"
    assert table["text"] == [
        *("", "", "+3.0", "+1.5 ± 0.5", penalty),
        *("+6.0 ± 1.0", "-1.0 ± 1.0", "averages of the weights", "+4.5 ± 1.5", "2"),
    ]
    assert "scripts" not in table, "A, which is its best pair, was not run in these seeds"
    assert table["all"][-2:] == ["+4.50 ± 1.50", "2"], "without the seeds of the choice"
    written(new_seeds, name_of("text"), of_seeds("CE", (9, 10), 50, (50, 52)))
    written(new_seeds, name_of("text"), of_seeds("logit penalty 0.1", (9, 10), 50, (52, 55)))
    assert cells_of(companion_tables.controls(new_seeds))["text"][4] == "+2.5 ± 0.5"
    of_text = cells_of(companion_tables.control_values(new_seeds))["text"]
    assert of_text == ["λ = 1", "", "λ = 0.3", "0.1", "λ = 1, α = 0.97"]


def test_other_networks_are_compared_with_plain_training_of_the_same_network(folder):
    found = [
        *of_seeds("CNN: CE", (0, 1), 50, (10, 10)),
        *of_seeds("MLP: CE", (0,), 50, (60,)),
        *of_seeds("MLP: DCL", (0,), three(50, 50, 50), (three(62, 65, 63),)),
        *of_seeds("CNN: DCL", (0, 1), three(50, 50, 50), (three(11, 12, 13), three(13, 14, 15))),
    ]
    written(folder, companion.VARIANTS, found)
    table = cells_of(companion_tables.variants(folder))
    assert table["CNN"] == ["10.0", "+2.0 ± 1.0", "+3.0 ± 1.0", "+4.0 ± 1.0", "2"]
    assert table["MLP"] == ["60.0", "+2.0", "+5.0", "+3.0", "1"]


def test_with_wrong_labels_dcl_stands_beside_tuned_rivals(results):
    """Mean Teacher's second value is chosen, and gains 5 and 7; B is the best pair, and today's default the default."""
    place = "digits-30-noise-30"
    first, second = settings.PLACES[place].of_round(9)[:2]
    found = [a_record("CE", 0, 50, 50), a_record(pair_row(B), 0, three(50, 60, 55), 0)]
    found += of_seeds("CE", (first, second), 50, (50, 52))
    found += of_seeds(pair_row(TODAY), (first, second), three(51, 50, 50), (three(52, 53, 54), three(54, 57, 58)))
    found += of_seeds(pair_row(B), (first,), three(51, 60, 55), (three(53, 64, 60),))
    written(results, f"rivals-companion-{place}", found)
    rivals_of_wrong_labels(results)
    label = values.LABELS["Mean Teacher"][1]
    written(results, name_of(place), of_seeds("CE", (first, second), 50, (50, 52)))
    written(results, name_of(place), of_seeds(label, (first, second), 50, (55, 59)))
    table = [line.strip("|").split("|") for line in companion_tables.wrong_labels(results).splitlines()]
    lines = {tuple(cell.strip() for cell in line[:2]): [cell.strip() for cell in line[2:]] for line in table}
    today = "DCL, λ = 0.1, α = 0.6 (today)"
    assert lines[today, "model"] == ["+2.0 ± 0.0", "2", "", ""]
    assert lines[today, "companion"] == ["+4.0 ± 1.0", "2", "", ""]
    assert lines[today, "mean of both"] == ["+5.0 ± 1.0", "2", "", ""]
    assert lines[today, "kept"] == ["+2.0 ± 0.0", "2", "", ""]
    assert lines["DCL, best pair", "kept"] == ["+14.0 (λ = 1, α = 0.97)", "1", "", ""]
    assert lines["DCL, best pair", "model"] == ["+3.0 (λ = 1, α = 0.97)", "1", "", ""]
    assert lines["Mean Teacher, tuned", ""] == ["+6.0 ± 1.0 (10)", "2", "", ""]
    assert lines["ELR, tuned", ""] == ["", "", "", ""]


def test_the_tables_are_printed_with_and_without_records(new_seeds, capsys):
    companion_tables.main(["--results", str(new_seeds / "nothing")])
    assert "Wrong labels of ten classes" in capsys.readouterr().out
    companion_tables.main(["--results", str(new_seeds), "--rounds", "0"])
    assert "Over all settings" in capsys.readouterr().out
