#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0: gradient accumulation multiplies the gradient of a text classifier.
# One step of 16 rows and one of 4 x 4 rows should have the same gradient, the mean over the 16 rows. That of
# BertForSequenceClassification is 4 times as large with accumulation: Trainer leaves the division to every model whose
# forward takes keyword arguments, and the classification loss does not divide. That of ViTForImageClassification is right.
# With model_accepts_loss_kwargs = False on the Trainer both are right.
#
# Output seen:
# text classifier: gradient of 4 micro-batches of 4 divided by that of 16 rows 4.000
# image classifier: gradient of 4 micro-batches of 4 divided by that of 16 rows 1.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy transformers==5.24.0 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

torch.manual_seed(0)
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


def norm_of_gradient(model, rows, size, steps):
    watch = Watch()
    options = {"max_steps": 1, "max_grad_norm": 0.0, "learning_rate": 0.0, "use_cpu": True, "report_to": []}
    options |= {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=size, gradient_accumulation_steps=steps, **options
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch]).train()
    return watch.norm


text = [{"input_ids": torch.randint(20, (6,)), "labels": number % 3} for number in range(16)]
images = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 3} for number in range(16)]
models = {
    "text": (BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **SMALL)), text),
    "image": (ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SMALL)), images),
}
ratios = {}
for kind, (model, rows) in models.items():
    ratios[kind] = norm_of_gradient(model, rows, 4, 4) / norm_of_gradient(model, rows, 16, 1)
    print(f"{kind} classifier: gradient of 4 micro-batches of 4 divided by that of 16 rows {ratios[kind]:.3f}")
raise SystemExit(not (abs(ratios["text"] - 4) < 0.01 and abs(ratios["image"] - 1) < 0.01))
PYTHON
