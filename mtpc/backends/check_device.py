"""Whether torch can use a GPU here, and what kind of device a GPU is."""

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


def architecture_of(device: torch.device) -> str:
    """The architecture of a GPU: of AMD's with its modes, as gfx942:sramecc+:xnack-; or sm_90."""
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "gcnArchName", "") or f"sm_{found.major}{found.minor}"


def device_name(device: torch.device) -> str:
    """A kind of device: model, architecture and number of processors."""
    found = torch.cuda.get_device_properties(device)
    processors = found.multi_processor_count
    return f"{found.name} {architecture_of(device)}, {processors} processors"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device of NVIDIA's; None of any other."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)
