"""Use cases of rubrics: built-in ones and those of each tenant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError, Violation
from services.judge.rubrics import BUILT_IN, Rubric, problems
from services.judge.store.rubrics import RubricStore, StoredRubric

_TRIES: Final = 8


class RubricShelf:
    """Rubrics of every tenant. Built-in ones are everybody's and never change."""

    def __init__(self, store: RubricStore, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def get(self, tenant: str, name: str, version: int) -> StoredRubric:
        """A version, 0 for the newest.

        Raises:
            NotFoundError: there is none.
        """
        built_in = BUILT_IN.get(name)
        if built_in is not None:
            found = StoredRubric(built_in, used=True, create_time=None) if version in {0, built_in.version} else None
        else:
            found = await self._store.get(tenant, name, version)
        if found is None:
            wanted = f"{name!r} version {version}" if version else repr(name)
            raise NotFoundError(f"there is no rubric {wanted}", reason="RUBRIC_NOT_FOUND", rubric=name, version=version)
        return found

    async def use(self, tenant: str, name: str, version: int) -> Rubric:
        """A rubric that a verdict will rest on: from now on it stays as it is."""
        for _ in range(_TRIES):
            found = await self.get(tenant, name, version)
            if found.used or await self._store.use(tenant, found.rubric):
                return found.rubric
        raise UnavailableError(f"rubric {name!r} changes all the time; retry", reason="RUBRIC_CHANGING", rubric=name)

    async def put(self, tenant: str, rubric: Rubric) -> StoredRubric:
        """Store a rubric; see JudgeService.PutRubric.

        Raises:
            InvalidArgumentError: it cannot be used.
        """
        if found := problems(rubric):
            raise InvalidArgumentError([Violation(f"rubric.{field}", description) for field, description in found])
        return await self._store.put(tenant, rubric, self._clock())

    async def page(self, tenant: str, after: str, count: int) -> Sequence[StoredRubric]:
        """The newest versions by name, behind a name."""
        own = await self._store.page(tenant, after, count)
        built_in = [
            StoredRubric(rubric, used=True, create_time=None) for name, rubric in BUILT_IN.items() if name > after
        ]
        return sorted([*own, *built_in], key=lambda found: found.rubric.name)[:count]
