"""The portable ways of computing dense attention, named as in the table of `plan.py`."""
