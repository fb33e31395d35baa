"""What the package shows to the outside: public names, policies, and the tree in the README."""

import ast
import inspect
import re
from pathlib import Path

import flexcp
import flexcp.core.errors
from flexcp.planner import POLICIES

ROOT = Path(__file__).parents[2]


def test_public_names_are_listed_and_sorted():
    """`__all__` is exactly what is visible, in order, each name real."""
    visible = {name for name in vars(flexcp) if not name.startswith("_")}
    modules = {name for name in visible if inspect.ismodule(getattr(flexcp, name))}
    hidden = {"TYPE_CHECKING", "annotations"}

    assert sorted(flexcp.__all__) == flexcp.__all__
    assert visible - modules - hidden <= set(flexcp.__all__)
    # megatron-core is imported in the processes of its own tests: that takes long, and warns.
    assert all(getattr(flexcp, name) is not None for name in flexcp.__all__ if name != "megatron")
    assert dir(flexcp) == flexcp.__all__


def test_unknown_name_is_an_attribute_error():
    """The lazy door opens for `Engine` only."""
    assert not hasattr(flexcp, "Motor")


def test_same_call_for_every_policy():
    """A policy can be swapped for another without touching its users."""
    calls = {name: list(inspect.signature(policy).parameters) for name, policy in POLICIES.items()}

    assert {"static", "paper", "flexcp"} <= set(calls)
    assert len({tuple(parameters) for parameters in calls.values()}) == 1, calls


def test_readme_tree_is_the_tree_on_disk():
    """The annotated tree at the end of the README lists exactly the files there are (`make readme`)."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```text\n(src/.*?)```", readme, flags=re.S)[-1]
    shown = set(_paths(block))
    on_disk = {
        str(path.relative_to(ROOT))
        for folder in ("src", "docs", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.name != "__init__.py" and "__pycache__" not in path.parts
    }

    assert on_disk == shown


def _paths(block: str) -> list[str]:
    """Full paths from an indented tree: two spaces a level, names before two spaces and a remark."""
    stack: list[str] = []
    paths = []
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0]
        stack = stack[:depth]
        if names.endswith("/"):
            stack.append(names)
        else:
            paths += ["".join(stack) + name for name in names.split()]
    return paths


def test_every_error_for_a_user_has_a_remedy():
    """One line of cause, one line of what to do: an error raised with a cause alone is half an error."""
    plain = set(flexcp.core.errors._kinds(flexcp.FlexCPError)) - {
        "PlanError",  # lists violations
        "SampleTooLongError",
        "UnknownNameError",
        "MissingExtraError",
    }
    halves = []
    for path in sorted(Path(flexcp.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(raised, ast.Call) or getattr(raised.func, "id", "") not in plain:
                continue
            if len(raised.args) < 2:
                halves.append(f"{path.name}:{node.lineno}")

    assert halves == []
