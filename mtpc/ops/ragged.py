"""Flat rows of several requests, one behind the other."""

from __future__ import annotations

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
