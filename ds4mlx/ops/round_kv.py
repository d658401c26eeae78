"""The fp8 round trip of keys and values that the model was trained with (model 15)."""

import mlx.core as mx

from . import metal

BLOCK = 64
_kernel = metal.Kernel(
    "round_kv",
    inputs=["x"],
    outputs=["out"],
    call="""round_kv(x, out, x_shape[1], QUANTISED, threadgroup_position_in_grid.x,
    threadgroup_position_in_grid.y, thread_index_in_simdgroup);""",
)


def round_kv(x: mx.array, rope_dims: int) -> mx.array:
    """x [N, Dh] float32: all channels but the last `rope_dims` go through e4m3, blocks of 64."""
    if not metal.enabled():
        return round_kv_reference(x, rope_dims)
    N, Dh = x.shape
    assert (Dh - rope_dims) % BLOCK == 0, (Dh, rope_dims)
    (out,) = _kernel(
        x,
        template={"QUANTISED": Dh - rope_dims},
        grid=(32 * -(-Dh // BLOCK), N, 1),
        group=(32, 1, 1),
        shapes=[x.shape],
        dtypes=[mx.float32],
    )
    return out


def round_kv_reference(x: mx.array, rope_dims: int) -> mx.array:
    blocks = x[..., :-rope_dims].reshape(*x.shape[:-1], -1, BLOCK)
    scale = power_of_two_scale(blocks, floor=1e-4, largest=448.0)
    scaled = mx.clip(blocks / scale, -448.0, 448.0)
    rounded = mx.from_fp8(mx.to_fp8(scaled), dtype=mx.float32) * scale
    return mx.concatenate([rounded.flatten(-2), x[..., -rope_dims:]], axis=-1)


def power_of_two_scale(blocks: mx.array, *, floor: float, largest: float) -> mx.array:
    """The power of two at or above max |x| / largest, from the exponent bits (model 15.2)."""
    amax = mx.maximum(mx.abs(blocks).max(axis=-1, keepdims=True), floor)
    bits = (amax * (mx.array(1.0) / largest)).view(mx.uint32)
    # Adding the largest mantissa carries into the exponent unless the value is a power of two.
    return (((bits + 0x7FFFFF) >> 23) << 23).view(mx.float32)
