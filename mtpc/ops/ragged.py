"""Flat rows of several requests, one behind the other."""

from __future__ import annotations

import torch
from torch import Tensor


def request_of(token: Tensor, query_start_loc: Tensor) -> Tensor:
    """Whose row each flat token is: the requests that end at or before it, counted.

    No device-side search, so that it may stand in a captured step.

    Args:
        token: int [T], flat indices.
        query_start_loc: int [R+1], ascending from 0.

    Returns:
        int64 [T]; R for tokens behind the last request's, which are padding.
    """
    return (token[:, None] >= query_start_loc[None, 1:]).sum(1)


def keep_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """x with zeros in rows that are not in use.

    Args:
        x: [..., N], rows of N.
        rows: int [1], how many leading rows are in use; None: all.
    """
    if rows is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    in_use = torch.arange(flat.shape[0], device=x.device) < rows
    return torch.where(in_use[:, None], flat, 0).view(x.shape)
