"""`python -m tests.bench <operator>`: correctness first, then time and memory beside the peers.

`operators` says how the cases of each operator are measured, and beside what: `peers`, and the formulas of
`plain`. `compiling`, `mods` and `programs` have workloads of their own, and `race` draws programs by lot.
`results/` keeps dated measurements with device, versions and commit.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the clone, from which `python -m tests.bench` is run
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))  # what lies there is imported by its own name, as in the tests
