"""Prints what is not UTF-8, and carriage returns before newlines that come later."""

import sys
import time

out = sys.stdout.buffer
for piece in (b"start\n", b"bad \xff\xfe bytes\n10%\r", b"20%\r", b"\n", b"end\n"):
    out.write(piece)
    out.flush()
    time.sleep(1)
