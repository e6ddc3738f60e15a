"""Packing and unpacking without any rank."""
import gc
import os

import numpy as np
import pytest
import torch

from dtlab import ConfigError
from dtlab.ranks import parcels


def there_and_back(value):
    return parcels.unpack(parcels.pack(value))[0]


def mapped_files():
    with open("/proc/self/maps") as maps:
        return sum("memfd" in line for line in maps)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def test_small_values_travel_inline_and_tensors_in_a_file():
    small = parcels.pack({"a": 1})
    assert small.fds == () and len(small.pickled) < 100
    large = parcels.pack(torch.ones(10))
    assert len(large.fds) == 1
    large.close()
    large.close()
    assert large.fds == ()


def test_kept_values_hold_memory_and_no_descriptors():
    gc.collect()
    before = open_fds()
    kept = [there_and_back((torch.ones(1000), np.ones(1000))) for _ in range(100)]
    assert open_fds() == before and all(t.sum() == 1000 == a.sum() for t, a in kept)


def test_memory_goes_without_the_garbage_collector():
    """It is megabytes that a loop over results would pile up, and nothing tells the collector of them."""
    gc.disable()
    try:
        before = mapped_files()
        values = [there_and_back([torch.ones(5000), np.ones(5000)]) for _ in range(5)]
        assert mapped_files() == before + 5
        values.clear()
        assert mapped_files() == before
    finally:
        gc.enable()


def test_memory_goes_when_the_last_part_of_a_value_goes():
    gc.collect()
    before = mapped_files()
    tensor, array = there_and_back((torch.ones(5000), np.ones(5000)))
    assert mapped_files() == before + 1
    view = tensor[10:]
    del tensor, array
    gc.collect()
    assert mapped_files() == before + 1 and view.sum() == 4990
    del view
    gc.collect()
    assert mapped_files() == before


def test_tensors_begin_on_a_cache_line():
    for tensor in there_and_back([torch.ones(n, dtype=torch.int8) for n in (1, 3, 65, 100)]):
        assert tensor.data_ptr() % 64 == 0


def test_a_small_view_does_not_drag_its_storage_along():
    parcel = parcels.pack(torch.zeros(1_000_000)[:3])
    assert os.fstat(parcel.fds[0]).st_size < 10_000
    parcel.close()


def test_equal_storages_travel_once():
    x = torch.zeros(100_000)
    parcel = parcels.pack([x, x[:50_000], x.view(100, 1000)])
    assert os.fstat(parcel.fds[0]).st_size < 450_000
    parcel.close()


def test_the_globals_of_functions_by_value_are_told():
    namespace = {"__name__": "__main__", "k": 3}
    exec("def f(): return k", namespace)
    function, found = parcels.unpack(parcels.pack(namespace["f"]))
    assert function() == 3 and [g["k"] for g in found] == [3]


def test_the_files_of_functions_by_value_are_told():
    namespace = {"__name__": "__main__"}
    exec(compile("def f(): return 1", "<cell 5>", "exec"), namespace)
    parcel = parcels.pack(namespace["f"])
    assert parcel.filenames == {"<cell 5>"}
    assert parcels.unpack(parcel)[0].__code__.co_filename == "<cell 5>"


def test_what_cannot_travel_leaves_no_descriptor_open():
    before = open_fds()
    for value in (open(os.devnull), (i for i in ()), [torch.ones(3), lambda: (yield)()]):
        try:
            parcels.pack(value).close()
        except ConfigError as error:
            assert "cannot travel between the notebook and the ranks" in str(error)
    gc.collect()
    assert open_fds() == before


@pytest.mark.parametrize("name, value", [("sock", "socket"), ("lock", "lock")])
def test_a_global_that_cannot_travel_is_named(name, value):
    import socket
    import threading

    namespace = {"__name__": "__main__", "sock": socket.socket(), "lock": threading.Lock()}
    exec(f"def use(): return {name}", namespace)
    with pytest.raises(ConfigError, match=rf"use\(\) uses '{name}' \({value}\) of the notebook"):
        parcels.pack((namespace["use"], (), {}))
    namespace["sock"].close()
