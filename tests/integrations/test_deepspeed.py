"""DeepSpeed: each stage of ZeRO trains as the same engine with the penalty written into the loss."""

from importlib.util import find_spec
from itertools import product

import pytest
import torch

from tests.helpers import assert_same, batches, fit, matrices_and_others, mlp, on_ranks, wrap
from tests.reference import EACH_WAY

# Not imported here: its globals, and those of Accelerate with it, would be those of all tests.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
STAGES, DTYPES = range(4), ("fp32", "bf16")
TRAINER = [*product((0, 1, 3), ["line", "term"])]
STEPS = 6
EXACT = {}
CLOSE = {"rtol": 0.0, "atol": 1e-6}
TOLERANCE = {"fp32": CLOSE, "bf16": EXACT}


def worker(rank, folder):
    from tests.integrations import deepspeed_runs

    deepspeed_runs.worker(rank, folder)


@pytest.fixture(scope="module", params=[1, 2])
def found(request, tmp_path_factory):
    """What all runs have come to, on a number of ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    on_ranks(request.param, worker, folder)
    return torch.load(folder / "found.pt", weights_only=True) | {"ranks": request.param}


def assert_right(run, hand, steps=STEPS, **tolerance):
    assert run["logs"]["penalty"] > 0
    assert (run["logs"]["step"], run["logs"]["skipped"]) == (steps, 0)
    assert_same(run["weights"], hand["weights"], **tolerance)
    assert_same(run["prototypes"], hand["prototypes"], **CLOSE)


@pytest.mark.parametrize(("stage", "dtype", "groups"), [*product(STAGES, DTYPES, [1, 2])])
def test_the_term_is_the_penalty_in_the_loss(stage, dtype, groups, found):
    """ZeRO steps each parameter group alone, and its bfloat16 in stage 0 steps once before it trains."""
    name = f"{stage} {dtype} {groups}"
    assert_right(found[f"{name} term"], found[f"{name} hand"], **TOLERANCE[dtype])
    base = found[f"{stage} {dtype} weight 0 base"]["weights"]
    assert (found[f"{name} hand"]["weights"] - base).abs().max() > 1e-2


@pytest.mark.parametrize("stage", STAGES)
def test_the_line_is_the_penalty_in_the_loss(stage, found):
    """In stage 3 the base has no parameters between its steps."""
    assert_right(found[f"{stage} line"], found[f"{stage} fp32 2 hand"], **CLOSE)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_and_clipping(stage, found):
    assert_right(found[f"{stage} parts term"], found[f"{stage} parts hand"], **CLOSE)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_stay_on_the_cpu_and_parts_of_groups(stage, found):
    """``offload_optimizer``, and in stage 3 a ``sub_group_size`` below that of a group."""
    assert_right(found[f"{stage} further"], found[f"{stage} fp32 2 hand"], **CLOSE)


@pytest.mark.parametrize(("stage", "dtype"), [*product(STAGES, DTYPES)])
def test_a_resumed_run_has_the_same_bits(stage, dtype, found):
    assert_same(found[f"{stage} {dtype} resumed"], found[f"{stage} {dtype} 2 term"])


@pytest.mark.parametrize(("stage", "dtype"), [*product(STAGES, DTYPES)])
def test_weight_0_is_the_base_bit_for_bit(stage, dtype, found):
    runs = (found[f"{stage} {dtype} weight 0 {way}"] for way in ("term", "base"))
    assert_same(*(run["weights"] for run in runs))


@pytest.mark.parametrize(("stage", "way"), [*product([1, 2, 3], ["line", "term"])])
def test_the_batch_of_a_step_that_overflows_is_forgotten(stage, way, found):
    run, hand = found[f"{stage} overflow {way}"], found[f"{stage} overflow hand"]
    tolerance = EXACT if way == "term" else {"rtol": 0.0, "atol": 2e-2}  # the line reads rounded gradients
    assert_right(run, hand | {"prototypes": run["prototypes"]}, steps=STEPS - 1, **tolerance)
    assert_same(run["prototypes"], hand["prototypes"], **{"rtol": 0.0, "atol": tolerance.get("atol", 1e-6)})


def test_several_ranks_without_a_group_are_said_once(found):
    several = found["ranks"] > 1
    assert len(found["warnings auto"]) == several
    assert all("has 2 ranks" in text and "group.WORLD" in text for text in found["warnings auto"])
    assert found["warnings none"] == found["warnings given"] == []


@EACH_WAY
def test_a_companion_needs_stage_0_in_float32(way, found):
    """Where DeepSpeed replaces the parameters, the error says so, and what to do."""
    model = mlp(dtype=torch.float32)
    weights, biases = matrices_and_others(model)
    base = torch.optim.SGD([{"params": weights, "weight_decay": 0.01}, {"params": biases}], lr=0.2, momentum=0.9)
    optimizer = wrap(model, base, weight=0.5, alpha=0.9)
    fit(optimizer, batches(STEPS, dtype=torch.float32))
    run = found[f"0 fp32 dcl {way}"]
    assert_same(run["weights"], torch.cat([p.detach().flatten() for p in model.parameters()]), **CLOSE)
    assert_same(run["companion"], dict(optimizer.companion.state_dict()), **CLOSE)
    for stage, dtype in product(STAGES, DTYPES):
        if (stage, dtype) != (0, "fp32"):
            error = found[f"{stage} {dtype} dcl {way}"]
            assert "an engine has put its own in their place" in error
            assert "with an engine use DCPOptimizer and add the penalty" in error
            assert "strict" not in error


def trainer_worker(rank, folder):
    from tests.integrations import deepspeed_trainer

    deepspeed_trainer.worker(folder, TRAINER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    on_ranks(1, trainer_worker, folder)
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize(("stage", "way"), TRAINER)
def test_trainer(stage, way, trained):
    """By the recipe of docs/frameworks.md; Trainer has two parameter groups, and resumes from its own checkpoint.

    Its loop is that of Accelerate's plugin.
    """
    hand, run = trained[f"{stage} hand"], trained[f"{stage} {way}"]
    assert_right(run, hand, steps=hand["steps"], **CLOSE)
    assert_same(trained[f"{stage} {way} resumed"], run)


def script_worker(rank, folder):
    from tests.integrations import deepspeed_runs

    deepspeed_runs.run_scripts(rank, folder)


def test_the_script_on_the_page_and_the_example(tmp_path):
    on_ranks(2, script_worker, tmp_path)
    logs, accuracy = (torch.load(tmp_path / "found.pt", weights_only=True)[name] for name in ("logs", "accuracy"))
    assert (logs["step"], logs["skipped"]) == (8, 0)
    assert logs["penalty"] > 0
    assert accuracy > 85
    assert (tmp_path / "checkpoint" / "last").is_dir()
