"""Metal text to C++, CUDA or C++ for OpenCL, token by token; every line keeps its number.

Touched are only: address spaces, [[attributes]], literals (`1.0`, `1.0h`, `1.0bf`), the type
`char` (signed in Metal), constant tables and, in a kernel's `call`, threadgroup variables.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import Ds4Error

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|//[^\n]*|/\*.*?\*/)+)
    |(?P<directive>\#[^\n]*(?:(?<=\\)\n[^\n]*)*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>0[xX]\w+|\.?\d(?:[eE][+-]|[\w.])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>.)""",
    re.X | re.S,
)
_FLOAT = re.compile(r"((?:\d+\.\d*|\.\d+|\d+(?=[eEhb]))(?:[eE][+-]?\d+)?)(h|H|bf|BF)?")
_VECTOR = re.compile(r"(?:char|uchar|short|ushort|int|uint|long|ulong|half|float)[234]")
_TYPE = r"(?:const\s+)?[\w:]+(?:<[\w\s,]*>)?"
_CV = {"const", "constexpr"}


@dataclass
class Dialect:
    """How a target spells what C++ lacks; a threadgroup variable has `type`, `name`, `dims`."""

    table: str  # starts the declaration of a constant table
    variable: str  # declares a threadgroup variable
    spaces: dict[str, str] = field(default_factory=dict)  # address spaces that are kept
    vector: str = ""  # prefix of a vector type in a constructor call


CPU = Dialect(
    table="static const",
    variable="typedef {type} {name}_tg{dims}; "
    '{name}_tg& {name} = msl::threadgroup_variable<{name}_tg>({id}, "{name}");',
)
CUDA = Dialect(table="__device__ static const", variable="__shared__ {type} {name}{dims};")
OPENCL = Dialect(
    table="__constant",
    variable="typedef {type} {name}_tg{dims}; __local {name}_tg& {name} = *(__local {name}_tg*)16;",
    spaces={
        "device": "__global",
        "constant": "__constant",
        "thread": "__private",
        "threadgroup": "__local",
    },
    vector="make_",
)


def rewrite(text: str, dialect: Dialect, *, body: bool = False) -> str:
    """The text of a .metal file, or with `body` of a kernel's `call`, in another dialect."""
    return "".join(_Rewriter(text, dialect, body).pieces())


class _Rewriter:
    def __init__(self, text: str, dialect: Dialect, body: bool):
        self.dialect, self.body = dialect, body
        self.tokens = [(m.lastgroup, m[0]) for m in _TOKEN.finditer(text)]
        self.at, self.depth, self.variables = 0, 0, 0
        self.previous = ";"  # the last token that is neither space nor directive

    def pieces(self) -> Iterator[str]:
        while self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            self.at += 1
            yield getattr(self, kind)(text)
            if kind not in ("space", "directive"):
                self.previous = text

    def space(self, text: str) -> str:
        return re.sub(
            r"//[^\n]*|/\*.*?\*/", lambda m: " " + "\n" * m[0].count("\n"), text, flags=re.S
        )

    def directive(self, text: str) -> str:
        head = re.match(r"#\s*define\s+\w+(?:\([^)]*\))?", text)
        if not head:
            return text
        return head[0] + rewrite(text[head.end() :], self.dialect, body=True)

    def string(self, text: str) -> str:
        return text

    def number(self, text: str) -> str:
        m = _FLOAT.fullmatch(text)
        if not m:
            return text
        value = m[1] if re.search(r"[.eE]", m[1]) else m[1] + "."
        kind = {"h": "half", "b": "bfloat"}.get((m[2] or "")[:1].lower())
        return f"(({kind}){value}f)" if kind else f"{value}f"

    def name(self, text: str) -> str:
        start = self.previous in (";", "{", "}")
        if text == "threadgroup" and start and (variable := self.threadgroup_variable()):
            return variable
        if text == "constant" and start and self.depth == 0 and not self.body:
            self.drop_cv()
            return self.dialect.table
        if text in self.dialect.spaces:
            return self.dialect.spaces[text]
        if text == "constant":
            return "" if self.beside_const() else "const"
        if text in ("device", "thread", "threadgroup"):
            return ""
        if text == "char" and not self.dialect.vector:
            return "int8_t"
        if self.dialect.vector and _VECTOR.fullmatch(text) and self.ahead(0) == "(":
            return text if self.ahead(1) in ("*", "&") else self.dialect.vector + text
        return text

    def mark(self, text: str) -> str:
        if text == "[" and self.at < len(self.tokens) and self.tokens[self.at][1] == "[":
            return self.drop_attribute()
        self.depth += {"{": 1, "}": -1}.get(text, 0)
        return text

    def ahead(self, n: int) -> str:
        """The n-th of the tokens to come, spaces left out."""
        rest = (t for k, t in self.tokens[self.at : self.at + 2 * n + 2] if k != "space")
        return next((t for i, t in enumerate(rest) if i == n), "")

    def drop_attribute(self) -> str:
        lines, deep = 0, 1
        while deep:
            text = self.tokens[self.at][1]
            deep += {"[": 1, "]": -1}.get(text, 0)
            lines += text.count("\n")
            self.at += 1
        return "\n" * lines

    def drop_cv(self):
        """Skip `const` or `constexpr` if it follows."""
        seen = self.ahead(0)
        if seen in _CV:
            while self.tokens[self.at][1] != seen:
                self.at += 1
            self.at += 1

    def beside_const(self) -> bool:
        if self.previous in _CV:
            return True
        n = 0
        while re.fullmatch(r"\w+|:", word := self.ahead(n)):
            if word in _CV:
                return True
            n += 1
        return False

    def threadgroup_variable(self) -> str:
        """The declaration that starts here, or nothing if a pointer is declared."""
        end = next(i for i in range(self.at, len(self.tokens)) if self.tokens[i][1] == ";")
        text = "".join(t for _, t in self.tokens[self.at : end])
        m = re.fullmatch(rf"\s*({_TYPE})\s+(\w+)\s*((?:\[[^\]]*\]\s*)*)", text)
        if not m:
            if re.match(rf"\s*{_TYPE}\s*[*&(]", text):
                return ""
            raise Ds4Error(f"threadgroup{text};: declare one variable, without a first value")
        if not self.body:
            raise Ds4Error(f"threadgroup{text};: only the kernel's call may declare it")
        # The `;` stays: what follows it starts a statement.
        self.at, self.variables = end, self.variables + 1
        type_ = rewrite(m[1], self.dialect, body=True)
        declared = self.dialect.variable.format(
            type=type_, name=m[2], dims=m[3].strip(), id=self.variables
        )
        return declared + "\n" * text.count("\n")
