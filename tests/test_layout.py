"""The laws of the house, as rules that a machine can check, and checks of the checks."""

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# `convert` and `metal` stand at the top; the links to them in ds4mlx/ are not followed here.
PACKAGE = [*sorted((ROOT / "ds4mlx").rglob("*.py")), *sorted((ROOT / "convert").glob("*.py"))]
PACKAGE = [p for p in PACKAGE if p.resolve() == p.absolute()]

WAITERS = {
    f"ds4mlx/{module}.py"
    for module in (
        *("generate", "sampling", "weights"),
        *("bench", "check", "selftest", "sweep", "synthetic"),
    )
}
# Law: pattern of the code that breaks it, and where alone that code may stand.
PATTERNS = {
    "kernels are built in one place": (r"\bfast\.\w+_kernel\b", {"ds4mlx/ops/metal.py"}),
    "few places wait for the GPU": (
        r"\bmx\.(async_)?eval\(|\bmx\.synchronize\(|\.item\(\)|\.tolist\(\)",
        WAITERS,
    ),
    "only the command line prints": (r"\bprint\(", {"ds4mlx/cli.py", "ds4mlx/bench.py"}),
    "no environment variable is a switch": (
        r"\benviron\b|\bgetenv\b",
        {"ds4mlx/cli.py", "ds4mlx/ops/metal.py"},  # which warns of them; which sets MLX's
    ),
}
ROOMS = {"target", "draft", "cache", "generate", "api", "cli"}  # what convert and ops do not know


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code(source: str) -> str:
    """`source` without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...
    return ast.unparse(tree)


def stems(pattern: str) -> set[str]:
    return {p.stem for p in ROOT.glob(pattern)}


def unpaired(ops: set[str], tests: set[str], kernels: set[str]) -> set[str]:
    """Stems of an op without its test, a test without its op, a kernel without its op."""
    return (ops ^ tests) | (kernels - ops)


def imported(source: str) -> set[str]:
    """Every part of every module name that `source` imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= set((node.module or "").split("."))
            if node.level or (node.module or "").startswith("ds4mlx"):
                names |= {alias.name for alias in node.names}
    return names


def changes_of_state(source: str) -> list[int]:
    """Lines that assign to an attribute, or into one, outside `__init__`."""
    found = []

    kinds = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete | ast.For

    def visit(node, free):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            free = node.name == "__init__"
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        changed = [p for t in targets for p in stored(t)] if isinstance(node, kinds) else []
        if not free and any(isinstance(p, ast.Attribute) for p in changed):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            found.append(node.lineno)
        for part in ast.iter_child_nodes(node):
            visit(part, free)

    visit(ast.parse(source), False)
    return found


def stored(target) -> list:
    """What an assignment to `target` changes: `a` and `b.c` of `a[i], b.c = ...`."""
    if isinstance(target, ast.Subscript | ast.Starred):
        return stored(target.value)
    return [p for t in getattr(target, "elts", []) for p in stored(t)] or [target]


def oversized(source: str, lines: int = 600, function: int = 90) -> list[str]:
    """What of `source` is too long, or opens without saying what it is for."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["no docstring"]
    if (n := source.count("\n")) > lines:
        found.append(f"{n} lines")
    for node in ast.walk(tree):
        n = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and n > function:
            found.append(f"{node.name} has {n} lines")
    return found


def machine_paths(text: str) -> list[str]:
    """Paths of one machine."""
    roots = "|".join(("work", "tmp", "root", "home", "Users"))
    return re.findall(rf"(?<![\w.~$}}\-/])/(?:{roots})/\w*", text)


def text_files() -> list[Path]:
    """Everything that a checkout holds as text."""
    left_out = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
    left_out |= {".pytest_cache", ".ruff_cache"}
    binary = {".gguf", ".safetensors"}
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in left_out and not f.endswith(".egg-info")]
        found += [
            Path(folder, f) for f in files if f not in left_out and Path(f).suffix not in binary
        ]
    return found


# The laws -------------------------------------------------------------------------------------


def test_one_kernel_is_one_metal_file_one_op_and_one_test():
    ops = stems("ds4mlx/ops/*.py") - {"__init__", "metal"}
    tests = {stem.removeprefix("test_") for stem in stems("tests/ops/test_*.py")}
    assert unpaired(ops, tests, stems("metal/*.metal")) == set()


@pytest.mark.parametrize("law", PATTERNS)
def test_code_stands_only_where_it_may(law):
    pattern, allowed = PATTERNS[law]
    users = {name(p) for p in PACKAGE if re.search(pattern, code(p.read_text()))}
    if "GPU" in law:  # NumPy has methods of these names too, and convert knows NumPy alone
        users = {user for user in users if not user.startswith("convert/")}
    assert users <= allowed


def test_only_the_warning_of_the_command_line_reads_names_of_variables():
    source = code((ROOT / "ds4mlx/cli.py").read_text())
    assert re.findall(r".*\benviron\b.*", source) == [
        "    names = sorted((name for name in os.environ if name.startswith('DS4MLX_')))"
    ]


@pytest.mark.parametrize("folder", ["convert", "ds4mlx/ops"])
def test_convert_and_ops_know_nothing_of_the_model(folder):
    paths = [p for p in PACKAGE if name(p).startswith(f"{folder}/")]
    own = {p.stem for p in paths}
    known = {name(p): imported(p.read_text()) & (ROOMS - own) for p in paths}
    assert paths and not any(known.values()), known


def test_convert_does_not_know_mlx():
    assert not [
        name(p) for p in (ROOT / "convert").glob("*.py") if "mlx" in imported(p.read_text())
    ]


@pytest.mark.parametrize("module", sorted(p.stem for p in PACKAGE if p.stem in ("target", "draft")))
def test_modules_change_no_state_outside_init(module):
    assert changes_of_state((ROOT / f"ds4mlx/{module}.py").read_text()) == []


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_a_file_says_what_it_is_for_and_can_be_read_at_once(path):
    assert oversized(path.read_text()) == []


def test_no_text_file_names_a_path_of_one_machine():
    found = {name(p): machine_paths(p.read_text(errors="replace")) for p in text_files()}
    assert {path: paths for path, paths in found.items() if paths} == {}


def test_the_links_lead_to_the_top_level():
    for folder in ("convert", "metal"):
        assert (ROOT / "ds4mlx" / folder).resolve() == ROOT / folder
        assert (ROOT / "ds4mlx" / folder).readlink() == Path("..") / folder


# The checks themselves ------------------------------------------------------------------------


def test_a_missing_test_op_or_kernel_is_seen():
    assert unpaired({"a", "b"}, {"a"}, set()) == {"b"}
    assert unpaired({"a"}, {"a", "b"}, set()) == {"b"}
    assert unpaired({"a"}, {"a"}, {"b"}) == {"b"}


OFFENCES = [
    ("kernels are built in one place", "k = mx.fast.metal_kernel(name)"),
    ("kernels are built in one place", "k = mx.fast.cuda_kernel(name)"),
    ("few places wait for the GPU", "mx.eval(x)"),
    ("few places wait for the GPU", "mx.async_eval(x)"),
    ("few places wait for the GPU", "mx.synchronize()"),
    ("few places wait for the GPU", "x.item()"),
    ("few places wait for the GPU", "x.tolist()"),
    ("only the command line prints", "print(x)"),
    ("no environment variable is a switch", "x = os.environ['X']"),
    ("no environment variable is a switch", "x = os.getenv('X')"),
]


@pytest.mark.parametrize("law, line", OFFENCES)
def test_an_offending_line_is_seen(law, line):
    assert re.search(PATTERNS[law][0], code(f"def f():\n    {line}"))
    assert not re.search(PATTERNS[law][0], code(f'def f():\n    """{line}"""  # {line}'))


@pytest.mark.parametrize(
    "line",
    [
        *("from ..target import Target", "from .. import cache", "import ds4mlx.api"),
        *("from ds4mlx.generate import x", "def f():\n    from ..cli import main"),
        "from ds4mlx import draft",
    ],
)
def test_an_import_of_the_model_is_seen(line):
    assert imported(line) & ROOMS


@pytest.mark.parametrize("line", ["from functools import cache", "import numpy as np"])
def test_other_imports_pass(line):
    assert not imported(line) & ROOMS


@pytest.mark.parametrize(
    "line",
    [
        *("self.x = 1", "self.x += 1", "self.x: int = 1", "self.x[0] = 1", "a, self.x = 1, 2"),
        *("del self.x", "setattr(self, 'x', 1)", "cache.rows[i] = x", "for self.x in y: pass"),
    ],
)
def test_a_change_of_state_is_seen(line):
    code = "class A:\n  def __init__(self):\n    self.x = 1\n  def __call__(self):\n    "
    assert changes_of_state(code + line) == [5]
    assert changes_of_state(code + "x = self.x\n    x[self.i] = 1") == []


def test_what_is_too_long_or_unexplained_is_seen():
    assert oversized('"""For a."""\n') == []
    assert oversized("x = 1\n") == ["no docstring"]
    assert oversized('"""For a."""\n' + "\n" * 600) == ["601 lines"]
    long = '"""For a."""\ndef f():\n' + "    x = 1\n" * 90
    assert oversized(long) == ["f has 91 lines"]


def test_a_path_of_one_machine_is_seen():
    for folder in ("work", "tmp", "root"):
        assert machine_paths(f"see /{folder}/x") and machine_paths(f'"/{folder}/x"')
    assert machine_paths("https://example.org/work/x ../tmp/y a/root/b") == []
