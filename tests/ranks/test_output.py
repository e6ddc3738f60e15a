"""What ranks print: whole lines, labelled, in rank order, equal output folded; the same in every run."""
import pytest

pytestmark = pytest.mark.ranks


def shown(capsys, ranks, code, on=None):
    """What a finished cell shows; ``on``: the ranks it runs on."""
    capsys.readouterr()
    ranks.run_cell(code, "cell [1]", ranks=on)
    return capsys.readouterr().out


def test_equal_output_is_folded_and_other_output_is_in_rank_order(ranks, capsys):
    assert shown(capsys, ranks, "print('hello')") == "ranks 0-2: hello\n"
    assert shown(capsys, ranks, "print(rank)") == "rank 0: 0\nrank 1: 1\nrank 2: 2\n"
    assert shown(capsys, ranks, "print('a' if rank == 1 else 'b')") == "ranks 0, 2: b\nrank 1: a\n"
    assert shown(capsys, ranks, "print('hi')", on=[1]) == "rank 1: hi\n"


def test_it_is_the_same_in_every_run(ranks, capsys):
    code = "import time, random\nfor i in range(3):\n    time.sleep(random.random() / 100)\n    print(rank, i)"
    assert len({shown(capsys, ranks, code) for _ in range(10)}) == 1


def test_pieces_of_a_line_are_joined_and_an_open_last_line_is_shown(ranks, capsys):
    code = "for i in range(3): print(i, end=' ')\nprint()\nprint('open', end='')"
    assert shown(capsys, ranks, code) == "ranks 0-2: 0 1 2 \nranks 0-2: open\n"


def test_stderr_is_marked_and_warnings_show(ranks, capsys):
    assert "ranks 0-2 (stderr): careful" in shown(capsys, ranks, "import sys; print('careful', file=sys.stderr)")
    assert "UserWarning: mind" in shown(capsys, ranks, "import warnings; warnings.warn('mind')")


def test_raw_writes_and_c_output_and_subprocesses_are_caught(ranks, capsys):
    code = """import os, ctypes, subprocess
os.write(1, b'raw\\n')
ctypes.CDLL(None).puts(b'from C')
subprocess.run(['echo', 'from a child']);"""
    text = shown(capsys, ranks, code, on=[1])
    assert sorted(text.splitlines()) == ["rank 1: from C", "rank 1: from a child", "rank 1: raw"]


def test_prints_of_data_loader_workers_are_shown_and_the_workers_end(ranks, capsys):
    code = """
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        print('loading', i)
        return i
print(sorted(torch.cat(list(torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2))).tolist()))"""
    text = shown(capsys, ranks, code, on=[0])
    assert text.count("rank 0: loading") == 4 and "rank 0: [0, 1, 2, 3]" in text


def test_a_flood_is_cut_and_counted(ranks, capsys):
    text = shown(capsys, ranks, "for i in range(20_000): print('x' * 50)")
    assert "more characters are not shown" in text and len(text) < 500_000


def test_values_are_shown_and_none_and_semicolons_are_not(ranks, capsys):
    assert shown(capsys, ranks, "1 + 1") == "ranks 0-2: 2\n"
    assert shown(capsys, ranks, "1 + 1;") == shown(capsys, ranks, "None") == ""
    assert shown(capsys, ranks, "display(rank, 'x')", on=[0]) == "rank 0: 0\nrank 0: 'x'\n"


def test_output_before_an_error_is_kept(ranks, capsys):
    from dtlab import RankError

    with pytest.raises(RankError):
        ranks.run_cell("print('before')\n1 / 0", "cell [1]")
    assert "before" in capsys.readouterr().out


def test_bytes_that_are_no_text_do_not_harm(ranks, capsys):
    assert shown(capsys, ranks, "import os; n = os.write(1, b'\\xff\\xfe ok\\n')", on=[0]).endswith("ok\n")


def test_one_progress_bar(ranks, capsys):
    text = shown(capsys, ranks, "import dtlab\nfor _ in dtlab.progress(range(8), 'steps'): pass")
    assert text.splitlines() == [f"rank 0: steps {n}/8" for n in (2, 4, 6, 8)]


def test_nothing_is_printed_by_torch_itself(ranks, capfd):
    ranks.run(lambda: dist.barrier())  # noqa: F821
    ranks.run(lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)) and None)  # noqa: F821
    assert capfd.readouterr() == ("", "")


def test_only_a_long_wait_is_shown_while_a_cell_runs(ranks, monkeypatch):
    from dtlab.ranks import relay

    seen = set()
    monkeypatch.setattr(relay.Relay, "tick", lambda self: seen.add(self.status))
    take_turns = "import time\nfor _ in range(15):\n    time.sleep(0.2 * (rank == 1))\n    dist.barrier()"
    ranks.run_cell(take_turns, "cell [1]")
    assert seen >= {"running for 2 s"} and not any("waits" in text for text in seen), seen
    seen.clear()
    ranks.run_cell("import time\ntime.sleep(4.6 * (rank == 1))\ndist.barrier()", "cell [1]")
    wanted = "rank 0 waits in barrier for rank 1, for 2 s; rank 2 waits in barrier for rank 1, for 2 s"
    assert any(text.endswith(wanted) for text in seen), seen
