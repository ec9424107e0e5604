"""XLA's alarm about slow compilation is dropped from standard error, and nothing else is."""

import subprocess
import sys

from jrl.system.alarm_filter import Filter

ALARM = (
    b"E1126 11:05:09.013465 18539 slow_operation_alarm.cc:73] \n"
    b"********************************\n"
    b"[Compiling module jit_generate for CPU] Very slow compile? If you want to file a bug, run "
    b"with envvar XLA_FLAGS=--xla_dump_to=/tmp/foo and attach the results.\n"
    b"********************************\n"
)
TOOK = b"E1126 11:07:09.0 18539 slow_operation_alarm.cc:140] The operation took 4m0.5s\n"
OTHERS = b"E1126 11:05:10.0 1 gpu.cc:7] out of memory\nhalf a line", b"\rnext half\n\n****\nEND\n"


def test_only_the_alarm_is_dropped_however_the_bytes_are_cut():
    data, expected = OTHERS[0] + b"\n" + ALARM + OTHERS[1] + TOOK, OTHERS[0] + b"\n" + OTHERS[1]
    for size in (1, 7, 64, 10_000):
        keep = Filter()
        out = b"".join(keep(data[i : i + size]) for i in range(0, len(data), size)) + keep.end()
        # A carriage return and an empty line right after the alarm are not its own.
        assert out == expected, size


def test_half_a_line_is_passed_on_at_once():
    keep = Filter()
    assert keep(b"downloading 40 %") == b"downloading 40 %"
    assert keep(b"E1126 11:05:09.01") == b""
    assert keep(b"3 1 other.cc:1] gone\n") == b"E1126 11:05:09.013 1 other.cc:1] gone\n"


SCRIPT = """
import os, sys, threading
import jax.monitoring as monitoring
from jrl.system import compile_alarm

compile_alarm.PATIENCE = 0.0
compile_alarm.hide_slow_compile_alarm()
monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1)
for thread in threading.enumerate():
    if isinstance(thread, threading.Timer):
        thread.join()
os.write(2, ALARM + b"from a library\\n")
print("from Python", file=sys.stderr)
if "dies" in sys.argv:
    os.write(2, b"last words\\n")
    os.abort()
monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 0.1)
os.write(2, ALARM[-9:] + b"after it\\n")
"""


def run(*arguments):
    script = f"ALARM = {ALARM!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True)
    return done.stderr


def test_libraries_of_this_process_are_filtered_while_it_compiles():
    lines = run().split(b"\n")
    assert sorted(lines[:2]) == [b"from Python", b"from a library"]
    assert lines[2:] == [b"*" * 8, b"after it", b""]


def test_last_words_of_a_process_that_dies_are_not_lost():
    assert sorted(run("dies").split(b"\n")) == [
        b"",
        b"from Python",
        b"from a library",
        b"last words",
    ]
