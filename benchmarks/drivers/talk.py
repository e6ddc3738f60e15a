"""A driver plays the notebook: it takes one command a line and answers with one line of JSON, until its input ends."""
import json
import os
import sys
import time

_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed goes to the log


def say(**answer):
    """One answer."""
    _out.write(json.dumps(answer) + "\n")
    _out.flush()


def serve(**commands):
    """Answer commands: ``name number``; each is called with the number, if there is one."""
    for line in sys.stdin:
        name, *numbers = line.split()
        say(value=commands[name](*map(int, numbers)))


def time_calls(call, times):
    """Seconds of each of so many calls."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds
