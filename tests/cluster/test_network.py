"""What sandboxes reach and who reaches them: the manifests' network policies, enforced on a real node."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.cluster.sandboxes import PROFILE, TERMS, Sandbox, start
from tests.integration.exec_agent.conftest import BACKSTOP, Client, spec
from tests.support.testbed import NAMESPACE, SERVICES, Testbed

# testbed/lib/outside.sh
RESOLVER = "203.0.113.53"
PUBLIC, LISTED, METADATA = "203.0.113.10", "198.51.100.10", "169.254.169.254"
ALLOW_LIST = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "allow-list-mirror", "namespace": NAMESPACE},
    "spec": {
        "podSelector": {"matchLabels": {pods.NETWORK_LABEL: "allow-list-mirror"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [{"ipBlock": {"cidr": f"{LISTED}/32"}}], "ports": [{"protocol": "TCP", "port": 80}]}],
    },
}
REACHED = {
    "none": set[str](),
    "dns-only": {"names"},
    "allow-list": {"names", "listed"},
    "open": {"names", "listed", "public"},
}
EVERYTHING = {"names", "listed", "public", "metadata", "neighbour", "service", "api service", "api server", "sandbox"}
CALLERS = {
    (SERVICES, "gateway"): True,
    (SERVICES, "watcher"): True,
    (SERVICES, "scheduler"): False,
    (SERVICES, ""): False,
    ("default", "gateway"): False,
    (NAMESPACE, "gateway"): False,
}


@pytest.fixture
def cluster(prepared: Testbed) -> Iterator[Testbed]:
    yield prepared
    prepared.clear()


@pytest.fixture(scope="module")
def prepared(node: Testbed, agent_image: str) -> Iterator[Testbed]:
    """With the resolver that is here, and an allow-list of the operator's."""
    changed = [{"op": "replace", "path": "/spec/egress/0/to/0/ipBlock/cidr", "value": f"{RESOLVER}/32"}]
    node.kubectl("-n", NAMESPACE, "patch", "networkpolicy/names", "--type=json", "-p", json.dumps(changed))
    node.apply(ALLOW_LIST, *servers())
    node.kubectl("-n", "default", "wait", "--for=condition=Ready", "pod/neighbour", "pod/free", "--timeout=110s")
    yield node
    node.kubectl("delete", "-f", "-", stdin="\n---\n".join(map(json.dumps, [ALLOW_LIST, servers()[-1]])))
    for namespace in (SERVICES, "default"):
        node.clear(namespace)


def servers() -> list[dict[str, Any]]:
    """Something of the cluster's own that answers, a Pod that no policy selects, and a Service."""
    service = {"selector": {"app": "neighbour"}, "ports": [{"port": 80, "targetPort": 8000}]}
    return [
        plain_pod("neighbour", "default", {"app": "neighbour"}, "exec httpd -f -p 8000"),
        plain_pod("free", "default", {}),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "neighbour", "namespace": "default"},
            "spec": service,
        },
    ]


def plain_pod(
    name: str, namespace: str, labels: Mapping[str, str], script: str = "exec sleep 2147483647"
) -> dict[str, Any]:
    # As the namespace of the services wants it.
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    of_pod = {"runAsNonRoot": True, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "only",
        "securityContext": security,
        "image": BUSYBOX,
        "imagePullPolicy": "Never",
        "workingDir": "/tmp",
        "command": ["sh", "-c", script],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {"terminationGracePeriodSeconds": 1, "securityContext": of_pod, "containers": [container]},
    }


def sandbox_with(cluster: Testbed, network: str, *start_argv: str) -> Sandbox:
    terms = replace(TERMS, network=network, allow_list="mirror" if network == "allow-list" else "")
    profile = replace(PROFILE, nameservers=(RESOLVER,), cpu_request_share=0.1)
    return start(cluster, profile=profile, terms=terms, start_argv=start_argv)


def looking(cluster: Testbed, sandbox: Sandbox) -> str:
    """A script that prints what it reaches, all at once, a line each."""
    service = cluster.get("-n", "default", "service/neighbour")["spec"]["clusterIP"]
    api = cluster.get("-n", "default", "endpoints/kubernetes")["subsets"][0]
    places = {
        "listed": f"{LISTED} 80",
        "public": f"{PUBLIC} 80",
        "metadata": f"{METADATA} 80",
        "neighbour": f"{cluster.get('-n', 'default', 'pod/neighbour')['status']['podIP']} 8000",
        "service": f"{service} 80",
        "api service": "10.0.0.1 443",
        "api server": f"{api['addresses'][0]['ip']} {api['ports'][0]['port']}",
        "sandbox": f"{sandbox.ip} {pods.AGENT_PORT}",
    }
    tries = [f"(nc -w 2 {where} </dev/null >/dev/null 2>&1 && echo {name}) &" for name, where in places.items()]
    return "\n".join([*tries, "(timeout 2 nslookup a.example $RESOLVER >/dev/null 2>&1 && echo names) &", "wait"])


async def reached(client: Client, script: str) -> set[str]:
    output = await client.run(spec(shell=script))
    return set(output.stdout.decode().splitlines())


async def test_a_sandbox_reaches_what_its_profile_opens_and_nothing_of_the_cluster(cluster: Testbed) -> None:
    async def comes_to_reach(network: str) -> None:
        sandbox = await asyncio.to_thread(sandbox_with, cluster, network)
        # By the resolver that the Pod has, and where it has none by the one that the others have.
        script = (await asyncio.to_thread(looking, cluster, other)).replace(
            "$RESOLVER", RESOLVER if network == "none" else ""
        )
        async with sandbox.client() as client:
            deadline = time.monotonic() + BACKSTOP
            # The node's plugin hears of a Pod when it is there already.
            while (seen := await reached(client, script)) != REACHED[network]:
                assert time.monotonic() < deadline, (network, seen)

    other = await asyncio.to_thread(sandbox_with, cluster, "open")
    await asyncio.gather(*map(comes_to_reach, REACHED))


def test_what_is_closed_to_sandboxes_is_there(cluster: Testbed) -> None:
    """From a Pod that no policy selects everything answers but the sandbox."""
    script = looking(cluster, sandbox_with(cluster, "open")).replace("$RESOLVER", RESOLVER)

    def seen() -> set[str]:
        return set(cluster.kubectl("-n", "default", "exec", "free", "--", "sh", "-c", script).splitlines())

    deadline = time.monotonic() + BACKSTOP
    while (found := seen()) != EVERYTHING - {"sandbox"}:
        assert time.monotonic() < deadline, found


async def test_agents_are_called_by_gateways_and_watchers_alone(cluster: Testbed) -> None:
    sandbox = await asyncio.to_thread(sandbox_with, cluster, "open", "/bin/nc", "-ll", "-p", "8080", "-e", "/bin/echo")
    async with sandbox.client() as client:
        cluster.apply(*(caller(*who) for who in CALLERS))
        for who in CALLERS:
            cluster.kubectl("-n", who[0], "wait", "--for=condition=Ready", f"pod/{name_of(*who)}", "--timeout=110s")
        expected = {(*who, pods.AGENT_PORT): allowed for who, allowed in CALLERS.items()}
        expected |= {(*who, 8080): False for who in CALLERS}
        deadline = time.monotonic() + BACKSTOP
        while (found := await connections(cluster, sandbox)) != expected:
            assert time.monotonic() < deadline, found
        # Something does listen there.
        inside = await client.run(spec(shell=f"until nc -w 2 {sandbox.ip} 8080 </dev/null; do sleep 0.1; done"))
        assert inside.result is not None
        assert inside.result.exit_code == 0


def name_of(namespace: str, component: str) -> str:
    return f"caller-{component or 'other'}"


def caller(namespace: str, component: str) -> dict[str, Any]:
    labels = {pods.MANAGED_BY_LABEL: pods.MANAGED_BY, **({pods.COMPONENT_LABEL: component} if component else {})}
    return plain_pod(name_of(namespace, component), namespace, labels)


async def connections(cluster: Testbed, sandbox: Sandbox) -> dict[tuple[str, str, int], bool]:
    def look(namespace: str, component: str) -> dict[tuple[str, str, int], bool]:
        ports = (pods.AGENT_PORT, 8080)
        script = "; ".join(f"nc -w 2 {sandbox.ip} {port} </dev/null >/dev/null 2>&1; echo $?" for port in ports)
        said = cluster.kubectl("-n", namespace, "exec", name_of(namespace, component), "--", "sh", "-c", script)
        return {(namespace, component, port): code == "0" for port, code in zip(ports, said.split(), strict=True)}

    found = await asyncio.gather(*(asyncio.to_thread(look, *who) for who in CALLERS))
    return {key: value for part in found for key, value in part.items()}
