"""Counts the code of every folder and holds it to its budget: `python benchmarks/budgets.py`.

A code line holds at least one token that is neither comment nor docstring. Exits with 1 when a
folder or a file is over its limit; long functions are only named, and kernels not even that.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    "registry",
    "core",
    "backends",
    "quant",
    "moe",
    "models",
    "plugins",
    "tests",
    "examples",
    "benchmarks",
)
MAX_FOLDER_LINES = {"registry": 4500, "core": 6000}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    breaches: list[str] = []
    long_functions: list[str] = []
    print(f"{'folder':<12}{'code':>7}{'limit':>7}{'files':>7}{'largest':>9}")
    for folder in FOLDERS:
        sizes: list[int] = []
        for path in sorted((root / folder).rglob("*.py")):
            source, place = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
            tree = ast.parse(source)
            lines = code_lines(source) - docstring_lines(tree)
            sizes.append(len(lines))
            if len(lines) > MAX_FILE_LINES:
                breaches.append(f"{place}: {len(lines)} lines of at most {MAX_FILE_LINES}")
            for function in functions(tree):
                size = len(lines.intersection(span(function)))
                if size > MAX_FUNCTION_LINES and not is_kernel(function):
                    long_functions.append(f"{place}:{function.lineno} {function.name}: {size}")
        if not sizes:
            continue
        total, limit = sum(sizes), MAX_FOLDER_LINES.get(folder)
        print(f"{folder:<12}{total:>7}{limit or '-':>7}{len(sizes):>7}{max(sizes):>9}")
        if limit and total > limit:
            breaches.append(f"{folder}/: {total} lines of at most {limit}")
    report(f"functions over {MAX_FUNCTION_LINES} lines", long_functions)
    report("over budget", breaches)
    return 1 if breaches else 0


def report(title: str, entries: list[str]) -> None:
    if entries:
        print(f"\n{title}:", *entries, sep="\n  ")


def code_lines(source: str) -> set[int]:
    """Numbers of the lines with a token that is neither comment nor layout."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of docstrings, those below a constant or a field included."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(span(node))
    return lines


def span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether a decorator is a just-in-time compiler's: `@triton.jit`, `@jit(...)`."""
    names = (node for decorator in function.decorator_list for node in ast.walk(decorator))
    return any("jit" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in names)


if __name__ == "__main__":
    sys.exit(main())
