"""Rotary embedding of the last channels, in adjacent pairs."""

import mlx.core as mx

from . import metal

_kernel = metal.Kernel(
    "rope",
    inputs=["x", "turn"],
    outputs=["out"],
    call="rope<INVERSE>(x, turn, out, DH, R, thread_position_in_grid, threads_per_grid.y);",
)


def rotation(positions: mx.array, freqs: mx.array) -> mx.array:
    """positions [N] int32, freqs [R / 2] float32 -> complex64 [N, R / 2].

    The angle is position times frequency in float32, as the published code has it (model 6, 20.5).
    """
    angle = positions.astype(mx.float32)[:, None] * freqs
    return mx.cos(angle) + 1j * mx.sin(angle)


def rope(x: mx.array, rotation: mx.array, inverse: bool = False) -> mx.array:
    """x [N, Dh] or [N, H, Dh] float32: pairs (2i, 2i+1) of the last R channels are rotated."""
    if not metal.enabled():
        return rope_reference(x, rotation, inverse)
    N, H, Dh = x.shape[0], x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
    group = min(256, metal.round_up(Dh, 32))
    (out,) = _kernel(
        x,
        rotation.view(mx.float32),
        template={"INVERSE": inverse, "DH": Dh, "R": 2 * rotation.shape[-1]},
        grid=(metal.round_up(Dh, group), H, N),
        group=(group, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.float32],
    )
    return out


def rope_reference(x: mx.array, rotation: mx.array, inverse: bool = False) -> mx.array:
    R = 2 * rotation.shape[-1]
    turn = mx.conjugate(rotation) if inverse else rotation
    if x.ndim == 3:
        turn = turn[:, None]
    pairs = mx.contiguous(x[..., -R:]).view(mx.complex64)
    return mx.concatenate([x[..., :-R], (pairs * turn).view(mx.float32)], axis=-1)
