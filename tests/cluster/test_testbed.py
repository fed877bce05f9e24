"""The testbed itself: the rights it gives, the node it runs, and that nothing of it stays."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import BUSYBOX
from tests.support.testbed import NAMESPACE, Testbed, run, start

PODS = {"create", "get", "list", "watch", "patch", "delete"}
READ = {"get", "list", "watch"}


@pytest.mark.parametrize(
    ("user", "allowed"),
    [
        ("orchard", {"pods": PODS, "events": READ}),
        ("orchard-watcher", {"pods": READ, "events": READ}),
    ],
)
def test_users_may_do_what_the_manifests_say_and_no_more(
    control_plane: Testbed, user: str, allowed: dict[str, set[str]]
) -> None:
    assert rules(control_plane, user, NAMESPACE) == allowed
    for elsewhere in ("orchard", "default", "kube-system"):
        assert rules(control_plane, user, elsewhere) == {}


def rules(testbed: Testbed, user: str, namespace: str) -> dict[str, set[str]]:
    """What a user may do to which resources, by the API server's own word; what every user may is left out."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = testbed.kubectl(
        *(
            "--kubeconfig",
            str(testbed.folder / f"{user}.kubeconfig"),
            "create",
            "--validate=false",
            "-f",
            "-",
            "-o",
            "json",
        ),
        stdin=json.dumps(review),
    )
    found: dict[str, set[str]] = {}
    for rule in json.loads(answer)["status"]["resourceRules"]:
        if rule["apiGroups"] == [""]:
            for resource in rule["resources"]:
                found.setdefault(resource, set()).update(rule["verbs"])
    return found


def test_a_sandbox_that_reaches_for_the_host_is_refused(control_plane: Testbed) -> None:
    pod = pod_of("reaching", "sleep 1")
    pod["spec"]["hostNetwork"] = True
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        control_plane.apply(pod)


def test_pods_run_and_answer_by_address_service_and_name(node: Testbed) -> None:
    """In a namespace without policies."""
    try:
        node.apply(pod_of("server", "echo hello >index.html; exec httpd -f -p 8000", "default"), SERVICE)
        node.kubectl("-n", "default", "wait", "--for=condition=Ready", "pod/server", "--timeout=110s")
        address = node.get("-n", "default", "pod/server")["status"]["podIP"]
        for client, url in (("address", f"{address}:8000"), ("service", "server.default.svc.cluster.local")):
            # Not wget -T: in Debian's static busybox it crashes.
            fetching = f"until timeout 10 wget -q -O - http://{url}/; do sleep 0.1; done"
            node.apply(pod_of(client, fetching, "default"))
        for client in ("address", "service"):
            succeeded = "--for=jsonpath={.status.phase}=Succeeded"
            node.kubectl("-n", "default", "wait", succeeded, f"pod/{client}", "--timeout=110s")
            assert node.kubectl("-n", "default", "logs", client).endswith("hello\n")
    finally:
        node.kubectl("-n", "default", "delete", "service/server", "--ignore-not-found")
        node.clear("default")


SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "server", "namespace": "default"},
    "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
}


def pod_of(name: str, script: str, namespace: str = NAMESPACE) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "sandbox",
                    "image": BUSYBOX,
                    "imagePullPolicy": "Never",
                    "workingDir": "/tmp",
                    "command": ["sh", "-c", script],
                }
            ],
        },
    }


def test_what_a_killed_run_left_is_ended_by_the_next(control_plane: Testbed) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        left = start(node=False, owner=owner.pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert processes_of(left.folder)
    other = start(node=False)
    try:
        assert other.folder == left.folder, "its slot is the first free one"
        assert processes_of(control_plane.folder), "whoever lives keeps what is theirs"
    finally:
        run("down", folder=other.folder).check_returncode()
    assert not other.folder.exists()
    assert processes_of(other.folder) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder, this process's own aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/" in line and "pytest" not in line:
            found.append(line)
    return found
