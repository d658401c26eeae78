"""Keeps the memory of a model resident on Metal while it is open.

Unwired weights may be paged out between two tokens, at a fortieth of the speed.
"""

import mlx.core as mx

from .preflight import Device


class Wired:
    """A share of MLX's wired limit, of which models that are open together each have their own."""

    def __init__(self, nbytes: int, on: Device):
        self.requested = self.granted = 0  # bytes; nothing is wired but on Metal
        if on.kind == "metal":
            most = _most()
            before = mx.set_wired_limit(most)
            after = min(before + nbytes, most)
            mx.set_wired_limit(after)
            self.requested, self.granted = nbytes, after - before

    def release(self):
        """Give the share back; once is enough."""
        if self.granted:
            now = mx.set_wired_limit(_most())
            mx.set_wired_limit(max(0, now - self.granted))
            self.granted = 0


def _most() -> int:
    """What the device allows; MLX refuses more."""
    return mx.device_info(mx.gpu)["max_recommended_working_set_size"]
