"""The house rules that no linter knows: what imports cost, what files look like, whether the documents are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "flowbench/README.md", "framework/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PURE = ("flowbench/judge", "flowbench/report")

# Calls that reach outside the process or ask for the time. Reading a template that lies in the package is no I/O.
IMPURE_NAMES = {"open", "print", "input", "breakpoint", "exec", "eval", "__import__"}
IMPURE_METHODS = set(
    "write_text write_bytes read_text read_bytes open unlink mkdir rmdir touch rename exists now today utcnow getenv"
    " perf_counter to_excel read_csv".split()
)
# These write to the place they are given, and return what they would write where they are given none.
WRITERS = {"to_csv", "to_parquet"}
IMPURE_MODULES = set(
    "os socket subprocess time shutil tempfile pathlib urllib http threading multiprocessing random secrets uuid psutil"
    " requests asyncio ctypes logging signal select mmap glob".split()
)


def sources(*places: str) -> list[str]:
    """The Python files in the given folders, and the files given, from the root."""
    found = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def python(code: str) -> str:
    """What a fresh Python prints for `code`, run in the root of the repository."""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_framework_needs_numpy_alone() -> None:
    blocked = ["click", "rich", "psutil", "torch", "torchvision", "cupy", "flowbench", "pandas", "jinja2", "scipy"]
    python(f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it raises ImportError
import framework as flow
flow.tensor([1.0, 2.0])
""")


def test_framework_imports_little() -> None:
    new = python("""
import sys, numpy
before = set(sys.modules)
import framework
print(*sorted(set(sys.modules) - before))
""").split()
    own = [name for name in new if name.split(".")[0] == "framework"]
    other = [name for name in new if name.split(".")[0] != "framework"]
    assert len(other) <= 40, f"import framework loads {len(other)} modules beside NumPy's and its own: {other}"
    assert len(own) <= 120


def test_flowbench_help_imports_no_framework() -> None:
    loaded = python("""
import contextlib, io, sys
from flowbench.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    main(["--help"])
assert "run" in said.getvalue()
print(*sorted({name.split(".")[0] for name in sys.modules}))
""").split()
    assert not set(loaded) & {"torch", "torchvision", "framework", "cupy", "pandas", "scipy", "pytest"}


@pytest.mark.parametrize("package", ["framework", "flowbench"])
def test_neither_package_needs_torch_or_cupy(package: str) -> None:
    python(f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(["torch", "torchvision", "cupy"]))
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    # The engines of torch and the GPU's kernels are the rooms that may ask for them.
    if not module.name.startswith(("flowbench.engines.", "framework.kernels.cuda", "flowbench.pytest_plugin")):
        importlib.import_module(module.name)
""")


@pytest.mark.parametrize("path", sources("framework", "flowbench", "suites", "tests", "noxfile.py"))
def test_a_file_opens_with_a_sentence_and_its_functions_are_short(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    sentence = (ast.get_docstring(tree) or "").split("\n\n")[0].strip()
    assert sentence.endswith((".", ":", "`")), f"{path} has to open with a sentence that says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 70, f"{path}: {node.name} has {length} lines, a function has 70 at most"


@pytest.mark.parametrize("path", sources(*PURE))
def test_judge_and_report_do_no_input_or_output(path: str) -> None:
    assert list(impurities((ROOT / path).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "open('x')",
        "import os",
        "import os.path as p",
        "from time import perf_counter",
        "from pathlib import Path",
        "Path('x').write_text('y')",
        "import socket",
        "def f():\n    import subprocess",
        "datetime.now()",
        "date.today()",
        "print('x')",
        "frame.to_csv('x')",
        "frame.to_parquet(path=place)",
        "frame.to_csv(**options)",
    ],
)
def test_input_and_output_are_found(code: str) -> None:
    assert list(impurities(code))


@pytest.mark.parametrize(
    "code",
    [
        "frame.to_csv(index=False)",
        "x.opened",
        "text.format(1)",
        "import statistics",
        "from math import pi",
        "opened(1)",
    ],
)
def test_what_is_pure_passes(code: str) -> None:
    assert not list(impurities(code))


def impurities(code: str) -> Iterator[str]:
    """The imports and calls in `code` by which it could reach a file, the network, another process or a clock."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        else:
            names = []
        yield from (f"line {node.lineno}: imports {name}" for name in names if name in IMPURE_MODULES)
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in IMPURE_NAMES:
                yield f"line {node.lineno}: calls {function.id}"
            writes = isinstance(function, ast.Attribute) and function.attr in WRITERS
            if writes and (node.args or {word.arg for word in node.keywords} & {"path", "path_or_buf", None}):
                yield f"line {node.lineno}: writes by .{function.attr}"
            if isinstance(function, ast.Attribute) and function.attr in IMPURE_METHODS:
                yield f"line {node.lineno}: calls .{function.attr}"


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert python("import flowbench; print(flowbench.__version__)") == project["version"]


def test_documents_name_sessions_that_exist() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for document in DOCUMENTS:
        named = set(re.findall(r"nox (?:--no-venv )?-s (\w+)", (ROOT / document).read_text()))
        assert named <= known, f"{document} names {named - known}, noxfile.py has {known}"
    assert {"bench", "tests", "lint"} <= known


def test_documents_name_commands_that_exist() -> None:
    from flowbench.cli import cli

    for document in DOCUMENTS:
        named = set(re.findall(r"`flowbench (\w+)", (ROOT / document).read_text()))
        assert named <= set(cli.commands), f"{document} names commands that flowbench does not have"


def test_documents_name_files_that_exist() -> None:
    ending = re.compile(r"[\w./*-]+\.(?:py|toml|md|yml|cu)|[\w.-]+(?:/[\w.-]+)*/")
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        # What a recipe tells its reader to create stands in angle brackets' company: `my_…` or NAME.
        quoted = [word for word in re.findall(r"`([^`\n]+)`", text) if ending.fullmatch(word)]
        linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        for name in filter(None, quoted):
            made_later = name.startswith("reports/out") or "my_" in name
            assert made_later or any(ROOT.glob(name)), f"{document} names {name}, which is not there"
        for name in filter(None, linked):
            assert ((ROOT / document).parent / name).exists(), f"{document} links {name}, which is not there"


def test_the_readme_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"\w+", row)}
    assert set(extras) == listed


def test_actions_are_pinned_with_their_version() -> None:
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for line in workflow.read_text().splitlines():
            if "uses:" in line and "uses: ./" not in line:
                assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d", line), f"{workflow.name}: {line.strip()}"
