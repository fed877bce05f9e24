"""One command is one trace, from the SDK through gateway and agent, at a real OTLP receiver."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.support.otlp import attributes, receiver
from tests.support.platform import ROOT, running_platform

PROGRAM = """
import orchard
from orchard._client import execs
execs.INLINE_WAIT_SECONDS = 60.0  # for a busy machine: the command's end comes with its first call
with orchard.SandboxClient() as client, client.create(labels={"traced": "yes"}) as sandbox:
    assert sandbox.exec("echo hello; exit 3").exit_code == 3
"""


async def test_one_command_is_one_trace(tmp_path: Path) -> None:
    async with receiver() as (received, endpoint):
        telemetry = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }

        def use() -> None:
            with running_platform(tmp_path, environment=telemetry) as platform:
                environment = {**os.environ, **platform.client_environment(), **telemetry}
                subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, check=True, timeout=110)

        await asyncio.to_thread(use)

        commands = [pair for pair in received.spans if attributes(pair[1]).get("orchard.exit_code") == 3]
        ((_service, agent),) = [pair for pair in commands if pair[1].name == "agent StartExec"]
        facts = attributes(agent)
        assert facts["orchard.output_bytes"] == 6
        assert facts["orchard.exec_id"]
        assert facts["orchard.sandbox_id"]
        trace = {span.span_id: (service, span) for service, span in received.spans if span.trace_id == agent.trace_id}
        # Up the parents: the agent's span, the gateway's, the client's, which has none.
        gateway_service, gateway = trace[agent.parent_span_id]
        assert gateway_service == "orchard-gateway"
        assert gateway.name == "orchard.exec.v1.ExecService/StartExec"
        client_service, client = trace[gateway.parent_span_id]
        assert client_service == "orchard-client"
        assert attributes(client)["orchard.exec_id"] == facts["orchard.exec_id"]
        assert not client.parent_span_id or client.parent_span_id in trace
        assert gateway.start_time_unix_nano <= agent.start_time_unix_nano <= agent.end_time_unix_nano
        create = [service for service, span in received.spans if span.name.endswith("SandboxService/CreateSandbox")]
        assert {"orchard-gateway", "orchard-scheduler"} <= set(create)
        assert {"orchard.calls", "orchard.call.duration", "orchard.sandboxes", "orchard.queue.length"} <= set(
            received.metrics
        )
