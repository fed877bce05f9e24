"""The rule that import-linter cannot say: which files may import generated messages."""

import ast
import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = (
    "services/common/*",
    "services/*/servicer*.py",
    "services/*/*/servicer*.py",
    "services/*/*_client.py",
    "services/*/*/*_client.py",
    "services/gateway/proxy.py",  # routes by descriptors
    "services/*/app.py",  # registers servicers
    "services/*/*/app.py",
)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_only_the_edges_import_generated_messages() -> None:
    offenders = []
    for path in (ROOT / "services").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if any(fnmatch.fnmatch(name, pattern) for pattern in ALLOWED):
            continue
        offenders += [
            f"{name}: {module}" for module in sorted(imports_of(path)) if module.endswith(("_pb2", "_pb2_grpc"))
        ]
    assert offenders == []
