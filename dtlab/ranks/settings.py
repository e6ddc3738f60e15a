"""What ``launch`` is asked for, checked, and the environment that ranks get."""
import os
import sys

from dtlab import machine
from dtlab.errors import ConfigError

PREDEFINED = ("rank", "world_size", "device", "dist", "torch", "display", "dtlab")  # names that every rank has


def is_in_rank():
    """Whether this process is a rank."""
    worker = sys.modules.get("dtlab.ranks.worker")
    return worker is not None and worker._worker is not None


def check_place():
    """Refuse to launch where ranks cannot live: on a rank, under torchrun, on Windows."""
    if is_in_rank():
        raise ConfigError("launch was called on a rank; launch ranks from the notebook")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("torchrun has started these processes: they are the ranks, use torch.distributed directly")
    if os.name == "nt":
        raise ConfigError("ranks need Linux or macOS: on Windows use WSL2 (wsl --install), see `dtlab doctor`")


def check_size(world_size, ending=0):
    """Refuse a number of ranks that is none, or more than memory holds once ``ending`` ranks have ended."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: the number of ranks is a whole number from 1 up, for example 4")
    free = machine.memory_available_bytes()
    if not free:
        return  # this system does not tell
    free += ending * machine.BYTES_PER_RANK
    most = machine.max_ranks(free)
    if world_size > most:
        need = world_size * machine.BYTES_PER_RANK
        raise ConfigError(
            f"{world_size} ranks need about {need / 1e9:.1f} GB ({machine.BYTES_PER_RANK // 10**6} MB each), and "
            f"{free / 1e9:.1f} GB are free: launch at most {most}, or close other kernels"
        )


def check_timeout(timeout):
    """Refuse a time limit that is none."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise ConfigError(f"timeout={timeout!r}: seconds above 0, or None for no limit")


def num_threads(world_size):
    """Threads of a rank: the reader's own setting (the first number of a list), else its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else max(1, machine.usable_cores() // world_size)


def rank_environ(threads):
    """Environment variables of a rank."""
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
