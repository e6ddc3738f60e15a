# ruff: noqa: F821  (names that live on the ranks)
"""The program of lesson 05 that trains with DeepSpeed. Run it to write the recording that is shipped for those without.

    python tests/peers/deepspeed_program.py dtlab/data/recordings/deepspeed_zero3.jsonl

The functions from ``train`` to ``record`` are the lesson's, word by word.
"""
import dataclasses
import sys

import torch

import dtlab
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.data.recordings import deepspeed_engine
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.simulate import Recording

WORLD_SIZE, BATCH_SIZE = 4, 8
config = GPTConfig(vocab_size=32, seq_length=32, hidden_size=32, num_layers=3, num_heads=4)
data = SyntheticLanguage(vocab_size=32).sample(65536, seed=0)
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)
my_rows = lambda batch: shard_batch(batch, rank, world_size)


def train(model, optimizer, rows, steps=range(3)):
    losses = []
    for step in steps:
        inputs, targets = rows(batches(data, config.seq_length, BATCH_SIZE, seed=0, step=step))
        loss = cross_entropy(model(inputs), targets, reduction="mean")
        optimizer.zero_grad()
        getattr(model, "backward", torch.Tensor.backward)(loss)  # DeepSpeed's model has its own
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def by_deepspeed(gpt):
    engine = deepspeed_engine(gpt, adamw(gpt.parameters()), micro_batch_size=BATCH_SIZE // world_size)
    return engine, engine  # it steps its optimizer itself


def two_steps(wrap):
    global system  # stays on the rank
    system = wrap(GPT(config))[:2]
    train(*system, my_rows, range(2))


def third_step():
    return train(*system, my_rows, [2]).item()


def record(wrap):
    ranks.run(two_steps, wrap)
    return ranks.record(third_step)


def small(recording):
    """What is shipped: rank 0, which stands for all, with times in microseconds; and the results of all ranks."""
    events = [dataclasses.replace(e, **{name: round(getattr(e, name), 6) for name in ("start_s", "end_s", "cpu_s")})
              for e in recording.events[0]]
    meta = {**recording.meta, "results": recording.results}
    return Recording({0: events}, world_size=recording.world_size, meta=meta)


if __name__ == "__main__":
    with dtlab.launch(WORLD_SIZE) as ranks:
        small(record(by_deepspeed)).save(sys.argv[1])
