"""An Airflow of our own sees nothing of the caller's, and keeps its secrets to itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from raytpu_ops.demo.airflow import MARK, AirflowInstance
from raytpu_ops.demo.airflow_config import environment, write_config
from raytpu_ops.demo.home import lock_home
from raytpu_ops.tpu.errors import Misconfigured


def read(home: Path) -> ConfigParser:
    config = ConfigParser()  # with interpolation, as Airflow reads it
    config.read(home / "airflow.cfg")
    return config


def write(home: Path, **changes: object) -> str:
    arguments: dict = {"port": 1234, "plugins_folder": None, "settings": {}} | changes
    return write_config(home, arguments.pop("dags", [home / "dags"]), **arguments)


def test_environment_has_nothing_of_another_airflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW_HOME", "/somewhere/else")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = environment(tmp_path, {"RAYTPU_LOCAL_ROOT": "/tmp/r"})
    assert env["AIRFLOW_HOME"] == str(tmp_path)
    assert env["RAYTPU_LOCAL_ROOT"] == "/tmp/r"
    assert not {"AIRFLOW__CORE__EXECUTOR", "AWS_SECRET_ACCESS_KEY", "PYTHONDONTWRITEBYTECODE"} & set(env)


def test_secrets_are_readable_by_the_owner_alone_and_differ_between_homes(tmp_path: Path):
    passwords = [write(tmp_path / name) for name in ("a", "b")]
    assert passwords[0] != passwords[1]
    for home in (tmp_path / "a", tmp_path / "b"):
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}
    one, other = read(tmp_path / "a"), read(tmp_path / "b")
    for section, option in (("core", "fernet_key"), ("api", "secret_key"), ("api_auth", "jwt_secret")):
        assert len(one.get(section, option)) >= 32
        assert one.get(section, option) != other.get(section, option)


def test_a_home_that_is_used_again_keeps_secrets_and_password_and_takes_the_new_port(tmp_path: Path):
    password = write(tmp_path, port=1111)
    before = read(tmp_path)
    assert write(tmp_path, port=2222) == password
    after = read(tmp_path)
    assert after.get("api_auth", "jwt_secret") == before.get("api_auth", "jwt_secret")
    assert after.get("core", "fernet_key") == before.get("core", "fernet_key")
    assert after.get("core", "execution_api_server_url") == "http://127.0.0.1:2222/execution/"


def test_it_is_for_loopback_alone(tmp_path: Path):
    write(tmp_path)
    assert read(tmp_path).get("api", "host") == "127.0.0.1"


def test_settings_win_and_percent_signs_survive(tmp_path: Path):
    write(tmp_path, settings={"core": {"parallelism": "2"}, "logging": {"log_format": "%(message)s"}})
    config = read(tmp_path)
    assert config.get("core", "parallelism") == "2"
    assert config.get("logging", "log_format") == "%(message)s"


def test_several_dag_folders_are_bundles_of_their_own(tmp_path: Path):
    import json

    write(tmp_path, dags=[tmp_path / "one", tmp_path / "two"])
    bundles = json.loads(read(tmp_path).get("dag_processor", "dag_bundle_config_list"))
    assert [bundle["kwargs"]["path"] for bundle in bundles] == [str(tmp_path / "one"), str(tmp_path / "two")]
    assert len({bundle["name"] for bundle in bundles}) == 2


def test_airflow_reads_every_option_that_is_set(tmp_path: Path):
    """An option that Airflow has renamed or dropped would be ignored without a word."""
    from airflow.configuration import conf

    write(tmp_path)
    config = read(tmp_path)
    known = conf.configuration_description
    unknown = [
        f"[{section}] {option}"
        for section in config.sections()
        for option in config.options(section)
        if option not in known.get(section, {}).get("options", {})
    ]
    assert unknown == []


def test_an_instance_marks_its_processes_and_hides_its_password(tmp_path: Path):
    one, other = (AirflowInstance(tmp_path / name, tmp_path) for name in ("a", "b"))
    assert one.env[MARK] == one.mark != other.mark
    assert one.port != other.port
    assert one.env["TMPDIR"] != other.env["TMPDIR"]
    assert one.password not in repr(one.api) + "".join(one.env.values())
    for instance in (one, other):
        assert instance.stop() == []
        assert not instance.temp.exists()


def test_a_home_that_an_airflow_uses_is_refused_and_left_as_it_is(tmp_path: Path):
    one = AirflowInstance(tmp_path / "home", tmp_path)
    before = (tmp_path / "home" / "airflow.cfg").read_text()
    with pytest.raises(Misconfigured, match=f"{tmp_path / 'home'} is up already, started by process {os.getpid()}"):
        AirflowInstance(tmp_path / "home", tmp_path)
    assert (tmp_path / "home" / "airflow.cfg").read_text() == before
    assert one.stop() == []
    assert AirflowInstance(tmp_path / "home", tmp_path).stop() == []


def test_a_home_whose_holder_was_killed_is_free(tmp_path: Path):
    code = f"""
import os, pathlib
from raytpu_ops.demo.home import lock_home
held = lock_home(pathlib.Path({str(tmp_path)!r}))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    lock_home(tmp_path).close()


def test_a_home_that_cannot_be_made_is_one_line():
    with pytest.raises(Misconfigured, match="^/proc/x can't be Airflow's home"):
        lock_home(Path("/proc/x"))
