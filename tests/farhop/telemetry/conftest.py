"""The tests here do not depend on the user's tracing settings."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_otel_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
