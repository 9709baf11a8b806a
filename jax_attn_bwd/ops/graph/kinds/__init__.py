"""The kinds of graph attention: one file each, with its equations; the loops call their methods alone."""

from jax_attn_bwd.ops.graph.kinds.gat import GAT as GAT
from jax_attn_bwd.ops.graph.kinds.gatv2 import GATv2 as GATv2
from jax_attn_bwd.ops.graph.kinds.kind import Kind as Kind
from jax_attn_bwd.ops.graph.kinds.transformer import Transformer as Transformer
from jax_attn_bwd.ops.graph.spec import Options

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (GAT, GATv2, Transformer)}


def of(options: Options) -> Kind:
    """Returns the kind that `options.kind` names."""
    return KINDS[options.kind](options)
