"""A small training with its checkpoint, and ways to damage what is in it."""

import io

import torch

from tests.helpers import batches, fit, mlp
from tests.reference import wrap

# What is put in place of each part of a state in turn.
JUNK = {"none": None, "text": "text", "minus one": -1, "nan": float("nan"), "list": [], "empty": {}}
JUNK |= {"scalar": torch.tensor(0.0), "vector": torch.zeros(7), "complex": torch.zeros(2, dtype=torch.complex64)}
ABSENT = object()


class Training:
    """A model and its optimizer after some steps."""

    def __init__(self, variant, steps, **options):
        self.model = mlp()
        self.optimizer = wrap(variant, self.model, torch.optim.Adam(self.model.parameters(), lr=0.01), **options)
        fit(self.optimizer, batches(steps))

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def everything(self):
        """All that a failed call must leave alone, to the bit."""
        hooks = [len(table) for name, table in vars(self.model).items() if name.endswith("hooks")]
        buffer = io.BytesIO()
        torch.save(self.state() | {"random": torch.get_rng_state(), "hooks": hooks}, buffer)
        return buffer.getvalue()


def places(tree, above=()):
    """The way to each part of a nested state, itself left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


def replaced(tree, place, value):
    """A copy of a state with another part at a place, or with none."""
    if not place:
        return value
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    changed = [(key, replaced(part, place[1:], value) if key == place[0] else part) for key, part in items]
    kept = [(key, part) for key, part in changed if part is not ABSENT]
    return dict(kept) if isinstance(tree, dict) else type(tree)(part for _, part in kept)
