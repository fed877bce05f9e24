"""The parts of a Pod that hold the agent. That Pods made of them work is tested on a real cluster."""

import re

import pytest

from services.common import pods
from services.scheduler.injection import Delivery, injection_of, probe_spec

IMAGE = "registry.example/orchard/agent:1"


@pytest.mark.parametrize("delivery", list(Delivery))
def test_every_mount_has_its_volume_and_everything_is_below_the_one_folder(delivery: Delivery) -> None:
    injection = injection_of(delivery, IMAGE)
    assert {mount["name"] for mount in injection.mounts} == {volume["name"] for volume in injection.volumes}
    for mount in injection.mounts:
        assert mount["mountPath"].startswith(f"{pods.ROOT}/")
        assert mount.get("readOnly", False) == (mount["mountPath"] != pods.STATE_FOLDER)
    assert injection.command == (f"{pods.PAYLOAD_FOLDER}/init",)


def test_the_config_folder_shows_every_file_that_the_agent_reads() -> None:
    volumes = {volume["name"]: volume for volume in injection_of(Delivery.COPY, IMAGE).volumes}
    items = volumes["orchard-config"]["downwardAPI"]["items"]
    assert {item["path"] for item in items} == {"uid", *pods.CONFIG_FILES}
    for item in items:
        found = re.fullmatch(r"metadata\.annotations\['(.+)']", item["fieldRef"]["fieldPath"])
        assert (found and found[1]) == pods.CONFIG_FILES.get(item["path"])


def test_only_a_copy_needs_an_init_container() -> None:
    assert injection_of(Delivery.IMAGE_VOLUME, IMAGE).init_containers == ()
    (copying,) = injection_of(Delivery.COPY, IMAGE, "Never").init_containers
    assert (copying["image"], copying["imagePullPolicy"]) == (IMAGE, "Never")
    assert copying["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_probe_runs_the_payload_out_of_the_volume() -> None:
    spec = probe_spec(IMAGE)
    (container,) = spec["containers"]
    assert container["command"] == [f"{pods.PAYLOAD_FOLDER}/init", "check"]
    assert spec["volumes"][0]["image"]["reference"] == IMAGE
