"""Importance matrices: how much each input channel of a tensor matters, as ds4 collects them.

llama.cpp's older binary layout, which `ds4 --imatrix-out` writes: a count, then per tensor its
name, how often it was seen, and the sums of squared inputs (for experts, one vector after another).
"""

import os
import struct
from pathlib import Path

import numpy as np

from ..errors import FileError

_NAME = 1 << 10  # bytes


def read_imatrix(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """float32 vectors by GGUF name; only ratios within a vector mean something.

    Raises FileError for another format, or a file that is not whole.
    """
    path = Path(os.path.expandvars(os.path.expanduser(path)))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if data[:4] == b"GGUF":
        raise FileError(
            f"{path}: an importance matrix in GGUF; wanted the older .dat layout, which "
            "ds4 --imatrix-out and llama-imatrix --output-format dat write"
        )
    at, found = 4, {}
    try:
        (count,) = struct.unpack_from("<i", data)
        for _ in range(count):
            (size,) = struct.unpack_from("<i", data, at)
            if not 0 < size <= _NAME:
                raise ValueError(f"a name of {size} bytes")
            name = data[at + 4 : at + 4 + size].decode()
            _, values = struct.unpack_from("<ii", data, at + 4 + size)
            at += size + 12
            found[name] = np.frombuffer(data, "<f4", values, at)
            at += values * 4
    except (struct.error, ValueError) as error:
        raise FileError(f"{path}: not a whole importance matrix ({error})") from None
    if not found:
        raise FileError(f"{path}: an importance matrix of no tensor")
    odd = [name for name, v in found.items() if not (np.isfinite(v).all() and (v >= 0).all())]
    if odd:
        raise FileError(f"{path}: {odd[0]} holds values that are negative or not finite")
    return found
