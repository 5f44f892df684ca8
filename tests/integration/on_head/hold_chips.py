"""Holds so many chips with an actor until it is stopped: python hold_chips.py COUNT."""

import sys
import time

import ray

ray.init(logging_level="ERROR")


@ray.remote(num_cpus=0, resources={"TPU": int(sys.argv[1])})
class Holder:
    def ping(self) -> str:
        return "held"


holder = Holder.options(name="holder").remote()
print(ray.get(holder.ping.remote()), flush=True)
time.sleep(1000)
