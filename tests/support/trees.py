"""Trees of files, compared whole."""

from __future__ import annotations

from pathlib import Path


def contents(root: Path) -> dict[str, object]:
    """What is below a folder, by its path there: the target of a link, the bytes and mode of a file."""
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = "directory"
        else:
            found[name] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found
