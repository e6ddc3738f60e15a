"""Arguments that cannot work are refused with the numbers, before anything starts."""
# ruff: noqa: F821
import pytest

import dtlab
from dtlab import ConfigError
from dtlab.ranks import notebook, settings


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True, None])
def test_sizes_that_are_no_number_of_ranks(size):
    with pytest.raises(ConfigError, match="the number of ranks is a whole number from 1 up, for example 4"):
        dtlab.launch(size)


def test_more_ranks_than_memory_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(settings.machine, "memory_available_bytes", lambda: 1_000_000_000)
    with pytest.raises(ConfigError, match=r"8 ranks need about 1.2 GB \(150 MB each\), and 1.0 GB are free: .* most 6"):
        dtlab.launch(8)
    settings.check_size(6)


def test_one_rank_is_never_refused_and_cores_never_count(monkeypatch):
    monkeypatch.setattr(settings.machine, "memory_available_bytes", lambda: 0)
    settings.check_size(1)
    monkeypatch.setattr(settings.machine, "memory_available_bytes", lambda: 10**12)
    monkeypatch.setattr(settings.machine, "usable_cores", lambda: 1)
    settings.check_size(64)


@pytest.mark.parametrize("timeout", [0, -3, "20", True])
def test_time_limits_that_cannot_be_meant(timeout):
    with pytest.raises(ConfigError, match="seconds above 0, or None for no limit"):
        dtlab.launch(1, timeout=timeout)


def test_devices():
    with pytest.raises(ConfigError, match="choose 'auto', 'cpu' or 'cuda'"):
        dtlab.launch(1, device="tpu")


def test_ranks_under_torchrun_are_its_own(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="they are the ranks"):
        dtlab.launch(1)


@pytest.mark.parametrize("asked, threads", [
    (None, 3), ("", 3), ("1", 1), ("5", 5), ("4,2", 4), ("many", 3), ("0", 3), ("-1", 3),
])  # fmt: skip
def test_threads_of_a_rank(monkeypatch, asked, threads):
    monkeypatch.setattr(settings.machine, "usable_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert settings.num_threads(2) == threads
    assert settings.num_threads(100) == (threads if asked in ("1", "5", "4,2") else 1)


def test_another_interface_is_named(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "utun9")
    assert settings.rank_environ(1)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME=utun9 is not used" in capsys.readouterr().err


@pytest.mark.parametrize("line, parsed", [
    ("", (None, ...)), ("all", (None, ...)), ("1", ([1], ...)), ("0,2", ([0, 2], ...)), ("[0,2]", ([0, 2], ...)),
    ("0-2,5", ([0, 1, 2, 5], ...)), ("--timeout 3", (None, 3.0)), ("1 --timeout=0.5", ([1], 0.5)),
    ("--timeout 30 0,1", ([0, 1], 30.0)), ("[0, 2]", ([0, 2], ...)), ("0, 2 --timeout 3", ([0, 2], 3.0)),
])  # fmt: skip
def test_lines_of_the_magic(line, parsed):
    assert notebook.parse_line(line) == (*parsed, None)
    for with_record in (f"{line} --record step", f"--record=step {line}"):
        assert notebook.parse_line(with_record) == (*parsed, "step")


@pytest.mark.parametrize("line", [
    "x", "1 2", "--record", "--record 1a", "--record a.b", "--timeout", "--timeout x", "--limit 3", "1-", "0,,2", "'",
    "3-1",
])  # fmt: skip
def test_lines_that_are_not_understood(line):
    with pytest.raises(ConfigError, match="%%ranks"):
        notebook.parse_line(line)


pytest_ranks = pytest.mark.ranks


@pytest_ranks
def test_ranks_that_do_not_exist(ranks):
    for wrong in ([3], [-1], [0, 7], [], [True], ["0"], [0.0]):
        with pytest.raises(ConfigError, match="there are ranks 0-2"):
            ranks.run(lambda: 1, ranks=wrong)


@pytest_ranks
def test_run_takes_a_function(ranks):
    with pytest.raises(ConfigError, match="run takes a function, not int"):
        ranks.run(3)


@pytest_ranks
def test_a_name_that_no_rank_has(ranks):
    from dtlab import RankError

    ranks.push(a=1)
    with pytest.raises(RankError, match="ranks 0-2 of 3 failed: .*no variable 'b'; their variables: a"):
        ranks.pull("b")


@pytest_ranks
def test_launch_on_a_rank_is_refused(ranks):
    from dtlab import RankError

    def nested():
        import dtlab

        dtlab.launch(2)

    with pytest.raises(RankError, match="launch was called on a rank"):
        ranks.run(nested)


@pytest_ranks
def test_another_thread_is_told_that_the_ranks_are_busy(ranks):
    import threading
    import time

    thread = threading.Thread(target=ranks.run, args=(time.sleep, 0.5))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(ConfigError, match="the ranks are busy with another cell"):
        ranks.run(lambda: 1)
    thread.join()
    assert ranks.run(lambda: 1) == [1] * 3


@pytest_ranks
def test_launch_with_another_size_replaces_the_ranks():
    first = dtlab.launch(2)
    second = dtlab.launch(4)
    assert dtlab.current_ranks() is second and len(second) == 4 and not first.alive
    with pytest.raises(ConfigError, match="shut down"):
        first.run(lambda: 1)
    assert dtlab.launch(1).run(lambda: (rank, world_size)) == [(0, 1)]  # noqa: F821


@pytest_ranks
def test_push_takes_names(ranks):
    for call in (lambda: ranks.push(5), lambda: ranks.push()):
        with pytest.raises(ConfigError, match=r"ranks.push\(x=5\)"):
            call()


@pytest_ranks
def test_a_lost_group_of_the_readers_is_said(ranks):
    def fails():
        if rank == 1:
            raise ValueError
        dist.barrier()

    def text():
        with pytest.raises(dtlab.RankError) as caught:
            ranks.run(fails)
        return str(caught.value)

    assert text().endswith("Variables are kept.")
    ranks.run_cell("pair = dist.new_group([0, 1])", "cell")
    assert text().endswith("Make process groups and DDP modules again.")
    ranks.run_cell("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))", "cell")
    assert text().endswith("Make process groups and DDP modules again.")
