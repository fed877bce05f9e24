from pathlib import Path

import pytest
from pydantic import ValidationError

from services.scheduler.settings import SchedulerSettings

COMMON = {
    "ORCHARD_LISTEN": "unix:/s",
    "ORCHARD_REDIS_URL": "unix:///r",
    "ORCHARD_WATCHER_ADDRESS": "unix:/w",
    "ORCHARD_PUBLIC_KEYS_FILE": "/keys.pem",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMMON.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("runtime", "field", "says"),
    [
        ("process", "node_address", "ORCHARD_RUNTIME=process"),
        ("kubernetes", "payload_image", "ORCHARD_RUNTIME=kubernetes"),
    ],
)
def test_each_runtime_asks_for_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, runtime: str, field: str, says: str
) -> None:
    monkeypatch.setenv("ORCHARD_RUNTIME", runtime)
    with pytest.raises(ValidationError) as caught:
        SchedulerSettings()  # type: ignore[call-arg]
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]
    assert says in caught.value.errors()[0]["msg"]


def test_the_operators_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RUNTIME": "kubernetes",
        "PAYLOAD_IMAGE": "payload:1",
        "KUBECONFIG": "/k",
        "POD_NODE_SELECTOR": '{"pool": "sandboxes"}',
        "POD_TOLERATIONS": '[{"key": "sandboxes", "operator": "Exists"}]',
        "POD_IMAGE_PULL_SECRETS": '["registry"]',
        "POD_RUNTIME_CLASS": "gvisor",
        "POD_MEMORY_REQUEST_SHARE": "0.5",
        "OFFERED_ALLOW_LISTS": '["pypi", "npm"]',
        "POD_NAMESERVERS": '["192.0.2.1", "2001:db8::1"]',
        "MAXIMUM_LIFETIME_SECONDS": "3600",
    }.items():
        monkeypatch.setenv(f"ORCHARD_{name}", value)
    settings = SchedulerSettings()  # type: ignore[call-arg]
    assert settings.kubeconfig == Path("/k")
    profile = settings.pod_profile("PEM")
    assert (profile.public_keys_pem, profile.lifetime_ms) == ("PEM", 3_600_000)
    assert (profile.cpu_request_share, profile.memory_request_share) == (1.0, 0.5)
    assert profile.offered_allow_lists == {"pypi", "npm"}
    assert profile.nameservers == ("192.0.2.1", "2001:db8::1")
    # The probe must run where sandboxes run.
    assert settings.probe_placement() == {
        "nodeSelector": {"pool": "sandboxes"},
        "tolerations": [{"key": "sandboxes", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
        "runtimeClassName": "gvisor",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POD_CPU_REQUEST_SHARE", "1.5"),
        ("POD_NODE_SELECTOR", "pool"),
        ("PAYLOAD_DELIVERY", "mail"),
        ("POD_NAMESERVERS", '["dns.example"]'),
        ("POD_NAMESERVERS", '["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"]'),
    ],
)
def test_bad_values_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("ORCHARD_NODE_ADDRESS", "unix:/n")
    monkeypatch.setenv(f"ORCHARD_{name}", value)
    with pytest.raises(Exception, match=name.lower()):
        SchedulerSettings()  # type: ignore[call-arg]
