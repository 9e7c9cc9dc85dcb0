"""The rules of docs/design.md that a syntax tree can show: who may import whom, where arithmetic lives, sizes.

Nothing is imported or run. The arithmetic rule holds where the forward pass is written (`moe/`, and in `model/` the
files in FORWARD): `+ - * /`, reshape, indexing and `.shape` on arrays, and everything else through `Kernels`, because
that is what makes one forward run on every backend. Files of `model/` that read and write checkpoints are host code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "coterie"
ORDER = ["spec", "observe", "kernels", "comm", "cache", "moe", "model", "engine", "server", "cli"]
ALLOWED = {name: set(ORDER[: index + 1]) for index, name in enumerate(ORDER)}
ALLOWED["train"] = {"train", *ORDER[: ORDER.index("model") + 1]}
ALLOWED["planner"] = {"planner", "spec", "observe"}
ALLOWED["loadgen"] = {"loadgen", "spec"}
CLI_EXTRA = {"train", "planner", "loadgen"}

FORWARD = {"attention.py", "transformer.py", "mtp.py", "overlap.py"}
HOST_VARIABLES = {"received"}
ARRAY_MODULES = {"torch", "numpy", "np", "math"}
ARRAY_METHODS = frozenset(
    """
    sum mean max min prod argmax argmin argsort sort cumsum exp log sqrt rsqrt pow softmax sigmoid silu relu copy astype
    to clone contiguous matmul dot mm bmm einsum topk gather scatter scatter_add index_select index_add where
    masked_fill transpose permute view expand repeat squeeze unsqueeze flatten float half bfloat16 double clip clamp
    norm
    """.split()  # noqa: SIM905
)
LONGEST_FUNCTION, LONGEST_FILE = 60, 500
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save")}

FILES = sorted(SOURCE.rglob("*.py"))
FORWARD_FILES = [*sorted((SOURCE / "moe").glob("*.py")), *(SOURCE / "model" / name for name in sorted(FORWARD))]


def label(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            yield node.lineno, module
            if module == "coterie":
                yield from ((node.lineno, f"coterie.{alias.name}") for alias in node.names)


def wrong_arrows(tree: ast.AST, folder: str) -> list[str]:
    """Imports from `folder` that point to its right."""
    allowed = ALLOWED[folder] | (CLI_EXTRA if folder == "cli" else set())
    wrong = []
    for line, module in imported_modules(tree):
        parts = module.split(".")
        if parts[0] == "coterie" and len(parts) > 1 and parts[1] in ALLOWED and parts[1] not in allowed:
            wrong.append(f"line {line}: {folder} imports {module}")
    return wrong


def forbidden_arithmetic(tree: ast.AST) -> list[str]:
    """What the forward pass may not do itself. Host counters of the exchange (`received`, ...) may be summed."""
    wrong = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult | ast.Pow):
            wrong.append(f"line {line}: operator {type(node.op).__name__}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            root = next((name.id for name in ast.walk(owner) if isinstance(name, ast.Name)), "")
            if isinstance(owner, ast.Name) and owner.id in ARRAY_MODULES:
                wrong.append(f"line {line}: {owner.id}.{node.func.attr}()")
            elif node.func.attr in ARRAY_METHODS and not is_kernel_call(owner) and not is_host_sum(node, owner, root):
                wrong.append(f"line {line}: .{node.func.attr}()")
    return wrong


def is_kernel_call(owner: ast.expr) -> bool:
    """`kernels.norm(...)`, `self.kernels.norm(...)`, `self.runtime.kernels.norm(...)`."""
    return (isinstance(owner, ast.Name) and owner.id == "kernels") or (
        isinstance(owner, ast.Attribute) and owner.attr == "kernels"
    )


def is_host_sum(node: ast.Call, owner: ast.expr, root: str) -> bool:
    """`received.sum(1)` and `kernels.to_host(...).reshape(...).sum(1)`: row counts that are on the host already."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "sum":
        return False
    fetched = any(isinstance(part, ast.Attribute) and part.attr == "to_host" for part in ast.walk(owner))
    return fetched or root in HOST_VARIABLES


def unsafe_code(tree: ast.AST) -> list[str]:
    """Ways to run what a file says."""
    wrong = [
        f"line {line}: imports {module}"
        for line, module in imported_modules(tree)
        if module.split(".")[0] in FORBIDDEN_IMPORTS
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
                wrong.append(f"line {node.lineno}: {function.id}()")
            owner = function.value if isinstance(function, ast.Attribute) else None
            if isinstance(owner, ast.Name) and (owner.id, function.attr) in FORBIDDEN_ATTRIBUTES:
                wrong.append(f"line {node.lineno}: {owner.id}.{function.attr}()")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False:
                    wrong.append(f"line {node.lineno}: allow_pickle")
    return wrong


def oversized(tree: ast.AST, lines: int) -> list[str]:
    """Functions over 60 lines, files over 500 lines."""
    wrong = [f"{lines} lines"] if lines > LONGEST_FILE else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                wrong.append(f"{node.name} has {length} lines")
    return wrong


@pytest.mark.parametrize("path", FILES, ids=label)
def test_imports_point_left(path: Path) -> None:
    parts = path.relative_to(SOURCE).parts
    if len(parts) > 1:
        assert parts[0] in ALLOWED, f"{parts[0]}/ is not in docs/design.md"
        assert not wrong_arrows(tree_of(path), parts[0])


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parent.name == "moe" or (path.parent.name == "model" and path.name in FORWARD)],
    ids=label,
)
def test_forward_pass_computes_through_kernels(path: Path) -> None:
    tree = tree_of(path)
    assert not forbidden_arithmetic(tree)
    assert "torch" not in {module.split(".")[0] for _, module in imported_modules(tree)}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_code_that_runs_what_a_file_says(path: Path) -> None:
    assert not unsafe_code(tree_of(path))


@pytest.mark.parametrize("path", FILES, ids=label)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not oversized(ast.parse(text), len(text.splitlines()))


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "spec"], ids=label)
def test_spec_is_pure(path: Path) -> None:
    roots = {module.split(".")[0] for _, module in imported_modules(tree_of(path))}
    assert not roots & {"torch", "safetensors", "transformers", "asyncio", "socket", "subprocess", "threading"}


def test_every_folder_of_the_order_was_walked() -> None:
    assert {path.parent.name for path in FILES} >= set(ORDER)
    assert all(path.is_file() for path in FORWARD_FILES)


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ("spec", "import coterie.model.names"),
        ("moe", "def f():\n    from coterie.model import mtp"),
        ("kernels", "from coterie import engine"),
        ("planner", "import coterie.engine.config"),
        ("train", "from coterie.engine.llm import LLM"),
    ],
)
def test_a_wrong_arrow_is_seen(folder: str, code: str) -> None:
    assert wrong_arrows(ast.parse(code), folder)


FORBIDDEN_EXAMPLES = """
x @ w
x ** 2
torch.exp(x)
np.sum(x)
x.sum(-1)
x.to(y)
f(x).mean()
x.reshape(2, 2).max(1)
self.kernels.linear(x, w).softmax(-1)
received.mean()
outputs.sum(1)
"""

ALLOWED_EXAMPLES = """
x + y * z - a / b
x[order].reshape(-1, x.shape[1])
kernels.norm(x, w)
self.kernels.to_host(c).sum(1)
received.sum(1)
kernels.linear(kernels.norm(x, w), b)
"""


@pytest.mark.parametrize("code", FORBIDDEN_EXAMPLES.strip().splitlines())
def test_forbidden_arithmetic_is_seen(code: str) -> None:
    assert forbidden_arithmetic(ast.parse(code))


@pytest.mark.parametrize("code", ALLOWED_EXAMPLES.strip().splitlines())
def test_allowed_arithmetic_is_not_refused(code: str) -> None:
    assert not forbidden_arithmetic(ast.parse(code))


@pytest.mark.parametrize(
    "code", ["import pickle", "torch.load(f)", "eval(s)", "from marshal import loads", "np.load(f, allow_pickle=True)"]
)
def test_unsafe_code_is_seen(code: str) -> None:
    assert unsafe_code(ast.parse(code))


def test_safe_code_is_not_refused() -> None:
    assert not unsafe_code(ast.parse("np.load(f)\nnp.load(f, allow_pickle=False)\nmodel.eval()"))
