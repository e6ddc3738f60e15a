"""Values on their way to the ranks and back: equal, private, with the layout they had."""
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.ranks


def tensors():
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "f16": torch.ones(3, dtype=torch.float16),
        "f64": torch.ones(3, dtype=torch.float64),
        "f8": torch.ones(4).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "bool": torch.tensor([True, False]),
        "int8": torch.tensor([-3, 4], dtype=torch.int8),
        "uint16": torch.tensor([3, 4], dtype=torch.uint16),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "small view of a large storage": torch.zeros(100_000)[10:13],
        "expanded": torch.tensor([1.0]).expand(5),
        "offset": base[2:],
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "requires_grad": torch.ones(2, requires_grad=True),
        "with a graph": torch.ones(2, requires_grad=True) * 3,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "large": torch.arange(3_000_000, dtype=torch.float32),
    }


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_goes_there_and_back(ranks, name):
    x = tensors()[name]
    for y in ranks.run(lambda t: t, x):
        assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape and y.layout == x.layout
        assert y.requires_grad == x.requires_grad and y.is_leaf
        one, other = (t.to_dense().to(torch.complex128) for t in (x.detach(), y.detach()))
        assert torch.equal(one, other)


def test_strides_are_kept(ranks):
    for name in ("transposed", "channels_last", "expanded"):
        x = tensors()[name]
        assert ranks.run(lambda t: t.stride(), x) == [x.stride()] * 3


def test_shared_storage_stays_shared_within_one_value(ranks):
    base = torch.zeros(4)
    for whole, half in ranks.run(lambda pair: pair, (base, base[:2])):
        half += 1
        assert whole.tolist() == [1, 1, 0, 0]
    assert base.sum() == 0


def test_copies_are_private_between_ranks_and_notebook(ranks):
    x = torch.zeros(1000)

    def change(t):
        t += rank  # noqa: F821
        return t

    values = ranks.run(change, x)
    assert [v[0].item() for v in values] == [0, 1, 2] and x.sum() == 0
    values[0] += 5
    assert values[1][0] == 1


def test_pushed_values_are_private_and_stay(ranks):
    x = torch.zeros(1000)
    ranks.push(x=x, text="hi")
    x += 1
    ranks.run_cell("x += rank", "cell [1]")
    assert [v[0].item() for v in ranks.pull("x")] == [0, 1, 2] and ranks.pull("text", ranks=[1]) == ["hi"]


def test_modules_optimisers_and_state_dicts(ranks):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    tied = torch.nn.ModuleList([net[0], net[0]])
    for there, state, pair in ranks.run(lambda n, t: (n, n.state_dict(), t), net, tied):
        assert list(state) == list(net.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(there.state_dict().values(), net.state_dict().values()))
        assert pair[0].weight is pair[1].weight
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for state in ranks.run(lambda s: s, optimizer.state_dict()):
        assert torch.equal(state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("x", [
    np.arange(10.0), np.arange(20_000).reshape(100, 200), np.arange(20_000).reshape(100, 200).T,
    np.arange(20_000)[::3], np.zeros(0), np.float32(3), np.array("text"), np.array([None, "x"]), np.ones(3, "c16"),
    np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]), np.asfortranarray(np.ones((50, 60))),
], ids=str)  # fmt: skip
def test_arrays(ranks, x):
    for y in ranks.run(lambda a: a, x):
        assert type(y) is type(x) and y.dtype == x.dtype and np.array_equal(x, y)


def test_arrays_can_be_written_to(ranks):
    def change(a):
        a[0] = rank  # noqa: F821
        return a

    values = ranks.run(change, np.zeros(5000))
    values[2][1] = 9
    assert [v[0] for v in values] == [0, 1, 2] and values[1][1] == 0


@pytest.mark.parametrize("value", [
    None, True, 10**30, 1.5, 2j, "text \N{SNOWMAN}", b"bytes" * 10_000, bytearray(b"x" * 5000), (1, [2, {3: {4}}]),
    range(3), slice(1, 2), Ellipsis, frozenset("ab"), torch.float32, torch.device("cpu"), torch.Size([1, 2]),
    {"a": torch.float16}, "x" * 200_000, int, len,
], ids=lambda v: repr(v)[:20])  # fmt: skip
def test_plain_values(ranks, value):
    assert ranks.run(lambda v: v, value) == [value] * 3


def test_a_hundred_megabytes_come_back(ranks):
    values = ranks.run(lambda: torch.full((25_000_000,), float(rank)), ranks=[0, 2])  # noqa: F821
    assert [v[-1].item() for v in values] == [0, 2]


def test_many_small_tensors_share_one_trip(ranks):
    values = ranks.run(lambda: [torch.full((3,), i) for i in range(500)])
    assert values[2][499].tolist() == [499] * 3


def test_a_random_generator_travels(ranks):
    state = torch.Generator().manual_seed(3).get_state()
    assert all(torch.equal(state, there) for there in ranks.run(lambda s: s, state))


def test_tensors_that_begin_at_one_address(ranks):
    array = np.arange(1000.0)
    pair = torch.from_numpy(array[:600]), torch.from_numpy(array)
    back = ranks.run(lambda pair: pair, pair)[0]
    assert torch.equal(back[0], pair[0]) and torch.equal(back[1], pair[1])
