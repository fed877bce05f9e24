"""What is wrong with a file, and where: file, line, field and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchard._client.errors import InvalidArgument, OrchardError


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file.

    Attributes:
        file: its path, as it was given.
        line: from 1; 0 where the file is one document, or has no lines.
        field: the path of a field, like `steps[2].observation`; empty for the whole.
    """

    file: str = ""
    line: int = 0
    field: str = ""

    def at(self, key: str | int) -> Where:
        """The place of a key or an index below this one."""
        if isinstance(key, int):
            return replace(self, field=f"{self.field}[{key}]")
        return replace(self, field=f"{self.field}.{key}" if self.field else key)

    @property
    def whole(self) -> Where:
        """The file and the line, without the field."""
        return replace(self, field="")

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return ": ".join(part for part in (place, self.field) if part)


class DataError(OrchardError):
    """A file that cannot be read, an option that cannot be, or a plan with a mistake.

    Attributes:
        where: the file, its line and the field.
        problem: what is wrong.
        fix: what to do about it.
    """

    default_reason = "BAD_DATA"

    def __init__(self, problem: str, *, where: Where | None = None, fix: str = "") -> None:
        place = where or Where()
        text = f"{place}: {problem}" if str(place) else problem
        super().__init__(
            f"{text}; {fix}" if fix else text,
            metadata={"file": place.file, "line": str(place.line), "field": place.field},
        )
        self.where = place
        self.problem = problem
        self.fix = fix


class OptionError(DataError, InvalidArgument):
    """What was asked for cannot be, whatever the files say: a format, an option, a place. Nothing was done."""


class NoExampleError(Exception):
    """A trajectory gives no row; the message says why. Exports report it and go on."""


class MissingExtraError(DataError):
    """A format needs a package that an extra of this distribution brings."""

    default_reason = "MISSING_EXTRA"

    def __init__(self, needs: str, package: str, extra: str) -> None:
        super().__init__(f"{needs} needs {package}", fix=f"pip install 'orchard-platform[{extra}]'")
