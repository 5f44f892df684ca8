"""How hypothesis runs here: as many examples as a busy machine likes, none of them timed, nothing kept."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "raytpu", deadline=None, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("raytpu")
