"""`tests/slow_tests.txt` names tests that exist: one that was renamed would be a default test again."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "tests" / "slow_tests.txt").read_text().splitlines()


def test_names_stand_once_and_in_order():
    assert sorted(set(NAMES)) == NAMES


def test_each_name_is_that_of_a_test():
    """Or of a function, class or method of the package, whose docstring's example is one."""
    for path in {name.split("::")[0] for name in NAMES}:
        defined = set(re.findall(r"^(?:    )?(?:def|class) (\w+)", (ROOT / path).read_text(), re.MULTILINE))
        named = {
            name.split("::")[1].split("[")[0].split(".")[-1] for name in NAMES if name.startswith(f"{path}::")
        }
        assert named <= defined, path
