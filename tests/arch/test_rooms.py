"""The shape of the house: sizes, docstrings, import directions, and what may be used where."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "flexcp"
MAX_FILE_LINES, MAX_FUNCTION_LINES, P90_FUNCTION_LINES = 400, 60, 35


def sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, signature and docstring not counted: they are for the reader."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_every_module_says_what_it_is():
    """Every module opens with a docstring."""
    silent = [name for name, tree in trees(sources()) if not ast.get_docstring(tree)]

    assert silent == []


def test_files_are_small():
    """A file that grows past the limit is two files."""
    sizes = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in sources()}

    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_are_small():
    """No function above the limit, and nine of ten well below it."""
    sizes = {f"{name}:{f.name}": lines_of_code(f) for name, tree in trees(sources()) for f in functions(tree)}

    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}
    assert statistics.quantiles(sizes.values(), n=10)[-1] <= P90_FUNCTION_LINES


def test_no_print_in_the_library():
    """The command line prints through rich or typer; the library returns values."""
    calls = [
        f"{name}:{node.lineno}"
        for name, tree in trees(sources())
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]

    assert calls == []


def test_environment_variables_only_at_the_launcher():
    """No hidden switches: only the launcher reads or writes the environment."""
    touching = {
        name
        for name, tree in trees(sources())
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"})
        or (isinstance(node, ast.alias) and node.name in {"environ", "getenv"})
    }

    assert touching <= {"src/flexcp/runtime/launch.py"}


def test_nothing_from_outside_is_unpickled():
    """The launcher talks to its children; `safe_reader` knows a list of names; weights load as weights."""
    pickling, unsafe = set(), []
    for name, tree in trees(sources()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(
                a.name in {"pickle", "dill", "shelve"} for a in node.names
            ):
                pickling.add(name)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load":
                said = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                module = getattr(node.func.value, "id", "")  # type: ignore[attr-defined]
                if (module == "torch" and said.get("weights_only") is not True) or (
                    module == "np" and said.get("allow_pickle") is not False
                ):
                    unsafe.append(f"{name}:{node.lineno}")

    assert pickling <= {f"src/flexcp/runtime/{name}.py" for name in ("launch", "rank_process", "safe_reader")}
    assert unsafe == []


def test_imports_point_down_only():
    """The layers of pyproject.toml hold."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout


def test_every_test_compares_with_something():
    """A test without assert, raises or assert_close proves nothing."""
    idle = [
        f"{name}:{function.name}"
        for name, tree in trees(sorted((ROOT / "tests").rglob("test_*.py")))
        for function in functions(tree)
        if function.name.startswith("test_") and not _asserts(function, _asserting_helpers(tree))
    ]

    assert idle == []


def _asserting_helpers(tree: ast.Module) -> set[str]:
    """Functions of the same file that assert; one level is enough, deeper is hard to follow."""
    return {f.name for f in functions(tree) if not f.name.startswith("test_") and _asserts(f, set())}


def _asserts(function: ast.AST, helpers: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if (
                name in {"raises", "warns", "fail"}
                or name.startswith(("assert_", "expect_"))
                or name in helpers
            ):
                return True
    return False


@pytest.mark.parametrize("room", ["core", "cost", "planner", "report", "reproduce", "simulate"])
def test_heart_never_names_torch(room):
    """Not even inside a function: the heart plans on a laptop."""
    naming = [
        f"{name}:{node.lineno}"
        for name, tree in trees(sorted((SRC / room).rglob("*.py")))
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "torch" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
    ]

    assert naming == []
