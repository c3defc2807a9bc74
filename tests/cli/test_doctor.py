"""The doctor: what it finds, and that it notices what is broken."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

import offmap
from offmap import cli
from offmap.cli import doctor


def test_a_sound_installation_is_well():
    health = doctor.examine_installation()
    assert health["test"]["passed"]
    assert 0.9 <= health["test"]["auroc"] <= 1
    assert health["versions"]["offmap"] == offmap.__version__
    assert health["versions"]["numpy"] == np.__version__
    assert "cpu" in health["devices"]
    assert health["threads"]["torch"] == torch.get_num_threads()
    assert health["extras"]["scikit-learn"]
    assert health == json.loads(json.dumps(health))


def test_an_absent_package_is_shown_with_what_it_is_for(monkeypatch, capsys):
    monkeypatch.setitem(doctor.EXTRAS, "nobody-has-this", "wishes")
    monkeypatch.setattr(doctor, "self_test", lambda: {"passed": True})
    assert doctor.examine_installation()["extras"]["nobody-has-this"] is None
    doctor.doctor()
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["extra", "nobody-has-this", "not installed (wishes)"] in lines
    assert ["test", "passed", "yes"] in lines


def test_a_broken_installation_fails_with_its_reason(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(doctor, "fit", fail)
    result = doctor.self_test()
    assert not result["passed"]
    assert result["error"] == "RuntimeError: no kernel image"


@pytest.mark.parametrize("passed", [True, False])
def test_the_command_prints_json_and_its_exit_code_says_so(monkeypatch, capsys, passed):
    monkeypatch.setattr(doctor, "self_test", lambda: {"passed": passed, "seconds": 0.1})
    monkeypatch.setattr(sys, "argv", ["offmap", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == (0 if passed else 1)
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"versions", "devices", "threads", "extras", "test"}
    assert record["test"] == {"passed": passed, "seconds": 0.1}
