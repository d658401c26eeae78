"""A kernel as one C++ function: its file, and its `call` with every name that it mentions."""

from collections.abc import Callable

import mlx.core as mx

from .rewrite import Dialect, rewrite

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "half",
    mx.bfloat16: "bfloat",
    mx.float32: "float",
}
ATTRIBUTES = {
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "thread_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
}


def shaped(kernel, inputs) -> list[str]:
    """The inputs whose shape the call mentions; MLX passes no shape of a scalar."""
    found = zip(kernel.inputs, inputs, strict=True)
    return [n for n, x in found if x.ndim and f"{n}_shape" in kernel.call]


def function(
    kernel,
    inputs,
    template: dict,
    dtypes,
    *,
    dialect: Dialect,
    attribute: Callable[[str], str],
    last: tuple[str, ...] = (),
) -> str:
    """metal::NAME_call(inputs, shapes of `shaped`, outputs): C++ text, lines marked.

    attribute: the expression of a Metal attribute, by its name. last: a further parameter.
    """
    shapes = shaped(kernel, inputs)
    parameters = [f"const void* {n}_p" for n in kernel.inputs]
    parameters += [f"const void* {n}_shape_p" for n in shapes]
    parameters += [f"void* {n}_p" for n in kernel.outputs]
    lines = []
    for name, value in template.items():
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {TYPES[value]};")
        else:
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
    for name, x in zip(kernel.inputs, inputs, strict=True):
        pointer = f"(const {TYPES[x.dtype]}*){name}_p"
        lines.append(f"auto {name} = {pointer};" if x.ndim else f"auto& {name} = *{pointer};")
    lines += [f"auto {n}_shape = (const int*){n}_shape_p;" for n in shapes]
    for name, dtype in zip(kernel.outputs, dtypes, strict=True):
        lines.append(f"auto {name} = ({TYPES[dtype]}*){name}_p;")
    for name, kind in ATTRIBUTES.items():
        if name in kernel.call:
            lines.append(f"const {kind} {name} = {attribute(name)};")
    head = f"METAL_FUNC void {kernel.name}_call({', '.join((*parameters, *last))}) {{\n"
    return (
        "namespace metal {\n"
        + rewrite(kernel.header, dialect)
        + head
        + "\n".join(lines)
        + f'\n#line 1 "{kernel.name} (call)"\n'
        + rewrite(kernel.call, dialect, body=True)
        + "\n}\n}  // namespace metal\n"
    )
