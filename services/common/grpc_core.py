"""Settings of gRPC's C core that have no channel or server option: it reads them when it is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CORE_ENVIRONMENT: Final[Mapping[str, str]] = {
    # Poll sockets in the thread that waits for them instead of handing each event to a thread pool. Measured with
    # grpcio 1.85 on 2 cores: a call through two hops takes 15 % less, a sandbox's life 10 %. A core that does not know
    # the names says so in its log and goes on.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
"""For the environment of every process of ours; a setting of the user's own wins."""
