"""Where an etcd is: what cannot work is refused by the field's name, and no password is shown."""

from pathlib import Path

import pytest

from farhop.store.etcd_settings import EtcdSettings


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"endpoints": ()}, "endpoints"),
        ({"endpoints": ("localhost",)}, "endpoints"),
        ({"endpoints": ("localhost:0",)}, "endpoints"),
        ({"endpoints": ("ftp://localhost:1",)}, "endpoints"),
        ({"cert_file": Path("c")}, "cert_file"),
        ({"key_file": Path("k")}, "cert_file"),
        ({"username": "u"}, "username"),
        ({"password": "p"}, "username"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(fields, name):
    with pytest.raises(ValueError, match=name):
        EtcdSettings(**{"endpoints": ("127.0.0.1:2379",), **fields})


def test_settings_never_show_the_password():
    settings = EtcdSettings(("h:1", "https://h:2/"), username="root", password="hunter2")
    assert "hunter2" not in repr(settings)
    assert [settings.tls(endpoint) for endpoint in settings.endpoints] == [False, True]
