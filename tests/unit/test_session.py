from __future__ import annotations

import os
import socket

import pytest

from frazil.spark.session import give_the_host_an_address


@pytest.mark.parametrize(("known", "address"), [(False, "127.0.0.1"), (True, None)])
def test_spark_starts_on_a_machine_whose_name_has_no_address(
    monkeypatch: pytest.MonkeyPatch, known: bool, address: str | None
):
    def look_up(name: str) -> str:
        if known:
            return "10.0.0.7"
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setenv("SPARK_LOCAL_IP", "set, so that it is restored")
    monkeypatch.delenv("SPARK_LOCAL_IP")
    give_the_host_an_address()
    assert os.environ.get("SPARK_LOCAL_IP") == address
