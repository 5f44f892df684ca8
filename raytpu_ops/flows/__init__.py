"""What a task does on a lease, as coroutines: the same ones run in a blocking task and in a trigger.

Between the backends below and the Airflow shell above: nothing here knows Airflow, nothing above
decides anything. Each flow is idempotent, so a retry, a triggerer restart and a second triggerer
may run it again.
"""
