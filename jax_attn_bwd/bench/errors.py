"""An exception in one line, for reports that go on after it."""

import os
import traceback

LIMIT = 1500  # characters: compilers quote whole programs


def sentence(error: BaseException) -> str:
    """Its type, the place in the code it came from, and its message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"[:LIMIT]
