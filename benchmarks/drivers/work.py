"""What every engine is asked to do on its ranks: the same functions for all of them."""
import os
import time

MARK = "DTLAB_BENCH"  # environment variable of a driver and of all that it starts


def join(rank, world_size, store):
    """Join a gloo group over a store file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return os.getpid()


def first_result():
    """Sum of ones over the ranks: the number of ranks, if the group works."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def first_ddp():
    """Seconds that this rank's first DistributedDataParallel() takes."""
    import torch

    model = torch.nn.Linear(8, 8)
    started = time.perf_counter()
    torch.nn.parallel.DistributedDataParallel(model)
    return time.perf_counter() - started


def make_tensor(num_bytes):
    """A float32 tensor of so many bytes, every page of it written."""
    import torch

    return torch.arange(num_bytes // 4, dtype=torch.float32)


def read_tensor(tensor):
    """Read one number of every 4 KiB page: a tensor that is mapped but not there yet is not back."""
    return tensor[::1024].sum().item()


def pids_started(mark):
    """Pids of living processes whose environment carries this mark: drivers and what they have started."""
    entry, found = f"{MARK}={mark}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if any(variable.startswith(entry) for variable in file.read().split(b"\0")):
                    found.append(int(name))
        except OSError:  # not ours, or just ended
            continue
    return found


def all_pids():
    """Pids of everything that this driver has started."""
    return [pid for pid in pids_started(os.environ[MARK]) if pid != os.getpid()]


def pss_bytes(pid):
    """Memory of a process in bytes; pages shared by n processes count 1/n for each. Linux only."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no Pss line for process {pid}")


def pss_per_rank(pids, num_ranks):
    """Memory of these processes together, in bytes for each rank; None where the system does not count it."""
    time.sleep(0.5)  # idle
    try:
        return sum(pss_bytes(pid) for pid in pids) / num_ranks
    except OSError:
        return None
