"""Makes an environment, says which sandbox it has, and is killed."""

import os
import signal

from orchard.harness.mini_swe_agent import OrchardEnvironment

environment = OrchardEnvironment(sandbox_options={"heartbeat_timeout": 10})
print(environment.sandbox_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
