"""The indexer's scores of prefill, from the products of a query's heads with the entries (CSA)."""

import mlx.core as mx

from . import metal

_kernel = metal.Kernel(
    "index_weigh",
    inputs=["products", "w"],
    outputs=["out"],
    call="""index_weigh<HI>(products, w, out, products_shape[2],
    thread_position_in_grid.xy);""",
)


def index_weigh(products: mx.array, w: mx.array) -> mx.array:
    """products [N, Hi, C], w [N, Hi] float32 -> sum_h w_h relu(products_h), [N, C] (model 8).

    The kernel takes products of 8 elements or more.
    """
    if not metal.enabled() or products.size < 8:
        return index_weigh_reference(products, w)
    N, Hi, C = products.shape
    (out,) = _kernel(
        products,
        w,
        template={"HI": Hi},
        grid=(metal.round_up(C, 256), N, 1),
        group=(256, 1, 1),
        shapes=[(N, C)],
        dtypes=[mx.float32],
    )
    return out


def index_weigh_reference(products, w):
    return (w[:, None] @ mx.maximum(products, 0.0)).squeeze(1)
