"""ipyparallel's engines, driven from a plain program."""
import os
import sys
import tempfile
import time

import ipyparallel
import talk
import work

num_ranks = int(sys.argv[1])
folder = tempfile.TemporaryDirectory(prefix="dtlab-bench-")
os.environ["IPYTHONDIR"] = folder.name
cluster = ipyparallel.Cluster(n=num_ranks, log_level=40)
client = cluster.start_and_connect_sync(activate=False)


def join():
    """Engines join one group; their pids."""
    store = os.path.join(folder.name, f"store-{time.monotonic()}")
    waits = [client[i].apply_async(work.join, rank, num_ranks, store) for rank, i in enumerate(client.ids)]
    return [wait.get() for wait in waits]


def first_result():
    assert client[:].apply_sync(work.first_result) == [num_ranks] * num_ranks


def relaunch():
    """Engines end, new ones start and give their first result; the controller stays, the quickest way there is."""
    cluster.restart_engines_sync()
    client.wait_for_engines(num_ranks, interactive=False)
    join()
    first_result()


def make_tensor(num_bytes):
    client[0:1].execute(f"import work; tensor = work.make_tensor({num_bytes}); array = tensor.numpy()", block=True)
    import torch  # noqa: F401


def pull():
    work.read_tensor(client[client.ids[0]].pull("tensor", block=True))


def pull_array():
    work.read_tensor(client[client.ids[0]].pull("array", block=True))


try:
    pids = join()
    first_result()
    talk.say(value=True)
    talk.serve(
        first_ddp=lambda: max(client[:].apply_sync(work.first_ddp)),
        pss_before_ddp=lambda: work.pss_per_rank(pids, num_ranks),
        pss=lambda: work.pss_per_rank(pids, num_ranks),  # engines alone
        pss_all=lambda: work.pss_per_rank(work.all_pids(), num_ranks),  # with controller and nannies
        relaunch=lambda times: talk.time_calls(relaunch, times),
        empty_cell=lambda times: talk.time_calls(lambda: client[:].execute("", block=True), times),
        make_tensor=make_tensor,
        pull=lambda times: talk.time_calls(pull, times),
        pull_array=lambda times: talk.time_calls(pull_array, times),
    )
finally:
    client.close()
    cluster.stop_cluster_sync()
    folder.cleanup()
