"""What all tests share."""

import mlx.core as mx
import pytest


def pytest_collection_modifyitems(items):
    """Kernels are compared with their references wherever there is a Metal GPU."""
    if not mx.metal.is_available():
        skip = pytest.mark.skip(reason="needs a Metal GPU")
        for item in items:
            if item.get_closest_marker("metal"):
                item.add_marker(skip)
