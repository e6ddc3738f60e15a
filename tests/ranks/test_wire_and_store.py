"""Frames on socket pairs and the store of a group, without any rank."""
import os
import threading

import pytest

from dtlab.ranks import wire


@pytest.fixture
def ends():
    pair = tuple(map(wire.Channel, wire.channel_pair()))
    yield pair
    for end in pair:
        end.close()


def test_messages_arrive_whole_and_in_order(ends):
    here, there = ends
    for i in range(50):
        assert here.send("n", i, b"x" * i)
    assert [frame[0][1] for frame in there.receive_ready()] == list(range(50))
    assert there.receive_ready() == [] and there.receive(timeout=0.01) is None and not there.closed


def test_a_frame_larger_than_the_sockets_buffer(ends):
    here, there = ends
    sender = threading.Thread(target=here.send, args=("big", b"x" * 5_000_000))
    sender.start()
    assert len(there.receive(timeout=20)[0][1]) == 5_000_000
    sender.join()


def test_descriptors_arrive_with_their_own_frame(ends):
    here, there = ends
    files = [wire.anonymous_file() for _ in range(12)]
    for i, fd in enumerate(files):
        os.write(fd, str(i).encode())
    here.send("ten", fds=files[:10])
    here.send("none")
    here.send("two", fds=files[10:])
    frames = [there.receive(timeout=5) for _ in range(3)]
    assert [len(fds) for _, fds in frames] == [10, 0, 2]
    received = [fd for _, fds in frames for fd in fds]
    assert [os.pread(fd, 9, 0) for fd in received] == [str(i).encode() for i in range(12)]
    for fd in files + received:
        os.close(fd)


def test_the_end_of_the_other_side_is_noticed(ends):
    here, there = ends
    here.send("last")
    here.close()
    assert there.receive(timeout=5) == (("last",), []) and there.receive(timeout=5) is None and there.closed
    assert there.send("x") is False


def test_descriptors_nobody_took_are_closed():
    here, there = map(wire.Channel, wire.channel_pair())
    fd = wire.anonymous_file()
    before = len(os.listdir("/proc/self/fd"))
    here.send("with a file", fds=[fd])
    there._fill(0)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    there.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    here.close()
    os.close(fd)


@pytest.fixture
def stores():
    """Two views of one store, as two ranks have them."""
    from dtlab.ranks.store import MemoryStore

    fd = wire.anonymous_file()
    pair = MemoryStore(fd), MemoryStore(os.dup(fd))
    yield pair
    for store in pair:
        store.close()


def test_a_store_holds_what_anybody_sets(stores):
    one, other = stores
    one.set("a", b"1")
    other.set("b", "text")
    assert (other.get("a"), one.get("b"), one.num_keys()) == (b"1", b"text", 2)
    assert one.check(["a", "b"]) and not one.check(["a", "c"])
    assert other.delete_key("a") and not one.check(["a"]) and not one.delete_key("a")


def test_a_store_counts_and_compares(stores):
    one, other = stores
    assert [one.add("n", 2), other.add("n", 3), one.add("n", 0)] == [2, 5, 5] and other.get("n") == b"5"
    assert one.compare_set("k", "", "first") == b"first"
    assert other.compare_set("k", "wrong", "second") == b"first"
    assert other.compare_set("k", "first", "second") == one.get("k") == b"second"


def test_a_store_waits_for_what_comes_later(stores):
    import datetime

    one, other = stores
    threading.Timer(0.05, other.set, ("late", b"x")).start()
    assert one.get("late") == b"x"
    with pytest.raises(Exception, match="nobody has set never"):
        one.wait(["never"], datetime.timedelta(milliseconds=20))


def test_many_threads_and_processes_count_in_one_store(stores):
    def count(store):
        threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = []
    for store in stores:
        children.append(os.fork())
        if not children[-1]:
            count(store)
            os._exit(0)
    count(stores[0])
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert stores[1].get("n") == b"900"
