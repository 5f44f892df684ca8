"""What Airflow reads about this package at start-up: connection type, links. Imports nothing else.

The keys are those of Airflow's ``provider_info.schema.json`` (3.3) and of what its ProvidersManager
reads beyond it: ``conn-fields`` and ``ui-field-behaviour`` make the connection form.
"""

from __future__ import annotations

from typing import Any

from raytpu_ops import __version__


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata, for the ``apache_airflow_provider`` entry point."""
    return {
        "package-name": "raytpu-ops",
        "name": "Ray on TPU",
        "description": "Provisions Cloud TPU slices, proves them ready, trains and serves on them with Ray, "
        "and releases them.",
        "versions": [__version__],
        "connection-types": [
            {
                "connection-type": "ray_tpu",
                "hook-class-name": "raytpu_ops.hooks.ray_tpu.RayTpuHook",
                "hook-name": "Ray on TPU",
                "conn-fields": {
                    "backend": {
                        "label": "Backend",
                        "description": "Who grants the slices: 'local' lets this machine play the TPU hosts.",
                        "schema": {"type": ["string", "null"], "enum": ["local"], "default": "local"},
                    },
                    "root": {
                        "label": "Root folder (local)",
                        "description": "Where the local backend keeps its leases; empty for a folder of the user's "
                        "own in the temp folder. Short, because Ray puts sockets below it.",
                        "schema": {"type": ["string", "null"], "maxLength": 60},
                    },
                },
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "login", "password", "schema"],
                    "relabeling": {},
                    "placeholders": {},
                },
            }
        ],
        "extra-links": ["raytpu_ops.links.ray_dashboard.RayDashboardLink"],
    }
