"""Writes the annotated file tree at the end of the README from what the files say of themselves."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "examples", "benchmarks")
REMARK_COLUMN, WIDTH = 28, 130


def tree(folder: Path, depth: int = 0) -> Iterator[str]:
    """One line a file or folder, folders after files, two spaces a level."""
    yield line(folder.name + "/", remark(folder / "__init__.py"), depth)
    entries = [e for e in sorted(folder.iterdir()) if e.name not in ("__init__.py", "__pycache__")]
    for file in (e for e in entries if e.is_file()):
        yield line(file.name, remark(file), depth + 1)
    for inner in (e for e in entries if e.is_dir() and any(e.iterdir())):
        yield from tree(inner, depth + 1)


def line(name: str, text: str, depth: int) -> str:
    """Name, then its remark in one column, cut at a word to the width of a page."""
    start = "  " * depth + name
    start += " " * max(2, REMARK_COLUMN - len(start))
    room = WIDTH - len(start)
    if len(text) > room:
        text = text[: room - 2].rsplit(" ", 1)[0].rstrip(",;") + " …"
    return (start + text).rstrip()


def remark(file: Path) -> str:
    """The first sentence of a module, or the first comment of any other file."""
    if not file.exists():
        return ""
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    elif file.suffix in (".toml", ".md"):
        text = file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
    elif file.suffix in (".css", ".js"):
        text = file.read_text(encoding="utf-8").split("\n", 1)[0].strip("/* ")
    else:
        text = ""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    return re.split(r"(?<=[a-z`)])\.(?: |$)|; ", paragraph)[0]


def main() -> None:
    """Replace the last text block of the README."""
    lines = [text for name in FOLDERS if any((ROOT / name).glob("*")) for text in tree(ROOT / name)]
    readme = ROOT / "README.md"
    before, _ = readme.read_text(encoding="utf-8").split("## Files\n", 1)
    block = "\n".join(lines)
    readme.write_text(f"{before}## Files\n\n```text\n{block}\n```\n", encoding="utf-8")


if __name__ == "__main__":
    main()
