"""PTX, as nvcc writes it, to C++ that the host shim runs.

Every function becomes a function and every instruction a line: `add.rn.f32 %f1, %f2, %f3;` becomes
`_f1 = add_rn<f32>(_f2, _f3);`. Registers are unsigned integers of their size. The instructions are
defined in machine.h; one that it does not have is an error of the C++ compiler.
"""

import re
from collections.abc import Iterator

_TYPES = frozenset(
    [f"{kind}{bits}" for kind in "bsu" for bits in (8, 16, 32, 64)]
    + ["f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "pred"]
)
_SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ntid.x": "blockDim.x",
    "%ctaid.x": "blockIdx.x",
    "%nctaid.x": "gridDim.x",
    "%laneid": "(threadIdx.x % 32)",
}  # fmt: skip
_NO_RESULT = re.compile(r"(st|bar|membar|fence|red|nanosleep|cp|trap|prefetch)\b")
# Functions that know where they are called, or that are overloaded: those that meet others are told
# apart by their places.
_PLACED = re.compile(r"vote|shfl|mma|bar|nanosleep|trap|mov")
# Of accesses: where but in shared memory an address is, what is cached, and how they are ordered
# with those of other threads, of which one runs at a time.
_FREE = re.compile(r"global|local|param|const|nc|c[gvs]|volatile|relaxed|acquire|release|gpu|weak")

# A bfloat16 is the upper half of a float32; sm_90 has an instruction for it, and sm_80 moves bits.
_WIDENED = re.compile(r"cvt\.f32\.bf16 (%\w+), ?(%\w+);")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_VARIABLE = r"(?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d*)\])?"  # alignment, type, name, count
_OF_MODULE = re.compile(rf"\.(global|const|shared) {_VARIABLE}(?: = ([^;]*))?;")
_OF_FUNCTION = re.compile(rf"\.(?:local|param) {_VARIABLE}")
_FUNCTION = re.compile(
    r"\.(entry|func)\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)[^;{]*([;{])", re.DOTALL
)
_STATEMENT = re.compile(
    r"\s*(?:(?P<label>[\w$]+):(?!:)|(?P<scope>[{}])"
    r"|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)


def _normalised(ptx: str) -> str:
    """What counts of a module, whatever its architecture."""
    ptx = re.sub(r"[ \t]+", " ", _COMMENT.sub("", ptx))
    return re.sub(r"\.target \w+", "", _WIDENED.sub(r"mov.b32 \1, {0,\2};", ptx))


def translate(ptx: str) -> str:
    """The C++ of a module; ValueError for what is not understood."""
    ptx = _normalised(ptx)
    functions = list(_functions(ptx))
    lines = ['#include "ptx/machine.h"', "namespace {"]
    lines += _module_variables(ptx)
    lines += [f"void {name}({_parameters(names)});" for _, name, names, _ in functions]
    code = []
    for kind, name, names, body in functions:
        code += [f"void {name}({_parameters(names)}) {{", *_body(body), "}"]
        if kind == "entry":
            given = ", ".join(f"p[{i}]" for i in range(len(names)))
            code.append(
                f'const Kernel kernel_{name}("{name}", [](char** p) {{ {name}({given}); }});'
            )
    return "\n".join([*lines, *_looked_up_once("\n".join(code)), "}", ""])


def _looked_up_once(code: str) -> Iterator[str]:
    """The code with a reference to each instance of a template before it: to find the instance
    again at every call is a fifth of the time that it takes to compile."""
    references: dict[str, str] = {}

    def reference(match: re.Match[str]) -> str:
        if _PLACED.match(match[1]):
            return match[0]
        name = "_".join([match[1], "of", *match[2].split(", ")])
        references[name] = f"{match[1]}<{match[2]}>"
        return f"{name}("

    code = re.sub(r"\b(\w+)<([\w, ]+)>\(", reference, code)
    yield from (f"constexpr auto& {name} = {whole};" for name, whole in references.items())
    yield code


def _functions(ptx: str) -> Iterator[tuple[str, str, list[str], str]]:
    """(entry or func, name, names of results and parameters, body) of each that has a body."""
    at = 0
    while match := _FUNCTION.search(ptx, at):
        at = match.end()
        if match[5] == ";":
            continue
        depth = 1
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(ptx[at], 0)
            at += 1
        declared = ",".join(filter(None, (match[2], match[4]))).split(",")
        names = [re.sub(r"\[\d*\]$", "", one.split()[-1]) for one in declared if one.strip()]
        yield match[1], match[3], names, ptx[match.end() : at - 1]


def _parameters(names: list[str]) -> str:
    return ", ".join(f"[[maybe_unused]] char* {name}" for name in names)


def _module_variables(ptx: str) -> Iterator[str]:
    """Those in global and constant memory, and the shared ones of all functions."""
    for space, align, kind, name, count, value in _OF_MODULE.findall(ptx):
        if len(re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", ptx)) < 2:
            continue  # headers of CUDA's library bring dozens
        if space != "shared":
            yield f"alignas({align}) Bits<{kind}> {name}[{count or 1}] = {{{value.strip('{}')}}};"
        elif "[]" in ptx[ptx.index(name) + len(name) :][:2]:
            yield f"constexpr u64 {name} = kDynamic;"
        else:
            size = int(count or 1) * _size(kind)
            yield f"alignas({align}) thread_local char of_{name}[{size}];"
            yield f"const Shared {name}(of_{name});"


def _size(kind: str) -> int:
    return int(re.sub(r"\D", "", kind)) // 8


def _body(body: str) -> Iterator[str]:
    tables: dict[str, list[str]] = {}  # of brx.idx, by their labels
    label = ""
    at = 0
    while body[at:].strip():
        match = _STATEMENT.match(body, at)
        if match is None:
            raise ValueError(f"no statement: {body[at : at + 80]!r}")
        at = match.end()
        if match["label"]:
            label = match["label"]
            yield f"{label}:;"
        elif match["scope"]:
            yield match["scope"]
        else:
            text = " ".join(match["text"].split())
            if text.startswith(".branchtargets"):
                tables[label] = text.split(maxsplit=1)[1].replace(" ", "").split(",")
            elif text.startswith("."):
                yield from _declaration(text)
            elif text:
                yield _instruction(text, tables)


def _declaration(text: str) -> Iterator[str]:
    if text.startswith(".reg"):
        _, kind, names = text.split(maxsplit=2)
        registers: list[str] = []
        for name in names.replace(" ", "").split(","):
            many = re.fullmatch(r"(.+)<(\d+)>", name)
            registers += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        yield f"[[maybe_unused]] Bits<{kind[1:]}> {', '.join(map(_operand, registers))};"
    elif text.startswith((".local", ".param")):
        match = _OF_FUNCTION.fullmatch(text)
        if match is None:
            raise ValueError(text)
        align, kind, name, count = match.groups()
        size = int(count or 1) * _size(kind)
        yield f"alignas({align or _size(kind)}) char {name}[{size}];"
    elif not text.startswith((".shared", ".loc", ".pragma", ".file")):
        raise ValueError(text)


def _instruction(text: str, tables: dict[str, list[str]]) -> str:
    guard = ""
    if match := re.match(r"@(!?)(%\w+) ", text):
        guard, text = f"if ({match[1]}{_operand(match[2])}) ", text[match.end() :]
    name, _, rest = text.partition(" ")
    operands = _split(rest)
    if name in ("bra", "bra.uni"):
        return f"{guard}goto {operands[0]};"
    if name in ("ret", "ret.uni"):
        return f"{guard}return;"
    if name == "brx.idx":
        cases = (f"case {i}: goto {target};" for i, target in enumerate(tables[operands[1]]))
        return f"{guard}switch ({_operand(operands[0])}) {{ {' '.join(cases)} }}"
    if name in ("call", "call.uni"):
        return guard + _call(operands)
    return f"{guard}{{ {_assigned(name, operands)} }}"


def _call(operands: list[str]) -> str:
    results = operands.pop(0) if operands[0].startswith("(") else "()"
    function, parameters = operands[0], operands[1] if len(operands) > 1 else "()"
    given = [one for group in (results, parameters) for one in _split(group[1:-1])]
    return f"{function}({', '.join(given)});"


def _assigned(text: str, operands: list[str]) -> str:
    name = _function(text, operands)
    if _NO_RESULT.match(text):
        return f"{name}({', '.join(map(_operand, operands))});"
    result, *given = operands
    value = f"{name}({', '.join(map(_operand, given))})"
    if result.startswith("{"):
        parts = [(i, _operand(part)) for i, part in enumerate(_split(result[1:-1])) if part != "_"]
        return f"const auto all = {value}; " + " ".join(f"{r} = all[{i}];" for i, r in parts)
    if "|" in result:
        first, second = map(_operand, result.split("|"))
        return f"const auto both = {value}; {first} = both.first; {second} = both.second;"
    return f"{_operand(result)} = {value};"


def _function(text: str, operands: list[str]) -> str:
    """Of an instruction: `mad.lo.s32` is mad_lo<s32>. Of loads and stores, how many elements
    they move, and whether in shared memory, is all that counts."""
    parts = text.split(".")
    types = [part for part in parts[1:] if part in _TYPES]
    words = [part for part in parts if part not in _TYPES]
    if words[0] in ("ld", "st", "atom", "red"):
        words = [word for word in words if not _FREE.fullmatch(word)]
    if words[0] in ("ld", "st"):
        vector = words.pop() if re.fullmatch(r"v\d", words[-1]) else "v1"
        types.append(vector[1:])
    elif words[0] == "mov" and any(operand.startswith("{") for operand in operands):
        vector = next(operand for operand in operands if operand.startswith("{"))
        words[0] = "unpack" if vector is operands[0] else "pack"
        types.append(str(len(_split(vector[1:-1]))))
    name = "_".join(words).replace("::", "_")
    name += "_" if name in ("and", "or", "xor", "not") else ""  # keywords of C++
    return name + (f"<{', '.join(types)}>" if types else "")


def _split(operands: str) -> list[str]:
    """At the commas outside of brackets."""
    return [one.strip() for one in re.split(r",(?![^{(]*[})])", operands) if one.strip()]


def _operand(text: str) -> str:
    text = text.strip()
    if text in _SPECIAL:
        return _SPECIAL[text]
    if text.startswith("!"):
        return f"!{_operand(text[1:])}"
    if text.startswith("{"):
        return f"{{{', '.join(map(_operand, _split(text[1:-1])))}}}"
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return f"address({_operand(base)}) + {_operand(offset or '0')}"
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        return f"0x{match[1]}ull"
    if match := re.fullmatch(r"(-?(?:0x[0-9A-Fa-f]+|\d+))U?", text):
        return f"{int(match[1], 0) % 2**64:#x}ull"
    if text.startswith("%"):
        return "_" + text[1:]
    if re.fullmatch(r"[\w$]+", text):
        return text
    raise ValueError(f"operand {text!r}")
