"""What a DAG file pays for importing every public name, beside what a standard operator costs.

Run it with ``make bench``. Each figure is the median over fresh interpreters of the seconds that a
statement takes after ``from airflow.sdk import DAG``; the peer is measured in the same run, turn by
turn, so that a noisy machine moves both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

import raytpu_ops

ROUNDS = 9
OURS = f"from raytpu_ops import {', '.join(raytpu_ops.__all__)}"
PEER = "from airflow.providers.standard.operators.python import PythonOperator"
#: The most that our names may add, in seconds.
LIMIT_S = 0.15

PROBE = """
import sys, time
from airflow.sdk import DAG
start = time.perf_counter()
exec(sys.argv[1])
print(time.perf_counter() - start)
"""


def seconds_of(statement: str) -> float:
    """Seconds of one fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROBE, statement], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> int:
    seconds_of(OURS)
    pairs = [(seconds_of(OURS), seconds_of(PEER)) for _ in range(ROUNDS)]
    ours = statistics.median(one for one, _ in pairs)
    peer = statistics.median(one for _, one in pairs)
    print(f"every public name of raytpu_ops  {ours:.3f} s (limit {LIMIT_S:.2f} s)")
    print(f"PythonOperator of Airflow itself {peer:.3f} s")
    print(f"ratio                            {ours / peer:.2f}")
    return 0 if ours < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
