"""mini-swe-agent (2.4) in Orchard sandboxes.

    environment:
      environment_class: orchard.harness.mini_swe_agent.OrchardEnvironment
      image: python:3.12
      cwd: /testbed

SWE-bench batches: `python -m orchard.harness.mini_swe_agent.swebench` takes the arguments of `mini-extra swebench`.
"""

from orchard.harness.mini_swe_agent.environment import OrchardEnvironment, OrchardEnvironmentConfig

__all__ = ["OrchardEnvironment", "OrchardEnvironmentConfig"]
