"""Hypothesis draws the same examples on every run; a slow machine does not fail a test."""

from hypothesis import settings

settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("reproducible")
