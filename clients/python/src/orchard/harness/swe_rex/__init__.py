"""SWE-ReX (1.4) in Orchard sandboxes: a deployment and its runtime.

    deployment = OrchardDeployment(image="python:3.12")
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="cd /app && export A=1"))
    await deployment.stop()

SWE-ReX's own server does not run in the sandbox: an image needs bash for sessions, and nothing else.
"""

from orchard.harness.swe_rex.runtime import OrchardDeployment, OrchardDeploymentConfig, OrchardRuntime

__all__ = ["OrchardDeployment", "OrchardDeploymentConfig", "OrchardRuntime"]
