"""Which devices ranks may use; asked without starting CUDA in this process."""
import torch


def num_gpus():
    """CUDA devices that are visible, counted through NVML: a process that started CUDA could not be forked."""
    if torch.version.cuda is None:
        return 0
    try:
        return max(0, torch.cuda._device_count_nvml())
    except Exception:
        return 0
