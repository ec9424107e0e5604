"""The house test turns red for every planted fault, and is green without one."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

FILE = pathlib.Path(__file__).parent / "mutants.py"
spec = importlib.util.spec_from_file_location("mutants", FILE)
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants
spec.loader.exec_module(mutants)


@pytest.fixture(scope="module")
def forks():
    started = mutants.Forks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return mutants.copy_of_library(tmp_path_factory.mktemp("copy"))


def test_every_fault_fits_the_source():
    for name, mutant in mutants.MUTANTS.items():
        source = (mutants.ROOT / "jrl" / mutant.file).read_text()
        assert source.count(mutant.old) == 1, f"{name!r}: {mutant.file} has changed; mend the fault"


@pytest.mark.slow
def test_the_unedited_copy_is_green(directory, forks):
    result = forks.run(directory, "test_2_")  # the others run on the checkout itself
    assert result.returncode == 0, result.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import jrl; print(jrl.__file__)"],
        cwd="/",
        env=dict(os.environ) | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert pathlib.Path(where.stdout.strip()).is_relative_to(directory)  # not the checkout


def test_every_check_has_a_mutant():
    assert {mutant.check for mutant in mutants.MUTANTS.values()} == set(range(1, 11))
    assert len(mutants.MUTANTS) >= 10


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_fits_the_source(name):
    """Those that run with ``-m slow`` alone would otherwise go stale unseen."""
    mutant = mutants.MUTANTS[name]
    assert (mutants.ROOT / "jrl" / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.slow  # seconds a mutant
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_house_test_catches(name, forks, directory):
    caught, output = mutants.verdict(name, forks, directory)
    assert caught, output
