"""Shows the gateways' public keys to the agents of running Pods when the file with them was replaced.

An agent reads them from an annotation of its Pod. New Pods have the new keys at once; of the others each that has older
ones is patched, and its kubelet shows the change to the agent within about a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.common import pods
from services.common.backoff import Backoff
from services.common.errors import OrchardError, UnavailableError
from services.common.logs import get_logger
from services.common.tokens import PublicKeysFile
from services.scheduler.pod_api import PodApi

_log = get_logger(__name__)

_LOOK_SECONDS: Final = 2.0
_AWAY_IN_A_ROW: Final = 20  # after that it is not the Pods
_LATE_SECONDS: Final = 60.0  # a create that began before the change has ended by then


class PodKeys:
    """Keeps what Pods show in step with the file."""

    def __init__(self, file: PublicKeysFile, api: PodApi, use: Callable[[str], None]) -> None:
        """`use` is told what Pods to come must have."""
        self._file = file
        self._api = api
        self._use = use

    async def run(self, *, look_seconds: float = _LOOK_SECONDS, late_seconds: float = _LATE_SECONDS) -> None:
        """Look for ever. At the start too: the file may have been replaced while no scheduler ran."""
        shown, late_at, loop = "", 0.0, asyncio.get_running_loop()
        backoff = Backoff(0.5, 30.0)
        while True:
            self._file.look()
            pem, late = self._file.pem, 0.0 < late_at <= loop.time()
            if pem == shown and not late:
                await asyncio.sleep(look_seconds)
                continue
            try:
                await self.show(pem)
            except OrchardError as error:
                _log.warning("running Pods do not show the present public keys yet", why=error.message)
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            late_at = 0.0 if pem == shown else loop.time() + late_seconds
            shown = pem

    async def show(self, pem: str) -> int:
        """Have every Pod show these keys; returns how many did not.

        Raises:
            OrchardError: the API server refused some; all others show them, and once more does the rest.
        """
        self._use(pem)
        changed = away = 0
        refused: dict[str, OrchardError] = {}
        async for name, uid, notes in self._api.annotations():
            if notes.get(pods.PUBLIC_KEYS) == pem:
                continue
            try:
                changed += await self._api.annotate(name, uid, {pods.PUBLIC_KEYS: pem})
                away = 0
            except OrchardError as error:
                refused[name] = error
                away = away + 1 if isinstance(error, UnavailableError) else 0
                if away == _AWAY_IN_A_ROW:
                    break
        if changed:
            _log.info("public keys were shown to running Pods", pods=changed)
        for name, why in refused.items():
            _log.warning("a Pod does not show the present public keys", pod=name, refused=len(refused))
            raise why
        return changed
