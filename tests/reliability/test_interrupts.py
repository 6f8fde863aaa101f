"""Ctrl-C at random moments of overlapped training. That each place is safe is tests/test_executors.py's."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTS = 300  # docs/reliability.md says what ran with more


def test_no_interrupt_of_many_deadlocks():
    command = [sys.executable, "-m", "tests.reliability.interrupts", str(INTERRUPTS), "1"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{INTERRUPTS} interrupts, 0 threads left, 2 intra-op threads\n"
