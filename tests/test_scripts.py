"""Training loops in the shape that public scripts have, with the optimizer's line alone changed.

DCP built from two arguments finds the labels that another one is given with the classes and their dimension, and trains
as that one does; with weight=0 either variant trains bit for bit as the plain script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, cells

Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]
Labels = Callable[[Any], Tensor]
PAD, VOID, CLASSES, WORDS = 0, 255, 5, 11


@dataclass
class Data:
    """A loader that knows the batch it gave last, so that the labels can be given as well as read."""

    batches: list[Any]
    last: Any = field(default=None)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.last = batch
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def images(number: int = 8, size: int = 8) -> Data:
    draw = generator()
    pairs = [
        (torch.randn(size, 1, 8, 8, generator=draw), torch.randint(CLASSES, (size,), generator=draw))
        for _ in range(number)
    ]
    return Data(pairs)


def scenes(number: int = 6) -> Data:
    """Dense labels with a border that is void."""
    draw = generator()
    pairs = []
    for _ in range(number):
        labels = torch.randint(CLASSES, (2, 8, 8), generator=draw)
        labels[:, :2] = VOID
        pairs.append((torch.randn(2, 1, 8, 8, generator=draw), labels))
    return Data(pairs)


def texts(number: int = 8, time: int = 6, size: int = 4) -> Data:
    draw = generator()
    text = torch.randint(1, WORDS, (number, size, time + 1), generator=draw)
    return Data([(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in text])


def padded_texts() -> Data:
    data = texts()
    for _, y in data.batches:
        y[::2, 4:] = PAD
    return data


def time_first_texts() -> Data:
    return Data([(x.T.contiguous(), y.T.contiguous()) for x, y in padded_texts().batches])


def sentences() -> Data:
    draw = generator()
    return Data(
        [
            {
                "input_ids": torch.randint(1, WORDS, (8, 6), generator=draw),
                "labels": torch.randint(CLASSES, (8,), generator=draw),
            }
            for _ in range(8)
        ]
    )


# ---- models ----------------------------------------------------------------------------------------------------------


def convolutional(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6) if norm else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class MnistNet(nn.Module):
    """pytorch/examples, mnist."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(24, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Segmenter(nn.Module):
    """torchvision's segmentation models: a dict of resized main and auxiliary logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(1, 6, 3, padding=1, stride=2)
        self.head, self.aux = nn.Conv2d(6, CLASSES, 1), nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = F.relu(self.body(x))
        return {
            name: F.interpolate(head(features), x.shape[-2:], mode="bilinear", align_corners=False)
            for name, head in (("out", self.head), ("aux", self.aux))
        }


class GCN(nn.Module):
    """tkipf/pygcn: log-probabilities of all nodes, of which the training ones are in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.dropout(F.relu(adjacency @ self.first(x)), 0.5, training=self.training)
        return F.log_softmax(adjacency @ self.second(x), dim=1)


class CharacterModel(nn.Module):
    """Logits of shape (batch, time, words)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.rnn = nn.Embedding(WORDS, 8), nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])


class WordLanguageModel(nn.Module):
    """pytorch/examples, word_language_model: flattened log-probabilities, and the state that goes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(WORDS, 8)
        self.rnn, self.decoder = nn.LSTM(8, 8), nn.Linear(8, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, WORDS), dim=1), hidden


class TextClassifier(nn.Module):
    """The shape of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.drop, self.classifier = nn.Embedding(WORDS, 8), nn.Dropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.classifier(self.drop(torch.tanh(self.embedding(input_ids)).mean(1)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


# ---- scripts: each trains a model on its data, `wrap` being the line that changes -----------------------------------


def evaluated(model: nn.Module, data: Data) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in data.batches[:2]:
            model(x)
    model.train()


def mnist(data: Data, wrap: Wrap) -> nn.Module:
    """pytorch/examples, mnist/main.py."""
    model = MnistNet()
    optimizer = wrap(torch.optim.Adadelta(model.parameters(), lr=1.0), model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for x, y in data:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
        evaluated(model, data)
        scheduler.step()
    return model


def cifar(data: Data, wrap: Wrap) -> nn.Module:
    """kuangliu/pytorch-cifar."""
    model, criterion = convolutional(), nn.CrossEntropyLoss()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4), model)
    scheduler = CosineAnnealingLR(optimizer, T_max=2)
    for _ in range(2):
        for x, y in data:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        evaluated(model, data)
        scheduler.step()
    return model


def torchvision_references(data: Data, wrap: Wrap, half: bool = False) -> nn.Module:
    """pytorch/vision, references/classification/train.py: train_one_epoch with its average of the weights."""
    model, criterion = convolutional(), nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if half else None
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True), model)
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=2 * len(data))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        for image, target in data:
            with torch.amp.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
                output = model(image)
                loss = criterion(output, target)
            optimizer.zero_grad()
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            ema.update_parameters(model)
            scheduler.step()
    return model


def torchvision_references_with_amp(data: Data, wrap: Wrap) -> nn.Module:
    return torchvision_references(data, wrap, half=True)


def torchvision_segmentation(data: Data, wrap: Wrap) -> nn.Module:
    """pytorch/vision, references/segmentation/train.py: a function over the dict, the auxiliary loss at one half."""

    def criterion(inputs: dict[str, Tensor], target: Tensor) -> Tensor:
        losses = {name: F.cross_entropy(x, target, ignore_index=VOID) for name, x in inputs.items()}
        return losses["out"] + 0.5 * losses["aux"]

    model = Segmenter()
    groups = [
        {"params": [*model.body.parameters(), *model.head.parameters()]},
        {"params": model.aux.parameters(), "lr": 0.5},
    ]
    optimizer = wrap(torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-4), model)
    scheduler = LambdaLR(optimizer, lambda step: (1 - step / 20) ** 0.9)
    for image, target in data:
        optimizer.zero_grad()
        criterion(model(image), target).backward()
        optimizer.step()
        scheduler.step()
    return model


def run_glue(data: Data, wrap: Wrap) -> nn.Module:
    """huggingface/transformers, run_glue_no_trainer.py: groups without decay, accumulation, a warm-up."""
    model, parts = TextClassifier(), 2
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = wrap(torch.optim.AdamW(groups, lr=0.02), model)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for _ in range(2):
        for step, batch in enumerate(data):
            loss = model(**batch)["loss"] / parts
            loss.backward()
            if step % parts == parts - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model


def gcn(data: Data, wrap: Wrap) -> nn.Module:
    """tkipf/pygcn and PyTorch Geometric's examples: one graph, the loss on a mask."""
    model = GCN()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=5e-4), model)
    for x, adjacency, y, mask in data:
        model.train()
        optimizer.zero_grad()
        out = model(x, adjacency)
        F.nll_loss(out[mask], y[mask]).backward()
        optimizer.step()
    return model


def character_model(data: Data, wrap: Wrap) -> nn.Module:
    """Karpathy's loops: flattened (batch, time, words), clipping, a rate that is written into the groups."""
    model = CharacterModel()
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.05), model)
    for step, (x, y) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def translation(data: Data, wrap: Wrap) -> nn.Module:
    """PyTorch's tutorial on translation: padded words are ignored, logits reshaped."""
    model, criterion = CharacterModel(), nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9), model)
    for x, y in data:
        logits = model(x)
        optimizer.zero_grad()
        criterion(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
        optimizer.step()
    return model


def word_language_model(data: Data, wrap: Wrap) -> nn.Module:
    """pytorch/examples, word_language_model/main.py, with an optimizer: the state is detached from batch to batch."""
    model, hidden = WordLanguageModel(), None
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for x, y in data:
        optimizer.zero_grad()
        output, hidden = model(x, hidden)
        hidden = tuple(h.detach() for h in hidden)
        F.nll_loss(output, y.view(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return model


def lbfgs(data: Data, wrap: Wrap) -> nn.Module:
    """A closure, evaluated several times a step."""
    model, criterion = convolutional(norm=False), nn.CrossEntropyLoss()
    optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe"), model)
    for x, y in data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def several_backwards(data: Data, wrap: Wrap) -> nn.Module:
    """One forward, a loss whose parts are sent back one by one."""
    model = convolutional()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in data:
        optimizer.zero_grad()
        z = model(x)
        (0.75 * F.cross_entropy(z, y)).backward(retain_graph=True)
        (0.25 * F.cross_entropy(z, y)).backward()
        optimizer.step()
    return model


def penalized_weights(data: Data, wrap: Wrap) -> nn.Module:
    """Terms of the loss that do not come from the logits; losses by row, class weights."""
    model, counts = convolutional(), torch.linspace(0.5, 2.0, CLASSES)
    optimizer = wrap(torch.optim.RMSprop(model.parameters(), lr=0.01), model)
    for x, y in data:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, weight=counts, reduction="none")
        (losses.mean() + 1e-2 * sum(p.abs().sum() for p in model.parameters())).backward()
        optimizer.step()
    return model


def functional(data: Data, wrap: Wrap) -> nn.Module:
    model = convolutional(norm=False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
        optimizer.step()
    return model


def in_bfloat16(data: Data, wrap: Wrap) -> nn.Module:
    """Autocast and accumulation; the loss of the epoch is kept."""
    model, parts, total = convolutional(), 4, 0.0
    optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.02), model)
    for step, (x, y) in enumerate(data):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        (loss / parts).backward()
        total += loss.item()
        if step % parts == parts - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def compiled(data: Data, wrap: Wrap) -> nn.Module:
    torch._dynamo.reset()
    model = MnistNet()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    call = torch.compile(model, backend="aot_eager")
    for x, y in data:
        optimizer.zero_grad()
        F.nll_loss(call(x), y).backward()
        optimizer.step()
    torch._dynamo.reset()
    return model


def checkpointed(data: Data, wrap: Wrap) -> nn.Module:
    """Recomputed whole in the backward, by the reentrant form that hides the graph."""
    model = convolutional(norm=False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=True), y).backward()
        optimizer.step()
    return model


def resumed_from_weights(data: Data, wrap: Wrap) -> nn.Module:
    """A --resume that loads weights only, after the optimizer was built."""
    model = convolutional()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.manual_seed(5)
    model.load_state_dict({name: torch.rand_like(w.float()).to(w.dtype) for name, w in model.state_dict().items()})
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def graph() -> Data:
    draw = generator()
    adjacency = (torch.rand(20, 20, generator=draw) < 0.2).float() + torch.eye(20)
    x, y = torch.randn(20, 6, generator=draw), torch.arange(20) % CLASSES
    mask = torch.rand(20, generator=draw) < 0.6
    mask[:CLASSES] = True
    return Data([(x, adjacency / adjacency.sum(1, keepdim=True), y, mask)] * 12)


def second(batch: Any) -> Tensor:
    return batch[1]


def flat(batch: Any) -> Tensor:
    return batch[1].flatten()


def of_mask(batch: Any) -> Tensor:
    return batch[2].masked_fill(~batch[3], -100)


@dataclass
class Script:
    train: Callable[[Data, Wrap], nn.Module]
    data: Callable[[], Data] = images
    labels: Labels = second
    classes: int = CLASSES
    class_dim: int = 1
    ignored: int = -100


SCRIPTS = {
    "mnist": Script(mnist),
    "cifar": Script(cifar),
    "torchvision's references": Script(torchvision_references, lambda: images(size=32)),
    "torchvision's references, float16": Script(torchvision_references_with_amp, lambda: images(size=32)),
    "torchvision's segmentation": Script(torchvision_segmentation, scenes, ignored=VOID),
    "run_glue": Script(run_glue, sentences, lambda batch: batch["labels"]),
    "graph": Script(gcn, graph, of_mask),
    "characters": Script(character_model, texts, classes=WORDS, class_dim=-1),
    "translation": Script(translation, padded_texts, classes=WORDS, class_dim=-1, ignored=PAD),
    "translation, time first": Script(translation, time_first_texts, classes=WORDS, class_dim=-1, ignored=PAD),
    "word language model": Script(word_language_model, texts, flat, WORDS),
    "LBFGS": Script(lbfgs),
    "several backwards": Script(several_backwards),
    "penalized weights": Script(penalized_weights),
    "functional_call": Script(functional),
    "bfloat16": Script(in_bfloat16),
    "compiled": Script(compiled),
    "checkpointed": Script(checkpointed),
    "weights resumed": Script(resumed_from_weights),
}
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch's own tracer looks there
)


def run(script: Script, make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    """The trained model, and the optimizer that ``make(base, model, data)`` gave."""
    data, made = script.data(), []
    torch.manual_seed(2)

    def wrap(base: torch.optim.Optimizer, model: nn.Module) -> Any:
        made.append(make(base, model, data))
        return made[0]

    return script.train(data, wrap), made[0]


CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# Three of which others have all: "weights resumed", "translation" and the references in float16.
TWINS = ["cifar", "translation, time first", "torchvision's references"]


def note_labels(optimizer: DCPOptimizer, ignored: int) -> list[Tensor]:
    """A list of the label of each row, -100 for none, that grows with each forward pass that is observed."""
    noted: list[Tensor] = []
    observe = optimizer.forecaster.observe

    def note(forward: Any, loss: Any, *rest: Any) -> None:
        labels = loss.labels.flatten()
        classes = forward.logits.shape[loss.class_dim]
        noted.append(labels.masked_fill((labels == ignored) | (labels == classes), -100))
        observe(forward, loss, *rest)

    optimizer.forecaster.observe = note
    return noted


@pytest.mark.parametrize("name", cells(SCRIPTS, *(name for name in SCRIPTS if name not in TWINS)))
def test_dcp_reads_the_labels_that_it_could_be_given(name: str) -> None:
    """The labels exactly; the weights to rounding, since a given label leaves a few rows to read the scale from."""
    script = SCRIPTS[name]
    labels = []

    def reading(base: torch.optim.Optimizer, model: nn.Module, data: Data) -> DCPOptimizer:
        optimizer = DCPOptimizer(base, model, weight=1.0)
        labels.append(note_labels(optimizer, script.ignored))
        return optimizer

    def given(base: torch.optim.Optimizer, model: nn.Module, data: Data) -> DCPOptimizer:
        optimizer = DCPOptimizer(
            base,
            model,
            script.classes,
            weight=1.0,
            targets=lambda *_: script.labels(data.last),
            class_dim=script.class_dim,
            ignore_index=script.ignored,
        )
        labels.append(note_labels(optimizer, script.ignored))
        return optimizer

    model, optimizer = run(script, reading)
    expected, other = run(script, given)
    assert_same(*labels)
    assert_same(optimizer.forecaster.seen, other.forecaster.seen)
    found = torch.cat([script.labels(batch).flatten() for batch in script.data().batches])
    assert optimizer.forecaster.seen.nonzero().flatten().tolist() == found[found != script.ignored].unique().tolist()
    assert_same(model, expected, **CLOSE)
    assert_same(optimizer.prototypes, other.prototypes, **CLOSE)
    assert optimizer.logs() == pytest.approx(other.logs(), rel=1e-4)
    plain, _ = run(script, lambda base, model, data: base)
    with pytest.raises(AssertionError):
        assert_same(model, plain, **CLOSE)


VARIANTS = [DCLOptimizer, DCPOptimizer]


@pytest.mark.parametrize(
    ("name", "variant"),
    cells(
        itertools.product(SCRIPTS, VARIANTS),
        *((name, DCLOptimizer) for name in SCRIPTS if name not in TWINS),
        *((name, DCPOptimizer) for name in ("run_glue", "graph", "LBFGS", "weights resumed")),
    ),
)
def test_with_weight_zero_each_script_is_the_plain_one_bit_for_bit(name: str, variant: Any) -> None:
    # LBFGS is refused as the companion's.
    needed = {"companion_optimizer": torch.optim.SGD} if (name, variant) == ("LBFGS", DCLOptimizer) else {}
    model, _ = run(SCRIPTS[name], lambda base, model, data: variant(base, model, weight=0.0, **needed))
    plain, _ = run(SCRIPTS[name], lambda base, model, data: base)
    assert_same(model, plain)


# ---- a rate that is stable for the loss alone ------------------------------------------------------------------------


def linear_probe(wrap: Callable[[Any, nn.Module], Any]) -> tuple[float, float]:
    """HobbitLong/SupContrast, main_linear.py: --learning_rate 5. The largest loss, and the accuracy in the end."""
    draw = generator()
    centers = torch.randn(10, 64, generator=draw)
    labels = torch.randint(10, (1024,), generator=draw)
    inputs = centers[labels] + 1.5 * torch.randn(1024, 64, generator=draw)
    torch.manual_seed(0)
    model, classifier = nn.Sequential(nn.Linear(64, 512), nn.ReLU()), nn.Linear(512, 10)
    optimizer = wrap(torch.optim.SGD(classifier.parameters(), lr=5.0, momentum=0.9, weight_decay=0), classifier)
    largest = 0.0
    for epoch in range(10):
        for group in optimizer.param_groups:
            group["lr"] = 5.0 * 0.2 ** ((epoch > 5) + (epoch > 7))
        model.eval()
        classifier.train()
        for rows in torch.randperm(1024, generator=draw).split(256):
            with torch.no_grad():
                features = 4.0 * model(inputs[rows])
            output = classifier(features.detach())
            loss = F.cross_entropy(output, labels[rows])
            largest = max(largest, loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return largest, float((classifier(model(inputs)).argmax(1) == labels).float().mean())


@pytest.mark.filterwarnings("ignore:non-finite logits", "ignore:the companion's logits were not finite")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_linear_probe_with_the_rate_five_learns_as_the_plain_script_does(variant: Any) -> None:
    """Its loss reached 1e13, and its accuracy was that of guessing."""
    plain, found = linear_probe(lambda base, model: base), linear_probe(variant)
    assert plain[1] > 0.9
    assert found[1] > plain[1] - 0.02
    assert found[0] < 10 * plain[0]
    by_the_papers_distance = linear_probe(lambda base, model: variant(base, model, weight=1.0, distance="squared"))
    assert by_the_papers_distance[1] < 0.5


# ---- scripts whose loss is no cross-entropy of one class a row: DCP says so in its first backward --------------------


class VAE(nn.Module):
    """pytorch/examples, vae: the reconstruction, and what the divergence is taken of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.mean, self.log_variance = nn.Linear(64, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.decoder = nn.Linear(4, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.encoder(x.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(self.decoder(code)), mean, log_variance


def of_vae(output: Any, x: Tensor, y: Tensor) -> Tensor:
    found, mean, log_variance = output
    reconstruction = F.binary_cross_entropy(found, torch.sigmoid(x.flatten(1)), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())


def of_regression(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z[:, 0], y.float())


def of_attributes(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).float())


def of_mixup(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))


def of_distillation(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    teacher = torch.randn(z.shape, generator=generator())
    return F.cross_entropy(z, y) + 4.0 * F.kl_div(F.log_softmax(z / 2, 1), F.softmax(teacher / 2, 1))


def of_policy(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """REINFORCE with a baseline: the returns have either sign."""
    returns = torch.linspace(-1, 1, len(y))
    return -(torch.distributions.Categorical(logits=z).log_prob(y) * returns).sum()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "variational autoencoder": (VAE, of_vae),
    "regression": (convolutional, of_regression),
    "attributes": (convolutional, of_attributes),
    "distillation": (convolutional, of_distillation),
    "policy gradient": (convolutional, of_policy),
}


@pytest.mark.filterwarnings("ignore:the model returned a tuple", "ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("name", REFUSED)
def test_a_script_without_labels_to_read_is_refused_in_its_first_backward(name: str) -> None:
    build, loss_of = REFUSED[name]
    model, (x, y) = build(), images().batches[0]
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = loss_of(model(x), x, y)
    with pytest.raises(RuntimeError, match=r"(?s)this batch cannot be read.*Seen: the gradient.*Fix: "):
        loss.backward()
    assert not optimizer.forecaster.seen.any()
