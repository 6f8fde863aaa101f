"""What is built is what is meant: the wheel has the package alone, the sdist all that its tests read."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from dcl_optim import __version__

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
FOLDERS = ("dcl_optim", "tests", "benchmarks", "examples", "docs")
TEXTS = {"README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md"}
FILES = TEXTS | {"mkdocs.yml", "pyproject.toml"}
NAME = f"dcl_optim-{__version__}"


def files_of(folder):
    """The files of a folder of the repository, without what tools leave there."""
    paths = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not any(part[0] in "._" for part in path.parts[:-1])}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def wheel(built):
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as archive:
        yield archive


@pytest.fixture
def metadata(wheel):
    return Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())


def test_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")}
    assert names == files_of("dcl_optim")
    assert {"dcl_optim/py.typed", "dcl_optim/demo/digits.py"} <= names
    assert f"{NAME}.dist-info/licenses/LICENSE" in wheel.namelist()


def test_sdist_has_what_its_tests_read(built):
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    wanted = FILES.union(*map(files_of, FOLDERS), {"PKG-INFO", ".gitignore"})
    assert names == {name for name in wanted if not name.startswith(("examples/research/", "examples/paper.py"))}


def test_installing_the_package_alone_brings_torch_and_numpy(metadata):
    needed = {line for line in metadata.get_all("Requires-Dist") if ";" not in line}
    assert {line.split(">=")[0] for line in needed} == {"torch", "numpy"}


def test_citation_is_the_packages(metadata):
    """It gives no version, so there is one to raise: the package's."""
    import yaml  # what does not run this test need not have it

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert [author["name"] for author in citation["authors"]] == metadata["Author"].split(", ")
    assert [citation["abstract"], citation["license"]] == [metadata["Summary"], metadata["License-Expression"]]
    assert sorted(citation["keywords"]) == sorted(metadata["Keywords"].split(","))
    assert not {"version", "date-released"} & set(citation)


@pytest.mark.parametrize("command", [["-m", "dcl_optim"], [Path(sys.executable).with_name("dcl-demo")]])
def test_version(command, tmp_path):
    done = subprocess.run([sys.executable, *command, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dcl-optim {__version__}\n", "")
