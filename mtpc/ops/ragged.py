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
    """x with zeros in rows that are not in use: what operators that are told how many rows are give
    by their references. Their kernels may leave anything there, and `clear_idle_rows` be needed.

    Args:
        x: [..., N], rows of N.
        rows: int [1], how many leading rows are in use; None: all.
    """
    if rows is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    in_use = torch.arange(flat.shape[0], device=x.device) < rows
    return torch.where(in_use[:, None], flat, 0).view(x.shape)


@torch.library.custom_op("mtpc::clear_idle_rows", mutates_args=("x",))
def clear_idle_rows(x: Tensor, rows: Tensor, features: int) -> None:
    """Write zeros to rows that are not in use.

    Args:
        x: [..., F...], dense.
        rows: int32 or int64 [1], how many leading rows are in use.
        features: how many last dimensions are a row's.
    """
    lead = x.shape[: x.dim() - features]
    flat = x.view(lead.numel(), -1)
    flat.copy_(keep_rows(flat, rows))


@clear_idle_rows.register_fake
def fake_clear_idle_rows(x: Tensor, rows: Tensor, features: int) -> None:
    """It has no result."""
