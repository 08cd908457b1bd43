"""Hypothesis draws the same examples on every run; a slow machine does not fail a test."""

import os

import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that share the cores must not fight for them
    threadpool_limits(1)

settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=25)
settings.load_profile("reproducible")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Every device in turn; those that this machine lacks are skipped."""
    if request.param == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return request.param
