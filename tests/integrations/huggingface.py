"""Tiny randomly initialised models of transformers, data for them, and Trainer's arguments."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

CLASSES, WORDS, LENGTH = 3, 40, 10
ROWS = 4  # of a micro-batch


def text_classifier(dropout=0.0):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def sentences(number=24):
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (number, LENGTH), generator=draw)
    labels = torch.randint(CLASSES, (number,), generator=draw)
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def texts_to_continue(number=24):
    """Rows of different numbers of labelled words, so that micro-batches weigh differently."""
    rows = []
    for index, row in enumerate(sentences(number)):
        labels = row["input_ids"].clone()
        labels[: index % 6] = -100
        rows.append({"input_ids": row["input_ids"], "labels": labels})
    return rows


def arguments(folder, **options):
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    plain = {"use_cpu": True, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "num_train_epochs": 2}
    return TrainingArguments(str(folder), per_device_train_batch_size=ROWS, **(quiet | plain | options))
