"""The configuration of an Airflow that lives on this machine alone: one file, made once a home.

Everything is in the home's own ``airflow.cfg`` (mode 0600), secrets too, so nothing of it stands in
an environment or on a command line, and ``AIRFLOW_HOME=… airflow …`` by hand sees the same Airflow.
Not a model for a deployment: SQLite, one machine, one user.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from configparser import RawConfigParser
from pathlib import Path
from typing import IO

#: section -> option -> value, as in ``airflow.cfg``.
Settings = Mapping[str, Mapping[str, str]]

USERNAME = "admin"
_PASSWORDS = "simple_auth_manager_passwords.json.generated"

#: Of the caller's environment only this reaches Airflow; its own ``AIRFLOW__*`` in particular does not.
_PASSED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
)


def environment(home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the Airflow processes of ``home``."""
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    env |= {"AIRFLOW_HOME": str(home), "AIRFLOW_CONFIG": str(home / "airflow.cfg"), "PYTHONUNBUFFERED": "1"}
    return env | dict(extra)


def quick_settings() -> dict[str, dict[str, str]]:
    """What makes a small Airflow answer quickly; measured, two cores, SQLite."""
    return {
        "core": {
            "load_examples": "False",
            # LocalExecutor forks this many workers ahead, each a copy of the scheduler.
            "parallelism": "4",
            "dags_are_paused_at_creation": "True",
        },
        "scheduler": {
            # A task that has become ready waits for the next loop, and the loop sleeps this long when idle.
            "scheduler_idle_sleep_time": "0.2",
            # The longest that a trigger's time-out is overdue.
            "trigger_timeout_check_interval": "5",
        },
        "dag_processor": {
            "parsing_processes": "1",
            "refresh_interval": "10",
            "min_file_process_interval": "30",
        },
        "api": {"workers": "1"},
        "logging": {"colored_console_log": "False"},
    }


def write_config(
    home: Path, dags_folders: Sequence[Path], *, port: int, plugins_folder: Path | None, settings: Settings
) -> str:
    """Make or renew the home's configuration; secrets and password of an existing home are kept.

    :param home: the AIRFLOW_HOME, made with mode 0700 where it is not there.
    :param port: the API server's port on loopback.
    :param settings: what is set on top, and wins.
    :return: the password of :data:`USERNAME`.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / "airflow.cfg"
    before = _parser()
    before.read(path)
    after = _parser()
    layers = (quick_settings(), _places(home, dags_folders, port, plugins_folder), _secrets(before), settings)
    for layer in layers:
        for section, options in layer.items():
            if not after.has_section(section):
                after.add_section(section)
            for option, value in options.items():
                after.set(section, option, value.replace("%", "%%"))
    with _private(path) as file:
        after.write(file)
    return _password(home / _PASSWORDS)


def _parser() -> RawConfigParser:
    return RawConfigParser(strict=True)


def _places(home: Path, dags_folders: Sequence[Path], port: int, plugins_folder: Path | None) -> Settings:
    bundles = [
        {
            "name": "dags-folder" if not index else f"dags-folder-{index}",
            "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
            "kwargs": {"path": str(folder), "refresh_interval": 10},
        }
        for index, folder in enumerate(dags_folders)
    ]
    base = f"http://127.0.0.1:{port}"
    return {
        "core": {
            "executor": "LocalExecutor",
            "dags_folder": str(dags_folders[0]),
            "plugins_folder": str(plugins_folder or home / "plugins"),
            "execution_api_server_url": f"{base}/execution/",
            "simple_auth_manager_users": f"{USERNAME}:admin",
            "simple_auth_manager_passwords_file": str(home / _PASSWORDS),
        },
        "database": {
            # Whoever writes waits for the one before for so many seconds; by default only 5.
            "sql_alchemy_conn": f"sqlite:///{home / 'airflow.db'}?timeout=30",
            # The instance migrates before every start, and the API server comes up meanwhile.
            "check_migrations": "False",
        },
        "dag_processor": {"dag_bundle_config_list": json.dumps(bundles)},
        "api": {"host": "127.0.0.1", "port": str(port), "base_url": base},
        "logging": {
            "base_log_folder": str(home / "logs"),
            "dag_processor_child_process_log_directory": str(home / "logs" / "dag_processor"),
        },
    }


def _secrets(before: RawConfigParser) -> Settings:
    fresh = {
        ("core", "fernet_key"): base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        ("api", "secret_key"): secrets.token_urlsafe(32),
        ("api_auth", "jwt_secret"): secrets.token_urlsafe(64),
    }
    kept: dict[str, dict[str, str]] = {}
    for (section, option), value in fresh.items():
        kept.setdefault(section, {})[option] = before.get(section, option, fallback=value)
    return kept


def _password(path: Path) -> str:
    known = json.loads(path.read_text()) if path.exists() else {}
    if USERNAME not in known:
        known[USERNAME] = secrets.token_urlsafe(12)
        with _private(path) as file:
            json.dump(known, file)
    password: str = known[USERNAME]
    return password


def _private(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")
