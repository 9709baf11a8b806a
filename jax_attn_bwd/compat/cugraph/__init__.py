"""Graph attention of RAPIDS cugraph-ops (`pylibcugraphops.operators`), forward and backward, in JAX terms.

`mha_gat_n2n`, `mha_gat_n2n_efeat`, `mha_gat_v2_n2n`, `mha_gat_v2_n2n_efeat`, `mha_simple_n2n`

Kept from the source: names of the arguments, and the order of those it reads (those it writes, which come
first there, are returned; in a backward they are keywords that ask for gradients); heads side by side in the
columns of embeddings; `attention_weights` as `[source | destination | edge]`, each head by head; the names of
activations; `softmax_scores` `(2, num_heads, nnz)`, plane 0 before the softmax and plane 1 after it, float32
or wider; every gradient may be refused, is then not computed, and comes back as None; a destination without
edges gives 0. Edge embeddings and scores are in the caller's edge order, that of `map_csc_to_coo`.

Changed: `graph` is a `BipartiteCSC` (`make_bipartite_csc` builds one). What the source writes into arrays
that it is given is returned; such an array asks for a gradient, in its dtype, as True does, and None or False
refuses it. A gradient has the dtype of its argument, or float32 where an array of that asks, as the source
pairs type suffixes. `dst_node_embedding=None` means the first rows of the sources, whose gradient then holds
both shares.

Left out, for there is no use for it in JAX; delete them from a call that has them (one that names them is
refused in these words):
  * the arrays that a forward writes: `output_embedding`, `softmax_scores`;
  * `grad_softmax_scores`: workspace;
  * `grad_attention_weights_workspace`: it made that gradient deterministic; here it always is;
  * `stream_id`: XLA orders its own work;
  * `activation_scores` of the v2 calls: nnz x dim_node numbers for a backward that here does without.
The `softmax_scores` of a backward is not needed either: what is given is checked, not read; None will do.

Gradients of the forwards are those of the operators beneath: of every array, to any order.

References:
  RAPIDS cugraph-ops (until 25.02), pylibcugraphops.operators; cuDNN, cudnn.gnn.mha_gat, its successor.
"""

from jax_attn_bwd.compat.cugraph.call import MhaGatEfeatGrads, MhaGatGrads, make_bipartite_csc, mha_params
from jax_attn_bwd.compat.cugraph.gat import (
    mha_gat_n2n_bwd,
    mha_gat_n2n_efeat_bwd,
    mha_gat_n2n_efeat_fwd,
    mha_gat_n2n_fwd,
    mha_gat_v2_n2n_bwd,
    mha_gat_v2_n2n_efeat_bwd,
    mha_gat_v2_n2n_efeat_fwd,
    mha_gat_v2_n2n_fwd,
)
from jax_attn_bwd.compat.cugraph.simple import MhaSimpleGrads, mha_simple_n2n, mha_simple_n2n_bwd

__all__ = [
    "MhaGatEfeatGrads",
    "MhaGatGrads",
    "MhaSimpleGrads",
    "make_bipartite_csc",
    "mha_gat_n2n_bwd",
    "mha_gat_n2n_efeat_bwd",
    "mha_gat_n2n_efeat_fwd",
    "mha_gat_n2n_fwd",
    "mha_gat_v2_n2n_bwd",
    "mha_gat_v2_n2n_efeat_bwd",
    "mha_gat_v2_n2n_efeat_fwd",
    "mha_gat_v2_n2n_fwd",
    "mha_params",
    "mha_simple_n2n",
    "mha_simple_n2n_bwd",
]
