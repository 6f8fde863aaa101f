"""transformers' Trainer with DeepSpeed on a CPU, in one process, as on a CPU its world is one."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from dcl_optim import DCPOptimizer
from tests.helpers import batches, mlp
from tests.integrations.deepspeed_runs import WEIGHT, Prototypes, Run

PARTS, EPOCHS = 2, 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(dtype=torch.float32)

    def forward(self, x, labels):
        z = self.net(x)
        return SequenceClassifierOutput(loss=F.cross_entropy(z, labels), logits=z)


class Penalized(Trainer):
    """The recipe of docs/frameworks.md, or the penalty by hand."""

    way = "term"

    def create_optimizer(self, model=None):
        self.hand = Prototypes()
        if self.optimizer is None:
            self.wrapper = self.optimizer = super().create_optimizer(model)
            if self.way != "hand":
                self.wrapper = self.optimizer = DCPOptimizer(self.optimizer, self.model, weight=WEIGHT)
        self.model_accepts_loss_kwargs = False
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        loss = output.loss
        if self.way != "line":
            penalty = self.hand.penalty if self.way == "hand" else self.wrapper.penalty
            loss = loss + penalty(output.logits, inputs["labels"])
        return (loss, output) if return_outputs else loss


class Learns(TrainerCallback):
    """The prototypes by hand learn after each step."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_optimizer_step(self, *arguments, **options):
        if self.trainer.way == "hand":
            self.trainer.hand.step()


def trained(stage, way, folder, resumes=False):
    config = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }
    options = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "learning_rate": 1e-2}
    arguments = TrainingArguments(
        str(folder / f"{stage} {way}"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=PARTS,
        num_train_epochs=EPOCHS,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        deepspeed=config,
        **options,
    )
    data = [{"x": x, "labels": y} for rows in batches(6, dtype=torch.float32) for x, y in zip(*rows, strict=True)]
    model = Classifier()
    trainer = Penalized(model, arguments, train_dataset=data)
    trainer.way = way
    trainer.add_callback(Learns(trainer))
    steps = EPOCHS * len(data) // (8 * PARTS)
    trainer.train(
        resume_from_checkpoint=str(folder / f"{stage} {way}" / f"checkpoint-{steps // 2}") if resumes else None
    )
    held = trainer.optimizer
    while way != "hand" and not hasattr(held, "logs"):  # as docs/logging.md has it
        held = held.optimizer
    assert way == "hand" or held is trainer.wrapper
    run = Run.__new__(Run)
    run.stage, run.way, run.model, run.hand, run.optimizer = stage, way, model, trainer.hand, trainer.wrapper
    return run.end() | {"steps": steps}


def worker(folder, cells):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    found = {}
    for stage, way in cells:
        found[f"{stage} {way}"] = trained(stage, way, folder)
        found[f"{stage} {way} resumed"] = trained(stage, way, folder, resumes=True)
    for stage in {stage for stage, _ in cells}:
        found[f"{stage} hand"] = trained(stage, "hand", folder)
    torch.save(found, folder / "found.pt")
