"""No test here may be swayed by the tracing settings of whoever runs it."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_otel_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
