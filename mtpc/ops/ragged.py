"""Flat rows of several requests, one request after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def request_of(token: Tensor, query_start_loc: Tensor) -> Tensor:
    """The request that each flat token belongs to: the number of requests that end before it.

    It searches nothing on the device, so a captured step may contain it.

    Args:
        token: int [T], flat indices.
        query_start_loc: int [R+1], ascending from 0.

    Returns:
        int64 [T]; R for tokens after the last request, which are padding.
    """
    return (token[:, None] >= query_start_loc[None, 1:]).sum(1)


def keep_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """x with zeros in the rows that are not in use. `rows`, int [1], says how many leading rows of
    x [..., N] are; None: all.

    The references of operators with an argument `rows` return this. Kernels may leave anything in
    these rows, and `clear_idle_rows` clears them where it matters.
    """
    if rows is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    in_use = torch.arange(flat.shape[0], device=x.device) < rows
    return torch.where(in_use[:, None], flat, 0).view(x.shape)
