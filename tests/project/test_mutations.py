"""The list of deliberate faults is one of the code as it is: each can be made, and is Python."""

import ast

import pytest

from tests.project.mutations import FAULTS, HERE


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.behavior for fault in FAULTS])
def test_a_fault_can_be_made(fault):
    made = fault.made_in(HERE)  # raises where the function, or what is changed in it, is not there
    assert made != ast.unparse(ast.parse((HERE / fault.file).read_text(encoding="utf-8")))
    compile(made, fault.file, "exec")


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.behavior for fault in FAULTS])
def test_its_test_files_are_there(fault):
    paths = fault.paths
    assert all(any(name.strip("/*") in path for path in paths) for name in fault.tests.split())


def test_faults_are_few():
    assert len({fault.behavior for fault in FAULTS}) == len(FAULTS) <= 65
