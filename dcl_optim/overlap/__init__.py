"""Running the companion concurrently with the model: in a worker thread, or on a CUDA stream."""

from dcl_optim.overlap.companion import OverlappedCompanion

__all__ = ["OverlappedCompanion"]
