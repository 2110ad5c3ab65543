"""Compare a generated function with its reference in a separate, limited process.

The syntax tree is checked first: no import, no attribute or name with a leading underscore, a short list of built-ins.
"""

from __future__ import annotations

import ast
import json
import resource
import subprocess
import sys

SECONDS = 5
MEMORY = 512 * 2**20
ALLOWED_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For, ast.If,
    ast.Expr, ast.Call, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.List, ast.Tuple,
    ast.Attribute, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.IfExp, ast.ListComp,
    ast.comprehension, ast.GeneratorExp, ast.Continue, ast.Break, ast.Pass,
)  # fmt: skip
ALLOWED_METHODS = frozenset(
    ["append", "isdigit", "isalpha", "isupper", "islower", "isspace", "lower", "upper", "count"]
)
INPUTS: dict[str, list[object]] = {
    "numbers": [[], [0], [1, 2, 3, 4, 5, 6], list(range(-20, 21)), [7, -7, 14, 9, 27, 100, -100, 35]],
    "text": ["", "Hello World 42", "AEIOU aeiou xyz", "a1 B2 c3", "   "],
}
# Runs in the child with both sources on its standard input.
CHILD = """
import json, sys
job = json.load(sys.stdin)
safe = {"len": len, "sum": sum, "range": range, "str": str, "int": int, "max": max, "min": min}
safe["print"] = lambda *arguments: None
outputs = []
for source, name in job["functions"]:
    scope = {"__builtins__": safe}
    exec(source, scope)
    outputs.append([repr(scope[name](value)) for value in job["inputs"]])
print(json.dumps(outputs[0] == outputs[1]))
"""


def source_of(answer: str) -> str:
    """The text of the first Python block of an answer, or nothing."""
    _, opened, rest = answer.partition("```python\n")
    source, closed, _ = rest.partition("\n```")
    return source if opened and closed else ""


def parsed(source: str) -> tuple[ast.FunctionDef, list[str]] | None:
    """The single function of a source that keeps to the allowed syntax, and the statements beside it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            return None
        if isinstance(node, ast.Attribute) and node.attr not in ALLOWED_METHODS:
            return None
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return None
        # An exponent or a long repetition could fill the memory before the limit stops it.
        if isinstance(node, ast.Pow | ast.LShift):
            return None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1 or len(functions[0].args.args) != 1:
        return None
    return functions[0], [ast.dump(node) for node in tree.body if node is not functions[0]]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def same_behaviour(reference: str, answer: str) -> bool:
    """Whether the answer's function has the reference's name, docstring and results, and the same calls beside it."""
    sources = [source_of(reference), source_of(answer)]
    wanted, given = (parsed(source) for source in sources)
    if wanted is None or given is None:
        return False
    (one, beside_one), (two, beside_two) = wanted, given
    if one.name != two.name or beside_one != beside_two or ast.get_docstring(one) != ast.get_docstring(two):
        return False
    job = {"functions": [(s, one.name) for s in sources], "inputs": INPUTS[one.args.args[0].arg]}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", CHILD],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            preexec_fn=_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.strip() == "true"
