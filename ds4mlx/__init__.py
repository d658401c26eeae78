"""DeepSeek V4 Flash with its DSpark draft, on MLX.

>>> import ds4mlx
>>> model = ds4mlx.load()  # the small embedded model; give a path for a real one
>>> for piece in model.generate("def fibonacci(n):"):
...     print(piece, end="", flush=True)
"""

from importlib import import_module

__version__ = "0.1.0"

# MLX is loaded with the first of these names, so that `ds4mlx --help` does not wait for it.
_HOMES = {
    "load": "api",
    "Model": "api",
    "Reply": "api",
    "Session": "api",
    "Ds4Error": "errors",
    "UsageError": "errors",
    "FileError": "errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
