"""What a context may say: somewhere it must name, hubs or one etcd, and URLs that are ones."""

import pytest
from pydantic import ValidationError

from farhop.config import problems_of
from farhop_cli.context_document import Context

ETCD = {"endpoints": ["127.0.0.1:2379"]}


@pytest.mark.parametrize(
    "message", [{"etcd": ETCD}, {"hubs": {"a": ETCD}}, {"world": "w.json"}, {"admin": {"urls": ["http://[::1]:8082/"]}}]
)
def test_a_context_needs_only_one_of_etcd_hubs_world_or_admin_urls(message):
    made = Context.model_validate(message)
    assert all(not url.endswith("/") for url in made.admin.urls)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({}, "etcd.endpoints: are not given"),
        ({"etcd": ETCD, "hubs": {"a": ETCD}}, "they are one cluster, and `hubs` are several"),
        ({"hubs": {"a": {}}}, "hubs.a.endpoints: are not given"),
        ({"admin": {"urls": ["file:///etc/passwd"]}}, "is no URL of an admin port"),
        ({"admin": {"urls": ["http://user@host"]}}, "is no URL of an admin port"),
        ({"etcd": ETCD, "admin": {"server_name": "{secret}"}}, "admin.server_name"),
        ({"etcd": ETCD, "tenant": "acme"}, "correct its name"),
    ],
)
def test_invalid_fields_are_named(message, problem):
    with pytest.raises(ValidationError) as caught:
        Context.model_validate(message)
    assert any(problem in line for line in problems_of(caught.value))
