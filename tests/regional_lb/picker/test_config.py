from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import Engine, regional_config
from pydantic import ValidationError

from farhop_lab.world.certs import Authority
from regional_lb.picker.config import PickerConfig


def test_a_gateway_s_header_is_not_accepted_from_unauthenticated_clients(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("picker")
    tls = {"cert_file": pair.cert_file, "key_file": pair.key_file}
    off = {"host": "0.0.0.0", "port": 9003, "callers": "gateway"}
    with pytest.raises(ValidationError, match=r"callers: gateway trusts every client; give tls\.client_ca_file"):
        PickerConfig.model_validate({**off, "tls": tls})
    assert PickerConfig.model_validate({**off, "tls": {**tls, "client_ca_file": pair.cert_file}}).callers == "gateway"
    assert PickerConfig.model_validate({**off, "insecure": True}).failure_mode == "FailClose"


def test_replicas_of_a_picker_have_addresses() -> None:
    engine = Engine()
    engine.address = "engine.example:8000"
    with pytest.raises(
        ValidationError, match="one is at a name, and a gateway is told addresses; give it an IP address"
    ):
        regional_config(engine, picker={"port": 0})
    assert regional_config(engine).picker is None
