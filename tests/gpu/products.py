"""Products with weights against MLX's own of the nearest bit width, at 1 and 6 rows.

python -m tests.gpu.products

Weights are rotated over several times a GPU's L2. Ours are of exact float32 activations, MLX's of
its usual float16. On CUDA set MLX_USE_CUDA_GRAPHS=0, or independent launches overlap.
"""

import time
from statistics import median

import mlx.core as mx

from ds4mlx import ops
from ds4mlx.sweep import copy_bandwidth
from ds4mlx.synthetic import FLASH, random_matrix

CALLS, BYTES = 48, 400 << 20
LINEAR = (
    *(("Q8_0", shape) for shape in ((4096, 8192), (32768, 1024), (129280, 4096))),
    ("F16", (4096, 4096)),
    ("F16", (16384, 4096)),
    ("MXFP4", (32768, 4096)),
    ("Q4_K", (32768, 4096)),
)
EXPERTS = (("IQ2_XXS", "Q2_K"), ("MXFP4", "MXFP4"), ("Q4_K", "Q4_K"), ("Q8_0", "Q8_0"))
FORMS = {  # of mx.quantize, with about as many bits a weight
    "Q8_0": dict(bits=8, group_size=32),
    "Q4_K": dict(bits=4, group_size=32),
    "MXFP4": dict(bits=4, group_size=32, mode="mxfp4"),
    "Q2_K": dict(bits=2, group_size=64),
    "IQ2_XXS": dict(bits=2, group_size=64),
}


def seconds(run) -> float:
    """Median seconds of a call `run(i)`, of which many are submitted at once."""
    found = []
    for _ in range(9):
        calls = [run(i) for i in range(CALLS)]  # Python's part is not what is measured
        start = time.perf_counter()
        mx.eval(calls)
        found.append((time.perf_counter() - start) / CALLS)
    return median(found[2:])


def random(seed: int, type: str, *shape: int):
    return random_matrix(type, shape, FLASH, mx.random.key(seed))


def quantized(seed: int, type: str, *shape: int) -> tuple[list[mx.array], dict]:
    """A random matrix in MLX's form."""
    form = FORMS[type]
    w = mx.random.normal(shape, mx.float16, key=mx.random.key(seed)) * shape[-1] ** -0.5
    parts = mx.quantize(w.astype(mx.float16), **form)
    mx.eval(parts)
    return list(parts), form


def linears(type: str, shape: tuple[int, int]):
    ours = [random(0, type, *shape)]
    ours += [random(i, type, *shape) for i in range(1, max(1, BYTES // ours[0].nbytes))]
    if type == "F16":
        theirs = lambda i, x: x @ ours[i % len(ours)].T  # noqa: E731
    else:
        packed = [quantized(i, type, *shape) for i in range(len(ours))]

        def theirs(i, x):
            parts, form = packed[i % len(packed)]
            return mx.quantized_matmul(x, *parts, **form, transpose=True)

    def at(rows: int):
        x = mx.random.normal((rows, shape[1])) / 8
        half = x.astype(mx.float16)
        mx.eval(x, half)
        took = seconds(lambda i: ops.linear(x, ours[i % len(ours)]))
        return took, ours[0].nbytes, seconds(lambda i: theirs(i, half))

    return f"linear {type} {shape[0]} x {shape[1]}", at


def experts(gate: str, down: str):
    E, D, F, K = FLASH.n_routed_experts, FLASH.hidden_size, FLASH.moe_intermediate_size, 6
    ours = [random(0, gate, E, F, D), random(1, gate, E, F, D), random(2, down, E, D, F)]
    shapes = ((gate, (E, F, D)), (gate, (E, F, D)), (down, (E, D, F)))
    packed = [quantized(i, type, *shape) for i, (type, shape) in enumerate(shapes)]

    def theirs(x, ids):
        def product(x, n):
            parts, form = packed[n]
            return mx.gather_qmm(x, *parts, **form, rhs_indices=ids, transpose=True)

        x = x[:, None, None]
        return product(product(x, 0) * product(x, 1), 2)

    def at(rows: int):
        x = mx.random.normal((rows, D)) / 8
        half, weights = x.astype(mx.float16), mx.full((rows, K), 0.25)
        ids = [(mx.arange(rows * K) * 7 + i * 43) % E for i in range(CALLS)]  # all distinct
        ids = [i.reshape(rows, K).astype(mx.uint32) for i in ids]
        mx.eval(x, half, weights, ids)
        took = seconds(lambda i: ops.experts(x, ids[i], weights, *ours, 10.0))
        read = rows * K * sum(w.nbytes for w in ours) // E
        return took, read, seconds(lambda i: theirs(half, ids[i]))

    return f"experts {gate}, {down}: 6 of 256 a row", at


def main():
    copy = copy_bandwidth()
    print(f"{mx.device_info()['device_name']}, mlx {mx.__version__}, copy {copy / 1e12:.2f} TB/s")
    titles = ("product", "us, 1 row", "of copy", "MLX's us", "us, 6 rows", "of copy", "MLX's us")
    print(f"| {' | '.join((*titles, '6 rows / 1'))} |\n{'| --- ' * 8}|")
    for make, cases in ((linears, LINEAR), (experts, EXPERTS)):
        for case in cases:
            name, at = make(*case)
            cells, times = [name], []
            for rows in (1, 6):
                took, read, theirs = at(rows)
                cells += [f"{1e6 * took:.1f}", f"{read / took / copy:.0%}", f"{1e6 * theirs:.1f}"]
                times.append(took)
            print(f"| {' | '.join((*cells, f'{times[1] / times[0]:.2f}'))} |", flush=True)
            mx.clear_cache()


if __name__ == "__main__":
    main()
