"""What all tests share."""

import os

# MLX reads this at its first product: references are compared in full float32 on every GPU.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    """Kernels are compared with their references wherever there is a Metal GPU."""
    if not mx.metal.is_available():
        skip = pytest.mark.skip(reason="needs a Metal GPU")
        for item in items:
            if item.get_closest_marker("metal"):
                item.add_marker(skip)
