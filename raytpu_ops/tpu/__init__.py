"""Facts about TPU slices and the plain values that everything else speaks in; no I/O, nothing of Airflow or Ray."""
