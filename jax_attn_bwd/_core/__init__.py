"""What all operators share: dispatch, checks, masks, dropout, numerics, sharding."""
