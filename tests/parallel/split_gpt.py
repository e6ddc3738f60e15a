"""What the tests of split models share: a serial GPT, batches, and how parts are compared with the whole."""
import functools

import torch

from dtlab.models import GPT

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def serial_gpt(config, kind=GPT, **factory):
    """With biases and norms that are not all alike."""
    model = kind(config, seed=1, **{"dtype": torch.float64, **factory})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10
                parameter.add_(noise.to(parameter))
    return model


def batch(config, step=0, num_rows=2):
    """Other tokens in each step and row, some of whose targets do not count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.vocab_size, (num_rows, config.seq_length + 1), generator=generator)
    is_ignored = torch.rand(num_rows, config.seq_length, generator=generator) < 0.2
    return tokens[:, :-1], tokens[:, 1:].masked_fill(is_ignored, -100)


def with_shards(model):
    """Name, parameter and how it is cut out of the whole one."""
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        shard = getattr(model.get_submodule(path), "parameter_shards", {}).get(leaf)
        yield name, parameter, shard.take if shard else lambda whole: whole


def compare(model, whole, what, of, close=close):
    """Assert that ``of(parameter)`` is its part of ``whole[name]``, which may be None."""
    for name, parameter, take in with_shards(model):
        if whole[name] is None:
            assert of(parameter) is None, name
        else:
            close(of(parameter), take(whole[name]), msg=f"{what}{name}: ".__add__)


def compare_gradients(model, serial, close=close):
    """The same of all gradients, which may be on a GPU."""
    grads = {name: p.grad for name, p in serial.named_parameters()}
    compare(model, grads, "gradient of ", lambda p: p.grad if p.grad is None else p.grad.cpu(), close)
