"""Levels: by which steps the rows of each node, which lie together, are summed, where the rows are known.

A step reads for every row that it makes as many as it joins for one at most.
"""

from typing import Any, NamedTuple

import numpy as np

from jax_attn_bwd._core.trees import exportable_tuple

TOGETHER = 16  # rows that a step joins at most, where each row that is read counts
_MOST = 128  # where each step counts
_READ = 1 << 19  # rows that a step then reads


@exportable_tuple
class SumLevel(NamedTuple):
    """Rows that are sums of up to K rows, which lie together, of the level before; the last: one a node."""

    start: Any  # int32 [R + 1], where the rows of each begin; those of the next are behind them
    steps: Any  # int32 [K], 0 to K - 1: no row is the sum of more than K


def most_together(nodes: int) -> int:
    """Returns how many rows a step may join where each step counts, as a launch on a GPU does."""
    return min(_MOST, max(TOGETHER, _READ // max(nodes, 1)))


def levels_of(count: np.ndarray, rows: int, exact: bool, limit: int) -> list[SumLevel]:
    """Finds the levels of `rows`, of which each node has a `count`; a row is the sum of `limit` at most.

    They are as many as the counts need if `exact`; else the shapes decide.
    """
    found: list[SumLevel] = []
    nodes, most = len(count), int(count.max(initial=0)) if exact else rows
    together, depth = 1, 1
    while limit**depth < most:
        depth += 1
    while together**depth < most:
        together += 1
    while most:
        start = np.concatenate([[0], np.cumsum(count)])
        if most <= together:
            return [*found, SumLevel(start, np.arange(most))]
        parts = -(-count // together)
        owner, begin = np.repeat(np.arange(nodes), parts), np.cumsum(parts) - parts
        begin = start[owner] + (np.arange(len(owner)) - begin[owner]) * together
        rows = len(owner) if exact else nodes + rows // together
        begin = np.pad(begin, (0, rows + 1 - len(owner)), constant_values=start[-1])
        found.append(SumLevel(begin, np.arange(together)))
        count, most = parts, -(-most // together)
    return found
