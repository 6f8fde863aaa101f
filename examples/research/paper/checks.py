"""What must be there before the first step, every missing thing in one message."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from examples.research.datasets.listings import SIZES
from examples.research.paper import estimate
from examples.research.paper.images import FETCH, PLACES, Blank, folder, load
from examples.research.paper.rows import Work
from examples.research.paper.session import Session
from examples.research.paper.training import fits, weights_file

INSTALL = "pip install -U pip && pip install -e '.[demo]' --group research --group integrations"
SHARED = ("plain", "dcl", "dcp")  # methods that several processes train together
GIB = 2**30
OFFER = " You can use download=True to download it"  # torchvision's, which this command has not
OWN = "python -m examples.image_classification --paper --images DIR"
TIMED = 64  # images whose loading is timed
_SECONDS: dict[tuple[str | None, ...], float] = {}  # for one, by what it depends on


def problems(works: Sequence[Work], session: Session, space: bool = True) -> list[str]:
    """What is missing, each with the line that brings it; ``space`` on disk and device takes timed steps to know."""
    found = [*_packages(works), *_networks(works), *_processes(works, session)]
    if importlib.util.find_spec("torchvision") is None:  # which reads the files
        found += _folders(works, session)
    else:
        found += [*_data(works, session), *_weights(works, session)]
    return list(_space(works, session)) if space and not found else found


def _packages(works: Sequence[Work]) -> Iterator[str]:
    wanted = {"torchvision"}
    for work in works:
        chosen = work.configuration
        if chosen.network in ("vit-tiny", "swin-tiny") or work.task in ("reconstruct", "tune"):
            wanted.add("timm")
        if chosen.augmentation == "rand":
            wanted.add("timm")
        if work.task in ("reconstruct", "tune"):
            wanted.add("transformers")
        if chosen.options.get("rho"):
            wanted.add("pytorch_optimizer")
        if chosen.data == "cars":
            wanted.add("scipy")
        if chosen.data == "cifar100":
            wanted |= {"matplotlib", "sklearn"}  # for the figures
    missing = sorted(name for name in wanted if importlib.util.find_spec(name) is None)
    if missing:
        yield f"packages {', '.join(missing)} are not installed: {INSTALL}"


def _networks(works: Sequence[Work]) -> Iterator[str]:
    for network, data in sorted({(work.configuration.network, work.configuration.data) for work in works}):
        work = next(w for w in works if (w.configuration.network, w.configuration.data) == (network, data))
        try:
            fits(work, Blank(data).classes, Blank(data).shape)
        except ValueError as error:
            yield f"network {network} for {data}: {error}"
        except ImportError:
            pass  # among the packages


def _processes(works: Sequence[Work], session: Session) -> Iterator[str]:
    if session.processes == 1:
        return
    alone = {work.configuration.method for work in works} - set(SHARED)
    alone |= {work.task for work in works} & {"distill", "fixmatch"}
    alone |= {"class_means" for work in works if work.configuration.options.get("class_means")}
    if alone:
        yield f"{', '.join(sorted(alone))}: trained by one process alone: start these rows without torchrun"
    for size in sorted({work.configuration.batch_size for work in works}):
        if size % session.processes:
            yield f"batches of {size} do not divide among {session.processes} processes: choose --batch-size"


def _data(works: Sequence[Work], session: Session) -> Iterator[str]:
    yield from _folders(works, session)
    by_name = {work.configuration.data: work for work in works if not is_missing(work, session)}
    unreadable = set()
    for name, work in sorted(by_name.items()):
        if PLACES[name] in unreadable:
            continue
        place = folder(name, session.data)
        try:
            data = load(work, session, 0)
            x, _ = next(iter(data.fixed("test", 1)))
        except (ValueError, ImportError, OSError) as error:
            unreadable.add(PLACES[name])
            why = str(error).replace(OFFER, "")
            yield f"{why}; {session.data / PLACES[name]} is damaged or of another layout; to get it again: " + _fetch(
                name, session
            )
            continue
        found = data.sizes()
        if found != SIZES[name]:
            whole = f"but the whole data set has {_sizes(SIZES[name])}"
            yield f"{name} in {place} has {_sizes(found)}, {whole}; for images of your own: {OWN}"
        if tuple(x.shape[1:]) != Blank(name).shape:
            yield f"{name} in {place} has images of {tuple(x.shape[1:])}, not of {Blank(name).shape}"


def _folders(works: Sequence[Work], session: Session) -> Iterator[str]:
    missing = {PLACES[work.configuration.data]: work for work in works if is_missing(work, session)}
    for place, work in sorted(missing.items()):
        yield f"{session.data / place} is missing; to get it: {_fetch(work.configuration.data, session)}"


def is_missing(work: Work, session: Session) -> bool:
    """Whether the folder of its images is not there."""
    return not (session.data / PLACES[work.configuration.data]).exists()


def _fetch(name: str, session: Session) -> str:
    return FETCH[name].replace("ROOT", str(session.data))


def _sizes(sizes: tuple[int, int, int]) -> str:
    classes, train, test = sizes
    return f"{classes:,} classes, {train:,} training and {test:,} test images"


def _weights(works: Sequence[Work], session: Session) -> Iterator[str]:
    for network in sorted({work.configuration.network for work in works if work.pretrained}):
        path, command = weights_file(network, session.data)
        if not path.exists():
            yield f"ImageNet's weights of {network} are not in {path}: {command}"


def _space(works: Sequence[Work], session: Session) -> Iterator[str]:
    session.out.mkdir(parents=True, exist_ok=True)
    largest = max(estimate.disk(work, session) for work in works)
    kept = sum(estimate.price(work.needs, session).weights for work in works if work.needs)
    needed, free = 2 * largest + kept, shutil.disk_usage(session.out).free  # an old and a new checkpoint at once
    if needed > free:
        yield f"checkpoints take {needed / GIB:.1f} GiB, and {session.out} has {free / GIB:.1f}: choose another --out"
    if session.device.type == "cuda":
        total = torch.cuda.get_device_properties(session.device).total_memory
        for work in works:
            if (wanted := estimate.memory(work, session)) > total:
                chosen = work.configuration
                yield (
                    f"{chosen.method} with {chosen.network} on {chosen.data} takes about {wanted / GIB:.0f} GiB, and "
                    f"the device has {total / GIB:.0f}: choose a smaller --batch-size, or --precision bf16"
                )


def _loading(work: Work, session: Session) -> float:
    """Seconds that one process takes to load and augment an image."""
    data = load(work, replace(session, workers=0), 0)
    begin = time.perf_counter()
    x, _, _ = next(iter(data.epoch(min(TIMED, data.train_size()), torch.Generator().manual_seed(0))))
    return (time.perf_counter() - begin) / len(x)


def loading_hours(work: Work, session: Session) -> float:
    """The time that the workers take to load the images of a whole training."""
    chosen = work.configuration
    kind = (work.task, chosen.data, chosen.augmentation)
    if kind not in _SECONDS:
        _SECONDS[kind] = _loading(work, session)
    images = estimate.steps(work) * chosen.batch_size / session.processes
    return _SECONDS[kind] * images / max(1, session.workers) / 3600
