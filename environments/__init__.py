"""Surroundings that a test on a quiet machine never meets, each set up for real: `python -m environments`.

Every module with a function `run` is one of them. It returns its figures, raises AssertionError if a promise was broken
and `Unavailable` if something has to be installed first. A module with `QUICK = True` takes some seconds, and is run by
the test suite as well.
"""
