"""Tells by the jaxpr of a user's function: bounds of its results, axes that it mixes, bad derivatives."""
