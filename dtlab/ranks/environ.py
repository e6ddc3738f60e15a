"""Environment variables of ranks."""
import os
import sys

from dtlab import machine


def num_threads(world_size):
    """Threads of a rank: the reader's own setting (the first number of a list), else its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else max(1, machine.usable_cores() // world_size)


def rank_environ(threads):
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    preset = os.environ.get("GLOO_SOCKET_IFNAME")
    if preset not in (None, "", loopback):
        print(f"GLOO_SOCKET_IFNAME={preset} is not used: ranks on one machine talk over {loopback}", file=sys.stderr)
    return {
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(threads),
        "MPLBACKEND": "module://dtlab.ranks.figures",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
