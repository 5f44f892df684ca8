"""Prints so many numbered lines, and one without a newline: python lines.py COUNT PAUSE."""

import sys
import time

count, pause = int(sys.argv[1]), float(sys.argv[2])
for number in range(count):
    print(f"line {number}", flush=pause > 0)
    time.sleep(pause)
print("last line without newline", end="")
