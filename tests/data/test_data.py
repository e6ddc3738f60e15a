"""Text, batches and the synthetic language."""
import hashlib
import math
import sys

import pytest
import torch

from dtlab.data import SyntheticLanguage, batches, epoch_order, shard_batch, text_bytes
from dtlab.errors import ConfigError

ALPHABET = bytes(range(101))


def test_the_text_is_the_manual_that_python_ships():
    text = text_bytes()
    assert len(text) > 300_000 and b"expression" in text
    assert text == text_bytes()


def test_a_python_without_the_manual_is_told_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match=r"without pydoc_data.topics.*libpython3-stdlib.*text_bytes\('my_text.txt'\)"):
        text_bytes()


def test_a_text_of_your_own(tmp_path):
    path = tmp_path / "my.txt"
    path.write_bytes(b"abc")
    assert text_bytes(path) == b"abc"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        text_bytes(path)
    with pytest.raises(ConfigError, match="cannot read the text .*No such file"):
        text_bytes(tmp_path / "absent.txt")


@pytest.mark.parametrize("data", [ALPHABET, list(ALPHABET), torch.arange(101)])
def test_targets_are_the_next_tokens(data):
    inputs, targets = batches(data, seq_length=10, batch_size=4, seed=0, step=2)
    assert inputs.shape == targets.shape == (4, 10) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_an_epoch_visits_every_sample_once_and_the_next_in_another_order():
    epochs = [torch.cat([batches(ALPHABET, 10, 5, 0, 2 * epoch + half)[0] for half in (0, 1)]) for epoch in (0, 1)]
    for inputs in epochs:
        assert sorted(inputs.flatten().tolist()) == list(range(100))
    assert not torch.equal(*epochs)


def test_a_batch_runs_over_into_the_next_epoch():
    rows = torch.cat([batches(ALPHABET, 10, 4, 0, step)[0] for step in range(5)])[:, 0] // 10
    assert rows.tolist() == [*epoch_order(10, 0, 0), *epoch_order(10, 0, 1)]


def test_a_step_depends_on_seed_and_step_alone():
    late = batches(ALPHABET, 10, 4, 0, 1_000_003)[0]
    batches(ALPHABET, 10, 4, 0, 5)
    assert torch.equal(late, batches(ALPHABET, 10, 4, 0, 1_000_003)[0])
    assert not torch.equal(late, batches(ALPHABET, 10, 4, 1, 1_000_003)[0])


def test_golden_epoch_order():
    assert epoch_order(10, 0, 0).tolist() == [8, 0, 3, 7, 6, 4, 1, 5, 2, 9]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 12])
def test_shards_are_the_batch_no_row_twice_none_lost(world_size):
    batch = batches(ALPHABET, 5, 10, 0, 0)
    shards = [shard_batch(batch, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([inputs for inputs, _ in shards]), batch[0])
    assert torch.equal(torch.cat([targets for _, targets in shards]), batch[1])
    sizes = [len(inputs) for inputs, _ in shards]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("call, message", [
    (lambda: batches(b"abc", 3, 1, 0, 0), r"data has 3 tokens, but one sample of seq_length \(3\) needs 4"),
    (lambda: batches(ALPHABET, 10, 11, 0, 0), r"batch_size \(11\) is above the 10 samples .* use at most 10"),
    (lambda: batches(ALPHABET, 0, 1, 0, 0), r"seq_length \(0\) must be at least 1"),
    (lambda: batches(ALPHABET, 10, 1, 0, -1), r"step \(-1\) must be at least 0"),
    (lambda: batches([0.5, 1.5], 1, 1, 0, 0), "whole numbers, not float64"),
    (lambda: batches(torch.zeros(2, 2, dtype=torch.int64), 1, 1, 0, 0), r"of shape \(2, 2\)"),
    (lambda: batches("text", 1, 1, 0, 0), "data must be bytes"),
    (lambda: shard_batch(torch.zeros(4), 4, 4), r"rank \(4\) must be below world_size \(4\); the last one is 3"),
    (lambda: shard_batch(torch.zeros(4), 0, 0), r"world_size \(0\) must be at least 1"),
    (lambda: shard_batch((torch.zeros(4), torch.zeros(3)), 0, 2), r"same number of rows, not \[4, 3\]"),
    (lambda: SyntheticLanguage(1), r"vocab_size \(1\) must be at least 2"),
    (lambda: SyntheticLanguage(2000), r"vocab_size \(2000\) must be at most 1024"),
    (lambda: SyntheticLanguage(8, seed=-1), r"seed \(-1\) must be at least 0"),
    (lambda: SyntheticLanguage(8).sample(0, seed=0), r"num_tokens \(0\) must be at least 1"),
])
def test_impossible_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("vocab_size, seed, digest, entropy", [
    (16, 0, "753c71a2c7d8dc36", 1.3851495671459215),
    (64, 0, "66f2ff5579304c4b", 2.5100563548261636),
    (64, 1, "37325c16a4473203", 2.63304498013869),
    (256, 7, "addee91a6c89488f", 3.36998679774328),
])
def test_golden_samples_and_entropies(vocab_size, seed, digest, entropy):
    language = SyntheticLanguage(vocab_size, seed)
    sample = language.sample(10_000, seed=3).numpy().astype("<u2").tobytes()
    assert hashlib.sha256(sample).hexdigest()[:16] == digest
    assert math.isclose(language.entropy_nats, entropy, rel_tol=1e-12)


@pytest.mark.parametrize("vocab_size", [2, 16, 1024])
def test_probabilities_are_exact_and_the_stationary_distribution_stays(vocab_size):
    language = SyntheticLanguage(vocab_size, seed=0)
    assert (language.probabilities.sum(1) == 1).all() and (language.probabilities > 0).all()
    assert abs(language.stationary @ language.probabilities - language.stationary).max() < 1e-12


def test_a_long_sample_has_the_stated_entropy():
    language = SyntheticLanguage(16, seed=0)
    tokens = language.sample(200_000, seed=0)
    counts = torch.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256).double().view(16, 16)
    joint = counts / counts.sum()
    conditional = -(joint * (joint / joint.sum(1, keepdim=True)).log()).nansum().item()
    unigram = -(joint.sum(1) * joint.sum(1).log()).sum().item()
    assert abs(conditional - language.entropy_nats) < 0.01
    assert abs(unigram - language.unigram_entropy_nats) < 0.01
    assert language.entropy_nats < language.unigram_entropy_nats < math.log(16)


def test_a_longer_sample_starts_with_the_shorter_one():
    language = SyntheticLanguage(8, seed=0)
    assert torch.equal(language.sample(100, seed=5)[:40], language.sample(40, seed=5))
    assert not torch.equal(language.sample(40, seed=5), language.sample(40, seed=6))
