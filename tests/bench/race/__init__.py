"""The race: training steps drawn by lot, each beside the plain formula that JAX differentiates.

`call` is what is drawn of an operator, and `dense`, `softmax`, `deformable`, `graph` and `linear` draw it;
`surroundings` puts a call into a program, `program` draws one whole, `rounding` tells rounding from a fault,
and `run` measures them.
"""
