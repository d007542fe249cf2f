"""The samples for autoscalers of engines: they ask for what there is, in the documented forms."""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from typing import Any

import aiohttp
import machine
import yaml

from farhop.service.admin import external_metrics as external
from farhop_lab.world.world import World
from regional_lb.scheduler.scaling import ScalingConfig
from tests.conftest import RunningWorld

SAMPLES = machine.DEPLOY / "kubernetes" / "engines"


def documents(name: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((SAMPLES / name).read_text())}


def test_keda_asks_a_path_that_there_is_with_rights_that_are_named() -> None:
    found = documents("keda.yaml")
    scaled, rights = found["ScaledObject"]["spec"], found["TriggerAuthentication"]
    (trigger,) = scaled["triggers"]
    asked = trigger["metadata"]
    url = urllib.parse.urlparse(asked["url"])
    assert (trigger["type"], asked["valueLocation"], asked["targetValue"]) == ("metrics-api", "value", "1")
    assert url.path.startswith("/scaling/")
    assert urllib.parse.parse_qs(url.query).keys() == {"model"}
    assert trigger["authenticationRef"]["name"] == rights["metadata"]["name"]
    assert {one["parameter"] for one in rights["spec"]["secretTargetRef"]} == {"token", "ca"}
    # It asks the ports that the chart's Services have, even if the comment names another tier's.
    chart = yaml.safe_load_all((machine.DEPLOY / "kubernetes" / "plain" / "farhop.yaml").read_text())
    ports = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in chart if one["kind"] == "Service"}
    for name, port in re.findall(r"https://([a-z-]+)\.farhop\.svc:(\d+)/", (SAMPLES / "keda.yaml").read_text()):
        assert ports[name] == int(port), name
    assert scaled["maxReplicaCount"] <= ScalingConfig().replicas_max


def test_the_hpa_asks_for_the_metric_by_its_labels() -> None:
    found = documents("hpa.yaml")
    (asked,) = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    metric = asked["external"]["metric"]
    assert (asked["type"], metric["name"]) == ("External", external.NAME)
    labels = ",".join(f"{name}={value}" for name, value in metric["selector"]["matchLabels"].items())
    assert external.selector(labels) == metric["selector"]["matchLabels"]
    (rule,) = yaml.safe_load(found["ConfigMap"]["data"]["config.yaml"])["externalRules"]
    assert rule["name"]["as"] == external.NAME


def test_live_balancers_answer_in_both_forms(running: RunningWorld) -> None:
    async def drill(world: World) -> None:
        run = world.regions["tokyo"]
        async with aiohttp.ClientSession() as session:

            async def got(path: str, admin: str) -> tuple[int, Any]:
                async with session.get(f"{admin}{path}") as page:
                    return page.status, await page.json()

            model = world.settings.model
            for admin in (run.regional_admin, run.global_admin):

                async def desired(admin: str = admin) -> int:
                    found = (await got("/scaling", admin))[1]["desired_replicas"].get("tokyo") or {}
                    return int(found.get(model, 0))

                async def alike(path: str, admin: str = admin) -> tuple[int, Any]:
                    """An answer around which as many were wanted: twice a second that is looked at."""
                    async with asyncio.timeout(60.0):
                        while True:
                            before, (status, body) = await desired(), await got(path, admin)
                            if before and before == await desired():
                                return before, (status, body)
                            await asyncio.sleep(0.1)

                wanted, found = await alike(f"/scaling/tokyo?model={model}")
                assert wanted >= 1
                assert found == (200, {"value": wanted})
                assert (await got("/scaling/tokyo?model=x", admin))[0] == 404
                base = f"/apis/{external.GROUP}"
                assert (await got(base, admin))[1] == external.RESOURCES
                wanted, listed = await alike(f"{base}/namespaces/n/{external.NAME}?labelSelector=region%3Dtokyo")
                assert [item["value"] for item in listed[1]["items"]] == [str(wanted)]
                assert (await got(f"{base}/namespaces/n/other", admin))[0] == 404
                assert (await got(f"{base}/namespaces/n/{external.NAME}?labelSelector=zone=a", admin))[0] == 400
            assert len((await got("/scaling", run.global_admin))[1]["desired_replicas"]) == len(world.regions)

    running.call(drill(running.world))
