"""Which signals were sent to a command, so that a call that is repeated sends none."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from services.common.errors import AlreadyExistsError
from services.exec_agent.process import Target

_KEPT: Final = 64


class SentSignals:
    """The last ones of each command that runs, by their request ids."""

    def __init__(self) -> None:
        self._sent: dict[str, OrderedDict[str, tuple[Target, int]]] = {}

    def is_new(self, exec_id: str, request_id: str, target: Target, number: int) -> bool:
        """Whether no signal was sent under this request id; from now on one is.

        Raises:
            AlreadyExistsError: another signal was, or one to another target.
        """
        sent = self._sent.setdefault(exec_id, OrderedDict())
        earlier = sent.get(request_id)
        if earlier is None:
            sent[request_id] = (target, number)
            if len(sent) > _KEPT:
                sent.popitem(last=False)
        elif earlier != (target, number):
            raise AlreadyExistsError(
                f"request id {request_id!r} was used with another signal or target; choose a new id for a new signal",
                reason="SIGNAL_REQUEST_REUSED",
                exec_id=exec_id,
            )
        return earlier is None

    def forget(self, exec_id: str) -> None:
        """It has ended: it gets none any more."""
        self._sent.pop(exec_id, None)
