"""Passes over a StepGraph that are no backend's own, and how a pipeline of passes runs."""

from mtpc.passes.base import Pass, Policy, run_pipeline
from mtpc.passes.verifier import Verifier
