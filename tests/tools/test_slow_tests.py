"""`tests/slow_tests.txt` names tests that exist: one that was renamed would be a default test again."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "tests" / "slow_tests.txt").read_text().splitlines()


def test_names_stand_once_and_in_order():
    assert sorted(set(NAMES)) == NAMES


def test_each_file_exists():
    assert {name for name in NAMES if not (ROOT / name.split("::")[0]).is_file()} == set()


def test_each_name_is_that_of_a_test(pytestconfig, all_names):
    """Of the files that this run collects whole; a docstring's example is a test, too."""
    if any("::" in name for name in pytestconfig.args):
        pytest.skip("this run was asked for single tests")
    whole = {name.split("::")[0] for name in all_names}
    assert [name for name in NAMES if name.split("::")[0] in whole and name not in all_names] == []
