"""The small changes that a mutation test makes to a source file: text in, changes out (T12).

A change replaces one piece of the text. Texts in SQL, in Lua and in DynamoDB's expressions are
changed too, because the stores' rules are written in them.
"""

import ast
import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

Place = ast.expr | ast.stmt | ast.keyword
Function = ast.FunctionDef | ast.AsyncFunctionDef
SHIFTED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
FOREIGN = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE)\b|redis\.call|\blocal \w|[<>=] :\w")
"""Tells a text that a server runs from one that people read."""
WORDS = {
    " <= ": " < ",
    " < ": " <= ",
    " >= ": " > ",
    " > ": " >= ",
    " == ": " ~= ",
    " ~= ": " == ",
    " AND ": " OR ",
    " OR ": " AND ",
    " and ": " or ",
    " or ": " and ",
    " + ": " - ",
    " - ": " + ",
    " = :": " <> :",
    " IS NULL": " IS NOT NULL",
    " IS NOT NULL": " IS NULL",
    "attribute_exists": "attribute_not_exists",
    "attribute_not_exists": "attribute_exists",
    " if not ": " if ",
}
WORD = re.compile("|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True)))
STEP = re.compile(r"^ *(redis\.call\(.*\)|\w[\w.\[\]]* = .+)$")
"""A line of Lua that does something by itself."""
COMMA = re.compile(rb"\s*, *")
SPOKEN = re.compile(r"^(self\.)?_?(log|logger|logs|warnings)\b")


class Change(NamedTuple):
    """One piece of a file's text (in bytes) and what stands there instead."""

    path: str
    line: int
    last: int
    start: int
    end: int
    new: str
    function: tuple[int, int] | None
    """The lines of the body of the function around it; none: it runs on import."""

    def applied(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def diff(self, source: str) -> list[str]:
        """The lines that go, with `-`, and those that come, with `+`."""
        lines = difflib.unified_diff(
            source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0
        )
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def changes(path: str, source: str) -> list[Change]:
    """All changes to one file, in the order of its text."""
    text = source.encode()
    starts = [0]
    for row in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(row))
    found: dict[tuple[int, int, str], Change] = {}

    for node, function in walked(ast.parse(source)):
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        start, end = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column
        if isinstance(node, ast.keyword) and (comma := COMMA.match(text, end)):
            end = comma.end()
        around = (function.body[0].lineno, function.end_lineno or 0) if function else None
        piece = text[start:end].decode()
        for first, length, new in replaced(node, piece):
            line = node.lineno + piece[:first].count("\n")
            at = start + len(piece[:first].encode())
            till = at + len(piece[first : first + length].encode())
            until = line if length < len(piece) else last
            change = Change(path, line, until, at, till, new, around)
            if piece[first : first + length] != new:
                found.setdefault((at, till, new), change)
    return sorted(found.values(), key=lambda change: (change.start, change.end, change.new))


def replaced(node: Place, piece: str) -> Iterator[tuple[int, int, str]]:
    """Where in a node's text something changes, for how many characters, and into what."""
    if isinstance(node, ast.keyword):
        if node.arg and node.arg != "name":  # which stands in errors
            yield 0, len(piece), ""
    elif isinstance(node, ast.JoinedStr) or is_text(node):
        yield from retold(piece) if FOREIGN.search(piece) else ()
    else:
        yield from ((0, len(piece), new) for new in rewritten(node))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def walked(tree: ast.AST) -> Iterator[tuple[Place, Function | None]]:
    """Every node that may change, with the function around it."""
    waiting: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, Place):
            yield node, function
        inner = node if isinstance(node, Function) else function
        waiting += [(child, inner) for child in children(node)]


def children(node: ast.AST) -> list[ast.AST]:
    """Without what no test could notice: types, decorators, docstrings, texts for people."""
    match node:
        case ast.ClassDef() if any("Protocol" in ast.unparse(base) for base in node.bases):
            return []
        case ast.ClassDef() | ast.Module():
            return list(node.body)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if any("overload" in ast.unparse(it) for it in node.decorator_list):
                return []
            defaults = [it for it in (*node.args.defaults, *node.args.kw_defaults) if it]
            return [*defaults, *node.body]
        case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
            return list(node.orelse)
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.Assign() if ast.unparse(node.targets[0]) in {"__all__", "__slots__"}:
            return []
        case ast.Call(ast.Name("TypeVar" | "ParamSpec")):
            return []
        case ast.Assert() | ast.JoinedStr() | ast.Raise() | ast.Expr(value=ast.Constant()):
            return []
        case ast.Expr(value=ast.Call() as call) if SPOKEN.match(ast.unparse(call.func)):
            return []
    return list(ast.iter_child_nodes(node))


def rewritten(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may stand in a node's place."""
    match node:
        case ast.Compare(left, [op], [right]):
            for other in SHIFTED[type(op)]:
                yield ast.unparse(ast.Compare(left, [other()], [right]))
        case ast.Compare(left, [first, *others], right):
            for other in SHIFTED[type(first)]:
                yield ast.unparse(ast.Compare(left, [other(), *others], right))
        case ast.BoolOp(op, values):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(swapped, values))})"
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                left = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                yield f"({ast.unparse(left)})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield repr(value + 1 if value < 10 else value * 2)
        case ast.BinOp(left, op, right) if type(op) in COUNTED and not is_text(right):
            yield f"({ast.unparse(ast.BinOp(left, COUNTED[type(op)](), right))})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Call(ast.Name(name), args, _) if name in OPPOSITE and args:
            yield ast.unparse(ast.Call(ast.Name(OPPOSITE[name]), args, node.keywords))
        case ast.Return(value) if value and ast.unparse(value) not in {"None", "False"}:
            yield "return None"
        case ast.Expr(ast.Call() | ast.Await()):
            call = node.value.value if isinstance(node.value, ast.Await) else node.value
            if not (isinstance(call, ast.Call) and SPOKEN.match(ast.unparse(call.func))):
                yield "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript(), *_]) | ast.Delete():
            yield "pass"
        case ast.AugAssign() if ast.unparse(node.target) != "__all__":
            yield "pass"
        case ast.Raise() | ast.Continue() | ast.Break():
            yield "pass"


def retold(piece: str) -> Iterator[tuple[int, int, str]]:
    """Of a text in another language: where it changes, and into what."""
    at = 0
    for line in piece.splitlines(keepends=True):
        if not line.lstrip().startswith("--"):
            for word in WORD.finditer(line):
                yield at + word.start(), len(word[0]), WORDS[word[0]]
            if "redis.call" in piece and (step := STEP.match(line.rstrip())):
                yield at + step.start(1), len(step[1]), ""
        at += len(line)
