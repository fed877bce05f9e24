"""Images of the docker runtime: the engine's own, pulled where it lacks one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from services.common.backoff import Backoff
from services.common.errors import FailedPreconditionError
from services.common.logs import get_logger
from services.local.docker.engine import Engine, EngineError, ImageFacts
from services.local.docker.references import credentials_for, is_id, with_tag
from services.local.runtime.images import Progress
from services.local.runtime.model import Image, PullError

_log = get_logger(__name__)

_ATTEMPTS: Final = 3
# What no second attempt changes: there is no such image, or not for us.
_FINAL: Final = frozenset({400, 401, 403, 404})
_FINAL_WORDS: Final = ("denied", "unauthorized", "not found", "manifest unknown", "no matching manifest", "invalid")


class EngineImages:
    """See services.local.node.service.Images. A sandbox's image is a name that only the engine can resolve."""

    def find(self, name: str) -> Image | None:
        """The name itself: whether there is such an image turns out when it is used."""
        return Image(name=name, digest=name, size=0, import_time=0.0, env={}, working_directory="", user="")

    def by_digest(self, digest: str) -> Image | None:
        """Likewise."""
        return self.find(digest)

    def page(self, after: str, count: int) -> list[Image]:  # noqa: ARG002
        """None of them is ours.

        Raises:
            FailedPreconditionError: with the command that lists them.
        """
        raise _elsewhere("`docker images` lists them")

    def imported(
        self,
        name: str,  # noqa: ARG002
        source: Path,  # noqa: ARG002
        used: Callable[[], set[str]],  # noqa: ARG002
        *,
        replace: bool,  # noqa: ARG002
    ) -> AsyncGenerator[Progress, None]:
        """Not here.

        Raises:
            FailedPreconditionError: with the commands that do it.
        """
        raise _elsewhere("`docker pull`, `docker load` and `docker build` add to them")

    async def remove(self, name: str, used: set[str]) -> None:  # noqa: ARG002
        """Not here.

        Raises:
            FailedPreconditionError: with the command that does it.
        """
        raise _elsewhere(f"`docker rmi {name}` removes it")

    async def unused(self, digest: str, still_used: Iterable[str]) -> None:
        """An image stays until somebody removes it."""


def _elsewhere(what: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"images of the docker runtime are the engine's own: {what}", reason="IMAGES_OF_ENGINE"
    )


class Puller:
    """Gets images for sandboxes."""

    def __init__(self, engine: Engine, environment: Mapping[str, str], *, may_pull: bool) -> None:
        self._engine = engine
        self._environment = environment
        self._may_pull = may_pull

    async def have(self, reference: str, seconds: float) -> ImageFacts:
        """An image, pulled if the engine lacks it.

        Raises:
            PullError: it cannot be had within `seconds`; the message says why.
            EngineError, EngineAwayError: see Engine.
        """
        found = await self._engine.image(reference)
        if found is not None:
            return found
        if is_id(reference) or not self._may_pull:
            why = "no registry knows an image by its id" if is_id(reference) else "this platform pulls none"
            raise PullError(
                f"the engine has no image {reference!r}, and {why}: get it with `docker pull` or `docker load`"
            )
        try:
            async with asyncio.timeout(seconds):
                await self._pull(reference)
        except TimeoutError:
            raise PullError(f"image {reference!r} was not pulled within the pull timeout of {seconds:g} s") from None
        found = await self._engine.image(reference)
        if found is None:
            raise PullError(f"image {reference!r} was pulled, and somebody removed it at once")
        return found

    async def _pull(self, reference: str) -> None:
        credentials = await asyncio.to_thread(credentials_for, reference, self._environment)
        backoff = Backoff(1.0, 10.0)
        for attempt in range(1, _ATTEMPTS + 1):
            _log.info("pulling an image", image=reference, attempt=attempt)
            try:
                await self._engine.pull(with_tag(reference), credentials)
            except EngineError as error:
                if attempt == _ATTEMPTS or _is_final(error):
                    raise PullError(f"image {reference!r} cannot be pulled: {error}") from None
                _log.warning("image not pulled yet", image=reference, why=str(error))
            else:
                return
            await asyncio.sleep(backoff.next())


def _is_final(error: EngineError) -> bool:
    text = str(error).lower()
    return error.status in _FINAL or any(word in text for word in _FINAL_WORDS)
