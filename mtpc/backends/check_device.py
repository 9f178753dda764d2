"""Whether torch can use a GPU here."""

from __future__ import annotations

import torch

from mtpc.errors import BackendError


def check_device() -> None:
    """Check that torch can use a GPU.

    Raises:
        BackendError: it cannot; the message says why and what to do.
    """
    if torch.cuda.is_available():
        return
    hip, cuda = torch.version.hip, torch.version.cuda
    if not (hip or cuda):
        raise BackendError(
            f"backend 'cuda' needs a GPU, and this torch ({torch.__version__}) is built for the "
            "CPU only; install a torch built for CUDA or ROCm (docs/gpu.md), or use backend='cpu'. "
            "To compile kernels for the GPU of another machine, use `mtpc build --target`"
        )
    built = f"ROCm {hip}" if hip else f"CUDA {cuda}"
    raise BackendError(
        f"backend 'cuda' needs a GPU, and this torch is built for {built} and finds none; check "
        f"that `{'rocminfo' if hip else 'nvidia-smi'}` lists one and that this user may open it"
    )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device of NVIDIA's; None of any other."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)
