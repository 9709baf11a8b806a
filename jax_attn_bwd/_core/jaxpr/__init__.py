"""What the jaxpr of a user's function tells: bounds of its results, axes that it mixes, bad derivatives."""
