"""Runs a real Airflow on this machine, for the demo, `raytpu ui` and the tests; never part of a deployment."""
