"""Shared by all operators: dispatch, checks, masks, dropout, numerics, sharding."""
