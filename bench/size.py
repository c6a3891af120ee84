"""Lines per file and the longest functions: a number for every review.

.venv/bin/python -m bench.size
"""

import ast
from pathlib import Path

ROOMS = tuple(sorted(path.parent.name for path in Path().glob("*/__init__.py")))
LONGEST_SHOWN = 15


def main() -> None:
    """Print a table per room, the longest files and the longest functions."""
    files = {path: path.read_text() for room in ROOMS for path in sorted(Path(room).rglob("*.py"))}
    lines = {path: text.count("\n") for path, text in files.items()}
    print(f"{'room':<18}{'files':>6}{'lines':>8}{'longest':>9}")
    for room in ROOMS:
        sizes = [count for path, count in lines.items() if path.parts[0] == room]
        print(f"{room:<18}{len(sizes):>6}{sum(sizes):>8}{max(sizes, default=0):>9}")
    print(f"{'total':<18}{len(lines):>6}{sum(lines.values()):>8}\n")
    print("longest files")
    for path in sorted(lines, key=lambda path: -lines[path])[:LONGEST_SHOWN]:
        print(f"{lines[path]:>6}  {path}")
    print("longest functions")
    functions = [entry for path, text in files.items() for entry in _functions(path, text)]
    for length, name in sorted(functions, reverse=True)[:LONGEST_SHOWN]:
        print(f"{length:>6}  {name}")


def _functions(path: Path, text: str) -> list[tuple[int, str]]:
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


if __name__ == "__main__":
    main()
