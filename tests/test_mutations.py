"""The list of deliberate faults is one of the code as it is: each can be made, in one place, and is Python."""

from __future__ import annotations

from collections import Counter

from tests.mutations import FAULTS, HERE


def test_every_fault_can_be_made() -> None:
    for fault in FAULTS:
        made = fault.made_in(HERE)  # raises where the text is not there once
        assert fault.old != fault.new, fault.name
        compile(made, fault.file, "exec")
        assert all((HERE / path).is_file() for path in fault.paths), fault.name
    assert Counter(fault.name for fault in FAULTS).most_common(1)[0][1] == 1
