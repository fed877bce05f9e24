"""mini-swe-agent's SWE-bench batches in Orchard sandboxes: `python -m orchard.harness.mini_swe_agent.swebench`.

Takes the arguments of `mini-extra swebench` and runs its own program, with these differences:

- The instance's image is passed on, unless the configuration names one (`-c environment.image=...`; empty for the
  host's root file system).
- An instance that the platform failed has no prediction, so that it is not scored as an empty patch and the same
  command tries it again. They are listed at the end, and the exit code is 1.
- An instance's sandbox is deleted when the instance is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from minisweagent.run.benchmarks import swebench

from orchard._client.errors import OrchardError

ENVIRONMENT: Final = "orchard.harness.mini_swe_agent.OrchardEnvironment"


class Batch:
    """One run of the batch program, between its steps."""

    def __init__(self, program: ModuleType) -> None:
        self._program = program
        self._make = program.get_sb_environment
        self._process = program.process_instance
        self._store = program.update_preds_file
        self._thread = threading.local()
        self.failures: dict[str, str] = {}
        """Instances that the platform failed, with why."""

    def run(self, arguments: Sequence[str]) -> int:
        """Run the program; returns the exit code."""
        program: Any = self._program
        originals = (program.get_sb_environment, program.process_instance, program.update_preds_file)
        # Looked up in the module when they are called, each instance in one thread from begin to end.
        program.get_sb_environment = self.environment
        program.process_instance = self.process
        program.update_preds_file = self.store
        try:
            program.app(list(arguments), prog_name="swebench", standalone_mode=False)
        finally:
            program.get_sb_environment, program.process_instance, program.update_preds_file = originals
        for instance_id, why in sorted(self.failures.items()):
            print(f"{instance_id}: no prediction, the environment failed: {why}", file=sys.stderr)  # noqa: T201
        return 1 if self.failures else 0

    def environment(self, config: dict[str, Any], instance: dict[str, Any]) -> Any:
        """An instance's environment, with its image."""
        options = dict(config.get("environment", {}))
        if "." not in options.get("environment_class", ""):
            # A name of the program's own, as its default configuration has one.
            options["environment_class"] = ENVIRONMENT
        options.setdefault("image", self._program.get_swebench_docker_image_name(instance))
        try:
            made = self._make({**config, "environment": options}, instance)
        except Exception as error:
            self._thread.failure = error
            raise
        self._thread.environment = made
        return made

    def process(self, instance: dict[str, Any], *arguments: Any) -> None:
        """One instance, and the end of its sandbox."""
        self._thread.environment = self._thread.failure = None
        try:
            self._process(instance, *arguments)
        finally:
            if (why := self._failure()) is not None:
                self.failures[instance["instance_id"]] = f"{type(why).__name__}: {why}"
            environment, self._thread.environment = self._thread.environment, None
            if environment is not None and hasattr(environment, "cleanup"):
                environment.cleanup()

    def store(self, output_path: Path, instance_id: str, model_name: str, result: str) -> None:
        """Keep a prediction, if there is one."""
        if self._failure() is None:
            self._store(output_path, instance_id, model_name, result)

    def _failure(self) -> Exception | None:
        failure: Exception | None = self._thread.failure
        return failure or getattr(self._thread.environment, "failure", None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a batch; returns the exit code: 1 if the platform failed an instance."""
    try:
        return Batch(swebench).run(sys.argv[1:] if arguments is None else arguments)
    except OrchardError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
