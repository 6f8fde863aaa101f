"""timm: its models, and the pieces of its training script, around the wrapped optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.data
import timm.loss
import timm.models
import timm.optim
import timm.scheduler
import timm.task
import timm.utils
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer
from dcl_optim.distances import mse
from dcl_optim.reference import dcl_step
from tests.helpers import assert_same, cells
from tests.integrations.timm_models import MODELS, TINY, VIT, adamw, create, images

# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cells(MODELS, VIT, "mobilenetv3_small_050"))  # layer norm, and batch norm
def test_a_model_with_random_depth_trains_as_the_algorithm_written_out(name: str) -> None:
    by_hand, model = create(name), create(name)
    companion = copy.deepcopy(by_hand)
    base, second = adamw(by_hand), adamw(companion)
    optimizer = DCLOptimizer(adamw(model), model, weight=0.3)
    torch.manual_seed(5)
    for x, y in images(3):
        dcl_step(by_hand, companion, base, second, x, y, F.cross_entropy, mse, weight=0.3)
    torch.manual_seed(5)
    for x, y in images(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_the_companion_drops_the_paths_and_patches_that_the_model_dropped(name: str) -> None:
    model = create(name)
    x, y = next(images(1, size=8))
    state = model.state_dict()
    assert not torch.equal(model(x), model(x))  # it does draw
    model.load_state_dict(state)
    optimizer = DCLOptimizer(adamw(model), model, weight=1.0)
    F.cross_entropy(model(x), y).backward()
    assert optimizer.penalty == 0.0  # same weights, same draws: the same logits to the last bit


def test_a_distilled_model_is_held_to_its_first_head_only() -> None:
    models = [create("deit_tiny_distilled_patch16_224", **TINY) for _ in range(2)]
    for model in models:
        model.set_distilled_training(True)
    plain, model = models
    companion = create("deit_tiny_distilled_patch16_224", seed=1, **TINY)
    companion.set_distilled_training(True)
    optimizer = DCLOptimizer(adamw(model), model, companion=companion, weight=0.3)
    x, y = next(images(1))
    with pytest.warns(UserWarning, match="is on item 0 of shape .* not on item 1"):
        model(x)

    def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output[0], y) + F.cross_entropy(output[1], y.flip(0))

    output = plain(x)
    (loss_of(output) + 0.3 * mse(output[0], companion(x)[0].detach())).backward()
    loss_of(model(x)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad, atol=1e-12)
    optimizer.step()


class OnFeatures(nn.Module):
    """A head on the last feature map, which timm collects by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = timm.create_model("test_efficientnet", features_only=True, feature_cls="hook")
        self.head = nn.Linear(self.body.feature_info.channels()[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[-1].mean((2, 3)))


def test_the_hooks_by_which_timm_collects_features_are_copied() -> None:
    torch.manual_seed(0)
    model = OnFeatures()
    optimizer = DCLOptimizer(adamw(model), model, weight=1.0)
    x, y = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])
    penalties = []
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        penalties.append(optimizer.penalty)
    assert penalties[0] == 0.0 < penalties[1]


def test_gradient_checkpointing_of_the_blocks_changes_nothing() -> None:
    models = create(), create()
    optimizers = [DCLOptimizer(adamw(model), model, weight=1.0) for model in models]
    models[1].set_grad_checkpointing(True)
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(5)
        for x, y in images(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_same(*models)
    assert_same(optimizers[0].companion, optimizers[1].companion)


def test_what_timm_froze_is_shared_and_its_statistics_stay() -> None:
    model = create("resnet10t")
    timm.utils.freeze(model, ["conv1", "bn1", "layer1"])
    optimizer: Any = DCLOptimizer(timm.optim.create_optimizer_v2(model, "sgd", lr=0.1, momentum=0.9), model, weight=1.0)
    before = copy.deepcopy(model.layer1.state_dict())
    for x, y in images(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    shared = zip(model.layer1.parameters(), optimizer.companion.layer1.parameters(), strict=True)
    assert all(mine.data_ptr() == its.data_ptr() for mine, its in shared)
    assert_same(before, model.layer1.state_dict())
    assert_same(before, optimizer.companion.layer1.state_dict())
    assert model.fc.weight.data_ptr() != optimizer.companion.fc.weight.data_ptr()


# ---- optimizer factory and scheduler ---------------------------------------------------------------------------------


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return timm.scheduler.CosineLRScheduler(
        optimizer, t_initial=8, warmup_t=2, warmup_lr_init=1e-5, lr_min=1e-6, t_in_epochs=False, noise_range_t=None
    )


def test_timms_scheduler_drives_both_networks_through_layer_decay() -> None:
    by_hand, model = create(drop_path_rate=0.0, patch_drop_rate=0.0), create(drop_path_rate=0.0, patch_drop_rate=0.0)
    companion = copy.deepcopy(by_hand)
    base, second = adamw(by_hand), adamw(companion)
    optimizer = DCLOptimizer(adamw(model), model, weight=0.3)
    first, other, ours = (cosine(each) for each in (base, second, optimizer))
    for update, (x, y) in enumerate(images(6), start=1):
        dcl_step(by_hand, companion, base, second, x, y, F.cross_entropy, mse, weight=0.3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for scheduler in (first, other, ours):
            scheduler.step_update(num_updates=update)
        rates = [[group["lr"] for group in each.param_groups] for each in (base, optimizer)]
        assert rates[0] == rates[1]
        assert len(set(rates[1])) > 2
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)


# ---- what runs beside the optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ema_first", [True, False])
def test_model_ema_v3_beside_it_averages_as_without_and_copies_no_hook(ema_first: bool) -> None:
    plain, model = create("mobilenetv3_small_050"), create("mobilenetv3_small_050")
    their_ema = timm.utils.ModelEmaV3(plain, decay=0.9, use_warmup=True)
    ema = timm.utils.ModelEmaV3(model, decay=0.9, use_warmup=True) if ema_first else None
    optimizer = DCLOptimizer(adamw(model), model, weight=0.0)
    ema = ema or timm.utils.ModelEmaV3(model, decay=0.9, use_warmup=True)
    for trained, stepping, average in ((plain, adamw(plain), their_ema), (model, optimizer, ema)):
        torch.manual_seed(5)
        for step, (x, y) in enumerate(images(3)):
            stepping.zero_grad()
            F.cross_entropy(trained(x), y).backward()
            stepping.step()
            average.update(trained, step=step)
    assert_same(their_ema.module, ema.module)
    before = optimizer.logs()
    ema.module.requires_grad_(True).train()
    F.cross_entropy(ema.module(x), y).backward()  # no business of the optimizer's
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.logs() == before | {"step": 4.0}


@pytest.mark.parametrize(("mode", "clip"), [("norm", 0.5), ("value", 0.01), ("agc", 0.05)])
def test_timms_scaler_and_clipping_act_on_loss_and_penalty_together(mode: str, clip: float) -> None:
    by_hand, model = create(), create()
    companion, scaler = copy.deepcopy(by_hand), timm.utils.NativeScaler("cpu")
    base, second, optimizer = (
        adamw(by_hand),
        adamw(companion),
        DCLOptimizer(adamw(model), model, weight=2.0),
    )
    for x, y in images(3):
        z, c = (seeded(network, x) for network in (by_hand, companion))
        base.zero_grad()
        (F.cross_entropy(z, y) + 2.0 * mse(z, c.detach())).backward()
        timm.utils.dispatch_clip_grad(by_hand.parameters(), clip, mode=mode)
        base.step()
        second.zero_grad()
        mse(c, 0.6 * c.detach() + 0.4 * z.detach()).backward()
        second.step()
        optimizer.zero_grad()
        loss = F.cross_entropy(seeded(model, x), y)
        scaler(loss, optimizer, clip_grad=clip, clip_mode=mode, parameters=model.parameters())
        assert optimizer.logs()["loss_scale"] == pytest.approx(65536.0)
    assert_same(by_hand, model, atol=1e-8)
    assert_same(companion, optimizer.companion, atol=1e-8)


def seeded(network: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return network(x)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning:torch")
def test_timms_scaler_with_create_graph_is_refused_at_the_step() -> None:
    model = create().float()
    optimizer, scaler = DCLOptimizer(adamw(model), model, weight=1.0), timm.utils.NativeScaler("cpu")
    x, y = next(images(1))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        scaler(F.cross_entropy(model(x.float()), y), optimizer, create_graph=True)


def run(model: nn.Module, optimizer: Any, scaler: Any, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        scaler(F.cross_entropy(model(x.float()), y), optimizer)


def test_timms_checkpoints_resume_bit_for_bit(tmp_path: Path) -> None:
    model, data = create("mobilenetv3_small_050").float(), list(images(5))
    optimizer, scaler = DCLOptimizer(adamw(model), model, weight=1.0), timm.utils.NativeScaler("cpu")
    ema = timm.utils.ModelEmaV3(model, decay=0.9)
    saver = timm.utils.CheckpointSaver(model, optimizer, model_ema=ema, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    torch.manual_seed(5)
    run(model, optimizer, scaler, data[:3])
    saver.save_checkpoint(0, metric=1.0)
    torch.manual_seed(6)
    run(model, optimizer, scaler, data[3:])

    resumed = create("mobilenetv3_small_050", seed=9).float()
    second, its_scaler = DCLOptimizer(adamw(resumed), resumed, weight=1.0), timm.utils.NativeScaler("cpu")
    path = str(tmp_path / "last.pth.tar")
    assert timm.models.resume_checkpoint(resumed, path, second, its_scaler, log_info=False) == 1
    torch.manual_seed(6)
    run(resumed, second, its_scaler, data[3:])
    assert_same(model, resumed)
    assert_same(optimizer.companion, second.companion)


def test_timms_task_holds_model_and_loss_and_trains_as_the_plain_loop() -> None:
    plain, model = create(), create()
    theirs = DCLOptimizer(adamw(plain), plain, weight=1.0)
    task = timm.task.ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    ours = DCLOptimizer(adamw(model), task.trainable_module, weight=1.0)
    torch.manual_seed(5)
    for x, y in images(3):
        theirs.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        theirs.step()
    torch.manual_seed(5)
    for x, y in images(3):
        ours.zero_grad()
        task(x, y)["loss"].backward()
        ours.step()
    assert_same(plain, model, atol=1e-12)
    assert_same(theirs.companion, ours.companion, atol=1e-12)
