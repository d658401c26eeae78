"""A Metal kernel for mx.fast.cuda_kernel: a simdgroup is a warp, a threadgroup a block."""

from importlib.resources import files

from .call import function, shaped
from .rewrite import CUDA

_INDEX = "(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))"
_ATTRIBUTES = {
    "thread_position_in_grid": "blockIdx.{} * blockDim.{} + threadIdx.{}",
    "thread_position_in_threadgroup": "threadIdx.{}",
    "threadgroup_position_in_grid": "blockIdx.{}",
    "threads_per_threadgroup": "blockDim.{}",
    "threadgroups_per_grid": "gridDim.{}",
    "threads_per_grid": "gridDim.{} * blockDim.{}",
    "thread_index_in_threadgroup": _INDEX,
    "thread_index_in_simdgroup": f"{_INDEX} % 32",
    "simdgroup_index_in_threadgroup": f"{_INDEX} / 32",
    "simdgroups_per_threadgroup": "blockDim.x * blockDim.y * blockDim.z / 32",
}


def translate(kernel, inputs, template: dict, dtypes) -> tuple[str, str]:
    """Header and source of the CUDA kernel, whose arrays are called NAME_p.

    Of a template with THREADS and RESIDENT each thread gets as many registers as leave room for
    RESIDENT threadgroups of THREADS threads on a multiprocessor.
    """
    shim = "".join((files("ds4mlx.msl") / name).read_text() for name in ("core.h", "cuda.h"))
    text = function(kernel, inputs, template, dtypes, dialect=CUDA, attribute=_attribute)
    arguments = [f"{n}_p" for n in kernel.inputs]
    arguments += [f"{n}_p_shape.data()" for n in shaped(kernel, inputs)]
    arguments += [f"{n}_p" for n in kernel.outputs]
    if "RESIDENT" in template:
        # MLX writes the kernel's head itself, behind this.
        bounds = f"__launch_bounds__({template['THREADS']}, {template['RESIDENT']})"
        text += f"#undef __global__\n#define __global__ __attribute__((global)) {bounds}\n"
    return shim + text, f"metal::{kernel.name}_call({', '.join(arguments)});"


def _attribute(name: str) -> str:
    value = _ATTRIBUTES[name]
    if "{}" not in value:
        return value
    return f"uint3({', '.join(value.replace('{}', axis) for axis in 'xyz')})"
