# ruff: noqa: F821  (names that live on the ranks)
"""The program of lesson 05 that trains with DeepSpeed. Run it to write the recording that is shipped for those without.

    python tests/peers/deepspeed_program.py dtlab/data/recordings/deepspeed_zero3.jsonl

The functions from ``my_rows`` to ``third_step`` are the lesson's, word by word.
"""
import dataclasses
import sys

import torch

import dtlab
from dtlab.data import SyntheticLanguage, batches, shard_batch
from dtlab.models import GPT, GPTConfig, cross_entropy
from dtlab.simulate import Recording

WORLD_SIZE, BATCH_SIZE = 4, 8
config = GPTConfig(vocab_size=32, seq_length=32, hidden_size=32, num_layers=3, num_heads=4)
data = SyntheticLanguage(vocab_size=32).sample(65536, seed=0)
adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
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


def with_deepspeed(gpt):
    import os
    import warnings
    warnings.simplefilter("ignore", FutureWarning)  # it uses names that torch is about to drop
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed
    zero = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 10_000,
            "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": BATCH_SIZE // world_size, "zero_optimization": zero,
                "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # else 1.0
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=adamw(gpt.parameters()), config=settings,
                                      dist_init_required=False)
    return engine, engine  # it steps its optimizer itself


def two_steps(wrap):
    global system
    system = wrap(GPT(config))
    return train(*system, my_rows, range(2))


def third_step():
    return train(*system, my_rows, [2])


def record(ranks):
    """The third step of training: in the first ones, DeepSpeed notes the order in which modules are used."""
    before = ranks.run(two_steps, with_deepspeed)
    recording = ranks.record(third_step)
    losses = [torch.cat(pair) for pair in zip(before, recording.results)]
    recording.meta["losses"] = torch.stack(losses).mean(0).tolist()
    return recording


def small(recording):
    """What is shipped: rank 0, which stands for all, with times in microseconds."""
    events = [dataclasses.replace(e, **{name: round(getattr(e, name), 6) for name in ("start_s", "end_s", "cpu_s")})
              for e in recording.events[0]]
    return Recording({0: events}, world_size=recording.world_size, meta=recording.meta)


if __name__ == "__main__":
    with dtlab.launch(WORLD_SIZE) as ranks:
        small(record(ranks)).save(sys.argv[1])
