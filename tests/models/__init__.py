"""Published models with our attention in the place of theirs: `python -m models` of a clone's `tests`."""
